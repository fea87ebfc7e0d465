"""Sampling the next step while this one trains (`trainer.async_level=1`).

Trap: sampler and trainer share a process, and maybe a GPU. New weights reach the sampler, and are compared with the
trainer's, only while neither of them works.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from ratchet.grains.session import Session
from ratchet.stages.rollout import Rollout
from ratchet.store.manifest import Manifest


class Ahead:
    """Begins the rollouts of the step after the one that trains."""

    def __init__(self, session: Session, stop: int, executor: ThreadPoolExecutor | None) -> None:
        self._session = session
        self._stop = stop
        self._executor = executor
        self._under_way: Future[Manifest] | None = None

    def begin(self, step: int) -> None:
        """Make the rollouts of `step` if nobody has, then begin those of the next one on another thread."""
        if self._executor is None:
            return
        self.wait()
        self._session.run(Rollout(), step)
        if step + 1 < self._stop and self._session.store_run.manifest(Rollout.name, step + 1) is None:
            policy = Rollout().inputs(self._session.store_run, self._session.config, step + 1)["policy"]
            self._session.residents.sampler(policy)
            self._under_way = self._executor.submit(self._session.run, Rollout(), step + 1)

    def wait(self) -> None:
        """Wait for the rollouts that are under way; raises what went wrong with them."""
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            under_way.result()


@contextmanager
def sampling_ahead(session: Session, stop: int) -> Iterator[Ahead]:
    """Yield what samples ahead as the config says, for the steps before `stop`; nothing runs on when the block ends."""
    if not session.config.trainer.async_level:
        yield Ahead(session, stop, None)
        return
    with ThreadPoolExecutor(1, thread_name_prefix="sampler") as executor:
        ahead = Ahead(session, stop, executor)
        yield ahead
        ahead.wait()
