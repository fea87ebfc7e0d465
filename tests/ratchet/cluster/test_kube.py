"""Reads of the Kubernetes API, against a server in this process that answers as the real one does."""

import base64
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet.cluster import kube
from ratchet.cluster.kube import Cluster
from ratchet.errors import ClusterError, NotAllowedError
from tests.kube_api import KubeApi, kube_api, make_certificate

RUN = "0b1c2d3e-run"


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeApi]:
    """A server whose kubeconfig this process uses; no pod's service account is in sight."""
    with kube_api() as server:
        use_kubeconfig(server.write_kubeconfig(tmp_path / "kubeconfig"), monkeypatch)
        yield server


def use_kubeconfig(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(path))
    for name in ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT", "RATCHET_POD_NAMESPACE"):
        monkeypatch.delenv(name, raising=False)


def test_a_secret_tells_its_keys_and_never_its_values(api: KubeApi) -> None:
    api.add("secrets", "ratchet-tokens", data={"HF_TOKEN": base64.b64encode(b"hf_x").decode(), "MLFLOW_TOKEN": ""})
    cluster = Cluster.open()
    assert cluster.secret_keys("ratchet-tokens") == {"HF_TOKEN", "MLFLOW_TOKEN"}
    assert cluster.secret_keys("ratchet-object-store") is None


def test_a_secret_and_a_config_map_without_data_are_there_and_empty(api: KubeApi) -> None:
    api.add("secrets", "empty")
    api.add("configmaps", "empty")
    api.add("configmaps", "ratchet-environment", data={"AWS_REGION": "eu-west-1"})
    cluster = Cluster.open()
    assert cluster.secret_keys("empty") == set()
    assert cluster.config_map("empty") == {}
    assert cluster.config_map("ratchet-environment") == {"AWS_REGION": "eu-west-1"}
    assert cluster.config_map("other") is None


def test_a_claim_is_there_or_not(api: KubeApi) -> None:
    api.add("persistentvolumeclaims", "ratchet-compile-cache")
    cluster = Cluster.open()
    assert cluster.claim_exists("ratchet-compile-cache")
    assert not cluster.claim_exists("other")


def test_nodes_come_with_what_pods_may_have_of_them(api: KubeApi) -> None:
    taint = {"key": "nvidia.com/gpu", "effect": "NoSchedule"}
    api.add_node("gpu-1", labels={"gpu": "h100"}, taints=[taint], gpu="8", cpu="63500m")
    api.add_node("cpu-1", is_ready=False)
    gpu, cpu = Cluster.open().nodes()
    assert gpu.allocatable["nvidia.com/gpu"] == "8"
    assert gpu.allocatable["cpu"] == "63500m"
    assert gpu.labels["gpu"] == "h100"
    assert gpu.taints == ({"key": "nvidia.com/gpu", "value": "", "effect": "NoSchedule"},)
    assert (gpu.is_ready, gpu.is_cordoned, cpu.is_ready) == (True, False, False)


def pod(node_name: str, **status: Any) -> dict[str, Any]:
    metadata = {
        "labels": {"pipeline/runid": RUN},
        "annotations": {"workflows.argoproj.io/node-name": node_name},
        "creationTimestamp": "2026-11-30T08:00:00Z",
    }
    return {"metadata": metadata, "status": status}


