"""How long a run takes and what it costs; nothing where nobody measured a speed or said a price."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ratchet.config import RunConfig
from ratchet.grains.plan.measured import Measured
from ratchet.grains.plan.work import Tasks, Tokens
from ratchet.stages.held import num_held
from ratchet.tracking.cost import CPU

UNKNOWN_TIME = "time and money are not known: give --throughput TOKENS_PER_SECOND, or --like RUN"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Seconds and money of a whole run; None where it is not known, and `notes` say why."""

    steps_seconds: float | None = None
    start_seconds: float = 0.0
    """Engines that start, once in each pod of the loop."""
    evaluation_seconds: float | None = None
    export_seconds: float | None = None
    pods_seconds: float = 0.0
    """Scheduling, where the run is a pipeline; no accelerator is held meanwhile."""
    accelerator_seconds: float | None = None
    money: float | None = None
    """In the currency of the price."""
    notes: tuple[str, ...] = ()

    @property
    def work_seconds(self) -> float | None:
        """Of everything but scheduling."""
        if self.steps_seconds is None:
            return None
        return self.steps_seconds + self.start_seconds + (self.evaluation_seconds or 0) + (self.export_seconds or 0)

    @property
    def total_seconds(self) -> float | None:
        """From the first pod to the last."""
        return None if self.work_seconds is None else self.work_seconds + self.pods_seconds


def estimate(
    config: RunConfig,
    tokens: Tokens,
    tasks: Tasks,
    measured: Measured,
    *,
    accelerator: str,
    prices: Mapping[str, float],
) -> Cost:
    """Turn tokens into seconds and these into money; `accelerator` is what prices call it, or cpu."""
    speed, trainer = measured.throughput, config.trainer
    if speed is None:
        return Cost(pods_seconds=tasks.overhead_seconds, notes=(UNKNOWN_TIME,))
    notes = [f"speed: {speed:,.0f} tokens a second and trainer process, by {measured.source}"]
    of_steps = tokens.trained_expected
    if of_steps is None:
        of_steps = float(tokens.trained_bound)
        notes.append("time is that of completions of full length: give --completion-tokens, or --like RUN")
    of_evaluation = None
    if tokens.evaluated_rows and measured.evaluation_seconds is not None:
        of_evaluation = tokens.evaluated_rows * measured.evaluation_seconds
    elif tokens.evaluated_rows:
        expected = tokens.evaluated_expected
        of_evaluation = (tokens.evaluated_bound if expected is None else expected) / speed
        notes.append("evaluations are counted at the speed of training steps: nobody measured them")
    if measured.export_seconds is None:
        notes.append("the export at the end is not in the time: nobody measured it")
    if not measured.start_seconds:
        notes.append("the start of engines is not in the time: nobody measured it")
    cost = Cost(
        steps_seconds=of_steps / speed / (trainer.n_gpus_per_node * trainer.nnodes),
        start_seconds=measured.start_seconds * tasks.iterations,
        evaluation_seconds=of_evaluation,
        export_seconds=measured.export_seconds,
        pods_seconds=tasks.overhead_seconds,
    )
    return _priced(cost, config, accelerator, prices, notes)


def _priced(cost: Cost, config: RunConfig, accelerator: str, prices: Mapping[str, float], notes: Sequence[str]) -> Cost:
    seconds = cost.work_seconds
    assert seconds is not None
    held = num_held(config, is_training=True, is_scoring=True, is_sampling=not config.is_offline)
    count = 0 if accelerator == CPU else held
    price = prices.get(accelerator)
    if price is None:
        missing = f"money is not known: {accelerator} has no price; set trainer.prices, or give --price"
        notes = [*notes, missing]
    if config.trainer.grain == "stage" and count > 1:
        notes = [*notes, f"accelerator-hours and money are upper bounds: as if every stage held all {count}"]
    return replace(
        cost,
        accelerator_seconds=seconds * count,
        money=None if price is None else seconds * max(count, 1) / 3600 * price,
        notes=tuple(notes),
    )
