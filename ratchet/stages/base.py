"""What a stage is, and the one way in which a stage runs: fence, compute, commit.

A stage is a function from committed artifacts to committed artifacts. Trap: anything it reads that is neither an input
nor one of its config keys would make equal manifests describe unequal work.
"""

import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from ratchet.config import RunConfig
from ratchet.config.semantics import selected
from ratchet.environment import code_revision
from ratchet.errors import CommitConflictError, NotCommittedError
from ratchet.stages.held import Held
from ratchet.store import layout
from ratchet.store.manifest import Artifact, Content, Manifest, Provenance, digest_of, finite_metrics
from ratchet.store.objects import ObjectStore
from ratchet.store.pending import PendingManifest
from ratchet.store.run import Run
from ratchet.store.writer import INLINE, Writer

if TYPE_CHECKING:
    from ratchet.stages.residents import Residents

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Input:
    """One committed output that a stage reads."""

    manifest: Manifest
    role: str
    """The output's role in the stage that made it."""

    @property
    def artifact(self) -> Artifact:
        """Where its files are."""
        if not self.manifest.has(self.role):
            place = layout.stage_folder(self.manifest.stage, self.manifest.step)
            raise NotCommittedError(f"{place} is committed without {self.role}, which this stage reads")
        return self.manifest.output(self.role)

    @property
    def digest(self) -> str:
        """What it is."""
        return self.artifact.digest

    @property
    def place(self) -> tuple[str, int | None, str]:
        """Stage, step and role: what it is called within the run, also while its digest is still computed."""
        return self.manifest.stage, self.manifest.step, self.role


@dataclass(kw_only=True, slots=True)
class Context:
    """Everything that one execution of a stage is given."""

    run: Run
    config: RunConfig
    step: int | None
    inputs: dict[str, Input]
    """Role in this stage -> committed output."""
    store: ObjectStore
    """Where outputs are written: the run's own store, or another one for a replay that publishes nothing."""
    folder: str
    """Key of this attempt's folder; outputs go to `<folder>/<role>`."""
    residents: "Residents"
    """Engines that may outlive the stage."""
    keep_trainer_state: bool
    """Whether policy_update writes the trainer's state."""
    writer: Writer = INLINE
    """Runs what need not be done before the next stage begins."""


@dataclass(kw_only=True, slots=True)
class Result:
    """What a stage made; its files are written, or the writer's jobs."""

    outputs: "Mapping[str, Artifact | Future[Artifact]]"
    """By role; of what is large, the writer still computes the digests."""
    policy_version: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    trainer_state: "Artifact | Future[Artifact] | None" = None
    on_commit: Callable[[], None] | None = None
    """Called once the manifest is published by this execution; a crash in between leaves it out."""


OUTPUT_OF = {"rollout": "rollouts", "reward": "rewards", "advantage": "trajectories", "critic_update": "critic"}
"""Stage -> the role of its table, where that is not the stage's name."""


def step_inputs(run: Run, stages: Iterable[str], step: int | None) -> dict[str, Input]:
    """Return the table of each named stage of `step` under its role; NotCommittedError if one is missing."""
    roles = {stage: OUTPUT_OF.get(stage, stage) for stage in stages}
    return {role: Input(run.require(stage, step), role) for stage, role in roles.items()}


def optional_inputs(run: Run, stage: str, step: int | None, roles: Iterable[str]) -> dict[str, Input]:
    """Return those of `roles` that the committed stage has as outputs."""
    manifest = run.require(stage, step)
    return {role: Input(manifest, role) for role in roles if manifest.has(role)}


