"""The charts of a report: what is drawn together, of the metrics that a run has."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ratchet.tracking.report_data import Numbers, Points

COLOURS = ("#3584e4", "#d97706", "#16a085", "#c2549d", "#8f7a00", "#7a6ff0", "#d64545", "#7c8794", "#3a9d3a")
"""At least 3:1 against white and against the dark background."""
_EVALUATED = re.compile(r"val-core/(.+)/acc/mean@(\d+)")
_HELD_OUT_LOSS = re.compile(r"val-core/(\w+)/loss")
_PART = re.compile(r"reward/(.+)/mean")
_SECONDS = re.compile(r"timing_s/(.+)")
_SUMS = ("step",)
"""Parts of timing_s that are sums of others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One curve."""

    name: str
    """Metric, or what `extra` calls it."""
    label: str
    colour: str = COLOURS[0]
    is_sparse: bool = False
    """Whether few steps have the metric, so that its points are marked and joined."""
    interval: tuple[str, str] | None = None
    """Metrics of the lower and the upper end of each point's interval."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """What is drawn into one frame, and what stands beside it in the page."""

    title: str
    note: str
    lines: tuple[Line, ...]
    band: tuple[str, str] | None = None
    """Metrics of the lower and the upper edge of an area."""
    is_stacked: bool = False
    is_log: bool = False
    has_zero: bool = False
    """Whether the axis begins at 0."""

    @property
    def names(self) -> list[str]:
        """Every column that it draws."""
        return [line.name for line in self.lines] + list(self.band or ())


def charts(numbers: Numbers) -> dict[str, list[Chart]]:
    """Return section -> its charts, of those that there are numbers for."""
    sections: dict[str, Callable[[Numbers], Iterator[Chart]]] = {
        "Reward": _reward,
        "Policy": _policy,
        "Completions": _lengths,
        "Sampler and trainer": _drift,
        "Critic": _critic,
        "Time and cost": _time,
    }
    found = {title: [chart for chart in make(numbers) if chart.lines] for title, make in sections.items()}
    return {title: made for title, made in found.items() if made}


def _reward(numbers: Numbers) -> Iterator[Chart]:
    yield Chart(
        title="Reward",
        note="Reward of a completion as it was graded, mean over the step.",
        lines=_lines(numbers, {"critic/score/mean": "mean"}),
    )
    yield Chart(
        title="Held-out accuracy",
        note="Mean reward of the held-out prompts, by data source.",
        lines=tuple(
            Line(name=name, label=label, colour=_colour(place), is_sparse=True, interval=_interval(numbers, name))
            for place, (name, label) in enumerate(evaluated(numbers).items())
        ),
    )
    held_out = {name: match[1] for name in numbers.series if (match := _HELD_OUT_LOSS.fullmatch(name))}
    yield Chart(title="Held-out loss", note="Of examples.", lines=_lines(numbers, held_out, is_sparse=True))
    in_order = "Share of pairs whose chosen side is the better one by the model."
    lines = _lines(numbers, {"rewards/accuracies": "training"})
    yield Chart(title="Pairs in the right order", note=in_order, lines=lines)
    lines = _lines(numbers, {"val-core/dpo/accuracy": "held-out"}, is_sparse=True)
    yield Chart(title="Held-out pairs in the right order", note=in_order, lines=lines)
    parts = {name: match[1] for name in numbers.series if (match := _PART.fullmatch(name))}
    yield Chart(title="Parts of the reward", note="Mean of each part, unweighted.", lines=_lines(numbers, parts))
    yield Chart(
        title="Answers that could be read",
        note="Share of completions in which an answer was found. The rest are parse failures.",
        lines=_lines(numbers, {"reward/parseable_ratio": "read"}),
    )
    yield Chart(
        title="Groups without a signal",
        note="Share of groups whose rewards are all equal: they teach nothing where groups are compared within.",
        lines=_lines(numbers, {"critic/constant_groups_ratio": "all equal"}),
        has_zero=True,
    )


def _policy(numbers: Numbers) -> Iterator[Chart]:
    kl = {
        "actor/ppo_kl": "to the sampling policy",
        "actor/kl_loss": "to the reference, in the loss",
        "actor/reward_kl_penalty": "to the reference, in the reward",
    }
    yield Chart(title="KL", note="In nats.", lines=_lines(numbers, kl))
    yield Chart(
        title="Entropy", note="Of the policy's distribution, in nats.", lines=_lines(numbers, {"actor/entropy": "mean"})
    )
    yield Chart(
        title="Clip fraction",
        note="Share of tokens at which the loss is a clipped one.",
        lines=_lines(numbers, {"actor/pg_clipfrac": "upper bound", "actor/pg_clipfrac_lower": "second bound"}),
        has_zero=True,
    )
    losses = {"actor/pg_loss": "policy gradient", "actor/sft_loss": "imitated examples", "actor/loss": "of the update"}
    yield Chart(title="Policy loss", note="", lines=_lines(numbers, losses))
    yield Chart(
        title="Gradient norm",
        note="Before clipping.",
        lines=_lines(numbers, {"actor/grad_norm": "policy", "critic/grad_norm": "critic"}),
        has_zero=True,
    )
    yield Chart(title="Learning rate", note="", lines=_lines(numbers, {"actor/lr": "policy", "critic/lr": "critic"}))


