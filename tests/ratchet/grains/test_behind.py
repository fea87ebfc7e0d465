"""Segments commit behind the work: in order, with bounded lag, fenced, and with the content of every other grain."""

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from ratchet.config import RunConfig
from ratchet.errors import CommitConflictError, EngineError, OwnershipLostError, StoreUnavailableError
from ratchet.grains import loop
from ratchet.grains.session import open_session, submit
from ratchet.stages.advantage import Advantage
from ratchet.stages.base import Context, Input, Result, Stage
from ratchet.stages.residents import Residents
from ratchet.stages.reward import Reward
from ratchet.stages.rollout import Rollout
from ratchet.store import layout
from ratchet.store.artifacts import scratch
from ratchet.store.objects import ObjectStore
from ratchet.store.run import Run
from ratchet.store.weights import read_weights
from ratchet.store.writer import BackgroundWriter
from tests.runs import attempts, content_digests, manifests, tiny_config, train_tiny, write_problems

STEPS = 5


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_problems(tmp_path_factory.mktemp("problems") / "problems.jsonl")


def _config(model: Path, problems: Path, **overrides: Any) -> RunConfig:
    values = {"trainer.total_training_steps": STEPS, "trainer.steps_per_segment": STEPS, **overrides}
    return tiny_config(model, problems, **{"trainer.full_weights_freq": 3, **values})


@pytest.fixture(scope="module")
def by_stage(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, problems: Path) -> Run:
    config = _config(tiny_model, problems, **{"trainer.grain": "stage"})
    return train_tiny(tmp_path_factory.mktemp("by-stage"), "run", config)


