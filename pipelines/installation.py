"""What every task of a compiled pipeline is given: secrets and settings by reference, memory, limits, no cache.

The names are the manifests' (`manifests/base`). What differs from one installation to the next is read from the
environment when pipelines are compiled (docs/operations.md). Trap: a pod waits for ever for a secret or a volume that
is not there, and no API says why. References are therefore optional, so that preflight can run and say what is missing;
a volume cannot be, and is left out unless it is named.
"""

import os
from collections.abc import Mapping
from typing import Any

from kfp import dsl, kubernetes

SECRETS: dict[str, tuple[str, ...]] = {
    "ratchet-object-store": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    "ratchet-tokens": (
        "HF_TOKEN",
        "MLFLOW_TRACKING_USERNAME",
        "MLFLOW_TRACKING_PASSWORD",
        "MLFLOW_TRACKING_TOKEN",
        "RATCHET_REWARD_TOKEN",
    ),
}
"""Secret -> its keys; `variable_of` says which variable each becomes."""

CONFIG_MAP = "ratchet-environment"
ENVIRONMENT = (
    "AWS_ENDPOINT_URL",
    "AWS_REGION",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "MLFLOW_TRACKING_URI",
    "OMP_NUM_THREADS",
    "RATCHET_LOG_LEVEL",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "VLLM_CACHE_ROOT",
)
"""Keys of the config map."""

POD_FIELDS = {"RATCHET_POD_NAME": "metadata.name", "RATCHET_POD_NAMESPACE": "metadata.namespace"}
COMPILE_CACHE = "/var/cache/ratchet"
SHARED_MEMORY = "16Gi"
"""Most that a pod may write to /dev/shm, which counts as its memory."""

PLACEMENT: dict[str, type] = {
    "image": str,
    "accelerator_type": str,
    "accelerator_count": str,
    "cpu": str,
    "memory": str,
    "node_selector": dict,
    "tolerations": list,
}
"""What a pod asks for, as run-time parameters. KFP takes amounts as text."""


def compile_cache_claim() -> str:
    """Return the volume claim that pods with models mount, "" for none."""
    return os.environ.get("RATCHET_COMPILE_CACHE_CLAIM", "")


def variable_of(key: str) -> str:
    """Return the variable that a key of a secret or of the config map becomes.

    MLflow's have a prefix, which a pod's program takes off: KFP's MLflow plugin may set the same ones, and Kubernetes
    refuses a pod that has one of them twice.
    """
    return f"RATCHET_{key}" if key.startswith("MLFLOW_") else key


def settle(task: dsl.PipelineTask, *, hours: int) -> dsl.PipelineTask:
    """Give a task what every task has; after `hours` its pod is ended. Returns the task."""
    # KFP's cache knows names and parameters, not what is in the run.
    task.set_caching_options(False)
    for secret, keys in SECRETS.items():
        kubernetes.use_secret_as_env(task, secret, {key: variable_of(key) for key in keys}, optional=True)
    kubernetes.use_config_map_as_env(task, CONFIG_MAP, {key: variable_of(key) for key in ENVIRONMENT}, optional=True)
    for variable, field in POD_FIELDS.items():
        kubernetes.use_field_path_as_env(task, variable, field)
    kubernetes.set_timeout(task, hours * 3600)
    if not os.environ.get("RATCHET_IMAGE"):
        # Of the project's own images it is known that they do; namespaces that enforce "restricted" want it said.
        kubernetes.set_security_context(task, run_as_non_root=True)
    policy = os.environ.get("RATCHET_IMAGE_PULL_POLICY")
    if policy:
        kubernetes.set_image_pull_policy(task, policy)
    queue = os.environ.get("RATCHET_QUEUE")
    if queue:
        kubernetes.add_pod_label(task, "kueue.x-k8s.io/queue-name", queue)
    return task


def place(task: dsl.PipelineTask, given: Mapping[str, Any], stage: str, *, hours: int) -> dsl.PipelineTask:
    """Give a task the resources that `given` holds as `<stage>_image`, `<stage>_cpu`, ... Returns the task.

    The pod has shared memory, and the compile cache's volume where RATCHET_COMPILE_CACHE_CLAIM names one.
    """
    settle(task, hours=hours)
    image, kind, count, cpu, memory, node_selector, tolerations = (given[f"{stage}_{name}"] for name in PLACEMENT)
    task.set_container_image(image)
    task.set_accelerator_type(kind).set_accelerator_limit(count)
    task.set_cpu_request(cpu).set_memory_request(memory).set_memory_limit(memory)
    kubernetes.add_node_selector_json(task, node_selector)
    kubernetes.add_toleration_json(task, tolerations)
    kubernetes.empty_dir_mount(task, "shared-memory", "/dev/shm", medium="Memory", size_limit=SHARED_MEMORY)
    claim = compile_cache_claim()
    if claim:
        kubernetes.mount_pvc(task, pvc_name=claim, mount_path=COMPILE_CACHE)
    return task
