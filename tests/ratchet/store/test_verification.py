"""Verification names every byte of a run that is not the committed one.

Warm files on a local disk were hashed at 94% (one of 1 GiB), 85% (four of 256 MiB) and 85% (2,000 of 64 KiB) of the
speed of plain `hashlib.file_digest`, with another process on one of two cores.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ratchet.grains import promotion
from ratchet.store import layout, stored_files
from ratchet.store.artifacts import write_bytes
from ratchet.store.manifest import canonical_json
from ratchet.store.retired import describe
from ratchet.store.run import Run
from ratchet.store.verification import Verification, verify
from tests.promotion import finished_run
from tests.ratchet.store.chains import commit, new_run
from tests.runs import tiny_config, train_tiny, write_problems

STEPS = 5


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """Folder of a finished run of one segment: steps 3 and 5 are deltas, the states of steps 4 and 5 are kept."""
    root = tmp_path_factory.mktemp("trained")
    values = {
        "trainer.grain": "segment",
        "trainer.full_weights_freq": 2,
        "trainer.trainer_state_freq": 1,
        "trainer.total_training_steps": STEPS,
    }
    train_tiny(root, "run", tiny_config(tiny_model, write_problems(root / "problems.jsonl"), **values))
    return root / "run"


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run, to be damaged."""
    return shutil.copytree(trained, tmp_path / "runs" / "run")


def of(folder: Path, **how: Any) -> Verification:
    return verify(Run(str(folder.parent), folder.name), **how)


def stored(folder: Path, stage: str, step: int, role: str, number: int = 0) -> Path:
    """A stored file of an output, or of the trainer's state."""
    manifest = Run(str(folder.parent), folder.name).require(stage, step)
    state = manifest.provenance.trainer_state
    place, entries = (state if role == "trainer_state" and state else manifest.output(role)).stored
    return folder / place / entries[number].path


