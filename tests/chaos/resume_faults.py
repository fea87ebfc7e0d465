"""Runs that go on otherwise than they were begun: at another grain, with more processes or fewer, with another config.

What must hold: what is semantically the same goes on and ends with the digests of an uninterrupted run, what is not is
refused with every difference named, and a run that is finished stays as it is.
"""

import hashlib
import json
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ratchet.config import RunConfig
from ratchet.config.keys import key_fields
from ratchet.config.semantics import semantic
from ratchet.errors import ConfigError, RatchetError
from ratchet.grains import loop
from ratchet.grains.promotion import promote
from ratchet.grains.session import open_session, submit
from ratchet.store import verification
from ratchet.store.run import Run
from tests.chaos.bench import Broken, Died, Finished, Workbench, committed, expect
from tests.chaos.case import Case, Outcome
from tests.runs import Stopped

KIND = "resume"
RUN_ID = "run"
GRAINS = ("segment", "step", "stage")

OTHER_GRAIN = "goes on at another grain"
SAME_GRAIN = "goes on at the same grain"
EPOCH = "goes on at the end of an epoch"
LONGER = "finished, goes on for more steps"
FINISHED = "finished, submitted again"
PROMOTED = "finished and promoted, promoted again"
SEMANTIC = "submitted with another value of a semantic key"
OPERATIONAL = "submitted with another value of an operational key"
WORLD = ("two processes, goes on with one", "one process, goes on with two")
EPOCHS = {"data.train_batch_size": 3}
"""Of four prompts: the second step of each epoch has one."""
_SHORT = {"trainer.total_training_steps": 2}
_PROMOTED = {"promotion.name": "champion", "promotion.min_accuracy": 0.0}
_WORLD: dict[str, Any] = {"trainer.total_training_steps": 3, "trainer.test_freq": -1, "data.val_files": ""}
_PATHS = ("path", "files", "url", "default_local_dir", "resume", "device", "nnodes", "n_gpus_per_node")
"""Keys of these names are not simply set to something else: what they name must be there."""


