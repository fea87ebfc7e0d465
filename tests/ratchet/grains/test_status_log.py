"""Which pod's log tells about a task, and what stands in for a log that is gone."""

from typing import Any

import pytest

from ratchet.cluster.waiting import Cause
from ratchet.errors import ConfigError
from ratchet.grains.status.log import find_log
from ratchet.grains.status.tasks import PodView
from ratchet.store.status import TaskStatus


def said(task: str, state: Any, step: int | None = None, started: float = 0.0, **fields: Any) -> TaskStatus:
    return TaskStatus(
        submission_id="s", task=task, step=step, state=state, host=f"{task}-{step}", started=started,
        updated=started + 1.0, **fields,
    )  # fmt: skip


def view(name: str, task: str, phase: str = "Running", **fields: Any) -> PodView:
    values = {"is_driver": False, "created": 1.0, "ended": None, "cause": None, **fields}
    return PodView(name=name, task=task, phase=phase, **values)


STATUSES = [
    said("preflight", "succeeded", started=1.0),
    said("segment", "succeeded", 1, started=2.0),
    said("segment", "failed", 51, started=3.0, exit_code=6, error="EngineError", message="no", advice="do"),
    said("segment", "failed", 101, started=4.0, exit_code=3, error="NotCommittedError", message="fence"),
]


def test_without_a_name_the_first_failure_is_meant_and_no_fence() -> None:
    assert find_log(STATUSES, []).status == STATUSES[2]


def test_what_runs_is_meant_where_nothing_failed_and_else_the_last_task() -> None:
    running = said("segment", "running", 51, started=3.0)
    assert find_log([*STATUSES[:2], running], []).status == running
    assert find_log(STATUSES[:2], []).status == STATUSES[1]


def test_a_task_is_named_as_kubeflow_or_as_ratchet_spells_it() -> None:
    scored = [said("policy_update", "succeeded", 4), said("policy_update", "succeeded", 5)]
    for name in ("policy_update", "policy-update", "policy-update-2"):
        assert find_log(scored, [], task=name, step=4).status == scored[0]


def test_a_segment_is_found_by_any_of_its_steps() -> None:
    assert find_log(STATUSES, [], task="segment", step=37).status == STATUSES[1]
    assert find_log(STATUSES, [], step=51).status == STATUSES[2]
    assert find_log(STATUSES, [], step=99).status == STATUSES[2]


def test_a_pod_that_waits_or_died_before_it_could_say_a_word_is_found() -> None:
    waits = Cause("settings", 'secret "nope" not found', "create it")
    pods = [view("a", "segment", "Pending", cause=waits), view("d", "segment", is_driver=True)]
    source = find_log(STATUSES[:1], pods)
    assert (source.pod, source.has_log) == (pods[0], False)
    assert source.instead("s") == ['pod a of segment has no log yet: secret "nope" not found', "create it"]
    died = [view("b", "segment", "Failed", cause=Cause("out_of_memory", "OOMKilled", "raise memory"))]
    assert find_log(STATUSES[:1], died).has_log


def test_without_its_pod_the_tasks_last_words_stand_in() -> None:
    source = find_log(STATUSES, [])
    assert source.instead("s", "http://kubeflow/#/runs/details/s") == [
        "segment of step 51: failed",
        "EngineError: no",
        "do",
        "pod segment-51 is gone, and its log with it",
        "Kubeflow keeps logs if it archives them: http://kubeflow/#/runs/details/s, task segment, Logs",
    ]
    assert find_log(STATUSES, [view("segment-51", "segment", "Failed")]).has_log


@pytest.mark.parametrize("wanted", [{"task": "rollout"}, {"task": "segment", "step": 0}, {"step": 0}])
def test_what_is_not_there_is_refused_with_what_is(wanted: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"its tasks are preflight, segment --step 1, segment --step 101, .*51"):
        find_log(STATUSES, [], **wanted)
    with pytest.raises(ConfigError, match="its tasks are none yet"):
        find_log([], [], **wanted)
