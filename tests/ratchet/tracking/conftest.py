"""Runs with committed manifests, one MLflow server for the session, and a gateway in front of it that can misbehave."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from demo.servers import mlflow_server
from ratchet.store.manifest import Artifact, Content, FileEntry, Manifest, Provenance
from ratchet.store.run import Run
from tests.mlflow_gateway import Gateway

ENDED = 1_700_000_000.25
_FILE = FileEntry(path="part-00000.parquet", bytes=8, sha256="ab" * 32)


@dataclass
class Chain:
    """A run whose stages are committed by name: every step has rollout, reward and policy_update."""

    run: Run
    clock: float = ENDED
    manifests: list[Manifest] = field(default_factory=list)

    def commit(self, stage: str, step: int | None, metrics: dict[str, float]) -> Manifest:
        self.clock += 1
        role = "prompts" if stage.startswith("preprocess/") else "rows"
        artifact = Artifact(folder=f"{stage}/0001-a", files=(_FILE,), rows=2)
        content = Content(
            step=step, stage=stage, policy_version=0, inputs={}, outputs={role: artifact.digest}, config="c0"
        )
        provenance = Provenance(
            run_id=self.run.run_id,
            attempt=self.run.new_attempt(),
            epoch=self.run.check_ownership().epoch,
            artifacts={role: artifact},
            previous={},
            started=self.clock - 1,
            ended=self.clock,
            device="cpu",
            gpu_seconds=0.0,
            code_revision="r",
            image="i",
            metrics=metrics,
        )
        manifest = self.run.commit(Manifest(content=content, provenance=provenance))
        self.manifests.append(manifest)
        return manifest

    def step(self, step: int) -> list[Manifest]:
        return [
            self.commit("rollout", step, {"response_length/mean": 10.0 + step}),
            self.commit("reward", step, {"critic/score/mean": step / 10}),
            self.commit("policy_update", step, {"actor/pg_loss": -step / 100, "training/global_step": float(step)}),
        ]


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    """A claimed run in a folder of its own."""
    run = Run(str(tmp_path / "runs"), "r1")
    run.create_or_check({"seed": 1})
    run.claim({})
    return Chain(run)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every test MLflow's variables as they are without a user; what the tracker sets is undone afterwards."""
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_WORKSPACE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "1")
    monkeypatch.setenv("MLFLOW_ARTIFACT_UPLOAD_DOWNLOAD_TIMEOUT", "30")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")


class Server:
    """A real MLflow server that can be stopped and started again on the same SQLite database, on another port."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.uri = ""
        self._running = ExitStack()

    def start(self) -> None:
        self.uri = self._running.enter_context(mlflow_server(self.folder)).uri

    def stop(self) -> None:
        self._running.close()


@pytest.fixture(scope="session")
def mlflow_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server and the tests without one have their database: making its tables takes seconds."""
    return tmp_path_factory.mktemp("mlflow")


@pytest.fixture(scope="session")
def database(mlflow_folder: Path) -> str:
    """Tracking URI of the database itself."""
    return f"sqlite:///{mlflow_folder / 'mlflow.db'}"


@pytest.fixture(scope="session")
def server(mlflow_folder: Path) -> Iterator[Server]:
    """The session's server; it runs unless a test has just stopped it."""
    server = Server(mlflow_folder)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def server_uri(server: Server) -> str:
    """Tracking URI of the server."""
    return server.uri


@pytest.fixture
def make_gateway() -> Iterator[Callable[[str], Gateway]]:
    """Start gateways; they end with the test."""
    with ExitStack() as running:

        def make(target: str) -> Gateway:
            gateway = Gateway(target)
            gateway.start()
            running.callback(gateway.close)
            return gateway

        yield make
