"""Decisions on what serves under a name, as text for people."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from ratchet.store.champions import Decision, serving


def decision_line(decision: Decision) -> str:
    """Return one line: what was decided about whose policy, with its numbers."""
    words = {"promoted": "promoted", "refused": "refused", "rolled_back": f"rolled back to {decision.targets}"}
    parts = [
        f"{decision.number}: {words[decision.verdict]}",
        f"{decision.run_id} step {decision.step}",
        f"accuracy {accuracy_text(decision)}",
    ]
    if decision.improvement is not None:
        parts.append(f"{improvement_text(decision)} over {decision.compared_with}")
    return " | ".join(parts)


def accuracy_text(decision: Decision) -> str:
    """Return the accuracy with its interval and the number of prompts."""
    found = decision.evaluation
    interval = "" if found.low is None or found.high is None else f" [{found.low:.4f}, {found.high:.4f}]"
    return f"{found.accuracy:.4f}{interval} on {found.prompts} prompts"


def improvement_text(decision: Decision) -> str:
    """Return the improvement with its interval; empty where there is none."""
    found = decision.improvement
    return "" if found is None else f"{found.mean:+.4f} [{found.low:+.4f}, {found.high:+.4f}]"


def history_lines(history: Sequence[Decision]) -> Iterator[str]:
    """Yield every decision, oldest first: a line with its numbers, one with who and when, and its reasons.

    The decision whose policy serves now is marked by an asterisk.
    """
    present = serving(history)
    for decision in history:
        mark = "*" if present is not None and decision.number == present.number else " "
        yield f"{mark} {decision_line(decision)}"
        when = datetime.fromtimestamp(decision.time, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
        submission = f", submission {decision.submission_id}" if decision.submission_id else ""
        yield f"    {when} by {decision.by or 'nobody known'}{submission}"
        yield from (f"    {reason}" for reason in decision.reasons)


def decision_markdown(decision: Decision) -> list[str]:
    """Return a short report of one decision as lines of Markdown, for the pipeline's UI."""
    bars = decision.bars
    compared = "by the lower end of its 95% interval" if bars.significant else "by the mean"
    rows = [
        ("policy", f"`{decision.run}` step {decision.step}"),
        ("accuracy", accuracy_text(decision)),
        ("must reach", f"{bars.min_accuracy:g} {compared}"),
        ("champion before", f"decision {decision.compared_with}" if decision.compared_with is not None else "none"),
        ("improvement", improvement_text(decision) or "not measured"),
        ("must exceed", f"{bars.min_improvement:g} {compared}"),
        ("serves now", f"decision {decision.targets}" if decision.targets is not None else "nothing"),
        ("export", f"`{decision.export.uri}`"),
    ]
    return [
        f"### {decision.name}: decision {decision.number}, {decision.verdict.replace('_', ' ')}",
        "",
        *(f"- {reason}" for reason in decision.reasons),
        "",
        "| | |",
        "|---|---|",
        *(f"| {key} | {value} |" for key, value in rows),
    ]


def decision_numbers(decision: Decision) -> dict[str, float]:
    """Return the decision's numbers by name; those that it lacks are left out."""
    found, improvement = decision.evaluation, decision.improvement
    numbers: dict[str, float | None] = {
        "promotion/decision": float(decision.number),
        "promotion/is_promoted": float(decision.verdict == "promoted"),
        "promotion/accuracy": found.accuracy,
        "promotion/accuracy_ci95_low": found.low,
        "promotion/accuracy_ci95_high": found.high,
    }
    if improvement is not None:
        numbers |= {
            "promotion/champion_accuracy": improvement.champion_accuracy,
            "promotion/improvement": improvement.mean,
            "promotion/improvement_ci95_low": improvement.low,
            "promotion/improvement_ci95_high": improvement.high,
        }
    return {name: value for name, value in numbers.items() if value is not None}