def test_pods_of_a_run_say_which_task_they_are_and_what_their_containers_wait_for(api: KubeApi) -> None:
    waiting = {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}}}
    init = {"name": "kfp-launcher", "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}
    api.add(
        "pods",
        "wf-system-container-impl-1",
        **pod(
            "wf.root(0).for-loop-2(0).iteration-item(1:1)(0).segment(0).executor(0)",
            phase="Pending",
            initContainerStatuses=[init],
            containerStatuses=[{"name": "main", "restartCount": 2, **waiting}],
            conditions=[{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}],
        ),
    )
    api.add("pods", "wf-system-container-driver-2", **pod("wf.root.plan-driver", phase="Succeeded"))
    api.add("pods", "of-another-run", metadata={"labels": {"pipeline/runid": "other"}}, status={"phase": "Running"})
    segment, driver = Cluster.open().pods(run=RUN)
    assert (segment.task, segment.is_driver, segment.phase) == ("segment", False, "Pending")
    assert (driver.task, driver.is_driver, driver.phase) == ("plan", True, "Succeeded")
    launcher, main = segment.containers
    assert (launcher.is_init, launcher.state, launcher.exit_code) == (True, "terminated", 0)
    assert (main.state, main.reason, main.message, main.restarts) == (
        "waiting",
        "ImagePullBackOff",
        "Back-off pulling image",
        2,
    )
    assert [(one.type, one.is_true, one.message) for one in segment.conditions] == [
        ("PodScheduled", False, "0/3 nodes")
    ]


def test_a_container_that_the_kernel_killed_is_out_of_memory(api: KubeApi) -> None:
    ended = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    api.add("pods", "p", **pod("wf.root.segment.executor", phase="Failed", containerStatuses=[{"state": ended}]))
    (found,) = Cluster.open().pods(names=["p", "gone"])
    assert found.containers[0].reason == "OOMKilled"
    assert found.containers[0].exit_code == 137


def test_events_of_a_pod_come_in_their_order_however_they_are_counted(api: KubeApi) -> None:
    def add(name: str, pod_name: str, **parts: Any) -> None:
        api.add("events", name, involvedObject={"kind": "Pod", "name": pod_name}, **parts)

    late = {"count": 9, "lastObservedTime": "2026-11-30T08:09:00Z"}
    add("b", "p", reason="FailedScheduling", message="0/1 nodes are available", type="Warning", series=late)
    add("a", "p", reason="Pulled", message="pulled", type="Normal", count=1, lastTimestamp="2026-11-30T08:01:00Z")
    add("c", "q", reason="Pulled", message="another pod")
    first, second = Cluster.open().events("p")
    assert (first.reason, first.count, first.is_warning) == ("Pulled", 1, False)
    assert (second.reason, second.count, second.is_warning) == ("FailedScheduling", 9, True)


def test_a_log_is_read_whole_or_from_its_end(api: KubeApi) -> None:
    api.add("pods", "p", status={"phase": "Running"})
    api.logs["p", "main"] = [f"2026-11-30T08:00:0{second}.000000000Z line {second}" for second in range(4)]
    cluster = Cluster.open()
    assert list(cluster.logs("p")) == ["line 0", "line 1", "line 2", "line 3"]
    assert list(cluster.logs("p", tail=2)) == ["line 2", "line 3"]


def test_a_log_that_is_followed_ends_with_its_container(api: KubeApi) -> None:
    api.add("pods", "p", status={"phase": "Running"})
    api.logs["p", "main"] = ["2026-11-30T08:00:00.000000000Z first"]
    lines = Cluster.open().logs("p", follow=True)
    assert next(lines) == "first"
    api.logs["p", "main"].append("2026-11-30T08:00:01.000000000Z second")
    assert next(lines) == "second"
    api.is_finished.add("p")
    assert list(lines) == []


def test_a_followed_log_that_is_quiet_for_long_goes_on_where_it_was(
    api: KubeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube, "QUIET_S", 0.1)
    api.add("pods", "p", status={"phase": "Running"})
    api.logs["p", "main"] = ["2026-11-30T08:00:00.000000001Z first", "2026-11-30T08:00:00.000000002Z second"]
    lines = Cluster.open().logs("p", follow=True, tail=1)
    assert next(lines) == "second"

    def more() -> None:
        time.sleep(0.4)
        api.logs["p", "main"].append("2026-11-30T08:00:00.000000003Z third")
        api.is_finished.add("p")

    thread = threading.Thread(target=more)
    thread.start()
    assert list(lines) == ["third"]
    thread.join()
    assert sum("/log" in path for _, path in api.seen) > 1


def test_the_log_of_a_container_that_has_not_started_says_so(api: KubeApi) -> None:
    api.add("pods", "p", status={"phase": "Pending"})
    with pytest.raises(ClusterError, match='400 about pods/log p: container "main" in pod "p" is waiting to start'):
        list(Cluster.open().logs("p"))
    with pytest.raises(ClusterError, match="no pod q in namespace team"):
        list(Cluster.open().logs("q"))


def test_a_read_that_rbac_forbids_names_the_rule_that_would_allow_it(api: KubeApi) -> None:
    api.rules = {("get", "secrets", "ratchet-tokens")}
    api.add("secrets", "ratchet-tokens", data={"HF_TOKEN": ""})
    cluster = Cluster.open()
    assert cluster.secret_keys("ratchet-tokens") == {"HF_TOKEN"}
    with pytest.raises(NotAllowedError) as refused:
        cluster.secret_keys("other")
    assert "may not get secrets other in namespace team; a rule of a Role allows it: " in str(refused.value)
    assert 'resources ["secrets"], verbs ["get"]' in str(refused.value)
    assert "system:serviceaccount:team:pipeline-runner" in str(refused.value)
    with pytest.raises(NotAllowedError, match=r'list nodes in the cluster; a rule of a ClusterRole .*verbs \["list"\]'):
        cluster.nodes()


def test_a_token_that_the_server_does_not_know_is_said(api: KubeApi) -> None:
    api.token = "another"
    with pytest.raises(ClusterError, match="does not accept this account's token: Unauthorized"):
        Cluster.open().nodes()


def test_a_server_that_is_not_there_is_one_error_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        api = KubeApi(url=f"http://127.0.0.1:{unused.getsockname()[1]}")
    use_kubeconfig(api.write_kubeconfig(tmp_path / "kubeconfig"), monkeypatch)
    began = time.monotonic()
    with pytest.raises(ClusterError, match=r"cannot be reached: .*refused"):
        Cluster.open().nodes()
    assert time.monotonic() - began < 2


def test_a_server_that_does_not_answer_is_given_up(api: KubeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube, "TIMEOUT_S", 1)
    api.delay_s = 3
    began = time.monotonic()
    with pytest.raises(ClusterError, match="cannot be reached: "):
        Cluster.open().nodes()
    assert time.monotonic() - began < 2.5


def test_without_a_pod_and_without_a_kubeconfig_there_is_no_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_kubeconfig(tmp_path / "none", monkeypatch)
    with pytest.raises(ClusterError, match=r"no pod with a service account, and there is no kubeconfig at .*none"):
        Cluster.open()


def test_a_kubeconfig_that_cannot_be_read_and_a_context_that_is_not_there_are_named(
    api: KubeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ClusterError, match=r"kubeconfig .*cannot be used: .*other"):
        Cluster.open(context="other")
    (tmp_path / "broken").write_text("contexts: [")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "broken"))
    with pytest.raises(ClusterError, match=r"kubeconfig .*broken cannot be used"):
        Cluster.open()


