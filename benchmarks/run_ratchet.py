"""Measures Ratchet on the benchmark's workload, through the same calls as `ratchet train`."""

import os
import shutil
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import volatile
from benchmarks.jobs import MAX_PROMPT_TOKENS, REWARD, Job
from benchmarks.measure import StepTimes, environment, memory, peak
from ratchet.config import RunConfig, load_config
from ratchet.environment import set_defaults
from ratchet.grains import loop
from ratchet.grains.session import Session, open_session, submit
from ratchet.stages.base import Stage
from ratchet.store import layout
from ratchet.store.manifest import Manifest
from ratchet.store.run import POLICY_UPDATE
from ratchet.store.writer import BackgroundWriter

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "speed.yaml"
BUCKET = "speed"


def config_of(job: Job) -> RunConfig:
    """configs/speed.yaml with what the job decides."""
    values: dict[str, Any] = {
        "data.train_files": job.prompts,
        "data.train_batch_size": job.num_prompts,
        "data.max_prompt_length": MAX_PROMPT_TOKENS,
        "data.max_response_length": job.num_tokens,
        "actor_rollout_ref.model.path": job.model,
        "actor_rollout_ref.actor.optim.lr": job.lr,
        "actor_rollout_ref.rollout.name": job.sampler,
        "actor_rollout_ref.rollout.n": job.group_size,
        "actor_rollout_ref.rollout.max_num_seqs": min(job.num_completions, 1024),
        "custom_reward_function.path": str(REWARD),
        "trainer.total_training_steps": job.steps,
        "trainer.steps_per_segment": job.steps,
    }
    if job.micro_batch is not None:
        values["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"] = job.micro_batch
    if job.system == "ratchet-off":
        values |= volatile.OVERRIDES
    if job.system == "ratchet-overlap":
        # What was sampled with an older policy is corrected for, by the sampler's log-probs.
        values |= {
            "trainer.async_level": 1,
            "algorithm.rollout_correction.rollout_is": "token",
            "actor_rollout_ref.rollout.calculate_log_probs": True,
        }
    return load_config(CONFIG, [*(f"{key}={value}" for key, value in values.items()), *job.overrides])


def measure(job: Job) -> dict[str, Any]:
    """Train for the job's steps in this process; return times, tokens and memory."""
    set_defaults()
    folder = Path(job.folder)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # The JSON Lines tracker writes here.
    os.chdir(folder)
    with ExitStack() as stack:
        root = str(folder / "runs") if job.system != "ratchet-s3" else _s3_root(stack, folder)
        config = config_of(job)
        run = submit(root, "speed", config)
        watch = Watch(job.steps)
        make_writer = BackgroundWriter
        if job.system == "ratchet-off":
            make_writer = volatile.VolatileWriter
            stack.enter_context(volatile.nothing_copied())
        session = stack.enter_context(open_session(run, config, watch, echo=lambda line: None, make_writer=make_writer))
        watch.follow(session)
        loop.prepare(session)
        loop.run_segment(session, 1, job.steps + 1)
        times = watch.collect()
        return {
            "steps": times.steps,
            "start_to_first_step": times.first,
            "peak": peak(getattr(session.residents._sampler, "_llm", None)),
            "stored_bytes": _stored_bytes(folder / "runs"),
            "settings": config.model_dump(mode="json", exclude={"code"}),
            "environment": environment(),
        }


class Watch:
    """A session's listener that notes when each step was finished and when it was committed, and the memory then."""

    def __init__(self, steps: int) -> None:
        self._num_steps = steps
        self._steps = {layout.stage_folder(POLICY_UPDATE, step): step for step in range(1, steps + 1)}
        self._committed: dict[int, float] = {}
        self._finished: dict[int, tuple[float, dict[str, dict[str, int]]]] = {}
        self._metrics: dict[int, dict[str, float]] = defaultdict(dict)

    def __call__(self, place: str, is_committed: bool) -> None:
        if is_committed and place in self._steps:
            self._committed[self._steps[place]] = time.time()

    def follow(self, session: Session) -> None:
        """Note what each stage says when it returns, before its commit."""
        run = session.run

        def note(stage: Stage, step: int | None, **options: Any) -> Manifest:
            manifest = run(stage, step, **options)
            if step:
                self._metrics[step] |= manifest.metrics
                if stage.name == POLICY_UPDATE:
                    self._finished[step] = (time.time(), memory(step, self._num_steps))
            return manifest

        session.run = note  # type: ignore[method-assign]

    def collect(self) -> StepTimes:
        """Put the steps' times together: a step is finished when its update is, and durable once it is committed."""
        times = StepTimes()
        for step in self._steps.values():
            finished, used = self._finished[step]
            metrics = self._metrics[step]
            phases = {name.partition("/")[2]: value for name, value in metrics.items() if name.startswith("timing_s/")}
            lag = {"commit_lag": self._committed[step] - finished} if step in self._committed else {}
            tokens = round(metrics["perf/total_num_tokens"])
            times.add(finished, tokens=tokens, phases=phases, split=_split(phases), **lag, **used)
        return times


def _split(phases: dict[str, float]) -> dict[str, float]:
    return {"generate": phases.get("gen", 0.0), "update": phases.get("update_actor", 0.0)}


def _s3_root(stack: ExitStack, folder: Path) -> str:
    """A bucket of a real S3 server on this machine."""
    from demo.servers import seaweedfs

    server = stack.enter_context(seaweedfs(folder / "runs"))
    os.environ.update(server.env())
    server.create_bucket(BUCKET)
    return f"s3://{BUCKET}"


def _stored_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
