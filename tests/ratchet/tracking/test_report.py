"""What a report says, against runs whose numbers are known."""

import dataclasses
import math
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from ratchet.cli import app
from ratchet.errors import ConfigError, NotCommittedError
from ratchet.store import layout, retired
from ratchet.store.manifest import Artifact, FileEntry
from ratchet.store.run import Run
from ratchet.store.status import TaskStatus, write_status
from ratchet.tracking import report_charts, report_data
from ratchet.tracking.report import Report, html, markdown, read_report
from ratchet.tracking.report_completions import evenly
from ratchet.tracking.report_events import changed_keys
from tests.promotion import decision
from tests.ratchet.tracking import report_runs
from tests.ratchet.tracking.report_runs import BEGAN, HOSTILE, learning_run

STEPS = 20


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return learning_run(str(tmp_path_factory.mktemp("runs")), STEPS)


@pytest.fixture(scope="module")
def report(run: Run) -> Report:
    return read_report(run)


def test_curves_are_the_metrics_of_the_manifests(run: Run, report: Report) -> None:
    found = report.numbers
    assert found.steps.tolist() == list(range(STEPS + 1))
    assert found.stride == 1
    for name, stage in (("critic/score/mean", "reward"), ("actor/entropy", "policy_update")):
        wanted = [run.require(stage, step).metrics[name] for step in range(1, STEPS + 1)]
        assert math.isnan(found.series[name][0]), "nothing was trained in step 0"
        assert np.allclose(found.series[name][1:], wanted)
    accuracy = found.series["val-core/openai/gsm8k/acc/mean@1"]
    assert accuracy[[0, 10, 20]].tolist() == [3 / 16, 7 / 16, 11 / 16]
    # Four stages of 5 s a step; the evaluations of every second one, and of the base, add 5 s each.
    assert found.series["gpu_hours"][-1] == pytest.approx((20 * 20 + 11 * 5) / 3600)


def test_a_long_run_is_drawn_by_means_of_several_steps(monkeypatch: pytest.MonkeyPatch, report: Report) -> None:
    monkeypatch.setattr(report_data, "MAX_POINTS", 2)
    three = [
        dataclasses.replace(one, metrics={"a": value})
        for one, value in zip(report.steps, (1.0, 3.0, 8.0), strict=False)
    ]
    three[1] = dataclasses.replace(three[1], metrics={"a": 3.0, "b": 5.0})
    found = report_data.numbers(three, {})
    assert (found.stride, found.steps.tolist()) == (2, [1, 2])
    assert found.series["a"].tolist() == [2.0, 8.0]
    assert found.series["b"][0] == 5.0, "the mean of what is there"
    assert math.isnan(found.series["b"][1])


def test_a_smoothed_curve_is_the_mean_of_what_is_there_around_each_point() -> None:
    values = np.array([1.0, 2.0, math.nan, 6.0, 10.0], np.float32)
    assert report_data.smoothed(values, 3).tolist() == [1.5, 1.5, 4.0, 8.0, 8.0]
    assert math.isnan(report_data.smoothed(np.array([math.nan], np.float32), 3)[0])


def test_a_few_steps_stand_for_all_and_the_ends_are_among_them() -> None:
    assert evenly(range(1, 1001), 6) == [1, 201, 401, 600, 800, 1000]
    assert evenly([4, 7], 6) == [4, 7]
    assert evenly([], 6) == []


def test_the_best_the_worst_and_the_unread_are_of_different_prompts_of_the_last_step(report: Report) -> None:
    found = report.examples
    assert found.steps[0] == 1
    assert found.steps[-1] == STEPS
    assert [one.reward for one in found.best] == [1.0, 1.0, 1.0]
    assert [one.reward for one in found.worst] == [0.0, 0.0, 0.0]
    for group in (found.best, found.worst):
        assert len({one.name.partition(",")[0] for one in group}) == 3
        assert {one.step for one in group} == {STEPS}
    best = found.best[0]
    number = int(best.name.removeprefix("train-").partition(",")[0])
    assert (best.wanted, best.extracted) == (str(2 * number + 1), str(2 * number + 1))
    assert best.prompt == f"Ann has {number} pears and buys {number + 1} more. How many?"
    # The table that the last step shares has one completion without an answer: prompt 2, sample 1.
    (unread,) = found.unreadable_examples
    assert unread.name == "train-0000002, sample 1"
    assert unread.extracted is None
    (last,) = [one for one in found.unreadable if one.step == STEPS]
    assert (last.count, last.total, last.cut, list(last.errors.values())) == (1, 256, 1, [1])