def cases(bench: Workbench) -> Iterator[Case]:
    """Yield every change at every boundary between stages that it is dealt, and every key of the config."""
    begun, keys = bench.fork(lambda: _begun(bench)), bench.fork(lambda: _changes(bench))
    for number, (first, then) in enumerate((first, then) for first in GRAINS for then in GRAINS):
        for index, place in enumerate(begun):
            # Each boundary at every second pair, and of each pair each boundary before or after a commit.
            if (index + number) % 2:
                continue
            moment = "begun" if (index // 2 + number) % 2 else "committed"
            fault = SAME_GRAIN if first == then else OTHER_GRAIN
            yield _case(fault, first, f"{place} {moment}, then {then}", place=place, moment=moment, then=then)
    for index, place in enumerate(("step-000002/policy_update", "step-000003/rollout", "step-000003/reward")):
        for number, first in enumerate(GRAINS):
            then, moment = GRAINS[(index + number) % 3], "begun" if place.endswith("rollout") else "committed"
            yield _case(EPOCH, first, f"{place} {moment}, then {then}", place=place, moment=moment, then=then)
    for first in GRAINS:
        for then in GRAINS:
            yield _case(LONGER, first, f"after step 2, then {then}", then=then)
            yield _case(FINISHED, first, f"finished, then {then}", then=then)
        yield _case(PROMOTED, first, "finished")
    for key, value in keys["semantic"]:
        yield _case(SEMANTIC, "-", key, key=key, value=json.dumps(value))
    for key, value in keys["operational"]:
        yield _case(OPERATIONAL, "-", key, key=key, value=json.dumps(value))
    for fault in WORLD:
        for place, moment in (("step-000002/rollout", "begun"), ("step-000002/advantage", "committed")):
            yield _case(fault, "stage", f"{place} {moment}", place=place, moment=moment)


def run(case: Case, bench: Workbench) -> Outcome:
    """Begin the run, go on with it in the other way, and say whether everything holds that must hold."""
    told = dict(case.params)
    root = str(bench.folder / f"root-{uuid.uuid4().hex}")
    kinds: dict[str, Callable[[Workbench, str, str, Mapping[str, Any]], Outcome]] = {
        SAME_GRAIN: _goes_on,
        OTHER_GRAIN: _goes_on,
        EPOCH: _goes_on_between_epochs,
        LONGER: _grows,
        FINISHED: _stays,
        PROMOTED: _stays_promoted,
        SEMANTIC: _is_refused,
        OPERATIONAL: _is_recorded,
        WORLD[0]: lambda *arguments: _changes_processes(*arguments, counts=(2, 1)),
        WORLD[1]: lambda *arguments: _changes_processes(*arguments, counts=(1, 2)),
    }
    try:
        return kinds[case.fault](bench, root, case.grain, told)
    except (Broken, Died, RatchetError) as error:
        return Outcome(survived=False, redone_seconds=0.0, redone_stages=0, detail=f"{type(error).__name__}: {error}")
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _case(fault: str, grain: str, boundary: str, **params: Any) -> Case:
    return Case(kind=KIND, fault=fault, grain=grain, boundary=boundary, params=tuple(params.items()))


# -- goes on -----------------------------------------------------------------------------------------------------------


def _goes_on(
    bench: Workbench, root: str, grain: str, told: Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> Outcome:
    """Stop at a boundary, and go on at the same grain or another."""
    changed = dict(overrides or {})
    bench.fork(lambda: _until(bench, root, grain, told["place"], told["moment"] == "committed", changed))
    return bench.check(root, RUN_ID, told["then"], **changed)


def _goes_on_between_epochs(bench: Workbench, root: str, grain: str, told: Mapping[str, Any]) -> Outcome:
    return _goes_on(bench, root, grain, told, EPOCHS)


def _grows(bench: Workbench, root: str, grain: str, told: Mapping[str, Any]) -> Outcome:
    """A finished run of one epoch is submitted for two: what it had stays, and the second epoch is that of any run."""
    expected = bench.reference(grain, **_SHORT) | bench.reference(told["then"])
    bench.fork(lambda: _finished(bench, root, grain, _SHORT))
    found: Finished = bench.fork(lambda: bench.finish(root, RUN_ID, told["then"], {}, expected))
    return found.outcome()


def _until(bench: Workbench, root: str, grain: str, place: str, is_committed: bool, overrides: dict[str, Any]) -> None:
    """Train up to a boundary between two stages."""
    journal = bench.journal(root, RUN_ID).listener()

    def listen(seen: str, seen_committed: bool) -> None:
        journal(seen, seen_committed)
        if seen == place and seen_committed == is_committed:
            raise Stopped(place)

    config = bench.config(grain, **overrides)
    try:
        with open_session(submit(root, RUN_ID, config), config, listen) as session:
            loop.train(session)
    except Stopped:
        return
    raise Broken(f"the run ended before {place}")


def _begun(bench: Workbench) -> list[str]:
    """Return the stages of an undisturbed run in order."""
    root = str(bench.folder / f"root-{uuid.uuid4().hex}")
    try:
        bench.train(root, RUN_ID, "stage", {})
        return bench.journal(root, RUN_ID).begun()
    finally:
        shutil.rmtree(root)


# -- finished ----------------------------------------------------------------------------------------------------------


def _finished(bench: Workbench, root: str, grain: str, overrides: Mapping[str, Any] | None = None) -> None:
    bench.train(root, RUN_ID, grain, dict(overrides or {}))


def _stays(bench: Workbench, root: str, grain: str, told: Mapping[str, Any]) -> Outcome:
    """A finished run that is submitted again gets a claim and a submission, and is otherwise as it was."""
    bench.fork(lambda: _finished(bench, root, grain))
    before = _files(root)
    bench.fork(lambda: _finished(bench, root, told["then"]))
    _expect_added(before, _files(root), {f"{RUN_ID}/owner/0002.json", f"{RUN_ID}/submissions/0002.json"})
    return bench.check(root, RUN_ID, told["then"])


def _stays_promoted(bench: Workbench, root: str, grain: str, told: Mapping[str, Any]) -> Outcome:
    """A policy that was promoted is not promoted a second time."""

    def finish_and_promote() -> int:
        _finished(bench, root, grain, _PROMOTED)
        config = bench.config(grain, **_PROMOTED)
        decision = promote(Run(root, RUN_ID), config)
        assert decision is not None
        expect(loop.is_finished(Run(root, RUN_ID), config), "a run that is promoted does not count as finished")
        return decision.number

    first = bench.fork(finish_and_promote)
    before = _files(root)
    expect("champions/champion/0001.json" in before, "nothing was decided on the run")
    second = bench.fork(finish_and_promote)
    expect(first == second == 1, f"decided {first}, and then {second}")
    _expect_added(before, _files(root), {f"{RUN_ID}/owner/0002.json", f"{RUN_ID}/submissions/0002.json"})
    return bench.check(root, RUN_ID, grain)


# -- another config ----------------------------------------------------------------------------------------------------


def _is_refused(bench: Workbench, root: str, grain: str, told: Mapping[str, Any]) -> Outcome:
    """Another value of a semantic key is refused, naming every difference with both values; nothing is written."""
    key, value = told["key"], json.loads(told["value"])
    config = bench.config("stage", **{key: value})
    bench.fork(lambda: _submit(root, bench.config("stage")))
    before = _files(root)
    try:
        bench.fork(lambda: _submit(root, config))
    except ConfigError as error:
        old, new = _leaves(semantic(bench.config("stage"))), _leaves(semantic(config))
        differences = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
        for name in differences:
            has, came = ("its default" if value is None else value for value in (old.get(name), new.get(name)))
            expect(f"{name}: the run has {has}, this submission {came}" in str(error), f"{name} is not named: {error}")
        expect(bool(differences), f"refused without a difference: {error}")
    else:
        raise Broken(f"{key} became {value}, and the run was not refused")
    _expect_added(before, _files(root), set())
    return Outcome(survived=True, redone_seconds=0.0, redone_stages=0, detail="refused")


def _is_recorded(bench: Workbench, root: str, grain: str, told: Mapping[str, Any]) -> Outcome:
    """Another value of an operational key is a new submission that says so, and the run's identity stays."""
    key, value = told["key"], json.loads(told["value"])
    config = bench.config("stage", **{key: value})
    bench.fork(lambda: _submit(root, bench.config("stage")))
    before = _files(root)
    bench.fork(lambda: _submit(root, config))
    _expect_added(before, _files(root), {f"{RUN_ID}/owner/0002.json", f"{RUN_ID}/submissions/0002.json"})
    recorded = Run(root, RUN_ID).submission(2)["config"]
    found, old = _at(recorded, key), _at(Run(root, RUN_ID).submission(1)["config"], key)
    expect(found != old, f"{key} became {value}, and submission 2 says {found} as the first one did")
    return Outcome(survived=True, redone_seconds=0.0, redone_stages=0, detail="a new submission")


def _submit(root: str, config: RunConfig) -> None:
    submit(root, RUN_ID, config)


def _changes(bench: Workbench) -> dict[str, list[tuple[str, Any]]]:
    """Return the keys of the config that can be changed by themselves, each with another value that is accepted."""
    plain, found = bench.config("stage"), {"semantic": [], "operational": []}
    for key in sorted(key_fields()):
        if any(part in key.rpartition(".")[2] for part in _PATHS):
            continue
        for value in _others(_at(plain.model_dump(mode="json"), key)):
            try:
                config = bench.config("stage", **{key: value})
            except ConfigError:
                continue
            if semantic(config) != semantic(plain):
                found["semantic"].append((key, value))
            elif config != plain and _at(config.model_dump(mode="json"), key) == value:
                found["operational"].append((key, value))
            else:
                continue
            break
    return found


def _others(value: Any) -> list[Any]:
    """Return values of the same type that are not this one; most keys take one of them."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value * 2 + 2, value - 1]
    if isinstance(value, float):
        return [value / 2 + 0.25, value + 0.5, value * 2 + 1e-6]
    if isinstance(value, str):
        return [f"{value}x"]
    return [1, 0.5, "x"] if value is None else []


def _leaves(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= _leaves(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def _at(values: Mapping[str, Any], key: str) -> Any:
    """Return what lies under a dotted key; None where it is left out."""
    found: Any = values
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


# -- another number of processes ---------------------------------------------------------------------------------------


def _changes_processes(
    bench: Workbench, root: str, grain: str, told: Mapping[str, Any], *, counts: tuple[int, int]
) -> Outcome:
    """Begin with some processes and go on with others: equal up to the order in which floats are added."""
    alone = _one_process(bench)
    first, then = ({**_WORLD, "trainer.n_gpus_per_node": count} for count in counts)
    bench.fork(lambda: _until(bench, root, grain, told["place"], told["moment"] == "committed", first))
    before = {place: item.provenance.attempt for place, item in committed(Run(root, RUN_ID)).items()}
    started = time.perf_counter()
    bench.fork(lambda: _finished(bench, root, grain, then))
    after = committed(Run(root, RUN_ID))
    expect(after.keys() == alone.keys(), f"committed {sorted(after)}, expected {sorted(alone)}")
    replaced = [place for place, attempt in before.items() if after[place].provenance.attempt != attempt]
    expect(not replaced, f"committed before and replaced: {', '.join(replaced)}")
    for place, metrics in alone.items():
        for name in ("actor/grad_norm", "actor/entropy", "actor/pg_loss"):
            old, new = metrics.get(name, 0.0), after[place].metrics.get(name, 0.0)
            expect(abs(old - new) <= 1e-3 * abs(old) + 1e-6, f"{place}: {name} is {new}, of one process {old}")
    faults = bench.fork(lambda: [str(fault) for fault in verification.verify(Run(root, RUN_ID)).faults])
    expect(not faults, f"ratchet verify: {'; '.join(faults)}")
    seconds = time.perf_counter() - started
    return Outcome(survived=True, redone_seconds=0.0, redone_stages=0, detail=f"went on within {seconds:.0f} s")


def _one_process(bench: Workbench) -> dict[str, dict[str, float]]:
    """Place -> metrics of the run that one process makes from beginning to end."""
    root = bench.folder / "one-process"
    if not root.is_dir():
        bench.fork(lambda: _finished(bench, str(root), "stage", _WORLD))
    return {place: dict(item.metrics) for place, item in committed(Run(str(root), RUN_ID)).items()}


# -- what lies there ---------------------------------------------------------------------------------------------------


def _files(root: str) -> dict[str, tuple[str, int]]:
    """Path -> digest and time of change of every file."""
    return {
        path.relative_to(root).as_posix(): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in Path(root).rglob("*")
        if path.is_file()
    }


def _expect_added(before: Mapping[str, Any], after: Mapping[str, Any], added: set[str]) -> None:
    changed = sorted(name for name in before if after.get(name) != before[name])
    expect(not changed, f"changed: {', '.join(changed)}")
    expect(after.keys() - before.keys() == added, f"added {sorted(after.keys() - before.keys())}, not {sorted(added)}")
