"""`python -m benchmarks.logging_cost`: what logging to MLflow takes from a step at segment grain.

A real MLflow server on this machine; steps of 2 seconds of Python, which hold the interpreter's lock as nothing of a
training does; 60 metrics in the manifests of 4 stages, and a table of completions every 10 steps. As in a segment, the
thread that commits logs while the next step runs. Every other step logs nothing, to compare with. Besides the clock's
time, which on a busy machine says more of others, the time is taken in which the step had neither a processor nor
waited for one (Linux's schedstat): it waited for the lock that the other thread held.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from demo.servers import mlflow_server
from ratchet.grains.session import SWITCH_SECONDS
from ratchet.store.manifest import Artifact, Manifest
from ratchet.store.run import Run
from ratchet.tracking.mlflow_tables import CompletionTables
from ratchet.tracking.mlflow_tracker import MLflowTracker
from tests.ratchet.tracking.report_runs import graded_tables, new_run, put, put_prompts

STAGES = ("rollout", "reward", "advantage", "policy_update")
METRICS = 15
"""Of each stage."""
STEP_SECONDS = 2.0
TABLE_EVERY = 10


def committed(run: Run, step: int, tables: dict[str, Artifact], dice: random.Random) -> list[Manifest]:
    """Return the manifests of a step of 256 rollouts."""
    artifacts = {"rollout": {"rollouts": tables["rollouts"]}, "reward": {"rewards": tables["rewards"]}}
    return [
        put(
            run,
            stage,
            step,
            metrics={f"{stage}/metric_{number}": dice.random() for number in range(METRICS)},
            artifacts=artifacts.get(stage, {}),
        )
        for stage in STAGES
    ]


def log_all(tracker: MLflowTracker, manifests: list[Manifest]) -> tuple[float, float]:
    """Return the seconds that logging took, and those of the processor, which may hold the lock."""
    wall, busy = time.perf_counter(), time.thread_time()
    for manifest in manifests:
        tracker.log(manifest)
    return time.perf_counter() - wall, time.thread_time() - busy


def blocked() -> float:
    """Return since when this thread has neither run nor waited to be run, in seconds of some clock."""
    ran, waited, _ = Path("/proc/thread-self/schedstat").read_text().split()
    return time.perf_counter() - (int(ran) + int(waited)) / 1e9


def work(rounds: int) -> int:
    """Do what a step stands for."""
    total = 0
    for number in range(rounds):
        total += number * number % 7
    return total


def rounds_of(seconds: float) -> int:
    """Return how much work takes so long."""
    started = time.thread_time()
    work(2_000_000)
    return int(2_000_000 * seconds / (time.thread_time() - started))


def measure(uri: str, root: str, steps: int) -> None:
    run, dice = new_run(root), random.Random(7)
    put_prompts(run)
    rewards = [[float(dice.random() < 0.5) for _ in range(16)] for _ in range(16)]
    tables = graded_tables(run, "step-000001/rollout/0001-aa", rewards)
    tracker = MLflowTracker(
        run,
        experiment="logging",
        run_name="r",
        params={},
        tracking_uri=uri,
        exhibits=[CompletionTables(TABLE_EVERY)],
    )
    tracker.catch_up()
    log_all(tracker, committed(run, 1, tables, dice))
    rounds = rounds_of(STEP_SECONDS)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    waits: dict[bool, list[float]] = {True: [], False: []}
    own: list[Future[tuple[float, float]]] = []
    sys.setswitchinterval(SWITCH_SECONDS)
    with ThreadPoolExecutor(1) as writer:
        for turn in range(2 * steps):
            logs = turn % 2 == 0
            manifests = committed(run, turn // 2 + 2, tables, dice) if logs else []
            started, before = time.perf_counter(), blocked()
            if logs:
                own.append(writer.submit(log_all, tracker, manifests))
            work(rounds)
            seconds[logs].append(time.perf_counter() - started)
            waits[logs].append(blocked() - before)
            own[-1].result()
    wall, busy = zip(*(one.result() for one in own), strict=True)
    with_, without = statistics.median(seconds[True]), statistics.median(seconds[False])
    with_lock, without_lock = statistics.mean(waits[True]), statistics.mean(waits[False])
    sys.stdout.write(
        f"{steps} steps that log: median {with_:.3f} s; as many that do not: {without:.3f} s\n"
        f"waiting for the lock, a step: {with_lock:.4f} s, and {without_lock:.4f} s without logging: "
        f"{(with_lock - without_lock) / STEP_SECONDS:.2%} of a step of {STEP_SECONDS:g} s\n"
        f"in the thread that logs, a step: {statistics.mean(wall):.3f} s, {statistics.mean(busy):.4f} s of them on a "
        f"processor: {statistics.mean(busy) / STEP_SECONDS:.2%}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, mlflow_server(Path(folder) / "mlflow") as server:
        measure(server.uri, str(Path(folder) / "runs"), arguments.steps)


if __name__ == "__main__":
    main()
