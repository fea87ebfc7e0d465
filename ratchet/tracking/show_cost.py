"""What a run used and what that costs, as people read it: a table by stage, and sentences on what it is and is not."""

from collections.abc import Sequence

from ratchet.tracking.cost import CPU, Cost, Used
from ratchet.tracking.metrics import span

HEADER = ("stage", "times", "seconds", "GPU-seconds", "tokens", "tokens/s", "cost")
LEFT_OUT = (
    "not counted: the start of processes and the time between stages, attempts that committed nothing outside a "
    "pipeline, and services that grade"
)


def cost_rows(cost: Cost) -> list[tuple[str, ...]]:
    """Return the cells under HEADER: a row for each stage, and the total."""
    return [*(_row(stage, used) for stage, used in cost.by_stage.items()), _row("total", cost.total)]


def cost_lines(cost: Cost) -> list[str]:
    """Return the table and the sentences as lines of text."""
    rows = [HEADER, *cost_rows(cost)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    return [*(_aligned(row, widths) for row in rows), *cost_sentences(cost)]


def cost_sentences(cost: Cost) -> list[str]:
    """Return what the money is made of, what was lost, and what is not in it."""
    said = [_price(device, used, cost) for device, used in cost.by_device.items() if used.seconds or used.gpu_seconds]
    lost = cost.replayed
    if lost.stages:
        worth = f", {money_text(lost.money)}" if lost.money is not None and cost.prices else ""
        said.append(f"of it replaying committed steps: {span(lost.seconds)}, {lost.gpu_seconds:.0f} GPU-seconds{worth}")
    if cost.failed_tasks:
        tasks = "task" if cost.failed_tasks == 1 else "tasks"
        took = span(cost.failed_task_seconds)
        said.append(f"beside it {cost.failed_tasks} failed {tasks}: {took} in which nothing was committed")
    return [*said, LEFT_OUT]


def money_text(money: float | None) -> str:
    """Return an amount; of small ones three significant digits."""
    if money is None:
        return "unknown"
    return f"{money:,.2f}" if money >= 10 or money == 0 else f"{money:.3g}"


def cost_in_short(cost: Cost) -> str:
    """Return GPU-seconds and money in a few words."""
    gpu = f"{cost.total.gpu_seconds:.0f} GPU-seconds"
    if not cost.prices:
        return gpu
    missing = f": {' and '.join(cost.unpriced)} without a price" if cost.unpriced else ""
    return f"{gpu}, cost {money_text(cost.total.money)}{missing}"


def row_text(used: Used) -> str:
    """Return what stages used in a few words."""
    times = "once" if used.stages == 1 else f"{used.stages} times"
    said = [f"{times}, {span(used.seconds)}", f"{used.gpu_seconds:.0f} GPU-seconds"]
    if used.tokens_per_second is not None:
        said.append(f"{used.tokens} tokens, {used.tokens_per_second:.0f} a second")
    return ", ".join([*said, money_text(used.money)] if used.money else said)


def _price(device: str, used: Used, cost: Cost) -> str:
    kind, seconds = ("hours", used.seconds) if device == CPU else ("GPU-hours", used.gpu_seconds)
    amount = f"{seconds / 3600:.4g} {kind} of {device}"
    if device not in cost.prices:
        return f"{amount}: no price (trainer.prices, or --price '{device}=...')"
    return f"{amount} at {cost.prices[device]:g} an hour: {money_text(used.money)}"


def _row(stage: str, used: Used) -> tuple[str, ...]:
    tokens = "" if used.tokens is None else f"{used.tokens}"
    rate = "" if used.tokens_per_second is None else f"{used.tokens_per_second:.0f}"
    worth = "" if used.money is None else money_text(used.money)
    return (stage, f"{used.stages}", f"{used.seconds:.1f}", f"{used.gpu_seconds:.1f}", tokens, rate, worth)


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
    return "  ".join([row[0].ljust(widths[0]), *cells]).rstrip()
