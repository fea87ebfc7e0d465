"""The runner `local`: a flow runs in this process, and its graph is read from the stages."""

import json
import sys
from dataclasses import dataclass, field
from typing import Any

from ratchet.config import RunConfig
from ratchet.environment import set_defaults
from ratchet.grains import loop
from ratchet.grains.session import open_session, place_of, submit
from ratchet.stages.checkpoint_export import CheckpointExport
from ratchet.stages.evaluate import Evaluate
from ratchet.stages.graph import step_stages
from ratchet.store.run import Run


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """What a run came to."""

    run: str
    """Where it lies."""
    steps: int
    """Steps that are committed."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of every stage of the last step, under verl's names."""
    export: str | None = None
    """The Hugging Face folder of the last policy."""

    def __str__(self) -> str:
        numbers = json.dumps({name: round(value, 6) for name, value in sorted(self.metrics.items())})
        return f"run {self.run}, {self.steps} steps, export {self.export}, {numbers}"


class LocalRunner:
    """Runs flows here."""

    def graph(self, config: RunConfig) -> list[tuple[str, tuple[str, ...]]]:
        """Return the stages of one step in order, each with those whose tables it reads."""
        return [(stage.name, tuple(stage.needs(config))) for stage in step_stages(config)]

    def fit(self, flow: Any, config: Any, *, root: str | None = None, run_id: str | None = None) -> FitResult:
        """Train the flow to the end, or resume it; `config` is what its user added to it.

        Objects that live in this process, a reward or a device mesh, are used as they are.
        """
        set_defaults()
        parsed = flow.config(config)
        trainer = parsed.trainer
        if trainer.n_gpus_per_node * trainer.nnodes > 1:
            # Their processes know the config alone.
            flow.check_travels("fit on several processes", roles=("advantage", "policy_update"))
        reward, mesh = flow.live_reward, flow.policy_update.device_mesh
        run = submit(*place_of(parsed, root, run_id), parsed, reward=reward)
        with open_session(run, parsed, echo=_say, reward=reward, mesh=mesh) as session:
            loop.train(session)
        return _result(run)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _result(run: Run) -> FitResult:
    step = run.last_step()
    metrics: dict[str, float] = {}
    for manifest in run.step_manifests(step):
        metrics |= manifest.provenance.metrics
    evaluated = run.manifest(Evaluate.name, step)
    if evaluated is not None:
        metrics |= evaluated.provenance.metrics
    exported = run.manifest(CheckpointExport.name, step)
    place = None if exported is None else f"{run.uri}/{exported.output('export').folder}"
    return FitResult(run=run.uri, steps=step, metrics=metrics, export=place)