def test_the_namespace_is_the_one_given_then_the_pods_then_the_contexts(
    api: KubeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Cluster.open().namespace == "team"
    assert Cluster.open(namespace="mine").namespace == "mine"
    monkeypatch.setenv("RATCHET_POD_NAMESPACE", "pods")
    assert Cluster.open().namespace == "pods"
    monkeypatch.delenv("RATCHET_POD_NAMESPACE")
    use_kubeconfig(api.write_kubeconfig(tmp_path / "bare", namespace=None), monkeypatch)
    assert Cluster.open().namespace == "kubeflow"


def test_in_a_pod_the_service_account_is_used_over_tls_with_its_own_authority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = make_certificate(tmp_path)
    with kube_api(tls=(certificate, key)) as api:
        account = tmp_path / "account"
        account.mkdir()
        for name, text in {"token": api.token, "namespace": "team\n", "ca.crt": certificate.read_text()}.items():
            (account / name).write_text(text)
        monkeypatch.setattr(kube, "_ACCOUNT", account)
        host, _, port = api.url.removeprefix("https://").partition(":")
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
        monkeypatch.delenv("RATCHET_POD_NAMESPACE", raising=False)
        api.add_node("one")
        cluster = Cluster.open()
        assert cluster.is_in_pod()
        assert cluster.namespace == "team"
        assert [node.name for node in cluster.nodes()] == ["one"]


def test_a_certificate_of_an_unknown_authority_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = make_certificate(tmp_path)
    with kube_api(tls=(certificate, key)) as api:
        api.add_node("one")
        use_kubeconfig(api.write_kubeconfig(tmp_path / "trusting", ca=certificate), monkeypatch)
        assert len(Cluster.open().nodes()) == 1
        use_kubeconfig(api.write_kubeconfig(tmp_path / "without"), monkeypatch)
        with pytest.raises(ClusterError, match=r"cannot be reached: .*certificate"):
            Cluster.open().nodes()


def test_the_server_of_the_tests_deletes_pods_and_knows_no_other_paths(api: KubeApi) -> None:
    api.add("pods", "p", status={"phase": "Running"})
    cluster = Cluster.open()
    cluster._api.call_api(
        "/api/v1/namespaces/team/pods/p", "DELETE", auth_settings=["BearerToken"], _preload_content=False
    )
    assert cluster.pods() == []
    assert cluster._request("services", None, {}) is None
    with pytest.raises(ClusterError, match="has no services: is this a Kubernetes API"):
        cluster._list("services")
