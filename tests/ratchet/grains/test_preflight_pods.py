"""What preflight asks the Kubernetes API, against a server in this process that answers as the real one does."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ratchet.config import RunConfig
from ratchet.config.cluster import PlacementConfig
from ratchet.grains.checks.finding import Finding, PipelineFacts
from ratchet.grains.checks.places import tracking_findings
from ratchet.grains.checks.pods import Pods
from ratchet.grains.preflight import check
from tests.kube_api import KubeApi, kube_api
from tests.runs import tiny_config, write_problems

GPU = PlacementConfig(accelerator_count=1, cpu="4", memory="16Gi")
S3 = "s3://bucket/runs"
KEYS = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeApi]:
    """A cluster with one GPU node, the secrets and the config map that the manifests make."""
    with kube_api() as server:
        monkeypatch.setenv("KUBECONFIG", str(server.write_kubeconfig(tmp_path / "kubeconfig")))
        names = ("KUBERNETES_SERVICE_HOST", "RATCHET_POD_NAMESPACE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", *KEYS)
        for name in (*names, "AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE", "RATCHET_COMPILE_CACHE_CLAIM"):
            monkeypatch.delenv(name, raising=False)
        server.add_node("gpu-1", gpu="8", labels={"gpu": "h100"})
        server.add("secrets", "ratchet-object-store", data=KEYS)
        server.add("secrets", "ratchet-tokens", data={"RATCHET_REWARD_TOKEN": ""})
        server.add("configmaps", "ratchet-environment", data={"AWS_REGION": "eu-west-1"})
        yield server


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return tiny_config("model", write_problems(tmp_path_factory.mktemp("problems") / "problems.jsonl"))


def facts(**more: Any) -> PipelineFacts:
    return PipelineFacts(**{"asks_cluster": True, "placements": {"segment": GPU}} | more)


def asked(config: RunConfig, root: str = S3, **more: Any) -> list[Finding]:
    return list(Pods(config, root, facts(**more)).findings())


def said(findings: list[Finding], check_name: str) -> dict[str, str]:
    return {finding.level: finding.message for finding in findings if finding.check == check_name}


def test_a_cluster_with_everything_is_fine(api: KubeApi, config: RunConfig) -> None:
    findings = asked(config)
    assert {finding.level for finding in findings} == {"ok"}
    assert "a node can take device_map.segment" in said(findings, "nodes")["ok"]


def test_a_missing_secret_is_refused_with_the_command_that_makes_it(api: KubeApi, config: RunConfig) -> None:
    del api.objects["team/secrets"]["ratchet-object-store"]
    message = said(asked(config), "secrets")["error"]
    assert "no secret ratchet-object-store in namespace team" in message
    assert "kubectl -n team create secret generic ratchet-object-store --from-literal=AWS_ACCESS_KEY_ID=..." in message
    assert "--from-literal=AWS_SECRET_ACCESS_KEY=..." in message


def test_a_secret_without_a_key_that_the_run_needs_is_refused(api: KubeApi, config: RunConfig) -> None:
    api.add("secrets", "ratchet-object-store", data={"AWS_ACCESS_KEY_ID": "", "access-key": ""})
    assert "has no AWS_SECRET_ACCESS_KEY, which the run needs; it has AWS_ACCESS_KEY_ID, access-key" in said(
        asked(config), "secrets"
    )["error"]  # fmt: skip


def test_a_secret_that_nothing_needs_may_be_missing(api: KubeApi, config: RunConfig) -> None:
    api.objects["team/secrets"] = {}
    assert set(said(asked(config, root="/runs"), "secrets")) == {"ok"}


def test_in_a_pod_its_own_credentials_are_proof_enough(
    api: KubeApi, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.objects["team/secrets"] = {}
    assert "error" in said(asked(config, in_pod=True), "secrets")
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::1:role/training")
    assert "error" not in said(asked(config, in_pod=True), "secrets")
    # Elsewhere this machine's credentials say nothing about the pods'.
    assert "error" in said(asked(config), "secrets")


def test_a_token_that_no_pod_gets_is_refused(api: KubeApi, tmp_path: Path) -> None:
    values = {"reward_model.type": "api", "reward_model.url": "http://judge/score"}
    problems = write_problems(tmp_path / "problems.jsonl")
    own = tiny_config("model", problems, **values, **{"reward_model.auth_env": "MY_TOKEN"})
    assert "reward_model.auth_env is MY_TOKEN, which pods do not get" in said(asked(own), "secrets")["error"]
    theirs = tiny_config("model", problems, **values, **{"reward_model.auth_env": "RATCHET_REWARD_TOKEN"})
    assert "error" not in said(asked(theirs), "secrets")
    api.add("secrets", "ratchet-tokens", data={"HF_TOKEN": ""})
    assert "has no RATCHET_REWARD_TOKEN" in said(asked(theirs), "secrets")["error"]


def test_a_missing_config_map_is_an_error_where_storage_was_reached_by_its_settings(
    api: KubeApi, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.objects["team/configmaps"] = {}
    assert "no config map ratchet-environment in namespace team" in said(asked(config), "settings")["warning"]
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://seaweedfs:8333")
    assert "AWS_ENDPOINT_URL=http://seaweedfs:8333 among them" in said(asked(config), "settings")["error"]
    # A pod has just reached the bucket with what pods have.
    assert "warning" in said(asked(config, in_pod=True), "settings")


def test_a_missing_volume_claim_is_refused(api: KubeApi, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_COMPILE_CACHE_CLAIM", "ratchet-compile-cache")
    assert "no volume claim ratchet-compile-cache in namespace team" in said(asked(config), "claim")["error"]
    api.add("persistentvolumeclaims", "ratchet-compile-cache", status={"phase": "Pending"})
    assert "ok" in said(asked(config), "claim")


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ({"accelerator_type": "amd.com/gpu"}, "expected a node with amd.com/gpu, got none; the cluster has nvidia.com"),
        ({"accelerator_count": 16}, "the pod would need 16 nvidia.com/gpu (it has 8)"),
        ({"node_selector": {"gpu": "a100"}}, "expected a node with gpu=a100, got none: gpu is h100 on 1 node"),
        ({"memory": "1Ti"}, "1Ti memory (it has 32Gi); lower device_map.segment.memory"),
    ],
)  # fmt: skip
def test_what_no_node_has_is_refused(api: KubeApi, config: RunConfig, placement: dict[str, Any], message: str) -> None:
    asked_for = GPU.model_copy(update=placement)
    assert message in said(asked(config, placements={"segment": asked_for}), "nodes")["error"]


def test_stages_that_ask_for_the_same_are_said_once(api: KubeApi, config: RunConfig) -> None:
    amd = GPU.model_copy(update={"accelerator_type": "amd.com/gpu"})
    placements = {"rollout": amd, "scores": amd.model_copy(update={"image": "other:1"}), "policy_update": GPU}
    findings = [one for one in asked(config, grain="stage", placements=placements) if one.check == "nodes"]
    assert [one.level for one in findings] == ["error", "ok"]
    assert "the same holds for device_map.scores" in findings[0].message


def test_where_nodes_come_on_demand_a_missing_one_is_a_warning(api: KubeApi, config: RunConfig) -> None:
    amd = {"segment": GPU.model_copy(update={"accelerator_type": "amd.com/gpu"})}
    api.add("configmaps", "ratchet-environment", data={"RATCHET_NODES_ON_DEMAND": "true"})
    assert "this cluster adds nodes on demand" in said(asked(config, placements=amd), "nodes")["warning"]
    api.add("configmaps", "ratchet-environment", data={})
    assert "error" in said(asked(config, placements=amd), "nodes")
    api.add_node("cpu-1", labels={"karpenter.sh/nodepool": "default"})
    assert "warning" in said(asked(config, placements=amd), "nodes")


def test_a_taint_is_refused_but_for_the_accelerators_own_which_some_clusters_tolerate_by_themselves(
    api: KubeApi, config: RunConfig
) -> None:
    api.objects["/nodes"] = {}
    api.add_node("gpu-1", gpu="8", taints=[{"key": "team", "value": "other", "effect": "NoSchedule"}])
    assert "add to device_map.segment.tolerations {key: team, value: other, effect: NoSchedule}" in said(
        asked(config), "nodes"
    )["error"]  # fmt: skip
    api.objects["/nodes"] = {}
    api.add_node("gpu-1", gpu="8", taints=[{"key": "nvidia.com/gpu", "effect": "NoSchedule"}])
    assert "some clusters add it" in said(asked(config), "nodes")["warning"]


def test_what_may_not_be_read_is_unknown_and_names_the_missing_rule(api: KubeApi, config: RunConfig) -> None:
    api.rules = set()
    findings = asked(config, claim="ratchet-compile-cache")
    assert {finding.level for finding in findings} == {"unknown"}
    assert [finding.check for finding in findings] == ["settings", "secrets", "claim", "nodes"]
    assert 'resources ["secrets"], verbs ["get"]' in said(findings, "secrets")["unknown"]
    assert 'a rule of a ClusterRole allows it: apiGroups [""], resources ["nodes"], verbs ["list"]' in said(
        findings, "nodes"
    )["unknown"]  # fmt: skip


def test_the_rules_of_the_manifests_are_enough(api: KubeApi, config: RunConfig) -> None:
    api.rules = {
        ("get", "secrets", "ratchet-object-store"),
        ("get", "secrets", "ratchet-tokens"),
        ("get", "configmaps", "ratchet-environment"),
        ("get", "persistentvolumeclaims", "ratchet-compile-cache"),
        ("list", "nodes"),
    }
    api.add("persistentvolumeclaims", "ratchet-compile-cache")
    assert {finding.level for finding in asked(config, claim="ratchet-compile-cache")} == {"ok"}


def test_an_api_that_does_not_answer_is_unknown_once(
    api: KubeApi, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = KubeApi(url="http://127.0.0.1:1")
    monkeypatch.setenv("KUBECONFIG", str(gone.write_kubeconfig(tmp_path / "gone")))
    findings = asked(config)
    assert [(finding.check, finding.level) for finding in findings] == [("cluster", "unknown")]
    assert "cannot be reached" in findings[0].message


def test_settings_of_pods_tell_whether_they_know_mlflow(api: KubeApi, config: RunConfig) -> None:
    tracked = config.model_copy(update={"trainer": config.trainer.model_copy(update={"logger": ("mlflow",)})})
    outside = facts()
    pods = Pods(tracked, S3, outside)
    list(pods.findings())
    (finding,) = tracking_findings(tracked, outside, pods.settings)
    assert (finding.level, "is not set for pods" in finding.message) == ("warning", True)
    api.add("configmaps", "ratchet-environment", data={"MLFLOW_TRACKING_URI": "http://mlflow:5000"})
    list(pods.findings())
    (finding,) = tracking_findings(tracked, outside, pods.settings)
    assert (finding.level, "http://mlflow:5000" in finding.message) == ("unknown", True)
    (finding,) = tracking_findings(tracked, outside, None)
    assert "their settings were not read" in finding.message


def test_the_names_are_those_that_pipelines_refer_to() -> None:
    from pipelines.installation import CONFIG_MAP, SECRETS
    from ratchet.grains.checks.pods import KEYS as NEEDED
    from ratchet.grains.checks.pods import OBJECT_STORE, REWARD_TOKEN, TOKENS

    known = PipelineFacts()
    assert set(known.secrets) == set(SECRETS)
    assert known.config_map == CONFIG_MAP
    assert set(NEEDED) <= set(SECRETS[OBJECT_STORE])
    assert REWARD_TOKEN in SECRETS[TOKENS]


def test_a_whole_preflight_asks_the_cluster_too(
    api: KubeApi, tmp_path: Path, tiny_model: Path, config: RunConfig
) -> None:
    problems = write_problems(tmp_path / "problems.jsonl")
    whole = tiny_config(tiny_model, problems, **{"trainer.device": "auto"})
    amd = replace(facts(), placements={"segment": GPU.model_copy(update={"accelerator_type": "amd.com/gpu"})})
    findings = check(whole, root=str(tmp_path / "runs"), run_id="run", facts=amd)
    assert [finding.check for finding in findings if finding.level == "error"] == ["nodes"]
