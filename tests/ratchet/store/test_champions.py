"""Decisions on what serves under a name, on a local folder and on a real S3 server."""

import dataclasses
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ratchet.errors import ConfigError, StoreError
from ratchet.store import ObjectStore, champions, layout
from ratchet.store.champions import Decision
from ratchet.store.manifest import canonical_json
from tests.promotion import IMPROVEMENT, decision, finished_run
from tests.ratchet.store.tcp import wire_to


def put(store: ObjectStore, *found: Decision) -> None:
    for one in found:
        store.put(layout.champion(one.name, one.number), one.to_json())


def promoting(history: Sequence[Decision]) -> Decision:
    present = champions.serving(history)
    return decision(len(history) + 1, compared_with=present.number if present else None)


# -- records ----------------------------------------------------------------------------------------------------------


def test_a_record_is_canonical_json_and_reads_back_as_it_was() -> None:
    full = decision(4, "refused", 2, compared_with=2, improvement=IMPROVEMENT, reasons=("one", "two \u00fc"))
    for one in (full, decision(1)):
        assert Decision.from_json(one.to_json(), place="here") == one
    raw = json.loads(full.to_json())
    assert raw["format"] == 1
    assert raw["decision"]["improvement"]["champion_accuracy"] == 0.25
    assert raw["decision"]["targets"] == 2


def test_numbers_count_up_from_one_and_the_newest_decision_says_who_serves(root: str, store: ObjectStore) -> None:
    assert champions.decisions(root, "math") == []
    assert champions.champion(root, "math") is None
    first = champions.append(root, "math", promoting)
    second = champions.append(root, "math", lambda history: decision(2, "refused", 1))
    third = champions.append(root, "math", promoting)
    assert champions.decisions(f"{root}/", "math") == [first, second, third]
    assert [info.key for info in store.list_objects("champions")] == [
        f"champions/math/000{number}.json" for number in (1, 2, 3)
    ]
    assert champions.champion(root, "math") == third
    assert third.compared_with == 1
    # Names do not know each other, even where one begins like another.
    assert champions.decisions(root, "mat") == []
    history = champions.decisions(root, "math")
    assert champions.newest_about(history, "/elsewhere/night-2", 50) == second
    assert champions.newest_about(history, second.run, 49) is None


def test_a_decision_that_stands_already_is_returned_and_nothing_is_written(root: str, store: ObjectStore) -> None:
    first = champions.append(root, "math", promoting)
    assert champions.append(root, "math", lambda history: history[0]) == first
    assert len(list(store.list_objects("champions"))) == 1


def test_foreign_files_beside_the_decisions_count_for_nothing(root: str, store: ObjectStore) -> None:
    put(store, decision(1))
    for name in ("notes.txt", "0002.json.bak", "old/0002.json", "00001.json", "0000.json", "2.json"):
        store.put(f"champions/math/{name}", b"?")
    assert [one.number for one in champions.decisions(root, "math")] == [1]


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a b"])
def test_a_name_that_cannot_be_a_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="champion"):
        champions.decisions(str(tmp_path), name)


