"""The bench that cases run on: a tiny model, a run of a few steps, and what must hold after every fault.

Trap: training leaves threads behind (torch, pyarrow), and a fork of a process with threads is not safe. Whatever works
on a run does so in a fork of its own (`Workbench.fork`), so that the process that forks has none.
"""

import contextlib
import gc
import importlib
import shutil
import sys
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from demo.servers import MlflowServer, S3Server, mlflow_server, seaweedfs
from ratchet.config import RunConfig
from ratchet.grains import loop
from ratchet.grains.session import Listener, open_session, submit
from ratchet.store import verification
from ratchet.store.run import CRITIC_UPDATE, POLICY_UPDATE, Run
from tests.chaos.case import Outcome
from tests.chaos.forks import LIMIT_SECONDS, Died, Fork
from tests.chaos.holds import Broken, check_chain, committed, expect, newest_state, watched_replays
from tests.runs import content_digests, tiny_config, write_problems

Value = TypeVar("Value")

BUCKET = "chaos"
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(solution_str) % 3)
"""
STEPS = 4


@dataclass(frozen=True, slots=True)
class Finished:
    """What the submission that came after the fault found and did."""

    before: dict[str, str]
    """Place -> attempt of what was committed when it began."""
    redone: dict[str, float]
    """Place -> seconds of each stage that had been begun before and was begun again."""
    replayed: tuple[tuple[str, int], ...]
    """Committed updates (stage, step) that were made again to bring a trainer back."""
    replay_seconds: float
    states: dict[str, int]
    """Stage -> the newest step whose trainer's state was there when it began, 0 where none was."""

    def outcome(self, end: str = "") -> Outcome:
        """Return what became of the run; `end` says how whoever was struck ended."""
        replayed = [f"replayed {stage} {step}" for stage, step in self.replayed]
        return Outcome(
            survived=True,
            redone_seconds=sum(self.redone.values()) + self.replay_seconds,
            redone_stages=len(self.redone) + len(replayed),
            detail="; ".join(filter(None, [end, ", ".join([*self.redone, *replayed])])),
        )


