"""Retention never takes the last checkpoint, nor what anything names or builds on; what it takes, it has recorded."""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratchet.errors import OwnershipLostError, RetiredError, StoreError
from ratchet.store import layout, leftovers
from ratchet.store.artifacts import scratch
from ratchet.store.local import LocalStore
from ratchet.store.manifest import canonical_json
from ratchet.store.retention import Rules, retire
from ratchet.store.retired import TRAINER_STATE, Retired, describe, find
from ratchet.store.run import CRITIC_UPDATE, POLICY_UPDATE, Run
from ratchet.store.survey import survey
from ratchet.store.usage import in_words, usage
from ratchet.store.verification import read_chain, verify
from ratchet.store.weights import read_weights
from tests.ratchet.store.chains import commit, new_run
from tests.ratchet.store.versions import Killed, killed_at, loadable, name, publish, readable


@pytest.fixture(autouse=True, scope="module")
def unsynced() -> Iterator[None]:
    """What a disk keeps when the machine loses its power is not tested here, and waiting for it takes long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


def trained(root: Path | str, steps: str, *, stage: str = POLICY_UPDATE) -> Run:
    """A run with version 0 and one for each letter: `w` whole, `d` a delta; capital letters have a trainer state."""
    run = new_run(str(root))
    publish(run, 0, stage=stage)
    for step, letter in enumerate(steps, 1):
        publish(run, step, is_delta=letter in "dD", has_state=letter.isupper(), stage=stage)
    return run


def apply(run: Run, rules: Rules | None, proven: set[str] | None = None) -> list[tuple[int, str]]:
    """Retire, as a process does that has just started; return steps and roles of what went."""
    gone = retire(run, survey(run, with_weights=True), rules, proven=set() if proven is None else proven)
    return [(item.step, item.role) for item in gone]


def file_of(run: Run, step: int, role: str, number: int = 0) -> Path:
    manifest = run.require(POLICY_UPDATE, step)
    state = manifest.provenance.trainer_state
    folder, entries = (state if role == TRAINER_STATE and state else manifest.output(role)).stored
    return Path(run.uri, folder, entries[number].path)


# -- what goes, by hand ------------------------------------------------------------------------------------------------

ALL = Rules()


@pytest.mark.parametrize(
    ("steps", "rules", "states"),
    [
        ("WWWWW", ALL, [4, 5]),
        ("WwwWw", ALL, [1, 4]),
        ("WWWWW", Rules(save_freq=2), [2, 4, 5]),
        ("WWWWWWW", Rules(save_freq=2, states={POLICY_UPDATE: 1}), [6, 7]),
        ("WWWWWWW", Rules(save_freq=2, states={POLICY_UPDATE: 2}), [4, 6, 7]),
        ("WWWWWWW", Rules(save_freq=2, states={CRITIC_UPDATE: 1}), [2, 4, 6, 7]),
    ],
)
def test_of_the_trainer_states_the_last_two_stay_and_those_that_are_saved(
    tmp_path: Path, steps: str, rules: Rules, states: list[int]
) -> None:
    run = trained(tmp_path, steps)
    apply(run, rules)
    assert loadable(run) == states
    assert readable(run) == list(range(len(steps) + 1))  # every policy, as nobody asked for fewer
    assert apply(run, rules) == []


@pytest.mark.parametrize(
    ("steps", "rules", "named", "policies"),
    [
        ("wwwww", Rules(versions=3), [], [0, 3, 4, 5]),
        ("wwwww", Rules(versions=1), [], [0, 4, 5]),  # the next step may read the last two
        ("wddwd", Rules(versions=2), [], [0, 4, 5]),
        ("wdddd", Rules(versions=2), [], [0, 1, 2, 3, 4, 5]),  # 5 is made of all of them
        ("wddwdd", Rules(versions=2), [2], [0, 1, 2, 4, 5, 6]),  # evaluated, and made of 1
        ("wwwwww", Rules(versions=2, test_freq=2), [], [0, 2, 4, 5, 6]),
        ("wWwwwWw", Rules(versions=2), [], [0, 2, 6, 7]),  # a state and its policy are one checkpoint
        ("WWWWWWW", Rules(versions=2, save_freq=3), [], [0, 3, 6, 7]),
        ("WWWWWWW", Rules(versions=2, save_freq=3, states={POLICY_UPDATE: 1}), [], [0, 6, 7]),
    ],
)
def test_of_the_policies_the_newest_stay_and_all_that_something_needs(
    tmp_path: Path, steps: str, rules: Rules, named: list[int], policies: list[int]
) -> None:
    run = trained(tmp_path, steps)
    for step in named:
        name(run, "evaluate", step)
    apply(run, rules)
    assert readable(run) == policies
    found = verify(Run(str(tmp_path), "run"))
    assert found.faults == ()
    assert len(steps) + 1 - len(policies) <= found.retired == len(list(Path(run.uri, "retired").rglob("*.json")))


def test_critics_are_kept_as_policies_are_and_an_evaluation_names_none(tmp_path: Path) -> None:
    run = trained(tmp_path, "wwww", stage=CRITIC_UPDATE)
    commit(run, "evaluate", 1, {"part": b"of the policy"})
    apply(run, Rules(versions=2, test_freq=1))
    assert readable(run, CRITIC_UPDATE) == [0, 3, 4]


def test_both_kinds_of_storage_lose_what_is_due_alone(root: str) -> None:
    run = trained(root, "WWWd")
    before = {info.key for info in run.store.list_objects("")}
    assert apply(run, Rules(versions=1)) == [(1, TRAINER_STATE), (1, "policy")]
    gone = before - {info.key for info in run.store.list_objects("")}
    assert len(gone) == 3 + 1
    assert all(key.startswith("step-000001/policy_update/") for key in gone)
    assert (loadable(run), readable(run)) == ([2, 3], [0, 2, 3, 4])
    assert verify(Run(root, "run")).faults == ()


# -- records -----------------------------------------------------------------------------------------------------------


def test_a_reader_of_what_was_retired_is_told_so_with_the_record(tmp_path: Path) -> None:
    run = trained(tmp_path, "wdwww")
    manifest = run.require(POLICY_UPDATE, 2)
    apply(run, Rules(versions=2))
    record = find(run.store, POLICY_UPDATE, 2, "policy")
    assert record is not None
    assert (record.digest, record.epoch, record.folder) == (manifest.output("policy").digest, 1, record.folder)
    assert record.stored_bytes == sum(entry.bytes for entry in manifest.output("policy").stored[1])
    said = (
        r"policy of policy_update of step 2 was deleted on purpose \(trainer\.keep_policies=2, and nothing that stays "
        r"needs it; .* UTC, under claim 1\); its record is .*/retired/step-000002/policy_update/policy\.json"
    )
    with scratch() as folder, pytest.raises(RetiredError, match=said):
        read_weights(run, manifest, "policy", folder)


def test_a_file_that_is_missing_without_a_record_stays_an_error_of_its_own(tmp_path: Path) -> None:
    run = trained(tmp_path, "ww")
    file_of(run, 1, "policy").unlink()
    with scratch() as folder, pytest.raises(StoreError, match="no object") as caught:
        read_weights(run, run.require(POLICY_UPDATE, 1), "policy", folder)
    assert not isinstance(caught.value, RetiredError)
    (fault,) = verify(run).faults
    assert (fault.place, fault.found) == (str(file_of(run, 1, "policy").relative_to(run.uri)), "nothing")


def test_what_is_retired_is_not_read_even_while_its_files_are_there(tmp_path: Path) -> None:
    run = trained(tmp_path, "wwww")
    with pytest.raises(Killed), killed_at(1):
        apply(run, Rules(versions=2))
    assert file_of(run, 1, "policy").is_file()
    assert readable(run) == [0, 2, 3, 4]


def put(run: Run, **changes: Any) -> str:
    """Record that the policy of step 2, or what `changes` say, was retired; its files are gone, too."""
    artifact = run.require(POLICY_UPDATE, 2).output("policy")
    record = describe(POLICY_UPDATE, 2, "policy", artifact, reason="by hand", epoch=1)
    record = Retired(**{**{key: getattr(record, key) for key in Retired.__slots__}, **changes})
    run.store.put(record.key, record.to_json())
    return record.key


def of_an_export(run: Run) -> tuple[str, str]:
    export = name(run, "checkpoint_export", 2).output("checkpoint_export")
    key = put(run, stage="checkpoint_export", role="checkpoint_export", digest=export.digest, folder=export.folder)
    return key, "what step-000002/checkpoint_export/manifest.json names as weights or as a trainer's state"


def of_another_digest(run: Run) -> tuple[str, str]:
    return put(run, digest="0" * 64), "what step-000002/policy_update/manifest.json names"


def of_no_stage(run: Run) -> tuple[str, str]:
    return put(run, step=77), "a manifest of step-000077/policy_update"


def of_a_base(run: Run) -> tuple[str, str]:
    file_of(run, 2, "policy").unlink()
    return put(run), "policy to stay: step-000003/policy_update builds on it"


def of_the_newest(run: Run) -> tuple[str, str]:
    newest = run.require(POLICY_UPDATE, 3).output("policy")
    file_of(run, 3, "policy").unlink()
    return put(run, step=3, digest=newest.digest, folder=newest.folder), "policy to stay: it is the newest"


def of_what_is_exported(run: Run) -> tuple[str, str]:
    publish(run, 4)
    publish(run, 5)
    manifest = name(run, "checkpoint_export", 4)
    policy = run.require(POLICY_UPDATE, 4).output("policy")
    file_of(run, 4, "policy").unlink()
    assert manifest.step == 4
    key = put(run, step=4, digest=policy.digest, folder=policy.folder)
    return key, "policy to stay: step-000004/checkpoint_export names it"


def of_another_place(run: Run) -> tuple[str, str]:
    run.store.put(layout.retired(POLICY_UPDATE, 1, "policy"), run.store.get(put(run)))
    run.store.delete(layout.retired(POLICY_UPDATE, 2, "policy"))
    return layout.retired(POLICY_UPDATE, 1, "policy"), "the record of this place"


def of_other_bytes(run: Run) -> tuple[str, str]:
    key = put(run)
    raw = json.loads(run.store.get(key))
    raw["retired"]["step"] = "2"
    run.store.put(key, canonical_json(raw))
    return key, "a record as it was written"


@pytest.mark.parametrize(
    "forge",
    [
        of_an_export,
        of_another_digest,
        of_no_stage,
        of_a_base,
        of_the_newest,
        of_what_is_exported,
        of_another_place,
        of_other_bytes,
    ],
)
def test_a_record_that_retention_would_not_have_written_is_a_fault(tmp_path: Path, forge: Any) -> None:
    run = trained(tmp_path, "wwd")
    place, expected = forge(run)
    faults = [fault for fault in verify(run, fast=True).faults if fault.place == place]
    assert [fault.expected[: len(expected)] for fault in faults] == [expected]


def test_a_damaged_record_of_what_is_gone_is_a_fault_and_ends_no_verification(tmp_path: Path) -> None:
    run = trained(tmp_path, "wwd")
    place, _ = of_other_bytes(run)
    file_of(run, 1, "policy").unlink()
    assert place in {fault.place for fault in verify(run).faults}


# -- never the last ----------------------------------------------------------------------------------------------------


def damage(path: Path) -> None:
    path.write_bytes(bytes(len(path.read_bytes())))


def test_no_state_goes_until_a_newer_one_was_read_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = trained(tmp_path, "WWW")
    damage(file_of(run, 3, TRAINER_STATE, 1))
    assert apply(run, ALL) == []
    assert "no trainer_state of policy_update that stays is known to be whole" in caplog.text
    assert loadable(run) == [1, 2]
    # The trainer of this process has loaded one that stays: it can be gone back to.
    state = run.require(POLICY_UPDATE, 2).provenance.trainer_state
    assert state is not None
    assert apply(run, ALL, {state.folder}) == [(1, TRAINER_STATE)]
    publish(run, 4)
    proven: set[str] = set()
    assert apply(run, ALL, proven) == [(2, TRAINER_STATE)]
    assert len(proven) == 1
    assert loadable(run) == [4]


def test_a_state_that_is_cut_short_does_not_count_as_one(tmp_path: Path) -> None:
    run = trained(tmp_path, "WWWW")
    file_of(run, 4, TRAINER_STATE).unlink()
    assert apply(run, ALL) == [(1, TRAINER_STATE)]
    assert loadable(run) == [2, 3]


def test_a_state_that_is_cut_short_since_the_run_was_looked_at_keeps_the_others(tmp_path: Path) -> None:
    run = trained(tmp_path, "WWW")
    found, loaded = survey(run, with_weights=True), run.require(POLICY_UPDATE, 2).provenance.trainer_state
    assert loaded is not None
    file_of(run, 3, TRAINER_STATE).unlink()
    assert retire(run, found, ALL, proven={loaded.folder}) == []
    assert loadable(run) == [1, 2]


@pytest.mark.parametrize("step", [4, 5])
def test_no_policy_goes_while_the_newest_cannot_be_made(tmp_path: Path, step: int) -> None:
    run = trained(tmp_path, "wwwwd")
    file_of(run, step, "policy").unlink()
    assert apply(run, Rules(versions=2)) == []
    assert readable(run) == [one for one in range(5) if one != step]


def test_the_state_is_read_once_for_all_that_it_stands_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, proven, read = trained(tmp_path, "WW"), set[str](), list[str]()
    get_range = LocalStore.get_range
    monkeypatch.setattr(LocalStore, "get_range", lambda *a: (read.append(a[1].split("/")[0]), get_range(*a))[1])
    for step in range(3, 8):
        publish(run, step)
        apply(run, ALL, proven)
    # The state of step 3 stands for two retirements, then that of step 5, then that of step 7.
    assert list(dict.fromkeys(read)) == ["step-000003", "step-000005", "step-000007"]


def test_a_state_that_is_not_whole_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, read = trained(tmp_path, "WWW"), list[tuple[str, int]]()
    damage(file_of(run, 3, TRAINER_STATE, 1))
    found, get_range = survey(run, with_weights=True), LocalStore.get_range
    monkeypatch.setattr(LocalStore, "get_range", lambda *a: (read.append(a[1:3]), get_range(*a))[1])
    for _ in range(3):
        assert retire(run, found, ALL, proven=set()) == []
    assert read
    assert len(read) == len(set(read))


def test_whoever_lost_the_run_retires_nothing(tmp_path: Path) -> None:
    run = trained(tmp_path, "WWW")
    Run(str(tmp_path), "run").claim({"submission_id": "other"})
    with pytest.raises(OwnershipLostError):
        apply(run, Rules(versions=2))
    assert loadable(run) == [1, 2, 3]


def test_a_process_that_is_killed_at_any_operation_leaves_a_run_to_go_on_with(tmp_path: Path) -> None:
    rules = Rules(versions=2, save_freq=3)
    whole = trained(tmp_path / "whole", "WDWDWDW")
    with killed_at(10**6) as counted:
        went = apply(whole, rules)
    assert len(went) == 4 + 3  # states 1, 2, 4 and 5; weights 1, 2 and 4: 6 is made of 5
    assert counted[0] == 7 + 4 * 3 + 3  # a record each, then the files
    for number in range(counted[0]):
        run = trained(tmp_path / str(number), "WDWDWDW")
        with pytest.raises(Killed), killed_at(number):
            apply(run, rules)
        found = verify(Run(run.root, "run"))
        assert (found.faults, found.leftovers) == ((), ()), number
        assert {6, 7} <= set(loadable(run)) & set(readable(run)), number
        resumed = Run(run.root, "run")
        resumed.claim({"submission_id": None})
        apply(resumed, rules)
        assert (loadable(run), readable(run)) == (loadable(whole), readable(whole)), number
        assert verify(resumed).faults == ()


# -- by hand, without the run's ownership ------------------------------------------------------------------------------


def test_what_was_named_while_records_were_put_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained(tmp_path, "wwww")
    other = Run(str(tmp_path), "run")
    put_create = LocalStore.put_create

    def name_first(store: Any, key: str, data: bytes) -> bool:
        if key.startswith("retired/") and run.manifest("evaluate", 2) is None:
            name(run, "evaluate", 2)
        return put_create(store, key, data)

    monkeypatch.setattr(LocalStore, "put_create", name_first)
    assert other.owner is None
    assert apply(other, Rules(versions=2)) == [(1, "policy")]
    assert file_of(run, 2, "policy").is_file()
    record = find(run.store, POLICY_UPDATE, 1, "policy")
    assert record is not None
    assert str(record).endswith("by ratchet gc)")
    assert verify(run).faults == ()


def test_sizes_by_kind_are_everything_below_the_run(tmp_path: Path) -> None:
    run = trained(tmp_path, "WWW")
    name(run, "evaluate", 3)
    run.store.put("step-000002/rollout/0001-abc/rollouts/part", b"dead!")
    with pytest.raises(Killed), killed_at(1):
        apply(run, ALL)
    sizes = usage(read_chain(run))
    assert sum(sizes.values()) == sum(path.stat().st_size for path in Path(run.uri).rglob("*") if path.is_file())
    per_state = sum(len(f"state 1 part {number}") for number in range(3))
    assert {key: size for key, size in sizes.items() if key != "manifests and records"} == {
        "policies": 4 * 48,
        "trainer states": 2 * per_state,
        "being deleted": per_state,
        "tables": len("evaluate 3"),
        "leftovers of attempts": 5,
    }
    assert next(iter(sizes)) == "manifests and records"
    assert in_words({"policies": 5 * 1024**3 // 2, "tables": 10}) == "policies 2.5 GiB, tables 10 bytes"


# -- any history -------------------------------------------------------------------------------------------------------

steps = st.tuples(st.just("step"), st.booleans(), st.booleans())
names = st.tuples(st.just("name"), st.sampled_from(["evaluate", "checkpoint_export"]), st.integers(0, 12))
retirements = st.tuples(
    st.just("retire"),
    st.builds(
        Rules,
        versions=st.none() | st.integers(1, 4),
        save_freq=st.sampled_from([-1, 2, 3]),
        test_freq=st.sampled_from([-1, 4]),
        states=st.just({}) | st.builds(lambda limit: {POLICY_UPDATE: limit}, st.integers(1, 2)),
    ),
    st.none() | st.integers(0, 12),
)
others = st.tuples(st.sampled_from(["gc", "resume", "dead"]), st.none(), st.none())
histories = st.lists(st.one_of(steps, steps, steps, names, retirements, retirements, others), min_size=4, max_size=18)


@settings(max_examples=15, deadline=None)
@given(histories)
def test_after_any_history_there_is_a_checkpoint_and_everything_that_is_named(history: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as root:
        run, named, committed = trained(root, "W"), set[int](), 1
        for what, first, second in history:
            match what:
                case "step":
                    committed += 1
                    publish(run, committed, is_delta=first, has_state=second)
                case "name":
                    step = readable(run)[second % len(readable(run))]
                    if run.manifest(first, step) is None:
                        name(run, first, step)
                        named.add(step)
                case "retire" if second is None:
                    apply(run, first)
                    assert apply(run, first) == []
                case "retire":
                    with killed_at(second), contextlib.suppress(Killed):
                        apply(run, first)
                case "dead":
                    run.store.put(f"{layout.attempt_folder('rollout', committed, run.new_attempt())}/part", b"dead")
                case "resume":
                    run = Run(root, "run")
                    run.claim({"submission_id": None})
                case "gc":
                    leftovers.delete(run, leftovers.plan(run, older_than=0))
                    apply(Run(root, "run"), None)
            assert verify(Run(root, "run"), fast=True).faults == (), what
            policies, states = readable(run), loadable(run)
            assert {0, committed, committed - 1} | named <= set(policies), what
            # Policy and state of one step, or a state from which the committed steps are made again.
            assert states, what
            assert set(states) & set(policies), what
