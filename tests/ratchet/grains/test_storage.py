"""Whole runs that retire what they need no more, are killed while they do, and stop where their storage budget ends."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ratchet.config import RunConfig
from ratchet.errors import BudgetError, StoreError, StoreUnavailableError
from ratchet.grains import loop
from ratchet.grains.session import open_session, submit
from ratchet.grains.storage import Storage
from ratchet.store import artifacts, retention
from ratchet.store.local import LocalStore
from ratchet.store.run import POLICY_UPDATE, Run
from ratchet.store.verification import verify
from tests.ratchet.store.versions import WRITING, Killed
from tests.runs import content_digests, tiny_config, train_tiny, write_problems

STEPS = 3
GIB = 1024**3


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_problems(tmp_path_factory.mktemp("problems") / "problems.jsonl")


def _config(model: Path, problems: Path, **overrides: Any) -> RunConfig:
    values = {
        "data.val_files": str(problems),
        "data.val_max_samples": 1,
        "trainer.val_before_train": False,
        "trainer.total_training_steps": STEPS,
        "trainer.steps_per_segment": STEPS,
        "trainer.full_weights_freq": 2,
        "trainer.trainer_state_freq": 1,
    }
    return tiny_config(model, problems, **{**values, **overrides})


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, problems: Path) -> Run:
    """A run that keeps every policy: at segment grain 3 is a delta."""
    return train_tiny(tmp_path_factory.mktemp("everything"), "run", _config(tiny_model, problems))


def _policies(run: Run) -> list[int]:
    """The steps whose policy is there."""
    updates = [run.require(POLICY_UPDATE, step) for step in run.steps()]
    return [update.step for update in updates if artifacts.is_present(run.store, update.output("policy"))]


def _states(run: Run) -> list[int]:
    updates = [run.require(POLICY_UPDATE, step) for step in run.steps()]
    states = [(update.step, update.provenance.trainer_state) for update in updates]
    return [step for step, state in states if state is not None and artifacts.is_present(run.store, state)]


def _stored(run: Run) -> int:
    return sum(path.stat().st_size for path in Path(run.uri).rglob("*") if path.is_file())


def test_few_policies_are_kept_and_the_run_is_the_same(
    tmp_path: Path, tiny_model: Path, problems: Path, everything: Run
) -> None:
    less = {"trainer.keep_policies": 1, "trainer.full_weights_freq": 1}
    run = train_tiny(tmp_path, "run", _config(tiny_model, problems, **less))
    assert content_digests(run) == content_digests(everything)
    assert (_policies(run), _states(run)) == ([0, 2, 3], [2, 3])
    assert _policies(everything) == [0, 1, 2, 3]
    # It goes on from what is left: 3 is exported by now, and the last two always stay.
    run = train_tiny(tmp_path, "run", _config(tiny_model, problems, **less, **{"trainer.total_training_steps": 6}))
    assert (_policies(run), _states(run)) == ([0, 3, 5, 6], [5, 6])
    assert verify(run).faults == ()
    # Of a run that is complete nothing begins that needed room.
    tight = {"trainer.total_training_steps": 6, "trainer.storage_budget_gib": 1e-9}
    assert train_tiny(tmp_path, "run", _config(tiny_model, problems, **tight)).newest_epoch() == 3


@contextmanager
def _killed_while_retiring(number: int) -> Iterator[list[str]]:
    """End the process at the operation `number` (from 0) of those that retire; yields their keys."""
    keys: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for method in WRITING:
            patch.setattr(LocalStore, method, _watched(method, getattr(LocalStore, method), number, keys))
        yield keys


def _watched(name: str, method: Any, number: int, keys: list[str]) -> Any:
    def call(store: LocalStore, *arguments: Any, **options: Any) -> Any:
        key = str(arguments[1] if name == "upload_file" else arguments[0])
        if len(keys) > number:
            raise Killed
        if name == "delete" or key.startswith("retired/"):
            keys.append(key)
            if len(keys) > number:
                raise Killed
        return method(store, *arguments, **options)

    return call


def test_a_segment_that_is_killed_while_it_retires_behind_its_work_goes_on(
    tmp_path: Path, tiny_model: Path, problems: Path, everything: Run
) -> None:
    """Within a deletion; at every operation: tests/ratchet/store/test_retention.py."""
    config = _config(tiny_model, problems, **{"trainer.keep_policies": 1, "trainer.full_weights_freq": 1})
    run = submit(str(tmp_path), "run", config)
    with pytest.raises(Killed), _killed_while_retiring(3) as keys, open_session(run, config) as session:
        loop.train(session)
    assert [key.startswith("retired/") for key in keys] == [True, True, False, False]
    assert verify(Run(run.root, run.run_id)).faults == ()
    run = train_tiny(tmp_path, "run", config)
    assert content_digests(run) == content_digests(everything)
    assert (_policies(run), _states(run)) == ([0, 2, 3], [2, 3])
    assert verify(run).faults == ()


def test_a_trainer_goes_back_to_an_earlier_state_where_the_last_one_is_damaged(
    tmp_path: Path, tiny_model: Path, problems: Path, everything: Run, caplog: pytest.LogCaptureFixture
) -> None:
    short = train_tiny(tmp_path, "run", _config(tiny_model, problems, **{"trainer.total_training_steps": 2}))
    for step in (2, 1):
        state = short.require(POLICY_UPDATE, step).provenance.trainer_state
        assert state is not None
        path = Path(short.uri, state.folder, state.files[0].path)
        path.write_bytes(bytes(path.stat().st_size))
    run = train_tiny(tmp_path, "run", _config(tiny_model, problems))
    passed_over = [record.message for record in caplog.records if "going back to an earlier" in record.message]
    assert [message.split("/policy_update")[0][-11:] for message in passed_over] == ["step-000002", "step-000001"]
    digests = content_digests(run)
    assert digests.items() >= content_digests(everything).items()
    # One that is damaged is kept, as a good one would be, and named.
    assert {fault.place.split("/")[0] for fault in verify(run).faults} == {"step-000002"}
    assert _states(run) == [2, 3]


def test_a_full_disk_while_a_state_is_read_is_no_damage(
    tmp_path: Path, tiny_model: Path, problems: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train_tiny(tmp_path, "run", _config(tiny_model, problems, **{"trainer.total_training_steps": 2}))

    def full(*_: Any) -> None:
        raise StoreError("No space left on device")

    monkeypatch.setattr("ratchet.stages.recovery.artifacts.read_folder", full)
    with pytest.raises(StoreError, match="No space left"):
        train_tiny(tmp_path, "run", _config(tiny_model, problems))
    assert run.last_step() == 2


def test_a_run_stops_at_its_storage_budget_and_goes_on_with_more_room(
    tmp_path: Path, tiny_model: Path, problems: Path, everything: Run
) -> None:
    budget = _stored(everything) * 1.1
    # What is under way is not counted yet: it stops within a few steps.
    tight = {"trainer.storage_budget_gib": budget / GIB, "trainer.commit_lag": 1, "trainer.total_training_steps": 5}
    every_state = _config(tiny_model, problems, **tight, **{"trainer.save_freq": 1})
    with pytest.raises(BudgetError) as stopped:
        train_tiny(tmp_path, "run", every_state)
    said, run = str(stopped.value), Run(str(tmp_path), "run")
    assert 0 < run.last_step() < 5
    # Every step that was begun is whole, and nothing is left over.
    assert {item.stage for item in run.step_manifests(run.last_step())} >= {"rollout", "reward", POLICY_UPDATE}
    assert run.steps()[-1] == run.last_step()
    found = verify(run)
    assert (found.faults, found.leftovers) == ((), ())
    used = _stored(run)
    assert budget < used
    assert (
        f"{run.uri} holds {used / 1024**2:.1f} MiB, more than the {budget / 1024**2:.1f} MiB of "
        "trainer.storage_budget_gib, and retention lets nothing more go: trainer states " in said
    )
    assert "set trainer.keep_policies" in said
    with pytest.raises(BudgetError, match="No step was begun"):
        train_tiny(tmp_path, "run", every_state)
    # What retention allows goes first; of the states of every step it is enough.
    run = train_tiny(tmp_path, "run", _config(tiny_model, problems, **tight))
    own_end = {"3/evaluate", "3/checkpoint_export"}
    expected = {place: digest for place, digest in content_digests(everything).items() if place not in own_end}
    assert content_digests(run).items() >= expected.items()
    assert (run.last_step(), _states(run)) == (5, [4, 5])
    assert verify(run).faults == ()


def test_outside_a_segment_each_step_is_asked_for_room(tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    tight = _config(tiny_model, problems, **{"trainer.grain": "step", "trainer.storage_budget_gib": 1e-6})
    with pytest.raises(BudgetError, match=r": policies .*, tables .*No step was begun"):
        train_tiny(tmp_path, "run", tight)
    run = Run(str(tmp_path), "run")
    assert run.steps() == [0]
    assert verify(run).faults == ()


def test_a_commit_that_is_told_of_again_counts_once(tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    config = _config(tiny_model, problems, **{"trainer.storage_budget_gib": 1.0})
    run = train_tiny(tmp_path, "run", config)
    storage = Storage(run, config, set())
    storage.make_room()
    assert storage._found is not None
    before = storage._found.bytes
    rollout = run.require("rollout", STEPS)
    for _ in range(2):
        storage.committed(rollout)
    stored = sum(entry.bytes for artifact in rollout.provenance.artifacts.values() for entry in artifact.files)
    assert storage._found.bytes == before + stored + len(rollout.to_json())


def test_a_commit_after_which_storage_did_not_answer_counts_once(
    tmp_path: Path, tiny_model: Path, problems: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _config(tiny_model, problems)
    run, answers = train_tiny(tmp_path, "run", config), [StoreUnavailableError("no answer")]
    storage = Storage(run, config, set())

    def retire(*_: Any, **__: Any) -> None:
        if answers:
            raise answers.pop()

    monkeypatch.setattr(retention, "retire", retire)
    with pytest.raises(StoreUnavailableError):
        storage.committed(run.require(POLICY_UPDATE, STEPS))
    storage.committed(run.require(POLICY_UPDATE, STEPS))
    assert storage._found is not None
    assert storage._found.bytes == _stored(run)


def test_what_cannot_be_read_of_an_old_step_ends_no_run(
    tmp_path: Path, tiny_model: Path, problems: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = _config(tiny_model, problems, **{"trainer.keep_policies": 2})
    run = train_tiny(tmp_path, "run", config)
    Path(run.uri, "step-000001", POLICY_UPDATE, "manifest.json").write_text("{}")
    Storage(run, config, set()).committed(run.require(POLICY_UPDATE, STEPS))
    assert "nothing more is retired" in caplog.text
