"""The screen of `ratchet status`: what it looks like, that it fits, and that it obeys nobody's messages."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from ratchet.cluster.waiting import Cause
from ratchet.grains.status import RunStatus
from ratchet.grains.status.records import Activity, Failure
from ratchet.grains.status.screen import LINES, screen_lines, span
from tests.ratchet.grains.run_stories import Story, ago, kubeflow, look


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(str(tmp_path / "runs"))


def at_s3(status: RunStatus) -> RunStatus:
    """The same run at a place that does not depend on where the test runs."""
    return dataclasses.replace(status, run="s3://bucket/runs/first")


RUNNING = """\
s3://bucket/runs/first                                                                       RUNNING
what      grpo, Qwen/Qwen2.5-0.5B-Instruct; 32 x 8 completions by vllm; segments of 50 steps
steps     37 of 100  [##############--------------------------] 37%
commits   the last one 5 s ago, 60 s a step, about 1 h 3 min left
reward    0.405 in step 1, 0.585 in step 37
accuracy  0.481 (0.456 to 0.506) on openai/gsm8k, policy of step 25
now       segment from step 1, at step 38 (rollout committed), pod grpo-x-segment-1, for 20 min,
          heard of 12 s ago
owner     pipeline run 6f0c2c6e-95a1-4c55-9a0a-0d5b2e6f7a11 (RUNNING), claim 1 by grpo-x-preflight-1
next      wait; ratchet status s3://bucket/runs/first --watch follows it
"""

FAILED = """\
s3://bucket/runs/first                                                                        FAILED
what      grpo, Qwen/Qwen2.5-0.5B-Instruct; 32 x 8 completions by vllm; segments of 50 steps
steps     37 of 100  [##############--------------------------] 37%
commits   the last one 3 min ago, 60 s a step
reward    0.405 in step 1, 0.585 in step 37
why       segment from step 1 in pod grpo-x-segment-1, 2 min ago (exit code 6: a model cannot be
          loaded, sampled or trained)
          EngineError: request 17 exceeds the model's context of 2048 tokens
          1 later task failed because of it
owner     pipeline run 6f0c2c6e-95a1-4c55-9a0a-0d5b2e6f7a11, claim 1 by grpo-x-preflight-1
next      lower data.max_response_length: ratchet submit grpo --config CONFIG.yaml --root
          s3://bucket/runs --run-id first
unasked   pods were not asked: no kubeconfig
"""


def test_a_running_run_on_one_screen(story: Story) -> None:
    story.prepared().steps(1, 37, ended=ago(12.0)).evaluate(25, ago(700.0), 0.481)
    story.commit("rollout", 38, ago(5.0), role="rollouts").task("segment", "running", step=1)
    status = at_s3(look(story, pipeline_run=kubeflow("RUNNING")))
    assert "\n".join(screen_lines(status)) + "\n" == RUNNING


def test_a_failed_run_on_one_screen(story: Story) -> None:
    story.prepared().steps(1, 37, ended=ago(200.0))
    message = "request 17 exceeds the model's context of 2048 tokens"
    story.task("segment", "failed", step=1, updated=ago(130.0), exit_code=6, error="EngineError", message=message,
               advice="lower data.max_response_length")  # fmt: skip
    story.task("segment", "failed", step=51, updated=ago(90.0), exit_code=3, error="NotCommittedError", message="fence")
    status = dataclasses.replace(at_s3(look(story)), notes=("pods were not asked: no kubeconfig",))
    assert "\n".join(screen_lines(status)) + "\n" == FAILED


def crowded(story: Story) -> RunStatus:
    """Everything that a screen can hold, and far too much of it."""
    status = look(story.prepared().steps(1, 37, ended=ago(12.0)).evaluate(25, ago(700.0), 0.481))
    text = "one word after the other, and no end of them; " * 40
    cause = Cause("accelerator", text, text)
    waits = Activity(
        task="rollout", step=38, pod="grpo-x-rollout-" + "1" * 200, doing="waiting", since=ago(9.0), cause=cause
    )
    failure = Failure(task="t", step=1, pod="p", at=ago(5.0), error="E", message=f"{text}\n{text}", advice=text)
    return dataclasses.replace(
        status,
        run="s3://bucket/" + "long/" * 40 + "first",
        state="waiting",
        now=(waits,) * 5,
        failure=failure,
        refused=failure,
        promotes_as="math",
        notes=(text,) * 9,
    )


@pytest.mark.parametrize("width", [20, 80, 100, 300])
def test_whatever_is_to_be_said_fits_on_a_screen(story: Story, width: int) -> None:
    lines = screen_lines(crowded(story), width)
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= max(60, min(width, 120))
    # What is to be copied is never cut in two.
    place = f"s3://bucket/{'long/' * 40}first"
    finished = screen_lines(dataclasses.replace(crowded(story), state="running", run=place), width)
    assert any(f" {place} " in f"{line} " for line in finished)
    labels = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert {"steps", "now", "why", "refused", "owner", "champion", "next", "unasked"} <= set(labels)
    assert lines[0].endswith("WAITING")
    assert lines[0].startswith("...")
    assert "/long/first " in lines[0]


def test_messages_cannot_command_the_terminal(story: Story) -> None:
    fields: dict[str, Any] = {"exit_code": 2, "error": "ConfigError"}
    story.task("preflight", "failed", message="bad \x1b[2J\x1b]0;title\x07 model\r\nsecond \u202eline", **fields)
    text = "\n".join(screen_lines(look(story)))
    assert all(character == "\n" or character.isprintable() for character in text)
    assert "second" in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "0 s"),
        (0.4, "0 s"),
        (99.4, "99 s"),
        (100, "2 min"),
        (59.4 * 60, "59 min"),
        (3599, "1 h"),
        (3720, "1 h 2 min"),
        (47.99 * 3600, "47 h 59 min"),
        (48 * 3600, "2 d"),
        (75 * 3600, "3 d 3 h"),
    ],
)
def test_durations_are_told_in_units_that_people_count_in(seconds: float, text: str) -> None:
    assert span(seconds) == text