def flip(path: Path, position: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if position is None else position] ^= 1
    path.write_bytes(data)


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest and write it in its own form."""
    raw = json.loads(path.read_bytes())
    change(raw)
    path.write_bytes(canonical_json(raw))


# -- a whole run -------------------------------------------------------------------------------------------------------


def test_a_run_that_nobody_touched_has_no_fault(trained: Path) -> None:
    found = of(trained)
    chain = [path for name in ("data", "step-*") for path in trained.glob(f"{name}/**/*") if path.is_file()]
    manifests = [path for path in chain if path.name == "manifest.json"]
    assert (found.faults, found.leftovers) == ((), ())
    assert found.manifests == len(manifests) == 2 + 4 * STEPS + 1
    assert found.files == len(chain) - len(manifests)
    assert found.bytes == sum(path.stat().st_size for path in chain) - sum(path.stat().st_size for path in manifests)
    assert found.retired == STEPS - 2  # trainer states
    assert stored(trained, "policy_update", 3, "policy").suffix == ".delta"


def damaged_table(folder: Path) -> tuple[str, str, str]:
    path = stored(folder, "reward", 2, "rewards")
    flip(path)
    return str(path), "sha256 ", "says step-000002/reward/manifest.json"


def damaged_delta(folder: Path) -> tuple[str, str, str]:
    path = stored(folder, "policy_update", 3, "policy")
    flip(path)
    return str(path), "sha256 ", "says step-000003/policy_update/manifest.json"


def damaged_whole_copy(folder: Path) -> tuple[str, str, str]:
    path = stored(folder, "policy_update", 2, "policy")
    flip(path)
    return str(path), "sha256 ", "says step-000002/policy_update/manifest.json"


def damaged_state(folder: Path) -> tuple[str, str, str]:
    path = stored(folder, "policy_update", 5, "trainer_state", 1)
    flip(path)
    return str(path), "sha256 ", "says step-000005/policy_update/manifest.json"


def truncated(folder: Path) -> tuple[str, str, str]:
    path = stored(folder, "rollout", 4, "rollouts")
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    return str(path), f"found {size - 1} bytes", f"{size} bytes, says step-000004/rollout/manifest.json"


def lengthened(folder: Path) -> tuple[str, str, str]:
    path = stored(folder, "rollout", 4, "rollouts")
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + b"x")
    return str(path), f"found {size + 1} bytes", f"{size} bytes, says step-000004/rollout/manifest.json"


def missing(folder: Path) -> tuple[str, str, str]:
    path = stored(folder, "advantage", 3, "trajectories")
    path.unlink()
    return str(path), "found nothing", "says step-000003/advantage/manifest.json"


def missing_delta(folder: Path) -> tuple[str, str, str]:
    path = stored(folder, "policy_update", 5, "policy")
    path.unlink()
    return str(path), "found nothing", "says step-000005/policy_update/manifest.json"


def missing_state(folder: Path) -> tuple[str, str, str]:
    """Nobody recorded that it was to go."""
    path = stored(folder, "policy_update", 4, "trainer_state")
    shutil.rmtree(path.parent)
    return str(path), "found nothing", "says step-000004/policy_update/manifest.json"


def half_a_state(folder: Path) -> tuple[str, str, str]:
    path = stored(folder, "policy_update", 5, "trainer_state", 1)
    path.unlink()
    return str(path), "found nothing", "says step-000005/policy_update/manifest.json"


def missing_manifest(folder: Path) -> tuple[str, str, str]:
    path = folder / layout.manifest("reward", 3)
    path.unlink()
    return str(path), "found nothing", "was read for step-000003/advantage"


def missing_base(folder: Path) -> tuple[str, str, str]:
    path = folder / layout.manifest("policy_update", 4)
    path.unlink()
    return str(path), "found nothing", "on which step-000005/policy_update builds"


def other_metric(folder: Path) -> tuple[str, str, str]:
    path = folder / layout.manifest("reward", 3)
    rewrite(path, lambda raw: raw["provenance"]["metrics"].update({"critic/score/mean": 1.0}))
    return str(path), "found sha256 ", "was read for step-000003/advantage"


def not_canonical(folder: Path) -> tuple[str, str, str]:
    path = folder / layout.manifest("reward", 3)
    path.write_bytes(path.read_bytes() + b"\n")
    return str(path), "a manifest as it was written", "canonical JSON"


def other_type(folder: Path) -> tuple[str, str, str]:
    path = folder / layout.manifest("reward", 3)
    rewrite(path, lambda raw: raw["content"].update(step=3.0))
    return str(path), "a manifest as it was written", "step"


def other_base(folder: Path) -> tuple[str, str, str]:
    path = folder / layout.manifest("policy_update", 5)
    rewrite(path, lambda raw: raw["provenance"]["artifacts"]["policy"]["delta"].update(base="0" * 64))
    return str(folder / layout.manifest("policy_update", 4)), f"policy {'0' * 64}", "step-000005/policy_update builds"


def later_base(folder: Path) -> tuple[str, str, str]:
    path = folder / layout.manifest("policy_update", 3)
    rewrite(path, lambda raw: raw["provenance"]["artifacts"]["policy"]["delta"].update(step=4))
    return str(path), "policy to build on an earlier step", "step 4"


def swapped_files(folder: Path) -> tuple[str, str, str]:
    one, other = (stored(folder, "policy_update", step, "policy") for step in (1, 2))
    data = one.read_bytes(), other.read_bytes()
    one.write_bytes(data[1])
    other.write_bytes(data[0])
    return str(other), "sha256 ", "says step-000002/policy_update/manifest.json"


def swapped_outputs(folder: Path) -> tuple[str, str, str]:
    one, other = (folder / layout.manifest("reward", step) for step in (2, 3))
    artifacts = [json.loads(path.read_bytes())["provenance"]["artifacts"] for path in (one, other)]
    rewrite(one, lambda raw: raw["provenance"].update(artifacts=artifacts[1]))
    rewrite(other, lambda raw: raw["provenance"].update(artifacts=artifacts[0]))
    return str(one), "rewards to be ", "as its content says"


def other_input(folder: Path) -> tuple[str, str, str]:
    path = folder / layout.manifest("advantage", 2)
    rewrite(path, lambda raw: raw["content"]["inputs"].update(rewards="0" * 64))
    return str(path), "the input rewards to be ", f"found {'0' * 64}"


def other_place(folder: Path) -> tuple[str, str, str]:
    path = folder / layout.manifest("reward", 3)
    shutil.copyfile(folder / layout.manifest("reward", 2), path)
    return str(path), "the manifest of step-000003/reward of run run", "that of step-000002/reward of run run"


def other_run(folder: Path) -> tuple[str, str, str]:
    path = folder / layout.manifest("reward", 3)
    rewrite(path, lambda raw: raw["provenance"].update(run_id="elsewhere"))
    return str(path), "the manifest of step-000003/reward of run run", "of run elsewhere"


def extra_beside(folder: Path) -> tuple[str, str, str]:
    path = stored(folder, "reward", 2, "rewards").with_name("part-00001.parquet")
    path.write_bytes(b"more")
    return str(path), "no such object", "found 4 bytes"


def extra_at_the_top(folder: Path) -> tuple[str, str, str]:
    path = folder / "notes.txt"
    path.write_bytes(b"more")
    return str(path), "no such object", "found 4 bytes"


def extra_code(folder: Path) -> tuple[str, str, str]:
    path = folder / layout.code("0" * 64, "reward.py")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")
    return str(path), f"sha256 {'0' * 64}", "says its folder's name"


def missing_claim(folder: Path) -> tuple[str, str, str]:
    path = folder / layout.owner(1)
    path.unlink()
    return str(path), "the claim under which ", "found nothing"


def damaged_claim(folder: Path) -> tuple[str, str, str]:
    path = folder / layout.owner(1)
    flip(path, 0)
    return str(path), "the canonical JSON of a record", ""


def damaged_submission(folder: Path) -> tuple[str, str, str]:
    path = folder / layout.submission(1)
    path.write_bytes(b"")
    return str(path), "the canonical JSON of a record", "Expecting value"


def bottomless_submission(folder: Path) -> tuple[str, str, str]:
    path = folder / layout.submission(1)
    path.write_bytes(b"[" * 100_000)
    return str(path), "the canonical JSON of a record", "RecursionError"


def other_submission(folder: Path) -> tuple[str, str, str]:
    path = folder / layout.submission(1)
    path.write_bytes(b'{"config":[1],"epoch":1}')
    return str(path), "a submission as it was written", "config: expected an object, found [1]"


def missing_identity(folder: Path) -> tuple[str, str, str]:
    path = folder / layout.RUN
    path.unlink()
    return str(path), "the run's semantic config", "found nothing"


IN_FILES = [damaged_table, damaged_delta, damaged_whole_copy, damaged_state, swapped_files, extra_code]
IN_THE_LISTING = [
    truncated,
    lengthened,
    missing,
    missing_delta,
    missing_state,
    half_a_state,
    extra_beside,
    extra_at_the_top,
]
IN_MANIFESTS = [
    missing_manifest,
    missing_base,
    other_metric,
    not_canonical,
    other_type,
    other_base,
    later_base,
    swapped_outputs,
    other_input,
    other_place,
    other_run,
    missing_claim,
    damaged_claim,
    damaged_submission,
    bottomless_submission,
    other_submission,
    missing_identity,
]


@pytest.mark.parametrize("damage", [*IN_FILES, *IN_THE_LISTING, *IN_MANIFESTS])
def test_each_kind_of_damage_is_named_where_it_is(folder: Path, damage: Callable[[Path], tuple[str, str, str]]) -> None:
    path, *said = damage(folder)
    place = Path(path).relative_to(folder).as_posix()
    faults = [str(fault) for fault in of(folder).faults if fault.place == place]
    assert any(all(text in fault for text in said) for fault in faults), faults
    is_seen_fast = any(fault.place == place for fault in of(folder, fast=True).faults)
    assert is_seen_fast == (damage not in IN_FILES)


def test_one_damaged_file_is_one_fault(folder: Path) -> None:
    damaged_delta(folder)
    assert len(of(folder).faults) == 1


def test_deltas_that_are_whole_and_make_other_weights_are_told(folder: Path) -> None:
    """Each stored byte is as its manifest says, and no manifest read this one; only the weights tell."""
    path = folder / layout.manifest("policy_update", 5)
    shutil.rmtree(folder / layout.stage_folder("checkpoint_export", 5))
    wrong = stored(folder, "policy_update", 3, "policy")

    def change(raw: dict[str, Any]) -> None:
        entry = raw["provenance"]["artifacts"]["policy"]["delta"]["files"][0]
        base = json.loads((folder / layout.manifest("policy_update", 3)).read_bytes())["provenance"]["artifacts"]
        entry.update({key: base["policy"]["delta"]["files"][0][key] for key in ("bytes", "sha256")})

    shutil.copyfile(wrong, stored(folder, "policy_update", 5, "policy"))
    rewrite(path, change)
    assert of(folder, fast=True).faults == ()
    (fault,) = of(folder).faults
    assert fault.place == "step-000005/policy_update/manifest.json"
    assert "made of step 4 and the deltas since, is damaged" in fault.found


def test_what_is_retired_while_it_is_verified_is_no_fault(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, hash_files = Run(str(folder.parent), folder.name), stored_files.hash_files
    state = stored(folder, "policy_update", 4, "trainer_state").parent

    def later(*arguments: Any) -> Any:
        artifact = run.require("policy_update", 4).provenance.trainer_state
        assert artifact is not None
        record = describe("policy_update", 4, "trainer_state", artifact, reason="a test", epoch=1)
        assert run.store.put_create(record.key, record.to_json())
        shutil.rmtree(state)
        return hash_files(*arguments)

    monkeypatch.setattr(stored_files, "hash_files", later)
    assert verify(run).faults == ()


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_flipped_bit_of_a_file_or_of_a_manifest_that_was_read_is_found(trained: Path, data: st.DataObject) -> None:
    # Nothing has read the last manifest.
    last = trained / layout.manifest("checkpoint_export", STEPS)
    chain = [path for name in ("data", "step-*") for path in trained.glob(f"{name}/**/*") if path != last]
    paths = sorted(path for path in chain if path.is_file() and path.stat().st_size)
    path = data.draw(st.sampled_from(paths))
    whole = path.read_bytes()
    changed = bytearray(whole)
    changed[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        path.write_bytes(changed)
        place = path.relative_to(trained).as_posix()
        assert any(fault.place == place for fault in of(trained).faults)
    finally:
        path.write_bytes(whole)


# -- small chains, on both kinds of storage ----------------------------------------------------------------------------


def test_verification_reads_any_storage(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_files, "_CHUNK_BYTES", 4)
    run = new_run(root)
    files = {f"part-{number}": bytes(range(number)) for number in (0, 1, 4, 5, 8, 13)}
    first = commit(run, "rollout", 1, files)
    commit(run, "reward", 1, {"part": b"reward"}, [first])
    run.store.put("status/id/segment.json", b"{}")
    run.store.put("preflight/probe", b"")
    found = verify(Run(root, "run"))
    assert (found.faults, found.manifests, found.files, found.bytes) == ((), 2, 7, 37)
    kept = first.output("rollout").folder
    run.store.delete(f"{kept}/part-0")
    run.store.put(f"{kept}/part-8", bytes(8))
    run.store.put(f"{kept}/part-13", bytes(12))
    run.store.put("step-000001/reward/0001-abc/reward/part", b"of nobody")
    found = verify(Run(root, "run"))
    assert {fault.place: fault.found[:8] for fault in found.faults} == {
        f"{kept}/part-0": "nothing",
        f"{kept}/part-8": "sha256 a",
        f"{kept}/part-13": "12 bytes",
    }
    assert [(one.folder, one.epoch, one.bytes) for one in found.leftovers] == [
        ("preflight/probe", 1, 0),
        ("step-000001/reward/0001-abc", 1, 9),
    ]


def test_a_stage_that_is_committed_while_the_run_is_listed_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listing met the second stage's manifest, and neither the first one's nor its files."""
    run = new_run(str(tmp_path))
    first = commit(run, "rollout", 1, {"part": b"rollout"})
    commit(run, "reward", 1, {"part": b"reward"}, [first])
    reader = Run(str(tmp_path), "run")
    seen = [info for info in reader.store.list_objects("") if "/rollout/" not in info.key]
    monkeypatch.setattr(reader.store, "list_objects", lambda folder: iter(seen))
    found = verify(reader)
    assert (found.faults, found.manifests, found.files) == ((), 2, 2)


