"""The live server as the tests see it: the command line against it, runs on it, and what is said when a wait is over.

Traps: a poll may fail where the next one succeeds; and a run that never ends must not be waited for without a word, so
that every wait has a limit, and its message says what was seen last.
"""

import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml

from pipelines.api import Api
from pipelines.runs import PipelineRun, get_run
from ratchet.errors import RatchetError
from ratchet.grains.status.tasks import read_statuses
from ratchet.store.run import Run
from ratchet.store.status import TaskStatus
from tests.e2e.cluster_access import ClusterAccess
from tests.e2e.environment import REPOSITORY, Environment

logger = logging.getLogger(__name__)

Found = TypeVar("Found")

OVER = ("SUCCEEDED", "FAILED", "CANCELED", "SKIPPED")
"""States of a pipeline run that has ended; a terminated one is FAILED on some servers."""
RUN_LIMIT = 1500.0
"""Seconds that one pipeline run may take: its pods start every 10 s, and two cores may share several runs."""
END_LIMIT = 420.0
"""Seconds between a termination and the end of the pipeline run."""
_NO_WORD = (
    "No task of the newest pipeline run has said anything. Does RATCHET_IMAGE hold the package ratchet, and can nodes "
    "get it? Do pods get keys for RATCHET_ROOT (secret ratchet-object-store) and its address (config map "
    "ratchet-environment, AWS_ENDPOINT_URL), and can they reach it?"
)
_COMMAND_LIMIT = 300.0
_ASK_SERVER_EVERY = 6.0


