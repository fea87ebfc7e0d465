"""What one committed evaluation measured: the accuracy on each held-out prompt, and what it may be compared with.

Trap: a mean reward is an accuracy, with an interval, only where every reward lies in [0, 1].
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ratchet.algorithms.statistics import wilson_interval
from ratchet.config import RunConfig, parse_config
from ratchet.config.semantics import selected
from ratchet.data import schemas
from ratchet.data.parquet import read_table
from ratchet.errors import ConfigError, NotCommittedError
from ratchet.stages.evaluate_offline import TABLE
from ratchet.stages.graph import evaluation
from ratchet.stages.settings import data_role
from ratchet.store import layout
from ratchet.store.decision import Evaluation
from ratchet.store.manifest import Manifest, digest_of
from ratchet.store.run import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One committed evaluation."""

    accuracies: Mapping[str, float]
    """prompt_id -> mean reward of its samples; of pairs, example_id -> whether what was chosen is preferred."""
    are_shares: bool
    """Whether every single reward lies in [0, 1], so that means are accuracies."""
    table: str
    held_out: str
    settings: str
    """As in `ratchet.store.decision.Evaluation`."""
    place: str
    """Run and step: ROOT/RUN-ID/step-000000."""

    @property
    def mean(self) -> float:
        """Mean over prompts; 0 without any."""
        return math.fsum(self.accuracies.values()) / max(len(self.accuracies), 1)

    def describe(self) -> Evaluation:
        """Return what a decision records of it."""
        low = high = None
        if self.are_shares:
            low, high = wilson_interval(math.fsum(self.accuracies.values()), len(self.accuracies))
        return Evaluation(
            accuracy=self.mean,
            low=low,
            high=high,
            prompts=len(self.accuracies),
            table=self.table,
            held_out=self.held_out,
            settings=self.settings,
        )


def measurement(run: Run, config: RunConfig, manifest: Manifest) -> Measurement:
    """Read a committed evaluation of `run`, whose config is `config`."""
    # The seed is left out: it makes other samples, not another question.
    keys = [key for key in evaluation(config).config_keys if key != "trainer.seed"]
    role, shown = data_role(config), TABLE if config.is_offline else "evaluations"
    sources = {name: digest for name, digest in manifest.content.inputs.items() if name not in (role, "policy")}
    rewards: dict[str, list[float]] = {}
    for prompt_id, reward in _rewards(run, manifest, config):
        rewards.setdefault(prompt_id, []).append(reward)
    return Measurement(
        accuracies={prompt_id: math.fsum(values) / len(values) for prompt_id, values in rewards.items()},
        are_shares=all(0 <= value <= 1 for values in rewards.values() for value in values),
        table=manifest.content.outputs[shown],
        held_out=manifest.content.inputs[role],
        settings=digest_of({"config": selected(config, keys), "sources": sources}),
        place=f"{run.uri}/{layout.step_folder(manifest.content.step or 0)}",
    )


def _rewards(run: Run, manifest: Manifest, config: RunConfig) -> Iterator[tuple[str, float]]:
    """Yield the id and the reward, or accuracy, of each row of an evaluation; ConfigError where it has none."""
    if not config.is_offline:
        table = read_table(run.store, manifest.output("evaluations"), schemas.EVALUATIONS)
        yield from zip(table["prompt_id"].to_pylist(), table["reward"].to_pylist(), strict=True)
        return
    if not config.needs_pairs:
        raise ConfigError(
            f"run {run.uri}: algorithm.objective={config.algorithm.objective} measures a loss on what is held out, "
            "which is no accuracy to compare with a champion's; leave promotion.name (the parameter champion) out"
        )
    table = read_table(run.store, manifest.output(TABLE), schemas.EVALUATIONS_OFFLINE)
    yield from zip(table["example_id"].to_pylist(), table["accuracy"].to_pylist(), strict=True)


def newest_config(run: Run) -> RunConfig:
    """Return the config of the run's newest submission; what an evaluation reads is the same in all of them."""
    newest = run.newest_submission()
    if newest is None:
        raise NotCommittedError(f"run {run.uri} was claimed, but nothing was submitted to it")
    return parse_config(run.config_of(newest), source=f"submission {newest['epoch']} of {run.uri}", is_stored=True)