def test_a_manifest_that_was_made_from_a_stage_reads_one_of_its_outputs(tmp_path: Path) -> None:
    run = new_run(str(tmp_path))
    first = commit(run, "rollout", 1, {"part": b"rollout"})
    other = commit(run, "policy_scores", 1, {"part": b"scores"})
    commit(run, "reward", 1, {"part": b"reward"}, [first], previous={"step-000001/policy_scores": other.sha256})
    (fault,) = verify(Run(str(tmp_path), "run")).faults
    assert fault.place == "step-000001/reward/manifest.json"
    assert "an output of step-000001/policy_scores among its inputs" in fault.expected


def test_a_record_of_what_is_stored_nowhere_is_whole(tmp_path: Path) -> None:
    """As `recovery` records a replayed policy."""
    run = new_run(str(tmp_path))
    commit(run, "recovery", 1, {}, artifacts={})
    found = verify(Run(str(tmp_path), "run"))
    assert (found.faults, found.manifests, found.files) == ((), 1, 0)


# -- decisions ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def promoted(tmp_path: Path) -> Run:
    run, config = finished_run(str(tmp_path), "first", [1.0, 0.0])
    decision = promotion.promote(run, config)
    assert decision is not None
    assert decision.verdict == "promoted"
    return Run(str(tmp_path), "first")


