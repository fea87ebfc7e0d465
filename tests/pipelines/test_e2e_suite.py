"""What the suite for a live server does before it has one: says what it lacks, and leaves what it finds alone."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet.errors import ClusterError
from tests.e2e.cluster_access import ClusterAccess
from tests.e2e.environment import NEEDED, REPOSITORY, Environment, is_this_machine, pod_settings, tokens
from tests.e2e.live import Live
from tests.e2e.rehearsal import NAMESPACE, Machine, served
from tests.kfp_endpoint import KfpServer
from tests.kube_api import KubeApi

GIVEN = {"KF_PIPELINES_ENDPOINT": "http://host:8888", "RATCHET_IMAGE": "image:1", "RATCHET_ROOT": "s3://bucket/prefix/"}

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture
def kube(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeApi]:
    """The API of a cluster that this process's kubeconfig names."""
    api = KubeApi()
    with served(Machine(KfpServer(), api, tmp_path, {})) as url:
        api.url = url
        monkeypatch.setenv("KUBECONFIG", str(api.write_kubeconfig(tmp_path / "kubeconfig")))
        monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
        yield api


def test_without_variables_every_test_is_skipped_with_their_names() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in NEEDED}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/e2e", "-q"],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"^\d+ skipped in", done.stdout.splitlines()[-1])
    assert f"set {', '.join(NEEDED)}" in done.stdout


def test_missing_variables_are_named_and_the_others_are_not() -> None:
    with pytest.raises(ValueError, match="set RATCHET_IMAGE, RATCHET_ROOT, as in make e2e"):
        Environment.read({"KF_PIPELINES_ENDPOINT": "http://host:8888", "RATCHET_IMAGE": ""})


def test_a_root_on_this_disk_is_refused() -> None:
    with pytest.raises(ValueError, match="RATCHET_ROOT is '/runs': expected s3://BUCKET/PREFIX"):
        Environment.read({**GIVEN, "RATCHET_ROOT": "/runs"})


def test_commands_compile_for_the_image_under_test() -> None:
    found = Environment.read(GIVEN)
    assert (found.root, found.namespace, found.patience) == ("s3://bucket/prefix", "kubeflow", 1.0)
    given = found.of_commands()
    assert (given["RATCHET_IMAGE"], given["RATCHET_IMAGE_PULL_POLICY"]) == ("image:1", "IfNotPresent")