@dataclass
class Live:
    """What every test shares."""

    environment: Environment
    api: Api
    root: str
    """Folder of this run of the suite."""
    token: str
    model: str
    """Where pods find the model."""
    folder: Path
    """For files of this machine."""
    cluster: ClusterAccess | None
    why_no_cluster: str
    settings: dict[str, str] | None
    """What pods get from the config map; None where that is not known."""
    begun: dict[str, "LiveRun"] = field(default_factory=dict)
    """Name -> run, of the whole session."""
    touched: list["LiveRun"] = field(default_factory=list)
    """Runs that the present test works with."""

    def run(self, name: str) -> "LiveRun":
        """Return the run of that name, which is this session's alone."""
        found = self.begun.setdefault(name, LiveRun(self, f"e2e-{self.token}-{name}"))
        if found not in self.touched:
            self.touched.append(found)
        return found

    def need_cluster(self, what: str) -> ClusterAccess:
        """Return the access to Kubernetes, or skip the test."""
        if self.cluster is None:
            pytest.skip(f"{what} needs access to the endpoint's Kubernetes API (KUBECONFIG): {self.why_no_cluster}")
        return self.cluster

    def command(self, *arguments: str, may_fail: bool = False) -> subprocess.CompletedProcess[str]:
        """Run `ratchet` with these arguments."""
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "ratchet.cli", *arguments],
            cwd=REPOSITORY,
            env=self.environment.of_commands(),
            capture_output=True,
            text=True,
            timeout=_COMMAND_LIMIT * self.environment.patience,
            check=False,
        )
        if done.returncode and not may_fail:
            pytest.fail(f"ratchet {' '.join(arguments)}\nended with {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done

    def answer(self, *arguments: str) -> dict[str, Any]:
        """Run `ratchet ... --json` and return its last object."""
        lines = self.command(*arguments, "--json").stdout.strip().splitlines()
        return dict(json.loads(lines[-1]))

    def wait(
        self,
        what: str,
        look: Callable[[], Found | None],
        *,
        limit: float,
        last_seen: Callable[[], str],
        every: float = 3.0,
    ) -> Found:
        """Return what `look` finds, asking again until it is not None; past the limit the test fails."""
        limit *= self.environment.patience
        began = time.monotonic()
        told = ""
        while True:
            try:
                found = look()
                told = ""
            except (RatchetError, OSError) as error:
                found, told = None, f"; the last look failed: {error}"
                logger.info("%s: %s", what, error)
            if found is not None:
                logger.info("%s: after %.0f s", what, time.monotonic() - began)
                return found
            if time.monotonic() - began > limit:
                pytest.fail(f"{what}: not within {limit:.0f} s{told}\n{last_seen()}")
            time.sleep(every)


@dataclass(eq=False)
class LiveRun:
    """One run: its submissions on the server, and what is committed of it."""

    live: Live
    run_id: str
    pipeline_runs: list[str] = field(default_factory=list)
    """What was submitted for it, oldest first."""
    values: dict[str, Any] = field(default_factory=dict)
    """Parameters of the first submission: another one has the same."""
    pipeline: str = "grpo"
    config: Path | None = None
    is_scheduled: bool = False
    """Whether the server has a schedule of its name."""

    @property
    def place(self) -> str:
        """ROOT/RUN-ID."""
        return f"{self.live.root}/{self.run_id}"

    @property
    def store(self) -> Run:
        """The run as object storage has it now."""
        return Run(self.live.root, self.run_id)

    def describe(self, pipeline: str, config: Mapping[str, Any], **values: Any) -> "LiveRun":
        """Say what the run is, for every submission of it; returns the run."""
        self.pipeline, self.values = pipeline, values
        self.config = self.live.folder / f"{self.run_id}.yaml"
        self.config.write_text(yaml.safe_dump(dict(config)), encoding="utf-8")
        return self

    def arguments(self) -> list[str]:
        """Return what `ratchet submit` and `ratchet schedule` are told about it."""
        assert self.config is not None
        place = ["--config", str(self.config), "--root", self.live.root, "--run-id", self.run_id]
        # JSON is YAML, and a text parameter is taken as it is.
        pairs = [
            f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in self.values.items()
        ]
        return [self.pipeline, *pairs, *place]

    def submit(self, *options: str, pipeline: str | None = None) -> dict[str, Any]:
        """Submit the run by the command line; return what that said."""
        arguments = self.arguments()
        answer = self.live.answer("submit", pipeline or arguments[0], *arguments[1:], *options)
        if answer["pipeline_run_id"] and answer["pipeline_run_id"] not in self.pipeline_runs:
            self.pipeline_runs.append(answer["pipeline_run_id"])
        logger.info("run %s: %s %s", self.run_id, answer["what"], answer["pipeline_run_id"])
        return answer

    def on_server(self, pipeline_run: str | None = None) -> PipelineRun:
        """Return what the server says of the newest submission, or of that one."""
        return get_run(self.live.api, pipeline_run or self.pipeline_runs[-1])

    def wait_for_end(self, pipeline_run: str | None = None, *, limit: float = RUN_LIMIT) -> str:
        """Return the state in which a pipeline run has ended."""

        def look() -> str | None:
            state = self.on_server(pipeline_run).state
            return state if state in OVER else None

        what = f"the pipeline run of {self.run_id} has ended"
        return self.live.wait(what, look, limit=limit, last_seen=self.report)

    def wait_for(self, what: str, look: Callable[[], Found | None], *, limit: float = RUN_LIMIT) -> Found:
        """Return what `look` finds; the test fails where the pipeline run ends before it does."""

        asked = time.monotonic()

        def look_twice() -> Found | None:
            nonlocal asked
            found = look()
            # The server is asked less often than storage: its answer holds every task.
            if found is not None or time.monotonic() - asked < _ASK_SERVER_EVERY:
                return found
            asked = time.monotonic()
            if self.on_server().state not in OVER:
                return None
            # What was committed just before the end counts.
            found = look()
            if found is None:
                pytest.fail(f"{self.run_id}: the pipeline run ended before: {what}\n{self.report()}")
            return found

        return self.live.wait(f"{self.run_id}: {what}", look_twice, limit=limit, last_seen=self.report, every=0.7)

    def wait_for_step(self, step: int) -> int:
        """Return the newest step whose policy is committed, once it is `step` or later."""

        def look() -> int | None:
            last = self.store.last_step()
            return last if last >= step else None

        return self.wait_for(f"step {step} is committed", look)

    def finished(self) -> "LiveRun":
        """Return this run, once its first submission has done everything."""
        from tests.e2e.chain import is_complete

        if not is_complete(self.store, self.values["total_steps"]):
            self.wait_for_end(self.pipeline_runs[0])
            assert is_complete(self.store, self.values["total_steps"]), self.report()
        return self

    def go_on(self) -> None:
        """Submit the run again under its run id, and wait until it is finished."""
        answer = self.submit()
        assert answer["what"] == "started", f"{answer}\n{self.report()}"
        assert self.wait_for_end() == "SUCCEEDED", self.report()
        assert self.status()["state"] == "finished", self.screen()

    def status(self) -> dict[str, Any]:
        """Return `ratchet status --json`."""
        return self.live.answer("status", self.place, *self.where())

    def screen(self) -> str:
        """Return `ratchet status` as people see it."""
        done = self.live.command("status", self.place, *self.where(), may_fail=True)
        return f"{done.stdout}{done.stderr}".strip()

    def statuses(self, pipeline_run: str | None = None) -> list[TaskStatus]:
        """Return what the tasks of a submission said last."""
        return read_statuses(self.store.store, pipeline_run or self.pipeline_runs[-1])[0]

    def attempts(self) -> dict[str, str]:
        """Return place -> attempt of everything that is committed now."""
        from tests.runs import attempts

        return attempts(self.store)

    def report(self) -> str:
        """Return everything that can be seen of the run now, for a message about a failure."""
        lines = [f"===== run {self.place}"]
        for pipeline_run in self.pipeline_runs:
            lines += self._server_lines(pipeline_run)
        lines += ["----- ratchet status", self.screen()]
        if self.pipeline_runs and not self.statuses():
            lines.append(_NO_WORD)
        if self.live.cluster is None:
            lines.append(f"----- pods: not asked ({self.live.why_no_cluster})")
        else:
            for pipeline_run in self.pipeline_runs[-2:]:
                lines += ["----- pods that have not succeeded", *self.live.cluster.log_tails(pipeline_run)]
        return "\n".join(lines)

    def where(self) -> list[str]:
        """Return what `ratchet status` and `ratchet logs` are told about the cluster."""
        context = self.live.cluster.context if self.live.cluster is not None else None
        return ["--namespace", self.live.environment.namespace, *(["--context", context] if context else [])]

    def _server_lines(self, pipeline_run: str) -> list[str]:
        try:
            found = self.on_server(pipeline_run)
        except RatchetError as error:
            return [f"pipeline run {pipeline_run}: {error}"]
        tasks = [f"{task.name}={task.state}" for task in found.tasks if task.state not in ("SUCCEEDED", "SKIPPED")]
        return [f"pipeline run {found.id}: {found.state} {found.error}", f"  tasks not succeeded: {', '.join(tasks)}"]