def test_a_decision_is_compared_with_its_run(promoted: Run) -> None:
    found = verify(promoted)
    assert (found.faults, found.decisions) == ((), 1)


@pytest.mark.parametrize(
    ("stage", "step", "said"),
    [
        ("checkpoint_export", 1, "the export of step 1 to be "),
        ("evaluate", 1, "the evaluations of step 1 to be "),
        ("preprocess/train", None, "the training prompts of step 1 to be "),
        ("policy_update", 0, "the base of step 1 to be "),
    ],
)
def test_a_run_that_was_made_anew_under_its_decisions_is_told(
    promoted: Run, stage: str, step: int | None, said: str
) -> None:
    """Each manifest is right by itself, and is not the one that was decided on."""
    digest = make_anew(promoted, stage, step)
    (fault,) = verify(promoted, fast=True).faults
    assert fault.place == f"{promoted.root}/champions/math/0001.json"
    assert said in fault.expected
    assert fault.found == digest


def test_a_refused_decision_on_an_earlier_run_of_that_name_is_no_fault(promoted: Run) -> None:
    second, config = finished_run(promoted.root, "second", [0.0, 1.0])
    decision = promotion.promote(second, config)
    assert decision is not None
    assert decision.verdict == "refused"
    second = Run(promoted.root, "second")
    make_anew(second, "checkpoint_export", 1)
    found = verify(second)
    assert (found.faults, found.decisions) == ((), 1)


