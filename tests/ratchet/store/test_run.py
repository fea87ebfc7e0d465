"""A run's identity, ownership and chain, on a local folder and on S3."""

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ratchet.errors import (
    CommitConflictError,
    ConfigError,
    DamagedError,
    NotCommittedError,
    OwnershipLostError,
    StoreError,
)
from ratchet.store import ObjectStore, layout
from ratchet.store import run as run_module
from ratchet.store.run import POLICY_UPDATE, Run
from tests.ratchet.store.records import make_manifest
from tests.ratchet.store.tcp import wire_to


class LosingAnswers:
    """A store whose create-only puts succeed and then say that they did not, `times` times."""

    def __init__(self, store: ObjectStore, times: int) -> None:
        self.store, self.times = store, times

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def put_create(self, key: str, data: bytes) -> bool:
        won = self.store.put_create(key, data)
        if self.times:
            self.times -= 1
            return False
        return won


@pytest.fixture
def run(root: str) -> Run:
    run = Run(root, "run-1")
    run.claim({"grain": "stage"})
    return run


def commit(run: Run, step: int | None, stage: str, **provenance: Any) -> None:
    epoch = run.owner.epoch if run.owner else 0
    run.commit(make_manifest(step=step, stage=stage, **{"epoch": epoch, "attempt": run.new_attempt(), **provenance}))


def test_a_run_is_created_once_and_joined_by_equal_configs(root: str) -> None:
    semantic = {"data": {"train_batch_size": 8}, "actor": {"lr": 1e-6, "betas": (0.9, 0.95)}}
    assert Run(root, "run-1").create_or_check(semantic) is True
    assert Run(root, "run-1").create_or_check(semantic) is False
    assert Run(root, "run-1").create_or_check(json.loads(json.dumps(semantic))) is False
    assert Run(root, "run-1").semantic() == {
        "data": {"train_batch_size": 8},
        "actor": {"lr": 1e-6, "betas": [0.9, 0.95]},
    }
    assert Run(root, "run-10").create_or_check({}) is True


def test_every_difference_of_a_config_is_named_with_both_values(root: str) -> None:
    Run(root, "run-1").create_or_check({"a": {"b": 1, "c": 2}, "gone": True, "same": [1, 2]})
    with pytest.raises(ConfigError) as caught:
        Run(root, "run-1").create_or_check({"a": {"b": 5, "c": 2}, "new": "x", "same": [1, 2]})
    text = str(caught.value)
    for line in (
        "a.b: the run has 1, this submission 5",
        "gone: the run has True, this submission its default",
        "new: the run has its default, this submission x",
    ):
        assert line in text
    assert "a.c" not in text
    assert "same" not in text


def test_one_of_two_racing_configs_creates_the_run(root: str) -> None:
    barrier = threading.Barrier(2)

    def create(number: int) -> str:
        barrier.wait()
        try:
            return "created" if Run(root, "run-1").create_or_check({"seed": number}) else "joined"
        except ConfigError:
            return "refused"

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(create, range(2))) == ["created", "refused"]


def test_storage_that_ignores_create_only_puts_is_refused(root: str) -> None:
    class Ignoring(LosingAnswers):
        def put_create(self, key: str, data: bytes) -> bool:
            self.store.put(key, data)
            return True

    run = Run(root, "run-1")
    run.store = Ignoring(run.store, 0)  # type: ignore[assignment]
    with pytest.raises(StoreError, match="ignores create-only puts"):
        run.create_or_check({})


def test_a_run_that_is_missing_damaged_or_of_another_format_is_named(root: str) -> None:
    run = Run(root, "run-1")
    with pytest.raises(NotCommittedError, match=r"no run at .*run-1: run\.json is missing"):
        run.semantic()
    for body, text in (
        (b"{", "damaged"),
        (b"3", "damaged"),
        (b'{"format":2,"semantic":{}}', "format 2"),
        (b"{}", "format"),
    ):
        run.store.put("run.json", body)
        with pytest.raises(StoreError, match=rf"run-1/run\.json.*{text}"):
            run.semantic()


