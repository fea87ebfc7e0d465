"""What a run cost: numbers worked by hand, what must always hold, and runs that really trained."""

import dataclasses
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from ratchet.errors import ConfigError
from ratchet.store.run import POLICY_UPDATE
from ratchet.store.status import TaskStatus, write_status
from ratchet.tracking import report_charts
from ratchet.tracking.cost import Used, before_steps, cost, parse_prices, prices_of, step_metrics
from ratchet.tracking.report import html, markdown, read_report
from ratchet.tracking.show import run_lines
from ratchet.tracking.show_cost import cost_in_short, cost_lines, cost_sentences
from ratchet.tracking.work import Work
from tests.ratchet.tracking.report_runs import learning_run
from tests.runs import manifests, tiny_config, train_tiny, write_problems

H200 = "NVIDIA H200"


def _work(stage: str, step: int | None, started: float, seconds: float, gpus: int = 1, **more: Any) -> Work:
    device = H200 if gpus else "cpu"
    fields = {"device": device, "gpu_seconds": seconds * gpus, **more}
    return Work(stage=stage, step=step, started=started, seconds=seconds, **fields)


def _synchronous() -> list[Work]:
    """Two steps on two accelerators, prepared and graded on machines without one."""
    return [
        _work("preprocess/train", None, 0, 10, gpus=0),
        _work("rollout", 1, 100, 20, gpus=2, tokens=4000),
        _work("reward", 1, 120, 5, gpus=0),
        _work("values", 1, 125, 4, gpus=2),
        _work(POLICY_UPDATE, 1, 130, 10, gpus=2, tokens=4000, replayed=2.5),
        _work("rollout", 2, 140, 30, gpus=2, tokens=6000),
        _work(POLICY_UPDATE, 2, 170, 10, gpus=2, tokens=6000),
        _work("evaluate", 2, 180, 8, gpus=2, tokens=800),
    ]


def _sampled_ahead() -> list[Work]:
    """Step 2 is sampled from 120 to 150, while step 1 trains until 140."""
    return [
        _work("rollout", 1, 100, 20),
        _work("reward", 1, 120, 5),
        _work(POLICY_UPDATE, 1, 125, 15),
        _work("rollout", 2, 120, 30),
        _work(POLICY_UPDATE, 2, 150, 10),
    ]


def test_seconds_gpu_seconds_tokens_and_money_add_up_by_stage_and_step() -> None:
    found = cost(_synchronous(), {H200: 3.6, "cpu": 0.36})
    # 0.001 a GPU-second, 0.0001 a second of a machine without one.
    assert found.total == Used(
        stages=8,
        seconds=97.0,
        gpu_seconds=164.0,
        tokens=10000,
        tokens_per_second=10000 / 97,
        money=pytest.approx(0.164 + 0.0015),  # type: ignore[arg-type]
    )
    rollout = found.by_stage["rollout"]
    assert (rollout.stages, rollout.seconds, rollout.gpu_seconds, rollout.tokens) == (2, 50.0, 100.0, 10000)
    assert rollout.tokens_per_second == 200.0
    assert found.by_stage["values"].tokens_per_second == 1000.0, "over the rollouts' tokens"
    assert found.by_stage["reward"].tokens is None
    assert found.by_stage["evaluate"].tokens_per_second == 100.0
    assert found.by_step.keys() == {1, 2}, "prompts belong to no step"
    assert (found.by_step[1].gpu_seconds, found.by_step[1].tokens) == (68.0, 4000)
    assert found.by_step[2].money == pytest.approx(0.096)
    assert found.by_device["cpu"].money == pytest.approx(0.0015)
    assert (found.replayed.stages, found.replayed.seconds, found.replayed.gpu_seconds) == (1, 2.5, 5.0)
    assert found.unpriced == ()


def test_a_moment_of_a_process_that_samples_ahead_is_counted_once_and_for_the_step_that_trains() -> None:
    found = cost(_sampled_ahead(), {H200: 3600})
    # The process was there from 100 to 160.
    assert (found.total.seconds, found.total.gpu_seconds, found.total.money) == (80.0, 60.0, 60.0)
    assert found.by_stage["rollout"].seconds == 50.0
    assert found.by_stage["rollout"].gpu_seconds == 30.0, "20 of step 1, and the 10 in which step 2 was sampled alone"
    assert [found.by_step[step].gpu_seconds for step in (1, 2)] == [40.0, 20.0]
    of_a_step = [
        step_metrics(
            [one for one in _sampled_ahead() if one.step == step],
            [one for one in _sampled_ahead() if one.step == step - 1],
            {H200: 3600},
        )
        for step in (1, 2)
    ]
    assert of_a_step == [{"cost/gpu_seconds": 40.0, "cost/money": 40.0}, {"cost/gpu_seconds": 20.0, "cost/money": 20.0}]