def make_anew(run: Run, stage: str, step: int | None) -> str:
    """Commit other files in place of a stage's; return their digest."""
    manifest = run.require(stage, step)
    (role,) = manifest.provenance.artifacts
    artifact = write_bytes(run.store, manifest.output(role).folder, {"other": b"other"})
    for entry in manifest.output(role).files:
        run.store.delete(f"{artifact.folder}/{entry.path}")

    def change(raw: dict[str, Any]) -> None:
        raw["content"]["outputs"][role] = artifact.digest
        entry = {"path": "other", "bytes": 5, "sha256": artifact.files[0].sha256}
        raw["provenance"]["artifacts"][role]["files"] = [entry]

    rewrite(Path(run.uri) / layout.manifest(stage, step), change)
    return artifact.digest


def test_the_config_that_was_decided_on_is_the_runs(promoted: Run) -> None:
    path = Path(promoted.uri) / layout.RUN
    raw = json.loads(path.read_bytes())
    raw["semantic"]["trainer"]["seed"] = 99
    path.write_bytes(canonical_json(raw))
    (fault,) = verify(promoted, fast=True).faults
    assert fault.expected.startswith("the config of step 1 to be ")


def test_a_damaged_decision_is_named(promoted: Run) -> None:
    flip(Path(promoted.root) / "champions" / "math" / "0001.json", 0)
    (fault,) = verify(promoted, fast=True).faults
    assert fault.place == f"{promoted.root}/champions/math"
    assert "0001.json" in fault.found