def test_pods_get_the_addresses_that_are_theirs() -> None:
    here = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9000", "MLFLOW_TRACKING_URI": "http://localhost:5000"}
    there = {"AWS_ENDPOINT_URL": "http://s3:9000", "MLFLOW_TRACKING_URI": "http://mlflow:5000"}
    found = pod_settings(here | {f"RATCHET_E2E_POD_{name}": value for name, value in there.items()})
    assert found == there | {"AWS_REGION": "us-east-1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    assert is_this_machine(pod_settings(here)["AWS_ENDPOINT_URL"])
    assert "MLFLOW_TRACKING_URI" not in pod_settings({"MLFLOW_TRACKING_URI": "sqlite:///mlflow.db"})
    assert tokens({"MLFLOW_TRACKING_USERNAME": "me", "MLFLOW_TRACKING_TOKEN": "", "HF_TOKEN": "secret"}) == {
        "MLFLOW_TRACKING_USERNAME": "me"
    }


def test_what_is_created_is_removed_and_what_was_there_is_neither_changed_nor_removed(kube: KubeApi) -> None:
    kube.add("secrets", "ratchet-object-store", namespace=NAMESPACE, data={"AWS_ACCESS_KEY_ID": "theirs"})
    cluster = ClusterAccess.open(NAMESPACE)
    assert not cluster.ensure_secret("ratchet-object-store", {"AWS_ACCESS_KEY_ID": "mine"})
    assert cluster.ensure_secret("ratchet-tokens", {"MLFLOW_TRACKING_TOKEN": "mine"})
    assert cluster.ensure_config_map("ratchet-environment", {"AWS_REGION": "us-east-1"})
    assert cluster.cluster.config_map("ratchet-environment") == {"AWS_REGION": "us-east-1"}
    cluster.remove_created()
    cluster.remove_created()
    left = kube.objects[f"{NAMESPACE}/secrets"]
    assert {name: secret["data"] for name, secret in left.items()} == {
        "ratchet-object-store": {"AWS_ACCESS_KEY_ID": "theirs"}
    }
    assert kube.objects[f"{NAMESPACE}/configmaps"] == {}


def test_nothing_is_created_where_pods_may_not_be_listed(kube: KubeApi) -> None:
    kube.rules = {("get", "secrets")}
    with pytest.raises(ClusterError, match="cannot list pods, namespace kubeflow: 403"):
        ClusterAccess.open(NAMESPACE)


def test_one_machine_is_known_by_its_boot(kube: KubeApi) -> None:
    cluster = ClusterAccess.open(NAMESPACE)
    kube.add_node("here")
    kube.objects["/nodes"]["here"]["status"]["nodeInfo"] = {"bootID": "another"}
    assert (cluster.is_one_node(), cluster.is_this_machine()) == (True, False)
    kube.add_node("there")
    assert not cluster.is_one_node()


def test_the_end_of_a_log_is_shown_with_its_pod(kube: KubeApi) -> None:
    labels = {"labels": {"pipeline/runid": "r-1"}}
    kube.add("pods", "segment-1", namespace=NAMESPACE, metadata=labels, status={"phase": "Failed"})
    kube.logs["segment-1", "main"] = ["2026-11-30T07:00:00.000000000Z ConfigError: no such model"]
    kube.is_finished.add("segment-1")
    shown = "\n".join(ClusterAccess.open(NAMESPACE).log_tails("r-1"))
    assert "pod segment-1 (unknown task): Failed" in shown
    assert "| ConfigError: no such model" in shown
    assert "no pod with the label pipeline/runid=r-2" in "\n".join(ClusterAccess.open(NAMESPACE).log_tails("r-2"))


def live(**parts: Any) -> Live:
    known: dict[str, Any] = {"root": "s3://b/r", "token": "t", "model": "m", "folder": Path(), "settings": None}
    known |= {"cluster": None, "why_no_cluster": "no kubeconfig", "api": None}
    return Live(environment=Environment.read(GIVEN | {"RATCHET_E2E_PATIENCE": "0.1"}), **known | parts)


def test_a_wait_that_is_over_says_what_was_seen_last() -> None:
    def look() -> None:
        raise ClusterError("answered 503")

    began = time.monotonic()
    with pytest.raises(
        pytest.fail.Exception, match=r"(?s)the end: not within 1 s; the last look failed: answered 503.*RUN"
    ):
        live().wait("the end", look, limit=10, last_seen=lambda: "state RUNNING", every=0.1)
    assert time.monotonic() - began < 5


def test_a_look_that_fails_is_followed_by_another() -> None:
    looks = iter([ClusterError("answered 503"), None, 3])

    def look() -> int | None:
        found = next(looks)
        if isinstance(found, ClusterError):
            raise found
        return found

    assert live().wait("it", look, limit=50, last_seen=str, every=0.01) == 3


def test_without_kubernetes_a_test_is_skipped_and_says_why() -> None:
    with pytest.raises(pytest.skip.Exception, match=r"deleting a pod needs access .* no kubeconfig"):
        live().need_cluster("deleting a pod")


def test_a_run_is_the_session_s_own_and_submitted_as_it_was_described(tmp_path: Path) -> None:
    shared = live(folder=tmp_path)
    run = shared.run("main").describe("grpo", {"data": {"train_batch_size": 4}}, total_steps=3, champion="a=b")
    assert shared.run("main") is run
    pipeline, *pairs = run.arguments()
    assert (pipeline, pairs[:2]) == ("grpo", ["total_steps=3", "champion=a=b"])
    assert pairs[2:] == ["--config", str(tmp_path / "e2e-t-main.yaml"), "--root", "s3://b/r", "--run-id", "e2e-t-main"]