def _lengths(numbers: Numbers) -> Iterator[Chart]:
    edges = ("response_length/min", "response_length/max")
    yield Chart(
        title="Completion length",
        note="Tokens, end token included; the area reaches from the shortest to the longest.",
        lines=_lines(numbers, {"response_length/mean": "mean"}),
        band=edges if all(numbers.has(name) for name in edges) else None,
    )
    yield Chart(
        title="Cut off",
        note="Share of completions that ended at the longest length allowed.",
        lines=_lines(numbers, {"response_length/clip_ratio": "cut off"}),
        has_zero=True,
    )


def _drift(numbers: Numbers) -> Iterator[Chart]:
    names = {"training/rollout_probs_diff_mean": "mean", "training/rollout_probs_diff_max": "max"}
    yield Chart(
        title="Drift in probability",
        note="Absolute difference between a token's probability under sampler and policy.",
        lines=_lines(numbers, names),
        is_log=_are_positive(numbers, names),
    )
    yield Chart(
        title="Drift at the same weights",
        note="Mean difference in nats on one fixed prompt, when the sampler was last given weights.",
        lines=_lines(numbers, {"training/probe_log_prob_diff": "difference"}),
        has_zero=True,
    )
    corrected = {"rollout_corr/rollout_is_mean": "mean", "rollout_corr/rollout_is_max": "max"}
    yield Chart(title="Importance weights", note="Of rollout correction.", lines=_lines(numbers, corrected))
    yield Chart(
        title="Drift of a rebuilt trainer",
        note="Largest difference of a weight between a replayed and a committed version.",
        lines=_lines(numbers, {"recovery/max_weight_drift": "difference"}, is_sparse=True),
    )


def _critic(numbers: Numbers) -> Iterator[Chart]:
    yield Chart(title="Value loss", note="", lines=_lines(numbers, {"critic/vf_loss": "loss"}))
    yield Chart(
        title="Explained variance",
        note="Share of the returns' variance that the values explain.",
        lines=_lines(numbers, {"critic/vf_explained_var": "share"}),
    )


def _time(numbers: Numbers) -> Iterator[Chart]:
    stages = {name: match[1] for name in numbers.series if (match := _SECONDS.fullmatch(name))}
    each = {name: stage for name, stage in stages.items() if stage not in _SUMS and _is_in_most(numbers.series[name])}
    ordered = dict(sorted(each.items(), key=lambda item: -float(np.nansum(numbers.series[item[0]]))))
    yield Chart(
        title="Seconds of a step",
        note="By stage, one on top of the other. What happens between stages is not in it.",
        lines=_lines(numbers, ordered),
        is_stacked=True,
    )
    yield Chart(
        title="Throughput",
        note="Prompt and completion tokens a second.",
        lines=_lines(numbers, {"perf/throughput": "tokens a second"}),
        has_zero=True,
    )
    yield Chart(
        title="GPU-hours",
        note="Added up over the steps shown.",
        lines=_lines(numbers, {"gpu_hours": "GPU-hours"}),
        has_zero=True,
    )
    yield Chart(
        title="Cost",
        note="Added up over the steps shown, at the prices in the table of costs.",
        lines=_lines(numbers, {"money": "cost"}),
        has_zero=True,
    )


def evaluated(numbers: Numbers) -> dict[str, str]:
    """Return the metrics of held-out accuracy, each with its data source and the samples of a prompt."""
    found = {name: match for name in numbers.series if (match := _EVALUATED.fullmatch(name))}
    return {name: f"{match[1]}, {match[2]} a prompt" for name, match in found.items()}


def _interval(numbers: Numbers, name: str) -> tuple[str, str] | None:
    match = _EVALUATED.fullmatch(name)
    assert match is not None
    low, high = (f"val-aux/{match[1]}/acc/ci95_{end}@{match[2]}" for end in ("low", "high"))
    return (low, high) if numbers.has(low) and numbers.has(high) else None


def _lines(numbers: Numbers, names: dict[str, str], *, is_sparse: bool = False) -> tuple[Line, ...]:
    """Return a curve for each metric that there is."""
    there = [(name, label) for name, label in names.items() if numbers.has(name)]
    return tuple(
        Line(name=name, label=label, colour=_colour(place), is_sparse=is_sparse)
        for place, (name, label) in enumerate(there)
    )


def _colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def _is_in_most(values: Points) -> bool:
    return float(np.isfinite(values).mean()) > 0.5


def _are_positive(numbers: Numbers, names: dict[str, str]) -> bool:
    there = [numbers.series[name] for name in names if numbers.has(name)]
    return all(bool((values[np.isfinite(values)] > 0).all()) for values in there)