def _changed(**changes: Any) -> bytes:
    raw = json.loads(decision(1).to_json())
    raw["decision"] |= changes
    return canonical_json(raw)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is not a decision"),
        (b"\xff", "is not a decision"),
        (b"3", "is not a decision"),
        (decision(1).to_json()[:-20], "is not a decision"),
        (decision(1).to_json().replace(b'"format":1', b'"format":2'), "format 2, but this version of Ratchet reads"),
        (decision(1).to_json() + b"\n", "not as it was written"),
        (_changed(surprise=1), "not as it was written"),
        (_changed(step="50"), r"is not a decision: step: "),
        (_changed(verdict="accepted"), r"is not a decision: verdict: "),
        (_changed(export={"uri": "u"}), r"is not a decision: export.digest: "),
        (_changed(number=2, targets=2), "is decision 2 of math: a copy in the wrong place"),
        (_changed(name="code"), "is decision 1 of code: a copy in the wrong place"),
        (_changed(targets=2), "damaged: a promoted decision cannot make 2 champion"),
        (_changed(targets=None), "damaged: a promoted decision cannot make None champion"),
        (_changed(verdict="refused"), "damaged: a refused decision cannot make 1 champion"),
        (_changed(verdict="refused", targets=0), "damaged: a refused decision cannot make 0 champion"),
    ],
)
def test_a_damaged_record_is_named_and_nothing_is_decided_on_it(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "champions" / "math" / "0001.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    for read in (champions.decisions, champions.champion, lambda root, name: champions.append(root, name, promoting)):
        with pytest.raises(StoreError, match=rf"champions/math/0001\.json.*{message}"):
            read(str(tmp_path), "math")


def test_a_missing_record_and_one_that_names_no_champion_are_named(root: str, store: ObjectStore) -> None:
    put(store, decision(1), decision(3), decision(4))
    with pytest.raises(StoreError, match="champions/math: decision 2 is missing"):
        champions.decisions(root, "math")
    put(store, decision(2, "refused", 1), decision(3, "rolled_back", 2))
    with pytest.raises(StoreError, match=r"0003\.json is damaged: it makes decision 2 champion"):
        champions.champion(root, "math")


# -- races ------------------------------------------------------------------------------------------------------------


def test_of_two_gates_that_race_one_wins_and_the_other_decides_again_against_the_winner(root: str) -> None:
    champions.append(root, "math", promoting)
    barrier = threading.Barrier(2)
    seen: dict[int, list[int | None]] = {0: [], 1: []}

    def race(racer: int) -> Decision:
        def decide(history: Sequence[Decision]) -> Decision:
            present = champions.serving(history)
            seen[racer].append(present.number if present else None)
            if len(seen[racer]) == 1:
                barrier.wait()  # both have read the same champion
            return decision(len(history) + 1, by=f"racer {racer}", compared_with=seen[racer][-1])

        return champions.append(root, "math", decide)

    with ThreadPoolExecutor(2) as pool:
        found = sorted(pool.map(race, range(2)), key=lambda one: one.number)
    assert [one.number for one in found] == [2, 3]
    assert [one.compared_with for one in found] == [1, 2]
    assert sorted(seen.values()) == [[1], [1, 2]]
    assert champions.decisions(root, "math")[1:] == found


RACER = """
import sys
from ratchet.store import champions
from tests.promotion import decision
root, racer = sys.argv[1:]
def decide(history):
    present = champions.serving(history)
    return decision(len(history) + 1, by=racer, compared_with=present.number if present else None)
for _ in range(4):
    champions.append(root, "math", decide)
"""


@pytest.mark.slow
def test_processes_that_race_share_the_numbers_without_a_gap(root: str) -> None:
    command = [sys.executable, "-c", RACER, root]
    racers = [
        subprocess.Popen([*command, str(racer)], env={**os.environ, "PYTHONPATH": os.getcwd()}) for racer in range(3)
    ]
    assert [racer.wait(timeout=60) for racer in racers] == [0, 0, 0]
    found = champions.decisions(root, "math")
    assert [one.number for one in found] == list(range(1, 13))
    # Each was decided against its predecessor, whoever that was.
    assert [one.compared_with for one in found] == [None, *range(1, 12)]
    assert sorted(one.by for one in found) == ["0"] * 4 + ["1"] * 4 + ["2"] * 4


def test_only_the_caller_of_a_lost_race_reads_what_came_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, asked = str(tmp_path), []

    def decide(history: Sequence[Decision]) -> Decision:
        asked.append(len(history))
        if len(asked) == 1:
            for _ in range(3):
                champions.append(root, "math", promoting)
        return dataclasses.replace(promoting(history), by="the loser")

    assert champions.append(root, "math", decide).number == 4
    assert asked == [0, 3]


# -- lost answers -----------------------------------------------------------------------------------------------------


class Failing:
    """A store whose first create-only put does `harm`."""

    def __init__(self, store: ObjectStore, harm: str) -> None:
        self.store, self.harm = store, harm

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def put_create(self, key: str, data: bytes) -> bool:
        harm, self.harm = self.harm, ""
        if harm != "not written":
            won = self.store.put_create(key, data)
        if harm in ("not written", "written, then an error"):
            raise StoreError("the wire was cut")
        return False if harm == "written, then refused" else won


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def make(harm: str) -> None:
        opened = champions.open_store
        monkeypatch.setattr(champions, "open_store", lambda uri: Failing(opened(uri), harm))

    return make


@pytest.mark.parametrize("harm", ["written, then refused", "written, then an error"])
def test_ones_own_decision_is_recognised_when_the_answer_was_lost(
    tmp_path: Path, failing: Callable[[str], None], harm: str
) -> None:
    failing(harm)
    asked: list[int] = []

    def decide(history: Sequence[Decision]) -> Decision:
        asked.append(len(history))
        return promoting(history)

    assert champions.append(str(tmp_path), "math", decide).number == 1
    assert asked == [0]
    assert len(champions.decisions(str(tmp_path), "math")) == 1


def test_a_decision_that_was_not_written_is_an_error_and_can_be_made_again(
    tmp_path: Path, failing: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing("not written")
    with pytest.raises(StoreError, match="the wire was cut"):
        champions.append(str(tmp_path), "math", promoting)
    monkeypatch.undo()
    assert champions.append(str(tmp_path), "math", promoting).number == 1


def test_an_answer_that_is_cut_on_the_way_from_s3_is_no_second_decision(
    s3_root: str, s3_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with wire_to(s3_server.endpoint) as wire:
        monkeypatch.setenv("AWS_ENDPOINT_URL", wire.endpoint)
        champions.append(s3_root, "math", promoting)
        wire.cut = "answer lost"
        assert champions.append(s3_root, "math", promoting).number == 2
        assert wire.cuts == 1
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint)
    assert [one.number for one in champions.decisions(s3_root, "math")] == [1, 2]


# -- rollback ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def served(tmp_path: Path) -> str:
    """A root with two champions, one after the other, and a refused policy after them; their exports are there."""
    root = str(tmp_path / "runs")
    for number in (1, 2, 3):
        run, _ = finished_run(root, f"run-{number}", [1.0])
        artifact = run.require("checkpoint_export", 1).output("export")
        found = decision(number) if number < 3 else decision(3, "refused", 2)
        export = champions.Export(uri=f"{run.uri}/{artifact.folder}", digest=artifact.digest)
        found = dataclasses.replace(found, run=run.uri, step=1, export=export)
        champions.append(root, "math", lambda history, found=found: found)
    return root


def test_rollback_makes_the_champion_before_the_present_one_serve_again(served: str) -> None:
    found = champions.rollback(served, "math", by="an operator", reason="wrong units in the answers")
    first, _, third, newest = champions.decisions(served, "math")
    assert found == newest
    assert (found.number, found.verdict, found.compared_with, found.targets) == (4, "rolled_back", 2, 1)
    assert (found.run, found.export, found.evaluation) == (first.run, first.export, first.evaluation)
    assert (found.reasons, found.by) == (("wrong units in the answers",), "an operator")
    assert champions.champion(served, "math") == first
    assert champions.placed_by([*champions.decisions(served, "math"), dataclasses.replace(third, targets=1)]) == found
    # Before the first champion nothing served, and what was rolled back from is not "before".
    with pytest.raises(ConfigError, match="decision 1 is the first champion of math: none served before it"):
        champions.rollback(served, "math")


def test_rollback_goes_to_what_served_and_not_to_what_was_rolled_back(served: str) -> None:
    champions.rollback(served, "math")
    fifth = champions.append(served, "math", lambda history: dataclasses.replace(history[1], number=5, targets=5))
    assert fifth.number == 5
    found = champions.rollback(served, "math")
    assert (found.number, found.targets) == (6, 1)
    assert found.reasons == ("rolled back from decision 5 to decision 1",)


def test_rollback_to_what_serves_already_writes_nothing(served: str) -> None:
    once = champions.rollback(served, "math", 1)
    assert champions.rollback(served, "math", 1) == once
    assert champions.rollback(served, "math", 2).number == 5
    assert len(champions.decisions(served, "math")) == 5


def test_two_operators_who_roll_back_at_once_go_back_once(served: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, barrier = champions._create, threading.Barrier(2)

    def create(*arguments: Any) -> bool:
        if threading.current_thread() not in met:
            met.add(threading.current_thread())
            barrier.wait()
        return waiting(*arguments)

    met: set[threading.Thread] = set()
    monkeypatch.setattr(champions, "_create", create)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda who: champions.rollback(served, "math", by=who), ("ann", "ben")))
    assert found[0] == found[1]
    assert [one.number for one in champions.decisions(served, "math")] == [1, 2, 3, 4]


@pytest.mark.parametrize("number", [3, 9])
def test_rollback_to_what_was_never_promoted_is_refused(served: str, number: int) -> None:
    with pytest.raises(ConfigError, match=rf"decision {number} of math promoted nothing; these did: 1, 2"):
        champions.rollback(served, "math", number)


def test_rollback_of_a_name_that_serves_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing serves as math"):
        champions.rollback(str(tmp_path), "math")


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        ("deleted", r"decision 1 of math: files of its export .*run-1/.* are missing or cut short"),
        ("cut short", "missing or cut short"),
        ("another export", "decision 1 of math is about another export than the one in .*run-1"),
        ("no run", "run-1 has no export of step 1"),
    ],
)
def test_rollback_to_an_export_that_is_gone_or_damaged_is_refused(served: str, harm: str, message: str) -> None:
    manifest = Path(served, "run-1", "step-000001", "checkpoint_export", "manifest.json")
    (weights,) = Path(served, "run-1").glob("step-000001/checkpoint_export/*/export/model.safetensors")
    if harm == "deleted":
        weights.unlink()
    elif harm == "cut short":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif harm == "no run":
        manifest.unlink()
    else:
        manifest.write_bytes(Path(served, "run-2", manifest.relative_to(Path(served, "run-1"))).read_bytes())
    with pytest.raises(StoreError, match=message):
        champions.rollback(served, "math")
    assert len(champions.decisions(served, "math")) == 3