def test_what_has_no_price_has_no_money_and_is_named() -> None:
    found = cost(_synchronous(), {H200: 3.6})
    assert found.unpriced == ("cpu",)
    assert (found.total.money, found.by_step[1].money, found.by_device["cpu"].money) == (None, None, None)
    assert found.by_device[H200].money == pytest.approx(0.164)
    assert found.by_step[2].money == pytest.approx(0.096)
    assert cost_in_short(found) == "164 GPU-seconds, cost unknown: cpu without a price"
    assert "0.004167 hours of cpu: no price (trainer.prices, or --price 'cpu=...')" in cost_sentences(found)
    assert "0.04556 GPU-hours of NVIDIA H200 at 3.6 an hour: 0.164" in cost_sentences(found)
    assert step_metrics(_synchronous()[1:5], [], {H200: 3.6}) == {"cost/gpu_seconds": 68.0}
    # A name that manifests do not have buys nothing, a device that did nothing needs no price, and 0 is a price.
    assert cost(_synchronous(), {"H200": 3.6, "cpu": 1}).unpriced == (H200,)
    assert cost([_work("recovery", 1, 5, 0, gpus=0)], {}).total.money == 0.0
    assert cost(_synchronous(), {H200: 0, "cpu": 0}).total.money == 0.0


def test_tokens_that_are_known_of_some_stages_only_are_not_passed_for_all() -> None:
    works = [*_synchronous(), _work("evaluate", 1, 145, 8)]
    assert cost(works, {}).by_stage["evaluate"].tokens is None
    assert cost([one for one in works if one.stage != POLICY_UPDATE], {}).total.tokens is None


@pytest.mark.parametrize("seed", range(20))
def test_parts_add_up_to_the_whole_and_prices_scale_it(seed: int) -> None:
    draw = random.Random(seed)
    works = [
        _work(stage, step, draw.uniform(0, 100), draw.uniform(0, 50), draw.randrange(3))
        for step in range(1, 6)
        for stage in ("rollout", "reward", POLICY_UPDATE)
    ]
    found = cost(works, {H200: 2.0, "cpu": 0.5})
    for parts in (found.by_stage, found.by_step, found.by_device):
        for name in ("gpu_seconds", "money"):
            assert math.fsum(getattr(one, name) for one in parts.values()) == pytest.approx(getattr(found.total, name))
    doubled = cost(reversed(works), {H200: 4.0, "cpu": 1.0})
    assert found.total.money is not None
    assert doubled.total.money == pytest.approx(2 * found.total.money)
    assert found.total.gpu_seconds <= math.fsum(one.gpu_seconds for one in works) + 1e-9


def test_failed_tasks_count_beside_with_the_time_in_which_they_committed_nothing() -> None:
    def task(task: str, state: Any, started: float, updated: float) -> TaskStatus:
        return TaskStatus(
            submission_id="6f", task=task, step=1, state=state, host="p", started=started, updated=updated
        )

    tasks = [
        task("segment", "failed", 90, 240),  # the stages from 100 to 188, without a pause of 1 s, were committed
        task("rollout", "terminated", 300, 310),
        task("segment", "succeeded", 400, 500),
        task("segment", "running", 400, 500),
    ]
    found = cost(_synchronous(), {}, tasks)
    assert (found.failed_tasks, found.failed_task_seconds) == (2, 150 - 87 + 10)
    assert found.total == cost(_synchronous(), {}).total
    assert "beside it 2 failed tasks: 73 s in which nothing was committed" in cost_sentences(found)
    assert "of it replaying committed steps: 2 s, 5 GPU-seconds" in cost_sentences(found)


def test_the_table_has_a_row_for_each_stage_and_the_total() -> None:
    lines = cost_lines(cost(_synchronous()[1:5], {H200: 3.6, "cpu": 3600}))
    assert lines[:6] == [
        "stage          times  seconds  GPU-seconds  tokens  tokens/s   cost",
        "rollout            1     20.0         40.0    4000       200   0.04",
        "policy_update      1     10.0         20.0    4000       400   0.02",
        "values             1      4.0          8.0    4000      1000  0.008",
        "reward             1      5.0          0.0                        5",
        "total              4     39.0         68.0    4000       103   5.07",
    ]
    assert lines[-1].startswith("not counted: ")


@pytest.mark.parametrize("text", ["cpu", "=1", "cpu=", "cpu=x", "cpu=-0.1", "cpu=nan", "cpu=inf", ""])
def test_a_price_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected DEVICE=PRICE"):
        parse_prices([text])


