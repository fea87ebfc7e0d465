"""Results of cases: kept as lines, chosen by sample, told as a table."""

import json
from pathlib import Path

import pytest

from tests.chaos import report
from tests.chaos.__main__ import sampled
from tests.chaos.case import Case, Outcome


def case(fault: str = "SIGKILL", boundary: str = "run.json, before", grain: str = "step") -> Case:
    return Case(kind="process", fault=fault, grain=grain, boundary=boundary)


def outcome(seconds: float, *, survived: bool = True, stages: int = 1) -> Outcome:
    return Outcome(survived=survived, redone_seconds=seconds, redone_stages=stages)


def test_names_are_unique_and_fit_for_files() -> None:
    names = {case(boundary=text).name for text in ("a/b, before", "a/b before", "a b/before", "\u00fc" * 300)}
    assert len(names) == 4
    assert all(len(name) < 120 and "/" not in name and name.isascii() for name in names)
    with_params = Case(kind="process", fault="f", grain="-", boundary="b", params=(("program", "x"),))
    assert with_params.name != Case(kind="process", fault="f", grain="-", boundary="b").name


def test_the_table_counts_by_kind_fault_and_grain() -> None:
    rows = [
        report.row(case(), outcome(1.0), 2.0),
        report.row(case(boundary="other"), outcome(4.0, stages=3), 2.0),
        report.row(case(boundary="third"), outcome(0.0, survived=False, stages=0), 2.0),
        report.row(case(grain="stage"), outcome(0.5), 2.0),
    ]
    assert report.table(rows).splitlines()[2:] == [
        "| process | SIGKILL | stage | 1 | 1 | 0.50 s | 0.50 s | 1 |",
        "| process | SIGKILL | step | 3 | 2 | 1.00 s | 4.00 s | 3 |",
        "| **all** |  |  | 4 | 3 | 0.75 s | 4.00 s | 3 |",
    ]


def test_lines_that_were_cut_off_are_run_again_and_the_last_result_counts(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    assert report.read(path) == []
    first, second = (report.row(case(), outcome(0.0, survived=survived), 1.0) for survived in (False, True))
    path.write_text(f"{json.dumps(first)}\n{json.dumps(second)}\n" + json.dumps(first)[:20])
    assert report.read(path) == [second]
    other = report.row(case(boundary="other"), outcome(1.0), 1.0)
    report.append(path, other)
    assert report.read(path) == [second, other]


def test_the_table_goes_between_the_markers_of_a_page(tmp_path: Path) -> None:
    page = tmp_path / "faults.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    rows = [report.row(case(), outcome(1.0), 2.0)]
    for _ in range(2):
        report.write(page, rows)
        assert page.read_text() == f"before\n{report.BEGIN}\n{report.table(rows)}\n{report.END}\nafter\n"
    page.write_text("no markers")
    with pytest.raises(ValueError, match="between which the table goes"):
        report.write(page, rows)


def test_a_sample_is_the_same_every_time_and_has_every_fault() -> None:
    cases = [case(boundary=str(number)) for number in range(100)] + [case("SIGTERM"), case("SIGSTOP")]
    chosen = sampled(cases, 10)
    assert len(chosen) in (9, 10)
    assert {one.fault for one in chosen} == {"SIGKILL", "SIGTERM", "SIGSTOP"}
    assert chosen == sampled(list(reversed(cases)), 10)[::-1]
