"""The compiled pipelines, read as a server reads them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.protobuf import json_format
from kfp.kubernetes import kubernetes_executor_config_pb2
from kfp.pipeline_spec import pipeline_spec_pb2

from pipelines import compile as compiling
from pipelines import installation
from ratchet.config import parse_text

RESOURCES = {
    "accelerator_type",
    "accelerator_count",
    "base_image",
    "cpu_request",
    "memory_request",
    "memory_limit",
}
"""What a task's inputs hold of its pod's resources."""
GOLDEN = sorted(compiling.GOLDEN, key=str)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def specification(path: Path) -> dict[str, Any]:
    """Return the pipeline's IR; a golden file may hold a second document with platform settings."""
    return next(iter(yaml.safe_load_all(path.read_text())))


def all_tasks(ir: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return every task of every DAG under its place."""
    dags = {"root": ir["root"]["dag"]} | {
        name: component["dag"] for name, component in ir["components"].items() if "dag" in component
    }
    return {f"{dag}/{name}": task for dag, body in dags.items() for name, task in body["tasks"].items()}


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_the_golden_file_is_what_the_pipeline_compiles_to(path: Path) -> None:
    assert path.read_text() == compiling.compiled(compiling.GOLDEN[path])


def test_every_golden_file_on_disk_belongs_to_a_pipeline() -> None:
    assert sorted(compiling.FOLDER.rglob("*.yaml"), key=str) == GOLDEN


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_a_strict_parse_accepts_every_field(path: Path) -> None:
    spec = json_format.ParseDict(specification(path), pipeline_spec_pb2.PipelineSpec())
    assert spec.schema_version


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_caching_is_off_on_every_task(path: Path) -> None:
    tasks = all_tasks(specification(path))
    cached = [place for place, task in tasks.items() if task.get("cachingOptions", {}).get("enableCache")]
    # The node of a loop or a condition has no caching options; every task that runs something states them.
    unstated = [place for place, task in tasks.items() if "cachingOptions" not in task]
    groups = [place for place, task in tasks.items() if "parameterIterator" in task or "condition-" in place[-12:]]
    assert cached == []
    assert unstated == groups


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_every_task_is_given_every_argument(path: Path) -> None:
    ir = specification(path)
    for place, task in all_tasks(ir).items():
        declared = ir["components"][task["componentRef"]["name"]].get("inputDefinitions", {}).get("parameters", {})
        given = task.get("inputs", {}).get("parameters", {})
        items = {task["parameterIterator"]["itemInput"]} if "parameterIterator" in task else set()
        # What a pod asks for at run time is given beside the arguments.
        assert set(declared) - items <= set(given), place
        asked = set(given) - set(declared)
        assert all(name.startswith("pipelinechannel--") or name in RESOURCES for name in asked), place


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_every_reference_resolves(path: Path) -> None:
    ir = specification(path)
    executors = ir["deploymentSpec"]["executors"]
    for component in ir["components"].values():
        assert component.get("executorLabel") in executors or "dag" in component
    for dag in [ir["root"]["dag"], *(c["dag"] for c in ir["components"].values() if "dag" in c)]:
        for task in dag["tasks"].values():
            assert task["componentRef"]["name"] in ir["components"]
            assert set(task.get("dependentTasks", [])) <= set(dag["tasks"])


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_loops_are_sequential(path: Path) -> None:
    loops = [task for task in all_tasks(specification(path)).values() if "parameterIterator" in task]
    assert len(loops) == 1
    assert loops[0]["iteratorPolicy"]["parallelismLimit"] == 1


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_no_outer_task_output_but_the_list_of_items_enters_a_loop(path: Path) -> None:
    """kfp.local would replace it by the loop's item."""
    for task in all_tasks(specification(path)).values():
        if "parameterIterator" in task:
            items = task["parameterIterator"]["items"]["inputParameter"]
            given = task["inputs"]["parameters"]
            outputs = [name for name, value in given.items() if "taskOutputParameter" in value]
            assert outputs == [items]


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_the_root_component_fits_one_argument_of_the_driver(path: Path) -> None:
    assert len(json.dumps(specification(path)["root"])) < 128 * 1024


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_parameters_are_described_for_the_form(path: Path) -> None:
    ir = specification(path)
    parameters = ir["root"]["inputDefinitions"]["parameters"]
    assert len(parameters) <= 12
    assert all(parameter.get("description") for parameter in parameters.values())


def settings(path: Path) -> dict[str, dict[str, Any]]:
    """Return executor -> what Kubernetes is told of its pods."""
    _, platform = yaml.safe_load_all(path.read_text())
    found: dict[str, dict[str, Any]] = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    return found


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_a_strict_parse_accepts_every_setting_of_pods(path: Path) -> None:
    _, platform = yaml.safe_load_all(path.read_text())
    json_format.ParseDict(platform, pipeline_spec_pb2.PlatformSpec())
    executors = settings(path)
    assert set(executors) == set(specification(path)["deploymentSpec"]["executors"])
    for one in executors.values():
        json_format.ParseDict(one, kubernetes_executor_config_pb2.KubernetesExecutorConfig())


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_every_pod_gets_secrets_and_settings_by_reference_and_a_limit_of_time(path: Path) -> None:
    for name, one in settings(path).items():
        secrets = {secret["secretName"]: secret for secret in one["secretAsEnv"]}
        assert set(secrets) == set(installation.SECRETS), name
        for secret, keys in installation.SECRETS.items():
            assert tuple(key["secretKey"] for key in secrets[secret]["keyToEnv"]) == keys
            # A pod whose secret is missing would wait for ever; preflight says so instead.
            assert secrets[secret]["optional"] is True
        (environment,) = one["configMapAsEnv"]
        assert environment["configMapName"] == installation.CONFIG_MAP
        assert environment["optional"] is True
        assert int(one["activeDeadlineSeconds"]) >= 3600
        # KFP's MLflow plugin and its proxy settings put these into a pod; twice in one pod, Kubernetes refuses it.
        names = [key["envVar"] for given in (*one["secretAsEnv"], environment) for key in given["keyToEnv"]]
        assert not [name for name in names if name.startswith("MLFLOW_") or name.lower().endswith("_proxy")]
        assert len(names) == len(set(names))
        assert one["securityContext"] == {"runAsNonRoot": True}
        assert {field["name"] for field in one["fieldPathAsEnv"]} == set(installation.POD_FIELDS)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_pods_that_may_have_accelerators_take_their_resources_at_run_time(path: Path) -> None:
    executors = specification(path)["deploymentSpec"]["executors"]
    platform = settings(path)
    light = {"preflight", "preprocess", "plan", "reward", "advantage", "promote"}
    for name, executor in executors.items():
        container, pod = executor["container"], platform[name]
        component = re.sub(r"^exec-|-\d+$", "", name).replace("-", "_")
        if component in light:
            assert "accelerator" not in container["resources"]
            assert container["image"].partition(":")[0].endswith("ratchet-base")
            continue
        resources = container["resources"]
        asked = [
            container["image"],
            resources["accelerator"]["resourceType"],
            resources["accelerator"]["resourceCount"],
        ]
        asked += [resources[key] for key in ("resourceCpuRequest", "resourceMemoryRequest", "resourceMemoryLimit")]
        assert all(value.startswith("{{$.inputs.parameters[") for value in asked), name
        assert pod["nodeSelector"]["nodeSelectorJson"]["componentInputParameter"].endswith("_node_selector")
        assert pod["tolerations"][0]["tolerationJson"]["componentInputParameter"].endswith("_tolerations")
        (memory,) = pod["emptyDirMounts"]
        assert (memory["mountPath"], memory["medium"]) == ("/dev/shm", "Memory")


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_nothing_runs_but_preflight_where_there_is_no_work(path: Path) -> None:
    tasks = specification(path)["root"]["dag"]["tasks"]
    (condition,) = [task for name, task in tasks.items() if name != "preflight"]
    assert condition["triggerPolicy"]["condition"].endswith("== 'train'")


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_every_parameter_has_a_default_that_runs(path: Path) -> None:
    parameters = specification(path)["root"]["inputDefinitions"]["parameters"]
    assert all("defaultValue" in one for one in parameters.values())
    config = parse_text(parameters["config"]["defaultValue"], [], source=str(path))
    assert config.actor_rollout_ref.model.path
    assert config.data.train_files
    assert config.data.val_files
    assert config.critic_is_needed == path.parent.name.startswith("ppo")
    assert parameters["root"]["defaultValue"].startswith("s3://")


def test_an_installation_says_what_compiling_bakes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Image, queue and volume come from the environment of a compilation."""
    monkeypatch.setenv("RATCHET_QUEUE", "training")
    monkeypatch.setenv("RATCHET_COMPILE_CACHE_CLAIM", "ratchet-compile-cache")
    monkeypatch.setenv("RATCHET_IMAGE_PULL_POLICY", "IfNotPresent")
    program = "from pipelines import compile as c; print(c.compiled(c.GOLDEN[c.FOLDER / 'grpo' / 'pipeline.yaml']))"
    environment = {**os.environ, "RATCHET_IMAGE_REGISTRY": "registry.example.com/team"}
    text = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], check=True, capture_output=True, text=True, env=environment
    ).stdout
    _, platform = yaml.safe_load_all(text)
    executors = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    queue = {"kueue.x-k8s.io/queue-name": "training"}
    assert all(one["podMetadata"]["labels"] == queue for one in executors.values())
    assert all(one["imagePullPolicy"] == "IfNotPresent" for one in executors.values())
    assert executors["exec-segment"]["pvcMount"][0]["mountPath"] == "/var/cache/ratchet"
    assert "pvcMount" not in executors["exec-preflight"]
    assert "registry.example.com/team/ratchet-segment:" in text
    assert "localhost/" not in text
    # Nobody knows as whom an image of somebody else runs.
    other = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "RATCHET_IMAGE": "team/all:3"},
    ).stdout
    assert "runAsNonRoot" not in other
    assert "ratchet-base" not in other