def test_prices_that_are_given_go_before_those_of_the_config() -> None:
    given = parse_prices([" NVIDIA H200 = 3.5", "a=b=0"])
    assert given == {H200: 3.5, "a=b": 0.0}
    assert prices_of({"trainer": {"prices": {H200: 1.0, "cpu": 2}}}, given) == {H200: 3.5, "cpu": 2.0, "a=b": 0.0}
    assert prices_of({}) == {}
    with pytest.raises(ConfigError, match="cpu is given twice, as 1 and as 2"):
        parse_prices(["cpu=1", "cpu=2"])


def test_a_run_that_samples_ahead_says_at_each_step_what_is_counted_afterwards(
    tmp_path: Path, tiny_model: Path
) -> None:
    problems = write_problems(tmp_path / "problems.jsonl", 8)
    config = tiny_config(
        tiny_model,
        problems,
        **{
            "data.val_files": str(problems),
            "trainer.async_level": 1,
            "trainer.total_training_steps": 3,
            "trainer.prices": {"cpu": 3600},  # 1 a second
        },
    )
    run = train_tiny(tmp_path / "runs", "ahead", config)
    committed = manifests(run)
    found = cost(map(Work.of, committed.values()), {"cpu": 3600})
    assert {one.device for one in committed.values()} == {"cpu"}
    for step in (1, 2, 3):
        metrics = run.require(POLICY_UPDATE, step).metrics
        beside = sum(one.seconds for one in map(Work.of, run.step_manifests(step)) if one.stage in OUTSIDE)
        # The manifest's own end is a little later.
        assert metrics["cost/money"] == pytest.approx((found.by_step[step].money or 0) - beside, abs=0.1)
        assert metrics["cost/gpu_seconds"] == 0.0
        assert found.by_step[step].tokens == metrics["perf/total_num_tokens"]
    assert found.total.seconds >= (found.total.money or 0.0)
    began = min(one.started for one in committed.values())
    assert found.total.money is not None
    assert found.total.money <= max(one.provenance.ended for one in committed.values()) - began
    # What the rollouts' lengths say is what the update counted.
    assert found.by_stage["rollout"].tokens == found.by_stage[POLICY_UPDATE].tokens == found.total.tokens
    assert (found.by_stage["version 0"].stages, found.by_stage[POLICY_UPDATE].stages) == (1, 3)
    assert (found.by_stage["evaluate"].tokens or 0) > 0
    # `show` counts the same, at the prices of the submission and at others.
    *_, last = run_lines(run, {}, as_json=True)
    assert json.loads(last)["cost"]["total"] == dataclasses.asdict(found.total)
    *_, last = run_lines(run, {"cpu": 7200}, as_json=True)
    assert json.loads(last)["cost"]["total"]["money"] == pytest.approx(2 * found.total.money)
    assert {one.stage for one in before_steps(run)} == {"preprocess/train", "preprocess/val"}


OUTSIDE = ("evaluate", "checkpoint_export")


def test_the_page_draws_the_cost_of_the_steps_and_lists_it_by_stage(tmp_path: Path) -> None:
    run = learning_run(str(tmp_path), 4)
    status = TaskStatus(
        submission_id="6f0c-1", task="segment", step=1, state="failed", host="p", started=0.0, updated=60.0
    )
    write_status(run.store, status)
    bare = read_report(run)
    assert "Cost" not in [chart.title for chart in report_charts.charts(bare.numbers)["Time and cost"]]
    assert "Cost" not in dict(bare.headline)
    report = read_report(run, prices={H200: 3600})
    # Four stages of 5 s a step and the evaluations of 5 steps, 1 a second; the prompts' two stages belong to no step.
    assert report.numbers.series["money"].tolist() == [5.0, 30.0, 55.0, 80.0, 105.0]
    assert dict(report.headline)["Cost"] == "115.00"
    assert report.cost.by_stage["rollout"].gpu_seconds == 20.0
    page = html(report)
    assert 'aria-label="Cost"' in page
    assert "0.03194 GPU-hours of NVIDIA H200 at 3600 an hour: 115.00" in page
    assert "beside it 1 failed task: 60 s in which nothing was committed" in page
    lines = markdown(report)
    assert "| stage | times | seconds | GPU-seconds | tokens | tokens/s | cost |" in lines
    assert "| evaluate | 5 | 25.0 | 25.0 |  |  | 25.00 |" in lines
    # A part of the run has the cost of its own steps: neither the evaluation before it nor what came before training.
    assert read_report(run, 3, 4, {H200: 3600}).cost.total.money == 50.0