class Stage(ABC):
    """One kind of work. Stages hold no state: what lasts is committed, what is expensive is resident."""

    name: str
    config_keys: ClassVar[tuple[str, ...]] = ()
    """The semantic keys that the stage reads; a section's name stands for all of its keys."""

    def keys(self, config: RunConfig) -> tuple[str, ...]:
        """The semantic keys that the stage reads under this config."""
        return self.config_keys

    timing: str | None = None
    """verl's name of the stage's duration: timing_s/<timing>."""

    @abstractmethod
    def inputs(self, run: Run, config: RunConfig, step: int | None) -> dict[str, Input]:
        """Find the committed outputs that this stage reads; NotCommittedError if one is missing."""

    def needs(self, config: RunConfig) -> tuple[str, ...]:
        """Names of the stages of the same step that must be committed before; the step's graph follows from them."""
        return ()

    @abstractmethod
    def compute(self, context: Context) -> Result:
        """Do the work and write the outputs' files below the attempt's folder."""

    def outside_inputs(self, config: RunConfig) -> dict[str, str] | None:
        """Role -> digest of each input from outside the run; None where one cannot be read (any more)."""
        return {}


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a stage would be made from now, to be compared with what it was made from."""

    inputs: dict[str, str]
    outside: dict[str, str] | None
    config: str


def run_stage(
    stage: Stage,
    run: Run,
    config: RunConfig,
    step: int | None,
    residents: "Residents",
    *,
    keep_trainer_state: bool = True,
    writer: Writer = INLINE,
) -> Manifest:
    """Run one stage to its commit, or return its manifest if it is committed already.

    A manifest with other inputs or another config is a CommitConflictError that names the difference. After a lost put
    everything resident is dropped and the chain is read again. With a writer that works behind, a PendingManifest is
    returned as soon as the stage is computed, and a lost put is the writer's failure.
    """
    inputs = stage.inputs(run, config, step)
    outside = stage.outside_inputs(config)
    committed = run.manifest(stage.name, step)
    if committed is not None:
        if not isinstance(committed, PendingManifest):
            _check_same_work(stage, run, config, committed, _wanted(stage, config, inputs, outside))
        return committed
    if writer is INLINE:
        # Behind the work, the commit asks; before it, one more request to storage would be waited for.
        run.check_ownership()
    attempt = run.new_attempt()
    context = Context(
        run=run,
        config=config,
        step=step,
        inputs=inputs,
        store=run.store,
        folder=layout.attempt_folder(stage.name, step, attempt),
        residents=residents,
        keep_trainer_state=keep_trainer_state,
        writer=writer,
    )
    place = layout.stage_folder(stage.name, step)
    logger.info("%s: started", place)
    started = time.time()
    result = stage.compute(context)
    work = _Work(stage, context, result, outside, attempt, started, time.time(), residents.held)
    if writer is not INLINE:
        pending = work.pending()
        run.expect(pending)
        pending.settle(writer.submit(work.commit))
        return pending
    try:
        return work.commit()
    except CommitConflictError:
        logger.warning("%s: another attempt was first; starting again from the chain", place)
        residents.drop()
        run.forget()
        published = run.require(stage.name, step)
        _check_same_work(stage, run, config, published, _wanted(stage, config, inputs, outside))
        return published


@dataclass(frozen=True, slots=True)
class _Work:
    """A stage that is computed and not yet committed."""

    stage: Stage
    context: Context
    result: Result
    outside: dict[str, str] | None
    attempt: str
    started: float
    ended: float
    held: Held

    @property
    def metrics(self) -> dict[str, float]:
        timing = {f"timing_s/{self.stage.timing}": self.ended - self.started} if self.stage.timing else {}
        return finite_metrics(self.result.metrics | timing)

    def pending(self) -> PendingManifest:
        return PendingManifest(
            stage=self.stage.name,
            step=self.context.step,
            policy_version=self.result.policy_version,
            artifacts={role: as_future(artifact) for role, artifact in self.result.outputs.items()},
            metrics=self.metrics,
            started=self.started,
            seconds=self.ended - self.started,
            device=self.held.device,
            gpu_seconds=self.held.gpu_seconds(self.ended - self.started),
        )

    def commit(self) -> Manifest:
        """Publish the stage; of what it read and wrote, every digest is known by now, or is waited for."""
        stage, context, result = self.stage, self.context, self.result
        artifacts = {role: as_future(artifact).result() for role, artifact in result.outputs.items()}
        wanted = _wanted(stage, context.config, context.inputs, self.outside)
        # What could not be read when the stage began has been read since, or there would be no result.
        outside = stage.outside_inputs(context.config) if wanted.outside is None else wanted.outside
        content = Content(
            step=context.step,
            stage=stage.name,
            policy_version=result.policy_version,
            inputs=wanted.inputs | (outside or {}),
            outputs={role: artifact.digest for role, artifact in artifacts.items()},
            config=wanted.config,
        )
        state = result.trainer_state
        provenance = describe_attempt(
            context.run,
            self.attempt,
            started=self.started,
            ended=self.ended,
            held=self.held,
            read=[item.manifest for item in context.inputs.values()],
            artifacts=artifacts,
            metrics=self.metrics,
            trainer_state=None if state is None else as_future(state).result(),
        )
        manifest = context.run.commit(Manifest(content=content, provenance=provenance))
        if result.on_commit is not None:
            result.on_commit()
        return manifest


def as_future(artifact: "Artifact | Future[Artifact]") -> "Future[Artifact]":
    """Return an artifact that is there as one that has been waited for."""
    if isinstance(artifact, Future):
        return artifact
    done: Future[Artifact] = Future()
    done.set_result(artifact)
    return done


def _wanted(stage: Stage, config: RunConfig, inputs: Mapping[str, Input], outside: dict[str, str] | None) -> Wanted:
    digests = {role: item.digest for role, item in inputs.items()}
    return Wanted(digests, outside, digest_of(selected(config, stage.keys(config))))


def describe_attempt(
    run: Run,
    attempt: str,
    *,
    started: float,
    ended: float,
    held: Held,
    read: Iterable[Manifest],
    artifacts: dict[str, Artifact],
    metrics: dict[str, float],
    trainer_state: Artifact | None = None,
) -> Provenance:
    """Return the provenance of work from `started` to `ended` (Unix seconds), under this process's claim."""
    assert run.owner is not None
    return Provenance(
        run_id=run.run_id,
        attempt=attempt,
        epoch=run.owner.epoch,
        artifacts=artifacts,
        previous={layout.stage_folder(item.stage, item.step): item.sha256 for item in read},
        started=started,
        ended=ended,
        device=held.device,
        gpu_seconds=held.gpu_seconds(ended - started),
        code_revision=code_revision(),
        image=os.environ.get("RATCHET_IMAGE", ""),
        metrics=finite_metrics(metrics),
        trainer_state=trainer_state,
    )


