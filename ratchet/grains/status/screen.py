"""A run's status as one screen of plain text: at most 24 lines, whatever is to be said.

Trap: messages come from pods and from people; what a terminal would take for a command is left out.
"""

import textwrap
from collections.abc import Iterator, Sequence

from ratchet.grains.status.advice import next_step
from ratchet.grains.status.chain import Accuracy
from ratchet.grains.status.records import Activity, Failure, RunStatus
from ratchet.tracking.metrics import span

LINES = 24
WIDTH = 100
LABEL = 10
"""Columns of a line's label."""

_BAR = 40

Section = tuple[str, list[str]]


def screen_lines(status: RunStatus, width: int = WIDTH) -> list[str]:
    """Return the screen; `width` is the terminal's, of which at most 120 columns are used."""
    width = max(60, min(width, 120))
    title, state = one_line(status.run), status.state.upper()
    room = width - len(state) - 2
    head = title if len(title) <= room else f"...{title[3 - room :]}"
    sections: list[Section] = [("", [f"{head}{state.rjust(width - len(head))}"])]
    for label, text, most in _texts(status):
        # A line break in a text begins a line here.
        lines = [line for part in text.split("\n") for line in _wrapped(part, width - LABEL, is_whole=label == "next")]
        sections.append((label, _cut(lines, most, width - LABEL)))
    _fit(sections, width - LABEL)
    return [
        *sections[0][1],
        *(
            f"{label if number == 0 else '':<{LABEL}}{line}".rstrip()
            for label, lines in sections[1:]
            for number, line in enumerate(lines)
        ),
    ]


def _texts(status: RunStatus) -> Iterator[tuple[str, str, int]]:
    """Yield label, text, and the most lines that it may take."""
    yield from _what(status)
    yield from _how_far(status)
    yield from (("now", _activity(status, one), 2) for one in status.now[:3])
    if not status.now and status.state in ("running", "starting"):
        yield "now", _between(status), 2
    if status.failure is not None:
        yield "why", _failure(status, status.failure), 6
    elif status.state == "failed" and status.pipeline_run is not None:
        yield "why", f"Kubeflow says {status.pipeline_run.state}", 1
    for one in status.now:
        if one.doing == "waiting" and one.cause is not None:
            yield "why", f"{one.task} waits: {one.cause.message}", 4
    if status.refused is not None:
        yield "refused", f"a later submission was refused: {_failure(status, status.refused)}", 4
    if status.owner is not None or status.pipeline_run is not None:
        yield "owner", _owner(status), 2
    if status.promotes_as:
        yield "champion", _promotion(status), 3
    yield "next", next_step(status), 5
    for note in status.notes[:3]:
        yield "unasked", note, 2


def _what(status: RunStatus) -> Iterator[tuple[str, str, int]]:
    setup = status.setup
    if not setup.algorithm:
        return
    parts = [f"{setup.algorithm}, {setup.model or 'no model'}"]
    if setup.prompts and setup.completions:
        parts.append(f"{setup.prompts} x {setup.completions} completions by {setup.sampler}")
    elif setup.prompts:
        parts.append(f"{setup.prompts} examples a step")
    parts.append(f"segments of {setup.steps_per_segment} steps" if setup.steps_per_segment else f"grain {setup.grain}")
    yield "what", "; ".join(parts), 2


def _how_far(status: RunStatus) -> Iterator[tuple[str, str, int]]:
    progress = status.progress
    if progress is None:
        return
    if progress.total:
        share = min(1.0, progress.steps / progress.total)
        bar = "#" * int(share * _BAR)
        yield "steps", f"{progress.steps} of {progress.total}  [{bar:-<{_BAR}}] {share:.0%}", 1
    else:
        yield "steps", f"{progress.steps} committed; how many there will be is not known yet", 1
    if progress.last_commit is not None:
        told = [f"the last one {span(status.at - progress.last_commit)} ago"]
        if progress.seconds_per_step is not None:
            told.append(f"{span(progress.seconds_per_step)} a step")
        if progress.seconds_left is not None and status.state == "running":
            told.append(f"about {span(progress.seconds_left)} left")
        yield "commits", ", ".join(told), 1
    if progress.reward is not None:
        first = f"{progress.first_reward:.4g} in step 1, " if progress.first_reward is not None else ""
        last = f"{progress.reward:.4g} in step {progress.steps}"
        yield "reward", f"{first}{last}" if progress.steps > 1 else last, 1
    if progress.loss is not None:
        first = f"{progress.first_loss:.4g} in step 1, " if progress.first_loss is not None else ""
        last = f"{progress.loss:.4g} in step {progress.steps}"
        yield "loss", f"{first}{last}" if progress.steps > 1 else last, 1
    if progress.accuracy:
        yield "accuracy", "; ".join(_held_out(progress.accuracy)), 2
    if progress.held_out_loss:
        yield "held out", "loss " + "; ".join(_held_out(progress.held_out_loss)), 2