def test_weights_lie_as_deltas_between_full_copies_and_are_those_of_the_other_grains(
    tmp_path: Path, tiny_model: Path, problems: Path, by_stage: Run
) -> None:
    run = train_tiny(tmp_path, "run", _config(tiny_model, problems))
    assert content_digests(run) == content_digests(by_stage)
    stored = {step: run.require("policy_update", step).output("policy").delta for step in range(STEPS + 1)}
    assert {step: delta and delta.step for step, delta in stored.items()} == {
        0: None,
        1: None,
        2: 1,
        3: None,
        4: 3,
        5: 4,
    }
    for step in (2, 5):
        with scratch() as folder, scratch() as expected:
            read_weights(run, run.require("policy_update", step), "policy", folder)
            read_weights(by_stage, by_stage.require("policy_update", step), "policy", expected)
            assert (folder / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()


def test_a_segment_that_ends_between_full_copies_is_resumed_from_deltas(
    tmp_path: Path, tiny_model: Path, problems: Path, by_stage: Run
) -> None:
    run = train_tiny(tmp_path, "run", _config(tiny_model, problems, **{"trainer.steps_per_segment": 2}))
    assert content_digests(run) == content_digests(by_stage)


class _Slow(BackgroundWriter):
    """A writer that counts the steps under way and lets none through before the gate opens."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__()
        self.submit(gate.wait)


def test_no_more_steps_are_under_way_than_the_config_allows(
    tmp_path: Path, tiny_model: Path, problems: Path, by_stage: Run
) -> None:
    config = _config(tiny_model, problems, **{"trainer.commit_lag": 2})
    gate, begun = threading.Event(), []

    def listen(place: str, is_committed: bool) -> None:
        if place.endswith("rollout") and not is_committed:
            begun.append(place)

    run = submit(str(tmp_path), "run", config)
    with open_session(run, config, listen, make_writer=lambda: _Slow(gate)) as session:
        loop.prepare(session)
        timer = threading.Timer(3.0, gate.set)
        timer.start()
        worker = threading.Thread(target=loop.run_segment, args=(session, 1, STEPS + 1))
        worker.start()
        worker.join(2.0)
        # Two steps wait for their commits, and the third waits for one of them.
        assert begun == ["step-000001/rollout", "step-000002/rollout"]
        assert Run(str(tmp_path), "run").last_step() == 0
        worker.join()
    assert len(begun) == STEPS
    steps = {place: digest for place, digest in content_digests(run).items() if place[0].isdigit()}
    assert steps.items() <= content_digests(by_stage).items()


def test_a_lost_put_drops_what_was_built_on_it_and_starts_again_from_the_chain(
    tmp_path: Path, tiny_model: Path, problems: Path, by_stage: Run
) -> None:
    rival = train_tiny(tmp_path / "rival", "run", _config(tiny_model, problems))

    def publish_first(place: str, is_committed: bool) -> None:
        # Another attempt of the same submission publishes step 3's rollouts while this process is at its own.
        if place == "step-000003/rollout" and not is_committed:
            shutil.copytree(
                Path(rival.uri) / "step-000003" / "rollout",
                tmp_path / "runs" / "run" / "step-000003" / "rollout",
                dirs_exist_ok=True,
            )

    run = train_tiny(tmp_path / "runs", "run", _config(tiny_model, problems), publish_first)
    assert content_digests(run) == content_digests(by_stage)
    assert attempts(run)["3/rollout"] == attempts(rival)["3/rollout"]
    ours = {place: epoch.provenance.attempt for place, epoch in manifests(run).items() if place != "3/rollout"}
    assert set(ours.values()).isdisjoint(attempts(rival).values())


def _publish(rival: Run, root: Path, place: str) -> None:
    """Let the run below `root` have a stage of the rival's, as if another attempt had been first."""
    shutil.copytree(Path(rival.uri) / place, root / "run" / place, dirs_exist_ok=True)


def test_what_another_attempt_published_reaches_the_trackers_in_the_same_session(
    tmp_path: Path, tiny_model: Path, problems: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rival = train_tiny(tmp_path / "rival", "run", _config(tiny_model, problems))

    def publish_first(place: str, is_committed: bool) -> None:
        if place == "step-000003/rollout" and not is_committed:
            _publish(rival, tmp_path / "runs", place)

    monkeypatch.chdir(tmp_path)
    run = train_tiny(
        tmp_path / "runs", "run", _config(tiny_model, problems, **{"trainer.logger": ["jsonl"]}), publish_first
    )
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    shown = [(line["step"], line["stage"]) for line in lines]
    with_metrics = {(item.step, item.stage) for item in manifests(run).values() if item.metrics}
    assert len(shown) == len(set(shown))
    assert set(shown) == with_metrics
    (line,) = [line for line in lines if (line["step"], line["stage"]) == (3, "rollout")]
    assert line["metrics"] == rival.require("rollout", 3).metrics


def test_puts_may_be_lost_again_and_again_as_long_as_something_is_committed_in_between(
    tmp_path: Path, tiny_model: Path, problems: Path, by_stage: Run
) -> None:
    rival = train_tiny(tmp_path / "rival", "run", _config(tiny_model, problems))
    places = [f"step-{step:06d}/rollout" for step in range(1, STEPS + 1)]

    def publish_first(place: str, is_committed: bool) -> None:
        if place in places and not is_committed:
            _publish(rival, tmp_path / "runs", place)

    run = train_tiny(tmp_path / "runs", "run", _config(tiny_model, problems), publish_first)
    assert content_digests(run) == content_digests(by_stage)
    theirs = {place for place, attempt in attempts(run).items() if attempt == attempts(rival)[place]}
    assert theirs == {f"{step}/rollout" for step in range(1, STEPS + 1)}


def test_who_is_always_second_gives_up_and_says_why(
    tmp_path: Path,
    tiny_model: Path,
    problems: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rival = train_tiny(tmp_path / "rival", "run", _config(tiny_model, problems))
    stages: list[type[Stage]] = [Rollout, Reward, Advantage]

    def publish_meanwhile(stage: type[Stage]) -> None:
        compute = stage.compute

        def computed(self: Stage, context: Context) -> Result:
            num_lost = sum("starting again from the chain" in record.message for record in caplog.records)
            if context.step == 2 and stage is stages[num_lost]:
                _publish(rival, tmp_path / "runs", f"step-000002/{stage.name}")
            return compute(self, context)

        monkeypatch.setattr(stage, "compute", computed)

    for stage in stages:
        publish_meanwhile(stage)
    with pytest.raises(CommitConflictError, match="3 times in a row: another process does this work"):
        train_tiny(tmp_path / "runs", "run", _config(tiny_model, problems))
    left = Run(str(tmp_path / "runs"), "run")
    assert left.last_step() == 1
    assert {attempts(left)[f"2/{stage}"] for stage in ("rollout", "reward", "advantage")} == {
        attempts(rival)[f"2/{stage}"] for stage in ("rollout", "reward", "advantage")
    }


def test_a_step_that_another_attempt_finished_is_evaluated_all_the_same(
    tmp_path: Path, tiny_model: Path, problems: Path
) -> None:
    values = {"data.val_files": str(problems), "trainer.test_freq": 2, "trainer.total_training_steps": 3}
    config = _config(tiny_model, problems, **values)
    rival = train_tiny(tmp_path / "rival", "run", config)

    def publish_first(place: str, is_committed: bool) -> None:
        # The other attempt ends between the update and its evaluation.
        if place == "step-000002/rollout" and not is_committed:
            for stage in ("rollout", "reward", "advantage", "policy_update"):
                folder = Path("run", "step-000002", stage)
                shutil.copytree(tmp_path / "rival" / folder, tmp_path / "runs" / folder, dirs_exist_ok=True)

    run = train_tiny(tmp_path / "runs", "run", config, publish_first)
    assert content_digests(run) == content_digests(rival)
    assert attempts(run)["2/policy_update"] == attempts(rival)["2/policy_update"]


def test_a_runner_that_lost_the_run_stops_and_publishes_nothing_more(
    tmp_path: Path, tiny_model: Path, problems: Path, by_stage: Run
) -> None:
    config = _config(tiny_model, problems)

    def claim(place: str, is_committed: bool) -> None:
        if place == "step-000003/reward" and not is_committed:
            Run(str(tmp_path), "run").claim({"submission_id": "other"})

    with pytest.raises(OwnershipLostError, match="lost it to epoch 2"):
        train_tiny(tmp_path, "run", config, claim)
    left = manifests(Run(str(tmp_path), "run"))
    assert {manifest.provenance.epoch for manifest in left.values()} == {1}
    assert "3/policy_update" not in left
    assert content_digests(train_tiny(tmp_path, "run", config)) == content_digests(by_stage)


class _Out(BackgroundWriter):
    """A writer whose storage stops answering at the first put of a key's folder, for `times` puts."""

    def __init__(self, folder: str, times: float) -> None:
        super().__init__(outage_seconds=0.5)
        self._folder, self._left = folder, times

    def _pause(self, seconds: float) -> None:
        """Go on at once."""

    def store(self, inner: ObjectStore) -> ObjectStore:
        put = inner.put

        def fail_first(key: str, data: bytes) -> None:
            if key.startswith(self._folder) and self._left > 0:
                self._left -= 1
                raise StoreUnavailableError(f"cannot write {key}: nobody listens")
            put(key, data)

        inner.put = fail_first  # type: ignore[method-assign]
        return super().store(inner)


def test_an_outage_is_ridden_out_and_one_without_end_leaves_a_run_that_resumes(
    tmp_path: Path, tiny_model: Path, problems: Path, by_stage: Run
) -> None:
    config = _config(tiny_model, problems)
    run = submit(str(tmp_path), "short", config)
    with open_session(run, config, make_writer=lambda: _Out("step-000002/reward", 3)) as session:
        loop.train(session)
    assert content_digests(run) == content_digests(by_stage)

    run = submit(str(tmp_path), "long", config)
    with open_session(run, config, make_writer=lambda: _Out("step-000002/reward", float("inf"))) as session:
        with pytest.raises(StoreUnavailableError, match="nobody listens"):
            loop.train(session)
        # A session that goes on finds nothing in memory that was not committed.
        assert not session.residents.trainers
    assert layout.stage_folder("reward", 2) not in {f"step-{place}" for place in manifests(run)}
    assert Run(str(tmp_path), "long").last_step() == 1
    assert content_digests(train_tiny(tmp_path, "long", config)) == content_digests(by_stage)


def test_a_sampler_with_other_weights_is_found_before_it_samples(
    tmp_path: Path, tiny_model: Path, problems: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ratchet.engines.sampler_hf import HFSampler

    monkeypatch.setattr(HFSampler, "load_weights", lambda self, weights: None)
    with pytest.raises(EngineError, match="does not hold the policy that policy_update of step 1 published"):
        train_tiny(tmp_path, "stale", _config(tiny_model, problems))
    monkeypatch.setattr(HFSampler, "fingerprint", lambda self: None)
    config = _config(tiny_model, problems, **{"actor_rollout_ref.rollout.max_log_prob_drift": 1e-4})
    with pytest.raises(EngineError, match="does not answer as the policy that policy_update of step 1 published"):
        train_tiny(tmp_path, "silent", config)


def test_a_sampler_whose_weights_were_half_replaced_is_given_whole_ones(
    tmp_path: Path, tiny_model: Path, problems: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ratchet.engines.sampler_hf import HFSampler

    run = train_tiny(tmp_path, "run", _config(tiny_model, problems, **{"trainer.total_training_steps": 1}))
    base, trained = (Input(run.require("policy_update", step), "policy") for step in (0, 1))
    load, loaded = HFSampler.load_weights, []

    def fail_halfway(self: HFSampler, weights: Any) -> None:
        loaded.append(1)
        if len(loaded) == 1:
            raise EngineError("out of memory")
        load(self, weights)

    monkeypatch.setattr(HFSampler, "load_weights", fail_halfway)
    residents = Residents(run, _config(tiny_model, problems))
    residents.sampler(base)
    with pytest.raises(EngineError, match="out of memory"):
        residents.sampler(trained)
    residents.sampler(base)
    assert len(loaded) == 2
    residents.close()