class Workbench:
    """The Bench of one worker process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.model, self.problems = folder / "model", folder / "problems.jsonl"
        self._reward = folder / "reward.py"
        self._configs: dict[str, RunConfig] = {}
        if not self.model.is_dir():
            self.fork(self._make_inputs)
        self._import_ahead()
        self._references: dict[str, dict[str, str]] = {}
        self._stack = ExitStack()
        self._s3: S3Server | None = None
        self._mlflow: MlflowServer | None = None

    def _make_inputs(self) -> None:
        from tests.tiny_models import make_tiny_model

        write_problems(self.problems, 4)
        self._reward.write_text(REWARD, encoding="utf-8")
        make_tiny_model(self.model)

    def _import_ahead(self) -> None:
        """Import here what runs import when they need it: forks then need not, and all have the same code."""
        root = self.folder / "imports"
        for name in self.fork(lambda: self._modules_of_a_run(str(root))):
            if name not in sys.modules:
                with contextlib.suppress(ImportError):
                    importlib.import_module(name)
        shutil.rmtree(root)
        # Forks need not look through what was imported for garbage, which copies its memory.
        gc.collect()
        gc.freeze()

    def _modules_of_a_run(self, root: str) -> list[str]:
        run = self.train(root, "run", "segment", {"trainer.total_training_steps": 1})
        verification.verify(run)
        return list(sys.modules)

    def close(self) -> None:
        """Stop what was started."""
        self._stack.close()

    def config(self, grain: str, **overrides: Any) -> RunConfig:
        """Four steps, as segments of three and one: there step 2 is a delta, and 2, 3 and 4 keep their states."""
        key = repr((grain, sorted(overrides.items())))
        if key not in self._configs:
            self._configs[key] = self._config(grain, overrides)
        return self._configs[key]

    def _config(self, grain: str, overrides: dict[str, Any]) -> RunConfig:
        values: dict[str, Any] = {
            "custom_reward_function.path": str(self._reward),
            "trainer.grain": grain,
            "trainer.total_training_steps": STEPS,
            "trainer.steps_per_segment": STEPS - 1,
            "actor_rollout_ref.rollout.max_num_seqs": 8,
            "trainer.full_weights_freq": 3,
            "trainer.trainer_state_freq": 2,
            "data.val_files": str(self.problems),
            "data.val_max_samples": 2,
            "trainer.test_freq": 2,
        }
        return tiny_config(self.model, self.problems, **{**values, **overrides})

    def reference(self, grain: str, **overrides: Any) -> dict[str, str]:
        key = repr((grain, sorted(overrides.items())))
        if key not in self._references:
            # Here and not in forks, which need not parse it again.
            self.config(grain, **overrides)
            root = self.folder / f"reference-{uuid.uuid4().hex[:8]}"
            self._references[key] = self.fork(lambda: content_digests(self.train(str(root), "whole", grain, overrides)))
            shutil.rmtree(root)
        return self._references[key]

    def s3(self) -> S3Server:
        if self._s3 is None:
            self._s3 = self._stack.enter_context(seaweedfs(self.folder / "seaweedfs"))
            self._s3.create_bucket(BUCKET)
        return self._s3

    def mlflow(self) -> MlflowServer:
        """Return a real MLflow server on SQLite below `mlflow`, started when first asked for."""
        if self._mlflow is None:
            self._mlflow = self._stack.enter_context(mlflow_server(self.folder / "mlflow"))
        return self._mlflow

    def train(self, root: str, run_id: str, grain: str, overrides: dict[str, Any]) -> Run:
        """Train, or resume, in this process, and keep the journal of what was begun; call it in a fork."""
        config = self.config(grain, **overrides)
        run = submit(root, run_id, config)
        with open_session(run, config, self.journal(root, run_id).listener()) as session:
            loop.train(session)
        return run

    def journal(self, root: str, run_id: str) -> "Journal":
        """Return the record of which stages of a run were begun, by whom ever; it lies beside the runs."""
        folder = self.folder / "journals"
        folder.mkdir(exist_ok=True)
        return Journal(folder / f"{root.strip('/').replace('/', '-').replace(':', '')[-100:]}-{run_id}.jsonl")

    def check(self, root: str, run_id: str, grain: str, **overrides: Any) -> Outcome:
        """Submit the run once more in a fork, let it finish, and say whether everything holds that must hold.

        The content digests are those of an uninterrupted run; what was committed was not made again; the whole chain
        verifies; `ratchet gc` leaves nothing over and no digest changed. Work that was redone is known where the
        earlier submissions kept the journal (`train`, or `journal(..).listener()`).
        """
        expected = self.reference(grain, **overrides)
        try:
            found = self.fork(lambda: self.finish(root, run_id, grain, overrides, expected))
        except (Broken, Died) as error:
            return Outcome(survived=False, redone_seconds=0.0, redone_stages=0, detail=str(error))
        return found.outcome()

    def finish(
        self, root: str, run_id: str, grain: str, overrides: dict[str, Any], expected: dict[str, str]
    ) -> Finished:
        """Finish the run in this process and raise Broken for what does not hold; call it in a fork."""
        run, journal = Run(root, run_id), self.journal(root, run_id)
        before = {place: item.provenance.attempt for place, item in committed(run).items()}
        states = {stage: newest_state(run, stage) for stage in (POLICY_UPDATE, CRITIC_UPDATE)}
        begun_before = journal.begun()
        with watched_replays() as replays:
            self.train(root, run_id, grain, overrides)
        begun = journal.begun()[len(begun_before) :]
        check_chain(run, expected)
        after = committed(run)
        again = sorted(before.keys() & set(begun))
        expect(not again, f"committed before and made again: {', '.join(again)}")
        replaced = [place for place, attempt in before.items() if after[place].provenance.attempt != attempt]
        expect(not replaced, f"committed before and replaced: {', '.join(replaced)}")
        redone = {place: after[place].seconds for place in sorted(set(begun_before) & set(begun))}
        return Finished(
            before=before,
            redone=redone,
            replayed=tuple((stage, step) for stage, step, _ in replays),
            replay_seconds=sum(seconds for _, _, seconds in replays),
            states=states,
        )

    def fork(self, work: Callable[[], Value], *, seconds: float = LIMIT_SECONDS) -> Value:
        """Return what `work` does in a fork of this process; what it raises is raised here.

        Died where the fork ends otherwise, or takes longer than `seconds`; it is killed then.
        """
        child = self.start(work)
        return child.result(seconds)

    def start(self, work: Callable[[], Value]) -> "Fork[Value]":
        """Begin `work` in a fork."""
        return Fork(work, self.folder / f"fork-{uuid.uuid4().hex}")


class Journal:
    """Which stages of a run were begun, in a file beside the runs: it outlives whoever is killed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def listener(self) -> Listener:
        """Return what a session tells of its stages."""

        def listen(place: str, is_committed: bool) -> None:
            if not is_committed:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(f"{place}\n")

        return listen

    def begun(self) -> list[str]:
        """Return the places of all stages in the order in which they were begun."""
        return self._path.read_text(encoding="utf-8").split() if self._path.exists() else []
