"""Tables of measurements that the test writes: what is compared, and what must not be."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import tables
from benchmarks.jobs import Job

BEGIN, END = "<!-- steps: begin -->", "<!-- steps: end -->"


def measurement(
    system: str = "ratchet", seconds: tuple[float, ...] = (2.0, 4.0, 3.0), *, tokens: int = 600, **job: Any
) -> dict[str, Any]:
    """A measurement whose first step has no time, and whose later ones took `seconds`."""
    facts = tables.job_facts(Job(system=system, model="/m/tiny", prompts="/p", steps=len(seconds) + 1, **job))
    steps = [
        {
            "step": number,
            "seconds": value,
            "tokens": tokens,
            "split": {"generate": 1.0, "update": 0.5},
            "memory": {"host": 100 + number},
        }
        for number, value in enumerate((None, *seconds), start=1)
    ]
    machine = {"gpu": None, "cpus": 2, "python": "3.12", "packages": {"torch": "2.11"}}
    return {"job": facts, "steps": steps, "start_to_first_step": 9.0, "peak": {}, "environment": machine}


def test_the_median_leaves_the_warm_up_out_and_puts_repeats_together() -> None:
    results = [measurement(seconds=(50.0, 2.0, 4.0)), measurement(seconds=(60.0, 6.0, 8.0), repeat=1)]
    (row,) = tables.summarise(results, warmup=2)
    assert row["median"] == 5.0
    assert row["mean"] == 5.0
    assert row["repeats"] == 2
    assert row["tokens_per_second"] == 600 / 5.0


def test_what_is_left_of_a_step_is_taken_step_by_step_and_parts_that_overlap_are_not_added_up() -> None:
    apart, beside = measurement(seconds=(3.1, 3.1, 4.1)), measurement("ratchet-overlap", (3.0, 3.0, 3.0))
    for step, parts in zip(apart["steps"][1:], [(2.0, 1.0), (1.0, 2.0), (2.0, 2.0)], strict=True):
        step["split"] = dict(zip(("generate", "update"), parts, strict=True))
    for step in beside["steps"]:
        step["split"] = {"generate": 2.9, "update": 2.0}
    text = tables.markdown(tables.summarise([apart, beside], warmup=1))
    assert "| 2.00 + 2.00 + 0.10 |" in text, "the medians of the parts add up to more than the median step"
    assert text.count("| overlapped |") == 1


def test_ratios_are_to_the_fastest_micro_batch_of_a_peer() -> None:
    results = [
        measurement("ratchet", (1.0, 1.0)),
        measurement("trl", (4.0, 4.0), micro_batch=64),
        measurement("trl", (2.0, 2.0), micro_batch=128),
        measurement("trl-durable", (5.0, 5.0), micro_batch=64),
    ]
    rows = {(row["system"], row["micro_batch"]): row for row in tables.summarise(results, warmup=1)}
    assert rows["ratchet", None]["ratio_to_trl"] == 0.5
    assert rows["ratchet", None]["ratio_to_trl-durable"] == 0.2
    text = tables.markdown(list(rows.values()))
    assert "trl, micro-batch 128" in text
    assert "trl, micro-batch 64" not in text


def test_unequal_tokens_are_no_comparison() -> None:
    with pytest.raises(SystemExit, match="ratchet trained on 600 tokens and trl on 601"):
        tables.summarise([measurement(), measurement("trl", tokens=601)], warmup=1)


def test_a_system_that_failed_says_why() -> None:
    failed = {"job": measurement("verl")["job"], "error": "SystemExit: verl is not installed"}
    text = tables.markdown(tables.summarise([measurement(), failed], warmup=1))
    assert "| verl | SystemExit: verl is not installed |" in text
    assert {line.count("|") for line in text.splitlines() if line.startswith("|")} == {12}


def test_long_runs_show_what_they_leak() -> None:
    (row,) = tables.summarise([measurement(seconds=(1.0,) * 24)], warmup=3)
    assert row["growth"] == {"host": pytest.approx(125 / 105 - 1)}
    assert "| ratchet, 25 | +19.05% | - |" in tables.markdown([row])


def test_seconds_a_token_are_against_the_smallest_batch() -> None:
    results = [measurement(seconds=(1.0, 1.0)), measurement(seconds=(3.0, 3.0), num_prompts=64, tokens=1200)]
    text = tables.markdown(tables.summarise(results, warmup=1))
    assert "| tiny 64 x 8 x 256, ratchet | 3.00 | 1.50 |" in text


def test_a_page_gets_the_table_between_its_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    tables.write_between_markers(page, "new\n", BEGIN, END)
    assert page.read_text() == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    page.write_text("nothing\n")
    with pytest.raises(SystemExit, match="expected the lines"):
        tables.write_between_markers(page, "new\n", BEGIN, END)


def test_the_chart_shows_every_system(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = tables.summarise([measurement(), measurement("trl", micro_batch=64)], warmup=1)
    tables.draw(rows, tmp_path / "chart.svg")
    text = (tmp_path / "chart.svg").read_text()
    assert all(word in text for word in ("ratchet", "trl", "generate", "update", "rest"))
