"""One process's work on one run: what it holds, what it may commit, whom it tells.

Every grain, from a pod of one stage to a resident segment, runs its stages through `Session.run`.
"""

import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

import ratchet
from ratchet.config import RunConfig, parse_config, semantic
from ratchet.errors import CommitConflictError, ConfigError, NotCommittedError
from ratchet.grains import distributed
from ratchet.grains.storage import Storage
from ratchet.grains.views import open_views
from ratchet.stages.base import Stage, run_stage
from ratchet.stages.residents import Residents
from ratchet.stages.reward import Reward, reward_sources
from ratchet.stages.settings import total_steps
from ratchet.store import layout
from ratchet.store.manifest import Manifest
from ratchet.store.run import CRITIC_UPDATE, POLICY_UPDATE, Run
from ratchet.store.writer import INLINE, BackgroundWriter, Writer
from ratchet.tracking.trackers import Trackers

logger = logging.getLogger(__name__)

Listener = Callable[[str, bool], None]
"""Called with a stage's place (`step-000001/rollout`) when it starts (False) and when it is committed (True).

Inside a segment the second comes later, from the writer's thread, while other stages run.
"""

GRACE_SECONDS = 20.0
"""What commits under way are given when a segment ends early: less than pods are given to stop."""
SWITCH_SECONDS = 0.0005


class LostPutError(Exception):
    """Another attempt was first to publish a stage that this process had built on."""


class Session:
    """A claimed run with its engines and trackers."""

    def __init__(
        self,
        run: Run,
        config: RunConfig,
        trackers: Trackers,
        residents: Residents,
        listener: Listener | None = None,
        make_writer: Callable[[], BackgroundWriter] = BackgroundWriter,
    ) -> None:
        self._make_writer = make_writer
        self.store_run = run
        self.config = config
        self.trackers = trackers
        self.residents = residents
        self._processes = distributed.processes(config)
        self._listener = listener or (lambda place, is_committed: None)
        self._writer: Writer = INLINE
        self._under_way: deque[Manifest] = deque()
        self.num_committed = 0
        self.storage = Storage(run, config, residents.proven_states)

    def run(self, stage: Stage, step: int | None, *, keep_trainer_state: bool = True) -> Manifest:
        """Run a stage, tell the trackers of its commit, and keep in memory what the grain keeps.

        The stage is committed when this returns, except inside `behind`.
        """
        place = layout.stage_folder(stage.name, step)
        is_new = self.store_run.manifest(stage.name, step) is None
        if is_new:
            self._listener(place, False)
            if stage.name == Reward.name:
                _check_reward_model(self.store_run, self.config)
        is_update = stage.name in (POLICY_UPDATE, CRITIC_UPDATE) and bool(step)
        if is_new and is_update and step and self._processes > 1:
            distributed.launch(self.store_run, stage.name, step, self._processes)
        manifest = run_stage(
            stage,
            self.store_run,
            self.config,
            step,
            self.residents,
            keep_trainer_state=keep_trainer_state,
            writer=self._writer,
        )
        if is_new:
            self._writer.submit(lambda: self._tell(manifest.committed(), place))
            # A job of its own: where storage does not answer, it is done again, and nobody is told twice.
            self._writer.submit(lambda: self.storage.committed(manifest.committed()))
            if stage.name == POLICY_UPDATE and self._writer is not INLINE:
                self._under_way.append(manifest)
        if self.config.trainer.grain == "stage":
            self.residents.drop()
        return manifest

    def _tell(self, manifest: Manifest, place: str) -> None:
        """Say that a stage is committed."""
        self.num_committed += 1
        self.trackers.log(manifest)
        self._listener(place, True)

    @contextmanager
    def behind(self, own_from: int) -> Iterator[None]:
        """Commit behind the work while the block runs; when it ends without an error, everything is committed.

        Nothing of step `own_from` or later is committed yet. A LostPutError says that another attempt published one of
        the stages: the chain must be read again. After any other error, what is under way is given a little time. What
        was made since, and every engine, is dropped.
        """
        run, writer = self.store_run, self._make_writer()
        store = run.store
        run.store, self._writer = writer.store(store), writer
        run.assume_own_from(own_from)
        grace, interval, is_whole = GRACE_SECONDS, sys.getswitchinterval(), False
        # The engines' thread may wait this long for the writer's, many times a step.
        sys.setswitchinterval(SWITCH_SECONDS)
        try:
            yield
            writer.drain()
            is_whole = True
        except CommitConflictError as error:
            grace = 0.0
            if writer.failure is error:
                raise LostPutError(str(error)) from error
            raise
        finally:
            writer.close(seconds=grace)
            sys.setswitchinterval(interval)
            run.store, self._writer = store, INLINE
            self._under_way.clear()
            run.forget()
            self.storage.forget()
            if not is_whole:
                # Engines may hold what was never committed, under the name of what will be.
                self.residents.drop()

    def wait_for_room(self) -> None:
        """Wait until fewer than `trainer.commit_lag` steps are still to be committed; raises why one cannot be."""
        while len(self._under_way) >= self.config.trainer.commit_lag:
            self._under_way.popleft().committed()

    def total_steps(self) -> int:
        """Return the steps of the whole run."""
        total, last = total_steps(self.store_run, self.config), self.store_run.last_step()
        if last > total:
            raise ConfigError(
                f"run {self.store_run.uri} has committed {last} steps, and this submission asks for {total} in all; "
                "a run may grow, never shrink: raise trainer.total_training_steps, or use another run id"
            )
        return total


