"""A run that is killed anywhere and resumed is the run that was never interrupted."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from ratchet.config import RunConfig
from ratchet.data import schemas
from ratchet.data.parquet import read_table
from ratchet.errors import CommitConflictError, ConfigError, NotCommittedError, OwnershipLostError
from ratchet.grains import loop
from ratchet.grains.session import join_submission, open_session, submit
from ratchet.stages.base_models import BasePolicy
from ratchet.stages.graph import step_stage
from ratchet.stages.preprocess import Preprocess
from ratchet.stages.recovery import RECOVERY
from ratchet.store import artifacts
from ratchet.store.run import POLICY_UPDATE, Run
from tests.runs import (
    Stopped,
    attempts,
    content_digests,
    manifests,
    stop_at,
    tiny_config,
    train_tiny,
    write_problems,
)
from tests.tiny_models import make_tiny_model

STEPS = 5
PLACES = [
    ("step-000000/policy_update", True),
    ("data/train", True),
    ("step-000001/rollout", False),
    ("step-000002/rollout", True),
    ("step-000002/reward", True),
    ("step-000004/advantage", True),
    ("step-000005/policy_update", False),
    ("step-000002/policy_update", True),
    ("step-000002/evaluate", False),
    ("step-000005/checkpoint_export", False),
]


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_problems(tmp_path_factory.mktemp("problems") / "problems.jsonl")


def _config(model: Path, problems: Path, **overrides: Any) -> RunConfig:
    values = {"trainer.total_training_steps": STEPS, "trainer.steps_per_segment": STEPS, **overrides}
    return tiny_config(model, problems, **{"trainer.trainer_state_freq": 3, "trainer.test_freq": 2, **values})


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, problems: Path) -> dict[str, str]:
    config = _config(tiny_model, problems, **{"data.val_files": str(problems)})
    return content_digests(train_tiny(tmp_path_factory.mktemp("uninterrupted"), "whole", config))


@pytest.mark.parametrize(("place", "is_committed"), PLACES, ids=lambda value: str(value))
def test_a_run_stopped_anywhere_resumes_to_the_same_content(
    tmp_path: Path, tiny_model: Path, problems: Path, uninterrupted: dict[str, str], place: str, is_committed: bool
) -> None:
    config = _config(tiny_model, problems, **{"data.val_files": str(problems)})
    with pytest.raises(Stopped):
        train_tiny(tmp_path, "stopped", config, stop_at(place, is_committed=is_committed))
    before = attempts(Run(str(tmp_path), "stopped"))

    run = train_tiny(tmp_path, "stopped", config)
    assert content_digests(run) == uninterrupted
    after = attempts(run)
    assert {key: after[key] for key in before} == before, "what was committed is never made again"
    assert len(before) < len(after)


def _state_steps(run: Run) -> list[int]:
    steps = range(1, run.last_step() + 1)
    states = [(step, run.require(POLICY_UPDATE, step).provenance.trainer_state) for step in steps]
    return [step for step, state in states if state and artifacts.is_present(run.store, state)]


def test_steps_after_the_last_trainer_state_are_replayed_from_committed_rollouts(
    tmp_path: Path, tiny_model: Path, problems: Path, uninterrupted: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    config = _config(tiny_model, problems, **{"data.val_files": str(problems)})
    with pytest.raises(Stopped):
        train_tiny(tmp_path, "run", config, stop_at("step-000005/rollout", is_committed=True))
    run = Run(str(tmp_path), "run")
    assert _state_steps(run) == [3]
    with caplog.at_level("INFO", logger="ratchet.stages.recovery"):
        run = train_tiny(tmp_path, "run", config)
    assert "replaying committed steps 4 to 4" in caplog.text
    assert "the committed one, bit for bit" in caplog.text
    assert content_digests(run) == uninterrupted
    assert all(run.manifest(RECOVERY, step) is None for step in range(STEPS + 1))
    replayed = {step: run.require(POLICY_UPDATE, step).metrics.get("timing_s/replay") for step in range(STEPS + 1)}
    seconds = replayed.pop(5)
    assert seconds is not None
    assert 0 < seconds < run.require(POLICY_UPDATE, 5).seconds
    assert set(replayed.values()) == {None}


def test_trainer_states_that_are_all_gone_cost_a_replay_from_the_base(
    tmp_path: Path, tiny_model: Path, problems: Path, uninterrupted: dict[str, str]
) -> None:
    config = _config(tiny_model, problems, **{"data.val_files": str(problems)})
    with pytest.raises(Stopped):
        train_tiny(tmp_path, "run", config, stop_at("step-000005/rollout", is_committed=False))
    run = Run(str(tmp_path), "run")
    state = run.require(POLICY_UPDATE, 3).provenance.trainer_state
    assert state is not None
    # Half a deletion is enough to make it unusable.
    run.store.delete(f"{state.folder}/{state.files[0].path}")
    assert content_digests(train_tiny(tmp_path, "run", config)) == uninterrupted


def test_a_replay_that_gives_other_weights_is_recorded_and_training_goes_on(
    tmp_path: Path, tiny_model: Path, problems: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ratchet.engines.trainer import Trainer

    config = _config(tiny_model, problems)
    with pytest.raises(Stopped):
        train_tiny(tmp_path, "run", config, stop_at("step-000005/rollout", is_committed=False))

    load_state = Trainer.load_state

    def load_other_state(self: Trainer, folder: Path) -> None:
        load_state(self, folder)
        # As another device's arithmetic would.
        self._parameters[0][1].data.mul_(1.001)

    monkeypatch.setattr(Trainer, "load_state", load_other_state)
    run = train_tiny(tmp_path, "run", config)
    recovery, committed = run.require(RECOVERY, 4), run.require(POLICY_UPDATE, 4)
    assert recovery.content.inputs == {"policy": committed.content.outputs["policy"]}
    assert recovery.content.outputs["policy"] != committed.content.outputs["policy"]
    assert 0 < recovery.provenance.metrics["recovery/max_weight_drift"] < 0.01
    assert recovery.provenance.previous == {"step-000004/policy_update": committed.sha256}
    assert run.last_step() == STEPS


@pytest.mark.parametrize(("save_freq", "kept"), [(-1, [4, 5]), (2, [2, 4, 5]), (3, [3, 4, 5])])
def test_the_last_two_trainer_states_are_kept_and_those_that_were_asked_for(
    tmp_path: Path, tiny_model: Path, problems: Path, save_freq: int, kept: list[int]
) -> None:
    config = _config(tiny_model, problems, **{"trainer.trainer_state_freq": 1, "trainer.save_freq": save_freq})
    assert _state_steps(train_tiny(tmp_path, "run", config)) == kept


def test_a_segment_keeps_its_own_states_and_its_last_one(tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    assert _state_steps(train_tiny(tmp_path, "run", _config(tiny_model, problems))) == [3, 5]


def test_a_finished_run_that_is_resumed_does_nothing(tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    config = _config(tiny_model, problems)
    before = attempts(train_tiny(tmp_path, "run", config))
    seen: list[str] = []
    run = train_tiny(tmp_path, "run", config, lambda place, is_committed: seen.append(place))
    assert attempts(run) == before
    assert seen == []
    assert run.newest_epoch() == 2


def test_the_grain_and_the_place_of_work_may_change_on_resume(
    tmp_path: Path, tiny_model: Path, problems: Path, uninterrupted: dict[str, str]
) -> None:
    values = {"data.val_files": str(problems)}
    for grain, place in (("segment", "step-000002/reward"), ("stage", "step-000003/advantage")):
        config = _config(tiny_model, problems, **values, **{"trainer.grain": grain})
        with pytest.raises(Stopped):
            train_tiny(tmp_path, "run", config, stop_at(place, is_committed=True))
    other = {"trainer.grain": "step", "trainer.save_freq": 2, "trainer.project_name": "other"}
    run = train_tiny(tmp_path, "run", _config(tiny_model, problems, **values, **other))
    assert content_digests(run) == uninterrupted
    assert [run.submission(epoch)["grain"] for epoch in (1, 2, 3)] == ["segment", "stage", "step"]


def test_a_run_may_grow_where_the_learning_rate_does_not_read_its_length(
    tmp_path: Path, tiny_model: Path, problems: Path, uninterrupted: dict[str, str]
) -> None:
    values = {"data.val_files": str(problems)}
    train_tiny(tmp_path, "run", _config(tiny_model, problems, **values, **{"trainer.total_training_steps": 2}))
    run = train_tiny(tmp_path, "run", _config(tiny_model, problems, **values))
    grown = content_digests(run)
    assert {key: grown[key] for key in uninterrupted} == uninterrupted
    # The shorter run had an end of its own.
    assert set(grown) - set(uninterrupted) == {"2/checkpoint_export"}


def test_a_run_may_not_grow_where_the_learning_rate_reads_its_length(
    tmp_path: Path, tiny_model: Path, problems: Path
) -> None:
    cosine = {"actor_rollout_ref.actor.optim.lr_scheduler_type": "cosine"}
    submit(str(tmp_path), "run", _config(tiny_model, problems, **cosine))
    with pytest.raises(ConfigError, match=r"trainer\.total_training_steps: the run has 5, this submission 6"):
        submit(str(tmp_path), "run", _config(tiny_model, problems, **cosine, **{"trainer.total_training_steps": 6}))


def test_a_run_id_with_another_config_is_refused_naming_every_difference(
    tmp_path: Path, tiny_model: Path, problems: Path
) -> None:
    submit(str(tmp_path), "run", _config(tiny_model, problems))
    other = {"trainer.seed": 7, "actor_rollout_ref.rollout.n": 3}
    with pytest.raises(ConfigError) as caught:
        submit(str(tmp_path), "run", _config(tiny_model, problems, **other))
    text = str(caught.value)
    assert "trainer.seed: the run has 0, this submission 7" in text
    assert "actor_rollout_ref.rollout.n: the run has 2, this submission 3" in text
    assert Run(str(tmp_path), "run").newest_epoch() == 1


def test_a_run_that_exists_is_refused_where_resuming_is_off(tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    config = _config(tiny_model, problems, **{"trainer.resume_mode": "disable"})
    submit(str(tmp_path), "run", config)
    with pytest.raises(ConfigError, match="resume_mode is disable"):
        submit(str(tmp_path), "run", config)


def test_a_submission_that_starts_again_keeps_its_epoch(tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    config = _config(tiny_model, problems)
    with pytest.raises(NotCommittedError, match="preflight comes first"):
        join_submission(str(tmp_path), "run", "pipeline-1")
    first = submit(str(tmp_path), "run", config, submission_id="pipeline-1")
    again = submit(str(tmp_path), "run", config, submission_id="pipeline-1")
    other = submit(str(tmp_path), "run", config, submission_id="pipeline-2")
    assert [run.owner.epoch for run in (first, again, other) if run.owner] == [1, 1, 2]
    joined, joined_config = join_submission(str(tmp_path), "run", "pipeline-1")
    assert joined_config == config
    with pytest.raises(OwnershipLostError, match="epoch 1 lost it to epoch 2"):
        joined.check_ownership()


def test_the_older_of_two_submissions_can_commit_nothing_more(
    tmp_path: Path, tiny_model: Path, problems: Path, uninterrupted: dict[str, str]
) -> None:
    config = _config(tiny_model, problems, **{"data.val_files": str(problems)})
    older = submit(str(tmp_path), "run", config)
    with open_session(older, config) as session:
        loop.prepare(session)
        newer = submit(str(tmp_path), "run", config)
        with pytest.raises(OwnershipLostError, match="epoch 1 lost it to epoch 2"):
            loop.run_step(session, 1)
    assert newer.manifest("rollout", 1) is None
    assert content_digests(train_tiny(tmp_path, "run", config)) == uninterrupted


def test_ownership_lost_while_a_stage_computes_is_noticed_before_its_commit(
    tmp_path: Path, tiny_model: Path, problems: Path
) -> None:
    config = _config(tiny_model, problems)
    run = submit(str(tmp_path), "run", config)

    class Overtaken(BasePolicy):
        def compute(self, context: Any) -> Any:
            result = super().compute(context)
            submit(str(tmp_path), "run", config)
            return result

    with open_session(run, config) as session, pytest.raises(OwnershipLostError):
        session.run(Overtaken(), 0)
    assert Run(str(tmp_path), "run").manifest(POLICY_UPDATE, 0) is None


def test_whoever_loses_a_put_drops_its_engines_and_takes_what_is_published(
    tmp_path: Path, tiny_model: Path, problems: Path
) -> None:
    config = _config(tiny_model, problems)
    run = submit(str(tmp_path), "run", config)
    with open_session(run, config) as session:
        loop.prepare(session)
        rollout = step_stage("rollout", config)
        assert rollout is not None
        # A second process of the same epoch, as a pod that the UI's Retry starts beside the first.
        twin = Run(str(tmp_path), "run")
        twin.adopt(1)
        with open_session(twin, config) as other:
            inner = type(rollout).compute

            class Raced(type(rollout)):  # type: ignore[misc]
                def compute(self, context: Any) -> Any:
                    result = inner(self, context)
                    other.run(rollout, 1)
                    return result

            manifest = session.run(Raced(), 1)
            published = other.store_run.require("rollout", 1)
        assert manifest.provenance.attempt == published.provenance.attempt
        assert session.residents._sampler is None
        loop.run_step(session, 1)
    assert manifests(run)["1/policy_update"].content.inputs["rollouts"] == published.content.outputs["rollouts"]


def test_a_stage_does_not_run_before_what_it_reads_is_committed(
    tmp_path: Path, tiny_model: Path, problems: Path
) -> None:
    config = _config(tiny_model, problems)
    with open_session(submit(str(tmp_path), "run", config), config) as session:
        with pytest.raises(NotCommittedError, match="step-000000/policy_update is not committed"):
            session.run(Preprocess("train"), None)
        loop.prepare(session)
        for name, missing in (("reward", "1/rollout"), ("policy_update", "1/rollout"), ("advantage", "1/rollout")):
            stage = step_stage(name, config)
            assert stage is not None
            with pytest.raises(NotCommittedError, match=f"step-00000{missing} is not committed"):
                session.run(stage, 1)
        rollout = step_stage("rollout", config)
        assert rollout is not None
        with pytest.raises(NotCommittedError, match="step-000001/policy_update is not committed"):
            session.run(rollout, 2)


def test_changed_prompts_are_refused_and_prompts_that_are_gone_are_not_missed(tmp_path: Path, tiny_model: Path) -> None:
    source = write_problems(tmp_path / "problems.jsonl")
    config = _config(tiny_model, source)
    with pytest.raises(Stopped):
        train_tiny(tmp_path, "run", config, stop_at("step-000001/rollout", is_committed=False))
    text = source.read_text()
    source.write_text(text.replace("3 pears", "three pears"))
    with pytest.raises(CommitConflictError, match="data/train is committed from other inputs; these changed: source"):
        train_tiny(tmp_path, "run", config)
    # Other bytes of equal rows are no change.
    source.write_text(f"\n{text}\n")
    with pytest.raises(Stopped):
        train_tiny(tmp_path, "run", config, stop_at("step-000001/rollout", is_committed=False))
    source.unlink()
    assert train_tiny(tmp_path, "run", config).last_step() == STEPS


def test_model_and_prompts_may_lie_elsewhere_on_resume(
    tmp_path: Path, tiny_model: Path, problems: Path, uninterrupted: dict[str, str]
) -> None:
    config = _config(tiny_model, problems, **{"data.val_files": str(problems)})
    with pytest.raises(Stopped):
        train_tiny(tmp_path, "run", config, stop_at("step-000002/rollout", is_committed=False))
    model = shutil.copytree(tiny_model, tmp_path / "elsewhere")
    moved = shutil.copyfile(problems, tmp_path / "moved.jsonl")
    run = train_tiny(tmp_path, "run", _config(model, moved, **{"data.val_files": str(moved)}))
    assert content_digests(run) == uninterrupted


def test_a_changed_base_model_is_refused_and_one_that_is_gone_is_not_missed(tmp_path: Path, problems: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    config = _config(model, problems)
    with pytest.raises(Stopped):
        train_tiny(tmp_path, "run", config, stop_at("step-000001/rollout", is_committed=False))
    make_tiny_model(model, seed=1)
    with pytest.raises(CommitConflictError, match="these changed: base_model"):
        train_tiny(tmp_path, "run", config)
    model.rename(tmp_path / "moved")
    assert train_tiny(tmp_path, "run", config).last_step() == STEPS


def test_committed_rollouts_hold_the_seeds_of_their_keys(tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    from ratchet.data.order import sample_seed

    run = train_tiny(tmp_path, "run", _config(tiny_model, problems, **{"trainer.total_training_steps": 2}))
    for step in (1, 2):
        rollouts = read_table(run.store, run.require("rollout", step).output("rollouts"), schemas.ROLLOUTS)
        for row in rollouts.to_pylist():
            assert row["seed"] == sample_seed(0, step, row["prompt_id"], row["sample_index"])
            assert row["group_id"] == f"{step:06d}/{row['prompt_id']}"
            assert len(row["sampler_log_probs"]) == len(row["completion_token_ids"])
