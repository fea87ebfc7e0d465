"""Runs as an operator meets them, written by hand: claims, commits and statuses at moments that the test chooses.

Nothing is trained: a story takes milliseconds, on a local folder and on S3.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from ratchet.cluster.kube import Cluster
from ratchet.grains.status import RunStatus, Sources, collect
from ratchet.grains.status.screen import screen_lines
from ratchet.store import layout
from ratchet.store.manifest import Artifact, Content, FileEntry, Manifest, Provenance
from ratchet.store.run import Run
from ratchet.store.status import State, TaskStatus, write_status

NOW = 1_800_000_000.0
"""When the story is told, Unix seconds (2027-01-15T08:00:00Z)."""
KFP_RUN = "6f0c2c6e-95a1-4c55-9a0a-0d5b2e6f7a11"
OTHER_RUN = "0e9b7a52-1111-4222-8333-444455556666"
CONFIG: dict[str, Any] = {
    "algorithm": {"adv_estimator": "grpo"},
    "actor_rollout_ref": {"model": {"path": "Qwen/Qwen2.5-0.5B-Instruct"}, "rollout": {"name": "vllm", "n": 8}},
    "data": {"train_batch_size": 32, "val_files": "gsm8k", "train_files": "gsm8k"},
    "trainer": {"total_training_steps": 100, "grain": "segment", "steps_per_segment": 50, "test_freq": 25},
    "promotion": {"name": ""},
}


def ago(seconds: float) -> float:
    """Unix seconds of a moment before the story is told."""
    return NOW - seconds


def kube_time(moment: float) -> str:
    """A moment as Kubernetes writes it."""
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class Story:
    """What happened to one run."""

    root: str
    run_id: str = "first"
    config: dict[str, Any] = field(default_factory=lambda: json.loads(json.dumps(CONFIG)))
    epoch: int = 0

    @property
    def run(self) -> Run:
        """The run, read from storage again."""
        return Run(self.root, self.run_id)

    def claim(self, submission_id: str | None = KFP_RUN, *, host: str = "grpo-x-preflight-1", pid: int = 1) -> "Story":
        """Somebody submits the run and claims it."""
        store = self.run.store
        self.epoch += 1
        store.put("run.json", b'{"format":1,"run_id":"first","semantic":{}}')
        store.put(layout.owner(self.epoch), json.dumps({"epoch": self.epoch, "host": host, "pid": pid}).encode())
        body = {"submission_id": submission_id, "config": self.config, "epoch": self.epoch, "version": "0.1"}
        store.put(layout.submission(self.epoch), json.dumps(body).encode())
        return self

    def commit(
        self,
        stage: str,
        step: int | None,
        ended: float,
        *,
        seconds: float = 10.0,
        role: str | None = None,
        rows: int | None = None,
        **metrics: float,
    ) -> "Story":
        """A stage is committed; metrics are given with `__` for `/` and `_at_` for `@`."""
        folder = f"{layout.attempt_folder(stage, step, '0001-a')}/{role or stage}"
        artifact = Artifact(folder=folder, files=(FileEntry(path="x", bytes=1, sha256="a" * 64),), rows=rows)
        content = Content(
            step=step,
            stage=stage,
            policy_version=step,
            inputs={},
            outputs={role or stage: artifact.digest},
            config="c" * 64,
        )
        provenance = Provenance(
            run_id=self.run_id,
            attempt="0001-a",
            epoch=self.epoch,
            artifacts={role or stage: artifact},
            previous={},
            started=ended - seconds,
            ended=ended,
            device="cuda",
            gpu_seconds=seconds,
            code_revision="r",
            image="i",
            metrics={name.replace("__", "/").replace("_at_", "@"): value for name, value in metrics.items()},
        )
        body = Manifest(content=content, provenance=provenance).to_json()
        self.run.store.put(layout.manifest(stage, step), body)
        return self

    def prepare(self, ended: float) -> "Story":
        """Version 0 and 1000 prompts are committed."""
        self.commit("policy_update", 0, ended, role="policy")
        return self.commit("preprocess/train", None, ended, role="prompts", rows=1000)

    def steps(self, first: int, last: int, *, ended: float, pace: float = 60.0) -> "Story":
        """Steps are committed, `pace` seconds each, the last one at `ended`."""
        for step in range(first, last + 1):
            at = ended - (last - step) * pace
            self.commit("rollout", step, at - 20.0, seconds=pace - 20.0, role="rollouts", response_length__mean=180.0)
            self.commit("reward", step, at - 10.0, role="rewards", critic__score__mean=0.4 + step / 200)
            self.commit("policy_update", step, at, role="policy")
        return self

    def evaluate(self, step: int, ended: float, mean: float) -> "Story":
        """A policy version is evaluated on GSM8K."""
        self.commit("evaluate", step, ended, role="evaluations")
        key = layout.manifest("evaluate", step)
        raw = json.loads(self.run.store.get(key))
        raw["provenance"]["metrics"] = {
            "val-core/openai/gsm8k/acc/mean@1": mean,
            "val-aux/openai/gsm8k/acc/ci95_low@1": mean - 0.025,
            "val-aux/openai/gsm8k/acc/ci95_high@1": mean + 0.025,
        }
        self.run.store.put(key, json.dumps(raw, sort_keys=True, separators=(",", ":")).encode())
        return self

    def export(self, step: int, ended: float) -> "Story":
        """The last policy is exported."""
        return self.commit("checkpoint_export", step, ended, role="export")

    def finish(self, *, ended: float = NOW - 3600.0) -> "Story":
        """Everything is committed."""
        self.prepare(ended - 7200.0).steps(95, 100, ended=ended - 120.0)
        self.commit("reward", 1, ended - 7000.0, role="rewards", critic__score__mean=0.4)
        return self.evaluate(100, ended - 60.0, 0.512).export(100, ended)

    def task(
        self,
        task: str,
        state: State,
        *,
        step: int | None = None,
        started: float = NOW - 1200.0,
        updated: float = NOW - 12.0,
        submission_id: str = KFP_RUN,
        **fields: Any,
    ) -> "Story":
        """A pod says what it is at."""
        status = TaskStatus(
            submission_id=submission_id,
            task=task,
            step=step,
            state=state,
            host=fields.pop("host", f"grpo-x-{task.replace('_', '-')}-{step or 0}"),
            started=started,
            updated=updated,
            **fields,
        )
        write_status(self.run.store, status)
        return self

    def prepared(self) -> "Story":
        """The run is claimed and prepared, its prompts are committed, and the tasks up to the loop ended well."""
        self.claim().prepare(ago(2400.0))
        for number, task in enumerate(("preflight", "preprocess", "plan")):
            self.task(task, "succeeded", started=ago(2600.0 - 60 * number), updated=ago(2570.0 - 60 * number))
        return self


def pod(
    name: str,
    task: str,
    *,
    run: str = KFP_RUN,
    phase: str = "Running",
    created: float = NOW - 1210.0,
    is_driver: bool = False,
    containers: list[dict[str, Any]] | None = None,
    conditions: list[dict[str, Any]] | None = None,
    **status: Any,
) -> dict[str, Any]:
    """Metadata, spec and status of a pod of a KFP run, as the API has them."""
    dashed = task.replace("_", "-")
    node = f"grpo-x.root.for-loop-2.{dashed}{'-driver' if is_driver else '(0).executor(0)'}"
    return {
        "metadata": {
            "name": name,
            "creationTimestamp": kube_time(created),
            "labels": {"pipeline/runid": run},
            "annotations": {"workflows.argoproj.io/node-name": node},
        },
        "spec": {"nodeName": "" if phase == "Pending" and not containers else "n-1"},
        "status": {
            "phase": phase,
            "containerStatuses": containers or [],
            "conditions": conditions or [],
            **status,
        },
    }


def container(kind: str, reason: str = "", message: str = "", name: str = "main", **state: Any) -> dict[str, Any]:
    """A container's status: `kind` is waiting, running or terminated."""
    told = {key: value for key, value in {"reason": reason, "message": message, **state}.items() if value != ""}
    return {"name": name, "state": {kind: told}, "restartCount": 0, "image": "ratchet-segment"}


@dataclass(frozen=True)
class Told:
    """What Kubeflow says of a pipeline run."""

    state: str
    id: str = OTHER_RUN
    url: str = "http://kubeflow/#/runs/details/x"


def look(story: Story, **sources: Any) -> RunStatus:
    """How the run is at the moment of the story, from its storage alone unless there are other sources."""
    return collect(story.run, now=NOW, sources=Sources(**sources))


def with_pods(story: Story, **sources: Any) -> RunStatus:
    """How the run is, with the pods of the cluster that the kubeconfig names."""
    return look(story, open_cluster=Cluster.open, **sources)


def kubeflow(state: str) -> Callable[[str], Told]:
    """A Kubeflow that says this of every pipeline run."""
    return lambda submission_id: Told(state)


def never(*arguments: Any) -> Any:
    """A source that is not to be asked."""
    raise AssertionError("nobody else is to be asked about this run")


def page(status: RunStatus) -> str:
    """The screen as one line."""
    return " ".join(" ".join(screen_lines(status)).split())