def test_claims_count_up_and_keep_the_submission(root: str) -> None:
    run = Run(root, "run-1")
    assert run.newest_epoch() == 0
    first, second = run.claim({"grain": "stage"}), Run(root, "run-1").claim({"grain": "segment"})
    assert (first.epoch, second.epoch, run.newest_epoch()) == (1, 2, 2)
    assert run.submission(1) == {"grain": "stage", "epoch": 1}
    assert run.submission(2) == {"grain": "segment", "epoch": 2}
    with pytest.raises(NotCommittedError, match="no submission 3"):
        run.submission(3)


def test_two_racers_claim_different_epochs(root: str) -> None:
    barrier = threading.Barrier(2)

    def claim(number: int) -> int:
        run = Run(root, "run-1")
        barrier.wait()
        return run.claim({"number": number}).epoch

    with ThreadPoolExecutor(2) as pool:
        epochs = list(pool.map(claim, range(2)))
    assert sorted(epochs) == [1, 2]
    for number, epoch in enumerate(epochs):
        assert Run(root, "run-1").submission(epoch) == {"number": number, "epoch": epoch}


def test_foreign_files_beside_the_claims_count_for_nothing(run: Run) -> None:
    for key in ("owner/notes.txt", "owner/old/0099.json", "owner/0003.json.bak", "owner/7.json"):
        run.store.put(key, b"?")
    assert run.newest_epoch() == 1
    commit(run, 1, "rollout")
    assert run.claim({}).epoch == 2


def test_a_claim_whose_answer_is_lost_is_still_ones_own(root: str) -> None:
    run = Run(root, "run-1")
    run.store = LosingAnswers(run.store, 1)  # type: ignore[assignment]
    assert run.claim({}).epoch == 1
    assert run.check_ownership().epoch == 1
    assert run.submission(1) == {"epoch": 1}


def test_who_lost_the_run_is_told_who_has_it(root: str, run: Run) -> None:
    assert run.check_ownership() == run.owner
    winner = Run(root, "run-1").claim({})
    Run(root, "run-1").claim({})
    with pytest.raises(
        OwnershipLostError, match=rf"epoch 1 lost it to epoch 3 \(process {winner.pid} on {winner.host}\)"
    ):
        run.check_ownership()


def test_who_claimed_nothing_may_only_read(root: str) -> None:
    with pytest.raises(OwnershipLostError, match="may only read"):
        commit(Run(root, "run-1"), 1, "rollout")


def test_a_zombie_cannot_commit(root: str, run: Run) -> None:
    commit(run, 1, "rollout")
    Run(root, "run-1").claim({})
    with pytest.raises(OwnershipLostError):
        commit(run, 1, "reward")
    assert Run(root, "run-1").manifest("reward", 1) is None
    assert Run(root, "run-1").manifest("rollout", 1) is not None


def test_a_pod_acts_under_the_epoch_of_its_submission(root: str, run: Run) -> None:
    pod = Run(root, "run-1")
    assert pod.adopt(1) == {"grain": "stage", "epoch": 1}
    commit(pod, 1, "rollout")
    assert pod.new_attempt().startswith("0001-")
    run.claim({"grain": "step"})
    with pytest.raises(OwnershipLostError, match="epoch 1 lost it to epoch 2"):
        commit(pod, 1, "reward")
    with pytest.raises(NotCommittedError, match="no submission 8"):
        pod.adopt(8)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"epo', "Unterminated string starting at: line 1 column 2 (char 1)"),
        (b"", "it is empty"),
        (b"no json", "Expecting value: line 1 column 1 (char 0)"),
        (b'\xff{"epoch":2}', "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
        (
            '{"epoch":2}'.encode("utf-16-le"),
            "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
        ),
        (b"[" * 100_000, "it is nested too deeply"),
        (b"[1,2]", "expected an object, found [1, 2]"),
        (b'[["epoch",2]]', "expected an object, found [['epoch', 2]]"),
        (b"null", "expected an object, found None"),
        (b"{}", "expected the submission of epoch 2, found that of epoch None"),
        (b'{"epoch":1}', "expected the submission of epoch 2, found that of epoch 1"),
        (b'{"epoch":2,"submission_id":3}', "submission_id: expected a text, found 3"),
        (b'{"epoch":2,"grain":[]}', "grain: expected a text, found []"),
        (b'{"epoch":2,"config":null}', "config: expected an object, found None"),
    ],
)
def test_a_damaged_submission_is_shown_as_its_epoch_and_decides_nothing(
    root: str, run: Run, caplog: pytest.LogCaptureFixture, body: bytes, said: str
) -> None:
    run.claim({"submission_id": "a"})
    run.claim({"submission_id": "b"})
    run.store.put(layout.submission(2), body)
    message = f"{run.uri}/submissions/0002.json is damaged: {said}"

    def refused(ask: Callable[[], Any]) -> str:
        with pytest.raises(DamagedError) as error:
            ask()
        return str(error.value)

    assert list(run.submissions()) == [
        {"submission_id": "b", "epoch": 3},
        {"epoch": 2},
        {"grain": "stage", "epoch": 1},
    ]
    assert caplog.messages == [f"{message}; what it said is left out"]
    pod = Run(root, "run-1")
    assert [refused(lambda: pod.submission(2)), refused(lambda: pod.adopt(2))] == [message, message]
    assert pod.owner is None
    # What claimed it may be the one that is looked for.
    assert refused(lambda: pod.epoch_of("a")) == message
    assert (pod.epoch_of("b"), pod.newest_submission()) == (3, {"submission_id": "b", "epoch": 3})
    run.store.put(layout.submission(3), b"")
    assert refused(pod.newest_submission) == f"{run.uri}/submissions/0003.json is damaged: it is empty"