def test_what_improved_most_is_told_by_the_held_out_prompts(report: Report) -> None:
    # The base has the prompts 0 to 2 right, the last policy 0 to 10.
    found = report.examples
    assert found.improved_of == "held-out prompts"
    assert [one.after.name for one in found.improved] == [f"val-{number:07d}, sample 0" for number in (3, 4, 5)]
    one = found.improved[0]
    assert (one.was, one.now, one.before.step, one.after.step) == (0.0, 1.0, 0, STEPS)
    assert one.before.completion == "held out 3: reward 0"


def test_a_segment_has_its_own_steps_and_the_evaluation_before_them(run: Run) -> None:
    found = read_report(run, 11, 15)
    assert [one.step for one in found.steps] == [10, 11, 12, 13, 14, 15]
    assert set(found.steps[0].metrics) == set(run.require("evaluate", 10).metrics)
    assert found.title == "gsm8k-grpo, steps 11 to 15"
    assert found.examples.steps == [11, 12, 13, 14, 15]
    with pytest.raises(NotCommittedError, match="nothing of steps 21 to 30"):
        read_report(run, 21, 30)


def test_training_prompts_tell_what_improved_where_nothing_was_evaluated_twice(tmp_path: Path) -> None:
    run = report_runs.new_run(str(tmp_path))
    report_runs.put_prompts(run)
    for step, rewards in ((1, [[0.0, 0.0], [1.0, 0.0]]), (2, [[1.0, 0.0], [1.0, 0.0]])):
        tables = report_runs.graded_tables(run, f"step-{step:06d}/rollout/0001-aa", rewards)
        report_runs.put(run, "rollout", step, metrics={}, artifacts={"rollouts": tables["rollouts"]})
        report_runs.put(run, "reward", step, metrics={}, artifacts={"rewards": tables["rewards"]})
    found = read_report(run).examples
    assert found.improved_of == "training prompts that both steps sampled"
    (one,) = found.improved
    assert (one.after.name, one.was, one.now) == ("train-0000000, sample 0", 0.0, 0.5)
    assert "</html>" in html(read_report(run))


def test_everything_that_happened_is_told_in_order(tmp_path: Path) -> None:
    run = learning_run(str(tmp_path), 4)
    run.claim({**report_runs.submission(total=8, submission_id="6f0c-2"), "config": _changed()})
    # Two hours later the second submission makes step 5; its trainer was rebuilt, and not bit for bit.
    metrics = {
        "recovery/max_weight_drift": 0.00123,
        "nonfinite/actor/grad_norm": 1.0,
        "actor/skipped_mini_batches": 2.0,
    }
    for stage in ("rollout", "policy_update"):
        report_runs.put(run, stage, 5, metrics=metrics, artifacts={}, after=7200.0)
    status = TaskStatus(
        submission_id="6f0c-1",
        task="segment",
        step=5,
        state="failed",
        host="pod",
        started=BEGAN + 160,
        updated=BEGAN + 170,
        attempt=3,
        exit_code=5,
        error="StoreError",
        message="a password: https://me:secret@bucket is hidden",
    )
    write_status(run.store, status)
    run.store.put("status/6f0c-1/torn.json", b"{")
    entry = Artifact(
        folder="step-000002/policy_update/0001-aa/policy", files=(FileEntry(path="m", bytes=9, sha256="0" * 64),)
    )
    gone = retired.describe("policy_update", 2, "policy", entry, reason="trainer.keep_policies=2", epoch=2)
    run.store.put(gone.key, gone.to_json())
    made = decision(1, run=run.uri, step=5, name="math", time=BEGAN + 9000)
    Path(tmp_path, "champions", "math").mkdir(parents=True)
    Path(tmp_path, layout.champion("math", 1)).write_bytes(made.to_json())

    events = read_report(run).events
    assert [(one.kind, one.step) for one in events if one.kind != "retired"] == [
        ("start", 0),
        ("pause", 5),
        ("retry", 5),
        ("failure", 5),
        ("resume", 5),
        ("recovery", 5),
        ("warning", 5),
        ("warning", 5),
        ("decision", 5),
    ]
    told = {one.kind: one.text for one in events}
    assert (
        'went on at step 5; changed: promotion.name: "" -> "math", trainer.total_training_steps: 100 -> 8'
        in told["resume"]
    )
    assert "secret" not in told["failure"]
    assert "segment failed with exit code 5" in told["failure"]
    assert told["retry"] == "segment began its work 3 times: object storage did not answer"
    assert told["recovery"].endswith("at most 0.00123")
    assert "2 h" in told["pause"]
    assert told["retired"] == "policy of step 2 deleted on purpose: trainer.keep_policies=2"
    assert "math 1: promoted" in told["decision"]
    # A segment tells its own part.
    assert [one.kind for one in read_report(run, 1, 3).events] == ["start", "retired"]