def _held_out(found: Sequence[Accuracy]) -> Iterator[str]:
    for one in found:
        interval = f" ({one.low:.3f} to {one.high:.3f})" if one.low is not None and one.high is not None else ""
        yield f"{one.mean:.3f}{interval} on {one.source}, policy of step {one.step}"


def _activity(status: RunStatus, one: Activity) -> str:
    parts = [_place(one.task, one.step)]
    progress = status.progress
    if one.task == "segment" and progress is not None and one.doing == "running":
        stages = f" ({', '.join(progress.stages)} committed)" if progress.stages else ""
        parts.append(f"at step {progress.steps + 1}{stages}")
    if one.attempt > 1:
        parts.append(f"attempt {one.attempt}")
    pod = f"pod {one.pod}" if one.pod else "pod not made yet"
    parts.append(pod if one.doing == "running" else f"{pod}, {one.doing}")
    if one.since is not None:
        parts.append(f"for {span(status.at - one.since)}")
    if one.heard is not None:
        parts.append(f"heard of {span(status.at - one.heard)} ago")
    if one.doing == "starting" and one.cause is not None:
        parts.append(one.cause.message)
    return ", ".join(parts)


def _between(status: RunStatus) -> str:
    owner, progress = status.owner, status.progress
    stages = (
        f"step {progress.steps + 1}: {', '.join(progress.stages)} committed" if progress and progress.stages else ""
    )
    if owner is not None and not owner.submission_id:
        alive = "" if owner.is_alive is None else ", which is alive"
        return "; ".join(filter(None, [f"process {owner.pid} on {owner.host}{alive}", stages]))
    if status.state == "starting":
        return "no pod has said a word yet"
    return "; ".join(filter(None, ["between two tasks", stages]))


def _failure(status: RunStatus, failure: Failure) -> str:
    code = ""
    if failure.exit_code is not None:
        code = f" (exit code {failure.exit_code}{': ' if failure.meaning else ''}{failure.meaning})"
    pod = f" in pod {failure.pod}" if failure.pod else ""
    when = f", {span(status.at - failure.at)} ago" if failure.at is not None else ""
    what = f"{failure.error}: " if failure.error and failure.cause is None else ""
    lines = [f"{_place(failure.task, failure.step)}{pod}{when}{code}", f"{what}{failure.message}"]
    if failure.consequences:
        tasks = "task" if failure.consequences == 1 else "tasks"
        lines.append(f"{failure.consequences} later {tasks} failed because of it")
    return "\n".join(line for line in lines if line)


def _owner(status: RunStatus) -> str:
    owner, pipeline_run, told = status.owner, status.pipeline_run, []
    state = f" ({pipeline_run.state})" if pipeline_run is not None else ""
    if pipeline_run is not None and (owner is None or owner.submission_id != pipeline_run.id):
        told.append(f"pipeline run {pipeline_run.id}{state}, which has not claimed the run yet")
    elif owner is not None and owner.submission_id:
        told.append(f"pipeline run {owner.submission_id}{state}")
    elif owner is not None:
        submitted = "its submission is damaged" if owner.has_damaged_submission else "outside a pipeline"
        told.append(f"process {owner.pid} on {owner.host}, {submitted}")
    if owner is not None:
        before = owner.epoch - 1
        lost = f"; {before} earlier {'one has' if before == 1 else 'ones have'} lost the run" if before else ""
        told.append(f"claim {owner.epoch}{f' by {owner.host}' if owner.submission_id else ''}{lost}")
    return ", ".join(told)


def _promotion(status: RunStatus) -> str:
    decided = status.promotion
    if decided is None:
        return f"{status.promotes_as}: nothing is decided about this run yet"
    if decided.serves is None:
        serves = "nothing serves yet"
    else:
        serves = "it serves now" if decided.serves == decided.number else f"decision {decided.serves} serves now"
    reasons = f": {'; '.join(decided.reasons)}" if decided.reasons else ""
    return f"{decided.name}: {decided.verdict} by decision {decided.number}{reasons}; {serves}"


def _place(task: str, step: int | None) -> str:
    if step is None:
        return task
    return f"{task} from step {step}" if task == "segment" else f"{task} of step {step}"


def one_line(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)


def _wrapped(text: str, width: int, *, is_whole: bool) -> list[str]:
    """Break a text into lines; what is to be copied into a shell stays whole, though it sticks out."""
    return textwrap.wrap(one_line(text), width, break_on_hyphens=False, break_long_words=not is_whole) or [""]


def _cut(lines: list[str], most: int, width: int) -> list[str]:
    if len(lines) <= most:
        return lines
    return [*lines[: most - 1], f"{lines[most - 1][: width - 4]} ..."]


def _fit(sections: Sequence[Section], width: int) -> None:
    """Shorten the longest sections until the screen holds them all; what to do next is shortened last."""
    while sum(len(lines) for _, lines in sections) > LINES:
        longest = max(sections, key=lambda section: len(section[1]) - 2 * (section[0] == "next"))
        if len(longest[1]) == 1:
            return
        longest[1][:] = _cut(longest[1], len(longest[1]) - 1, width)