def test_a_claim_without_a_submission_is_passed_over(run: Run) -> None:
    run.store.put_create(layout.owner(2), b"{}")
    assert (run.newest_submission(), run.epoch_of("a")) == ({"grain": "stage", "epoch": 1}, None)


def test_a_submission_without_a_config_is_damaged_for_whoever_needs_that(run: Run) -> None:
    assert run.config_of({"epoch": 1, "config": {"trainer": {}}}) == {"trainer": {}}
    with pytest.raises(DamagedError, match=r"/run-1/submissions/0001\.json is damaged: it has no config"):
        run.config_of(run.submission(1))


def test_a_manifest_of_another_epoch_is_refused(run: Run) -> None:
    with pytest.raises(StoreError, match="epoch 1 cannot commit a manifest of epoch 4"):
        commit(run, 1, "rollout", epoch=4)


def test_a_commit_whose_answer_is_lost_is_a_commit(run: Run) -> None:
    run.store = LosingAnswers(run.store, 1)  # type: ignore[assignment]
    commit(run, 1, "rollout", attempt="0001-mine")
    run.forget()
    assert run.require("rollout", 1).provenance.attempt == "0001-mine"


@pytest.mark.slow
def test_a_commit_whose_answer_is_lost_on_the_wire_is_a_commit(
    s3_server: Any, s3_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with wire_to(s3_server.endpoint) as wire:
        monkeypatch.setenv("AWS_ENDPOINT_URL", wire.endpoint)
        run = Run(s3_root, "run-1")
        wire.cut = "answer lost"
        assert run.create_or_check({"seed": 1}) is False
        wire.cut = "answer lost"
        assert run.claim({}).epoch == 1
        wire.cut = "answer lost"
        commit(run, 1, "rollout", attempt="0001-mine")
        assert wire.cuts == 3
        assert Run(s3_root, "run-1").require("rollout", 1).provenance.attempt == "0001-mine"


def test_committing_the_same_manifest_again_settles_an_open_outcome(run: Run) -> None:
    manifest = make_manifest(step=1, stage="rollout")
    assert run.commit(manifest) == manifest
    assert run.commit(manifest) == manifest


def test_another_attempts_manifest_is_a_conflict_that_names_both(root: str, run: Run) -> None:
    commit(run, 1, "rollout", attempt="0001-first")
    pod = Run(root, "run-1")
    pod.adopt(1)
    with pytest.raises(CommitConflictError, match="published by attempt 0001-first while attempt 0001-second"):
        commit(pod, 1, "rollout", attempt="0001-second")
    assert pod.require("rollout", 1).provenance.attempt == "0001-first"


def test_pods_of_one_epoch_that_race_commit_once(root: str, run: Run) -> None:
    barrier = threading.Barrier(4)

    def race(number: int) -> bool:
        pod = Run(root, "run-1")
        pod.adopt(1)
        barrier.wait()
        try:
            commit(pod, 1, "rollout", attempt=f"0001-{number}")
        except CommitConflictError:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        won = list(pool.map(race, range(4)))
    assert won.count(True) == 1
    assert run.require("rollout", 1).provenance.attempt == f"0001-{won.index(True)}"


def test_a_stage_that_is_not_committed_is_a_fence(root: str, run: Run) -> None:
    reader = Run(root, "run-1")
    with pytest.raises(NotCommittedError, match=r"run-1: step-000001/rollout is not committed"):
        reader.require("rollout", 1)
    run.store.put(f"{layout.attempt_folder('rollout', 1, '0001-x')}/part-00000.parquet", b"written, not published")
    assert reader.manifest("rollout", 1) is None
    commit(run, 1, "rollout")
    assert reader.require("rollout", 1).content.stage == "rollout"
    commit(run, None, "preprocess/train")
    assert reader.require("preprocess/train", None).content.step is None
    assert reader.store.size("data/train/manifest.json")


def test_a_manifest_that_was_tampered_with_is_found(root: str, run: Run) -> None:
    commit(run, 1, "rollout")
    key = layout.manifest("rollout", 1)
    run.store.put(key, run.store.get(key) + b" ")
    with pytest.raises(StoreError, match=r"run-1/step-000001/rollout/manifest\.json is not as it was written"):
        Run(root, "run-1").manifest("rollout", 1)


def test_the_last_step_is_the_newest_whose_policy_is_committed(root: str, run: Run) -> None:
    assert (run.steps(), run.last_step()) == ([], 0)
    commit(run, 0, "evaluate")
    assert (run.steps(), run.last_step()) == ([0], 0)
    for step in (1, 2, 4):
        commit(run, step, "rollout")
        commit(run, step, POLICY_UPDATE)
    commit(run, 5, "rollout")
    run.store.put("step-000006/rollout/0001-x/part", b"1")
    run.store.put("step-7/rollout/manifest.json", b"foreign")
    assert run.steps() == [0, 1, 2, 4, 5, 6]
    assert (run.last_step(), Run(root, "run-1").last_step()) == (4, 4)
    commit(run, 5, POLICY_UPDATE)
    assert run.last_step() == 5


def test_the_stages_of_a_step_come_in_the_order_in_which_they_ended(run: Run) -> None:
    for stage, ended in (("reward", 3.0), ("advantage", 5.0), ("rollout", 2.0), ("scores", 3.0)):
        commit(run, 1, stage, ended=ended)
    run.store.put("step-000001/policy_update/0001-x/part", b"1")
    assert [manifest.content.stage for manifest in run.step_manifests(1)] == [
        "rollout",
        "reward",
        "scores",
        "advantage",
    ]
    assert run.step_manifests(2) == []


def test_a_long_run_keeps_only_so_many_manifests_in_memory(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "_MANIFESTS_IN_MEMORY", 3)
    for step in range(1, 6):
        commit(run, step, POLICY_UPDATE)
    assert len(run._manifests) == 3
    assert run.require(POLICY_UPDATE, 1).content.step == 1
    assert len(run._manifests) == 3


def test_what_a_long_segment_has_committed_is_found_when_memory_has_dropped_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "_MANIFESTS_IN_MEMORY", 2)
    run.assume_own_from(1)
    for step in range(1, 5):
        assert run.manifest("rollout", step) is None
        commit(run, step, "rollout")
    assert [run.require("rollout", step).step for step in range(1, 5)] == [1, 2, 3, 4]
    # Nobody is asked for what comes next.
    monkeypatch.setattr(run, "store", None)
    assert run.manifest("rollout", 5) is None


def test_threads_may_read_while_another_forgets(run: Run) -> None:
    commit(run, 1, "rollout")
    failures: list[BaseException] = []

    def repeat(action: Callable[[], object]) -> None:
        try:
            for _ in range(100):
                action()
        except BaseException as error:
            failures.append(error)

    actions = (lambda: run.require("rollout", 1), run.forget, run.forget)
    threads = [threading.Thread(target=repeat, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_root_that_ends_in_a_slash_is_the_same_root(root: str) -> None:
    assert Run(f"{root}/", "run-1").uri == Run(root, "run-1").uri == f"{root}/run-1"