def _changed() -> dict[str, object]:
    config = report_runs.submission(total=8)["config"]
    return {**config, "promotion": {"name": "math"}}


def test_configs_are_compared_leaf_by_leaf() -> None:
    old = {"a": {"b": 1, "c": 2}, "d": [1]}
    assert list(changed_keys(old, {"a": {"b": 1, "c": 3}, "e": "x"})) == [
        "a.c: 2 -> 3",
        "d: [1] -> null",
        'e: null -> "x"',
    ]


def test_what_others_wrote_is_text_and_nothing_is_loaded(report: Report) -> None:
    page = html(report)
    body = page[page.index("\n<body>\n") :]
    assert HOSTILE not in page
    assert "&lt;/script&gt;&lt;script&gt;document.title" in body
    assert body.count("<script") == 2, "the numbers and what draws them"
    assert not re.search(r"<(?:link|img|iframe|script)[^>]*(?:src|href)=", page)
    assert "default-src 'none'" in page


def test_the_short_form_is_markdown(report: Report) -> None:
    lines = markdown(report)
    assert lines[0] == "### gsm8k-grpo"
    assert "| Steps | 20 |" in lines
    assert any(line.startswith("- 2026-") and "began the run" in line for line in lines)


def test_colours_are_legible_on_light_and_dark() -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for colour in report_charts.COLOURS:
        for ground in ("#ffffff", "#181c22"):
            light, dark = sorted((luminance(colour), luminance(ground)), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 3.0, (colour, ground)


def test_the_command_writes_the_page_of_a_run_and_of_some_steps(run: Run, tmp_path: Path) -> None:
    place = tmp_path / "new" / "run.html"
    done = CliRunner().invoke(app, ["report", run.uri, "--to", str(place), "--steps", "1-10"], catch_exceptions=False)
    assert done.output.startswith(f"{place}: 1.")
    assert "<title>gsm8k-grpo, steps 1 to 10</title>" in place.read_text()
    for wrong in ("10-1", "0-4", "newest"):
        with pytest.raises(ConfigError, match="--steps: expected FIRST-LAST"):
            CliRunner().invoke(app, ["report", run.uri, "--to", str(place), "--steps", wrong], catch_exceptions=False)


def test_a_run_that_learns_from_examples_has_its_losses_and_no_completions(tmp_path: Path) -> None:
    run = report_runs.new_run(str(tmp_path))
    examples = {"examples": Artifact(folder="data/train/0001-aa/examples", files=(), rows=8)}
    report_runs.put(run, "preprocess/train", None, metrics={}, artifacts=examples)
    for step in (0, 1):
        table = {"evaluations_offline": Artifact(folder="e", files=(), rows=3)}
        report_runs.put(run, "evaluate", step, metrics={"val-core/sft/loss": 2.0 - step}, artifacts=table)
    report_runs.put(run, "policy_update", 1, metrics={"actor/loss": 1.5}, artifacts={})
    found = read_report(run)
    assert found.examples.steps == []
    assert dict(found.facts)["Training examples"].startswith("8, ")
    page = html(found)
    assert "<h3>Held-out loss</h3>" in page
    assert "<h3>Policy loss</h3>" in page
