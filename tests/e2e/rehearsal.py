"""`python -m tests.e2e.rehearsal [PYTEST ARGUMENTS]`: the suite against servers of this machine, tasks as processes.

The endpoint and the Kubernetes API are the tests' own doubles, object storage is a real S3 server, and what is
submitted runs by kfp.local. With REHEARSAL_RESTARTS=1 a deleted pod is started again, as Kubeflow Pipelines 2.17 does.
Trap: this proves the suite and what it calls, never what a real server does; nothing of Argo is rehearsed.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import yaml

from tests import kube_api
from tests.e2e.cluster_access import BOOT_ID
from tests.e2e.environment import REPOSITORY
from tests.kfp_endpoint import KfpServer, kfp_server

NAMESPACE = "kubeflow"
HOOK = Path(__file__).parent / "rehearsal_hook"
_JOB_ID = "{{$.pipeline_job_uuid}}"
_TICK = 4.0
"""Seconds between two turns of a schedule, whatever it asks for."""
_OVER = ("SUCCEEDED", "FAILED", "CANCELED", "SKIPPED")


@dataclass
class Machine:
    """Runs what is submitted to the endpoint, and shows it as pods."""

    kfp: KfpServer
    kube: kube_api.KubeApi
    folder: Path
    environment: dict[str, str]
    """Of tasks, beside this process's own: what secret and config map would give them."""
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    turns: dict[str, float] = field(default_factory=dict)

    @property
    def pods(self) -> Path:
        return self.folder / "pods"

    def work(self, stop: threading.Event) -> None:
        """Do what a cluster does, until told to stop."""
        self.pods.mkdir()
        while not stop.wait(0.1):
            for run in list(self.kfp.runs):
                self._advance(run)
            for schedule in list(self.kfp.schedules):
                self._tick(schedule)
            self._show_pods()
        for process in self.processes.values():
            _kill(process, signal.SIGKILL)

    def end_pod(self, name: str) -> None:
        """End a pod's process as a kubelet does: SIGTERM, and its container is gone in less than a second."""
        (self.pods / f"{name}.deleted").touch()
        pid = json.loads((self.pods / f"{name}.json").read_text())["pid"]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
            time.sleep(0.6)
            os.kill(pid, signal.SIGKILL)

    def _advance(self, run: dict[str, Any]) -> None:
        identity, process = run["run_id"], self.processes.get(run["run_id"])
        if process is None and run["state"] in ("PENDING", "RUNNING"):
            self.kfp.set_state(identity, "RUNNING")
            self.processes[identity] = self._start(run)
        elif process is not None and run["state"] == "CANCELING":
            for path in self._alive(identity):
                self.end_pod(path.stem)
            _kill(process, signal.SIGKILL)
            process.wait()
            self.kfp.set_state(identity, "FAILED")
        elif process is not None and run["state"] not in _OVER and process.poll() is not None:
            self.kfp.set_state(identity, "FAILED" if process.returncode else "SUCCEEDED")

    def _start(self, run: dict[str, Any]) -> "subprocess.Popen[bytes]":
        identity, given = run["run_id"], run["runtime_config"]["parameters"]
        spec = run.get("pipeline_spec") or self._version(run)["pipeline_spec"]
        # kfp.local has an id of its own for every execution.
        text = yaml.safe_dump(spec.get("pipeline_spec", spec)).replace(_JOB_ID, identity)
        package = self.folder / f"{identity}.yaml"
        package.write_text(text, encoding="utf-8")
        pairs = [f"{name}={one if isinstance(one, str) else json.dumps(one)}" for name, one in given.items()]
        is_waiting = '"accelerator_count": 1' in json.dumps(given)
        environment = {
            **os.environ,
            **self.environment,
            "PYTHONPATH": str(HOOK),
            "REHEARSAL_RUN": identity,
            "REHEARSAL_PODS": str(self.pods),
            "REHEARSAL_WAITS": "segment" if is_waiting else "",
            "RATCHET_KFP_ROOT": str(self.folder / "artifacts" / identity),
        }
        with (self.folder / f"{identity}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "pipelines.local", str(package), *pairs],
                cwd=REPOSITORY,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _version(self, run: dict[str, Any]) -> dict[str, Any]:
        schedule = next(one for one in self.kfp.schedules if one["recurring_run_id"] == run["recurring_run_id"])
        wanted = schedule["pipeline_version_reference"]["pipeline_version_id"]
        return next(one for one in self.kfp.versions if one["pipeline_version_id"] == wanted)

    def _tick(self, schedule: dict[str, Any]) -> None:
        identity, now = schedule["recurring_run_id"], time.monotonic()
        if now - self.turns.get(identity, 0.0) > _TICK:
            self.turns[identity] = now
            self.kfp.tick(identity)

    def _alive(self, run: str) -> list[Path]:
        found = [path for path in self.pods.glob("*.json") if json.loads(path.read_text())["run"] == run]
        return [path for path in found if _lives(json.loads(path.read_text())["pid"])]

    def _show_pods(self) -> None:
        shown = self.kube.objects.setdefault(f"{NAMESPACE}/pods", {})
        for path in self.pods.glob("*.json"):
            name, told = path.stem, json.loads(path.read_text())
            ended = self.pods / f"{name}.ended"
            if (self.pods / f"{name}.deleted").exists():
                shown.pop(name, None)
                continue
            phase = "Pending" if told["waits"] else "Running"
            code = ended.read_text() if ended.exists() else ""
            states = []
            if code:
                phase = "Succeeded" if code == "0" else "Failed"
                # The launcher's own code, whatever the program's was.
                reason = "Completed" if code == "0" else "Error"
                states = [{"name": "main", "state": {"terminated": {"exitCode": min(int(code), 1), "reason": reason}}}]
            created = datetime.fromtimestamp(told["created"], UTC)
            log = self.pods / f"{name}.log"
            if log.exists():
                lines = log.read_text(errors="replace").splitlines()
                self.kube.logs[name, "main"] = [f"{created:%Y-%m-%dT%H:%M:%S.000000000Z} {line}" for line in lines]
            unscheduled = {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector. "
                "preemption: 0/1 nodes are available: 1 Preemption is not helpful for scheduling.",
            }
            self.kube.add(
                "pods",
                name,
                namespace=NAMESPACE,
                metadata={
                    "labels": {"pipeline/runid": told["run"]},
                    "annotations": {"workflows.argoproj.io/node-name": f"wf.root(0).{told['task']}(0).executor(0)"},
                    "creationTimestamp": f"{created:%Y-%m-%dT%H:%M:%SZ}",
                },
                spec={"nodeName": "" if told["waits"] else "here", "containers": [{"name": "main"}]},
                status={
                    "phase": phase,
                    "conditions": [unscheduled] if told["waits"] else [],
                    "containerStatuses": states,
                },
            )


class _Kubernetes(kube_api._Server):
    """The double, and what the suite does beyond reading: creating, deleting, and asking for Argo."""

    machine: Machine

    def do_GET(self) -> None:
        if self.path == "/apis/argoproj.io/v1alpha1":
            self._json(200, {"kind": "APIResourceList", "groupVersion": "argoproj.io/v1alpha1", "resources": []})
        else:
            super().do_GET()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        _, _, _, _, namespace, resource = self.path.split("/")
        name = body["metadata"]["name"]
        if name in self.api.objects.get(f"{namespace}/{resource}", {}):
            self._status(409, "AlreadyExists", f'{resource} "{name}" already exists')
            return
        data = body.get("data") or dict.fromkeys(body.get("stringData") or {}, "c2VjcmV0")
        self.api.add(resource, name, namespace=namespace, data=data)
        self._json(201, self.api.objects[f"{namespace}/{resource}"][name])

    def do_DELETE(self) -> None:
        *_, namespace, resource, name = self.path.split("/")
        found = self.api.objects.get(f"{namespace}/{resource}", {}).get(name)
        if resource == "pods" and found is not None:
            self.machine.end_pod(name)
            self._json(200, found)
        else:
            super().do_DELETE()


@contextmanager
def rehearsal(folder: Path, storage: dict[str, str], root: str) -> Iterator[dict[str, str]]:
    """Yield the environment of the suite, with everything that it speaks to running; `storage` are AWS variables."""
    with kfp_server() as kfp, kube_api.kube_api() as kube:
        machine = Machine(kfp, kube, folder, {**storage, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
        with served(machine) as url:
            kube.url = url
            kube.add_node("here")
            node = kube.objects["/nodes"]["here"]
            node["status"]["nodeInfo"] = {"bootID": BOOT_ID.read_text().strip() if BOOT_ID.is_file() else ""}
            config = kube.write_kubeconfig(folder / "kubeconfig", namespace=None)
            # The account of pods may not read the API: preflight warns, and nothing fails.
            machine.environment["KUBECONFIG"] = str(folder / "no-kubeconfig")
            stop = threading.Event()
            thread = threading.Thread(target=machine.work, args=(stop,), daemon=True)
            thread.start()
            try:
                yield {
                    **os.environ,
                    **storage,
                    "KF_PIPELINES_ENDPOINT": kfp.url,
                    "KUBECONFIG": str(config),
                    "RATCHET_IMAGE": "rehearsal/python:1",
                    "RATCHET_ROOT": root,
                    "HF_HUB_OFFLINE": "1",
                }
            finally:
                stop.set()
                thread.join()


@contextmanager
def served(machine: Machine) -> Iterator[str]:
    """Yield the URL of the machine's Kubernetes API."""
    handler: type[BaseHTTPRequestHandler] = type("Handler", (_Kubernetes,), {"api": machine.kube, "machine": machine})
    with kube_api._Threads(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def _kill(process: "subprocess.Popen[bytes]", number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def main(arguments: list[str]) -> int:
    """Run the suite, and return pytest's exit code; logs of pipelines stay in the folder that is named last."""
    from demo.servers import seaweedfs

    folder = Path(tempfile.mkdtemp(prefix="rehearsal-"))
    with seaweedfs(folder / "s3") as storage:
        storage.create_bucket("ratchet")
        with rehearsal(folder, storage.env(), "s3://ratchet/suite") as environment:
            command = [sys.executable, "-m", "pytest", "tests/e2e", "-v", "--log-cli-level=INFO", *arguments]
            code = subprocess.run(command, cwd=REPOSITORY, env=environment, check=False).returncode
    sys.stderr.write(f"{folder}\n")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