def _check_same_work(stage: Stage, run: Run, config: RunConfig, committed: Manifest, wanted: Wanted) -> None:
    place = f"{run.uri}/{layout.stage_folder(stage.name, committed.content.step)}"
    have, want = dict(committed.content.inputs), dict(wanted.inputs)
    if wanted.outside is None:
        logger.info("%s: its source cannot be read any more; the committed artifact stands", place)
        have = {role: digest for role, digest in have.items() if role in want}
    else:
        want |= wanted.outside
    changed = sorted(role for role in have.keys() | want.keys() if have.get(role) != want.get(role))
    if changed:
        raise CommitConflictError(
            f"{place} is committed from other inputs; these changed: {', '.join(changed)}. Give the data and the model "
            "that the run was begun with, or start another run id"
        )
    if committed.content.config != wanted.config:
        keys = ", ".join(stage.keys(config))
        raise CommitConflictError(f"{place} is committed with another configuration; it reads: {keys}")


@contextmanager
def timed(metrics: dict[str, float], name: str) -> Iterator[None]:
    """Add the seconds that the block took to `metrics` under `timing_s/<name>`."""
    started = time.perf_counter()
    yield
    metrics[f"timing_s/{name}"] = metrics.get(f"timing_s/{name}", 0.0) + time.perf_counter() - started
