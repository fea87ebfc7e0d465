"""A plan as lines of text, for people."""

from collections.abc import Iterator

from ratchet.grains.plan.planning import Plan
from ratchet.grains.plan.pods import OUTSIDE_TORCH
from ratchet.store.usage import readable


def plan_lines(plan: Plan) -> Iterator[str]:
    """Yield a plan, what does not fit first."""
    yield from (f"DOES NOT FIT  {fault}" for fault in plan.faults)
    models = ", ".join(
        f"{role} {one['parameters']:,} parameters"
        + ("" if one["trained"] == one["parameters"] else f", {one['trained']:,} trained")
        for role, one in plan.model.items()
    )
    yield f"model     {models}"
    yield f"steps     {plan.steps}, grain {plan.grain}"
    yield from _tokens(plan)
    yield from _memory(plan)
    tasks = plan.tasks
    yield (
        f"pods      {tasks.iterations} iterations of {tasks.per_iteration}, {tasks.total} tasks, {tasks.pods} pods in "
        f"a pipeline, {_time(tasks.overhead_seconds)} of scheduling"
    )
    yield from _storage(plan)
    yield from _cost(plan)
    yield from (f"note      {note}" for note in plan.notes)


def _tokens(plan: Plan) -> Iterator[str]:
    tokens = plan.tokens
    expected = tokens.trained_expected
    of = "at most" if expected is None else f"{expected:,.0f} expected, at most"
    yield f"tokens    {of} {tokens.trained_bound:,} trained on, {tokens.prompt:,} of them prompts; {tokens.rows:,} rows"
    if tokens.evaluated_rows:
        yield f"          at most {tokens.evaluated_bound:,} in evaluations, {tokens.evaluated_rows:,} completions"


def _memory(plan: Plan) -> Iterator[str]:
    where = "main memory" if plan.device == "cpu" else "each accelerator"
    for number, pod in enumerate(plan.pods):
        limit = "" if plan.accelerator_memory is None else f" of {readable(plan.accelerator_memory)}"
        title = "memory    " if number == 0 else "          "
        yield f"{title}{pod.name}: {readable(pod.peak)}{limit} of {where}"
        yield from (f"            {readable(size):>10}  {name}" for name, size in pod.resident.items())
        yield from (f"            {readable(size):>10}  while it runs: {name}" for name, size in pod.passing.items())
        if pod.device == "cuda":
            yield f"            {readable(OUTSIDE_TORCH):>10}  context, kernels, graphs"
        yield from (f"            {readable(size):>10}  pinned main memory: {name}" for name, size in pod.host.items())


def _storage(plan: Plan) -> Iterator[str]:
    storage = plan.storage
    yield f"storage   {readable(storage.final)} at the end, {readable(storage.peak)} at most"
    yield from (f"            {readable(size):>10}  {kind}" for kind, size in storage.by_kind.items())
    tables = ", ".join(f"{name} {readable(size)}" for name, size in storage.per_step.items())
    yield f"          a step: {tables or 'no tables'}; a full version {readable(storage.policy_bytes)}"


def _cost(plan: Plan) -> Iterator[str]:
    cost = plan.cost
    if cost.work_seconds is None or cost.total_seconds is None:
        yield "time      not known"
        yield "money     not known"
        return
    yield f"time      {_time(cost.work_seconds)} of work, {_time(cost.total_seconds)} as a pipeline"
    if cost.accelerator_seconds:
        yield f"          {cost.accelerator_seconds / 3600:.2f} accelerator-hours"
    yield "money     not known" if cost.money is None else f"money     {cost.money:.2f}"


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