def place_of(config: RunConfig, root: str | None, run_id: str | None) -> tuple[str, str]:
    """Return root and id of the run to start or to go on with: those given, or what the config says."""
    trainer = config.trainer
    if trainer.resume_mode != "resume_path" or root or run_id:
        return root or trainer.default_local_dir, run_id or trainer.experiment_name
    found_root, slash, found_id = trainer.resume_from_path.rstrip("/").rpartition("/")
    return found_root or slash or ".", found_id


def submit(
    root: str,
    run_id: str,
    config: RunConfig,
    *,
    submission_id: str | None = None,
    reward: Any = None,
    is_checked: bool = False,
) -> Run:
    """Create the run or check that it is the same one, and claim it for a new submission.

    A submission that claimed the run before (a pod of its pipeline that starts again) keeps its epoch. For a new run
    the model's tokenizer and every prompt are checked first, so that no mistake in them takes the run id;
    `is_checked` says that preflight has done so. `reward` is as in `open_session`.
    """
    distributed.processes(config)
    run = Run(root, run_id)
    is_old = run.store.size(layout.RUN) is not None
    epoch = run.epoch_of(submission_id) if is_old and submission_id is not None else None
    if epoch is not None:
        run.adopt(epoch)
        return run
    check_resumes(run, config, is_old)
    if not is_old and not is_checked:
        _check_sources(run.root, config, reward)
    run.create_or_check(semantic(config))
    if not is_checked or Path(config.reward_model.path).expanduser().is_dir():
        # Of weights that lie elsewhere the stage that loads them asks (`Session.run`).
        _check_reward_model(run, config)
    for file in config.code:
        run.store.put_create(layout.code(file.sha256, PurePath(file.path).name), file.source.encode())
    run.claim(
        {
            "submission_id": submission_id,
            "config": config.model_dump(mode="json"),
            "grain": config.trainer.grain,
            "version": ratchet.__version__,
            "image": os.environ.get("RATCHET_IMAGE", ""),
        }
    )
    return run


def _check_reward_model(run: Run, config: RunConfig) -> None:
    """Refuse to go on with another reward model than the one that graded step 1."""
    if "model" not in config.reward_weights:
        return
    graded = run.manifest("reward", 1)
    known = graded.content.inputs.get("reward_model") if graded is not None else None
    if known is None:
        return
    found = (reward_sources(config) or {}).get("reward_model")
    if found is not None and known != found:
        raise ConfigError(
            f"reward_model.path is {config.reward_model.path}, whose files are not those of the reward model that run "
            f"{run.uri} was begun with; use another run id"
        )


def check_resumes(run: Run, config: RunConfig, is_old: bool) -> None:
    """Raise ConfigError where trainer.resume_mode forbids to begin or to go on with the run."""
    if is_old and config.trainer.resume_mode == "disable":
        raise ConfigError(f"run {run.uri} exists and trainer.resume_mode is disable; use another run id")
    if config.trainer.resume_mode != "resume_path":
        return
    named = config.trainer.resume_from_path.rstrip("/")
    if named not in (run.uri, f"{run.root}/{run.run_id}"):
        raise ConfigError(f"trainer.resume_from_path is {named}, but this is run {run.uri}; name one run")
    if not is_old:
        raise ConfigError(f"no run at {named}, which trainer.resume_from_path names")


def _check_sources(root: str, config: RunConfig, reward: Any) -> None:
    """Raise what preflight would refuse first of model, reward and prompts."""
    from ratchet.grains.checks.finding import PipelineFacts
    from ratchet.grains.checks.sources import named_sources

    for refused in named_sources(config, root, PipelineFacts(), reward=reward, with_weights=True).refusals:
        raise refused


def join_submission(root: str, run_id: str, submission_id: str) -> tuple[Run, RunConfig]:
    """Act under the epoch that this submission claimed elsewhere; NotCommittedError if it has claimed none."""
    run = Run(root, run_id)
    epoch = run.epoch_of(submission_id)
    if epoch is None:
        raise NotCommittedError(f"run {run.uri}: submission {submission_id} has not claimed it; preflight comes first")
    return run, parse_config(run.config_of(run.adopt(epoch)), source=f"submission {submission_id}", is_stored=True)


@contextmanager
def open_session(
    run: Run,
    config: RunConfig,
    listener: Listener | None = None,
    *,
    echo: Callable[[str], None] | None = None,
    is_last: bool = True,
    reward: Any = None,
    mesh: Any = None,
    make_writer: Callable[[], BackgroundWriter] = BackgroundWriter,
) -> Iterator[Session]:
    """Open the trackers, bring them up to date, and close everything at the end, whatever happens.

    `echo` gets the console tracker's lines. `is_last` says whether the run ends with this session. `reward` is a reward
    object of this process and `mesh` its device mesh, where they are not to be made from the config.
    `make_writer` makes what commits behind a segment.
    """
    trackers = open_views(run, config, echo)
    residents = Residents(run, config, live_reward=reward, mesh=mesh)
    session = Session(run, config, trackers, residents, listener, make_writer)
    try:
        trackers.catch_up()
        yield session
    except BaseException:
        # A run that another runner has claimed goes on under that one.
        if run.is_owner():
            trackers.finish("FAILED")
        raise
    else:
        if is_last:
            trackers.finish("FINISHED")
    finally:
        session.residents.close()
        trackers.close()
