"""Why a pod waits: real texts, and advice that names what an operator can change."""

import re
from pathlib import Path

import pytest

from ratchet.cluster.records import ContainerState, Event, Node, Pod
from ratchet.cluster.waiting import component, place_of, why
from tests.ratchet.cluster.pods import PREEMPTION, RESOLVE, RPC, UNSCHEDULABLE, pending, told, waiting


@pytest.mark.parametrize(
    ("message", "kind", "advice"),
    [
        ("4 Insufficient nvidia.com/gpu.", "accelerator", "correct device_map.segment.accelerator_type"),
        (
            "1 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }, 3 Insufficient nvidia.com/gpu.",
            "accelerator",
            "wait until a nvidia.com/gpu is free",
        ),
        ("2 Insufficient memory, 4 Insufficient cpu.", "capacity", "wait until cpu and memory is free"),
        ("4 Insufficient ephemeral-storage.", "capacity", "ask for less in device_map.segment"),
        ("4 Too many pods.", "capacity", "wait, or add nodes"),
        (
            "1 node(s) had untolerated taint(s), 3 node(s) didn't match Pod's node affinity/selector.",
            "node_selector",
            "correct device_map.segment.node_selector",
        ),
        ("4 node(s) didn't match node selector.", "node_selector", "kubectl get nodes --show-labels"),
        (
            "4 node(s) had untolerated taint {nvidia.com/gpu: present}.",
            "taint",
            "(nvidia.com/gpu: present) to device_map.segment.tolerations",
        ),
        ("4 node(s) had untolerated taint(s).", "taint", "kubectl describe nodes lists them"),
        ("4 node(s) had taint {gpu: }, that the pod didn't tolerate.", "taint", "(gpu)"),
        ("4 node(s) had untolerated taint {node.kubernetes.io/not-ready: }.", "no_node", "kubectl describe nodes"),
        ("4 node(s) were unschedulable.", "no_node", "uncordon"),
        ('persistentvolumeclaim "ratchet-compile-cache" not found.', "volume", "create ratchet-compile-cache"),
        ("pod has unbound immediate PersistentVolumeClaims.", "volume", "kubectl -n team get pvc"),
        ("4 node(s) had volume node affinity conflict.", "volume", "WaitForFirstConsumer"),
        ("4 node(s) didn't find available persistent volumes to bind.", "volume", "storage class"),
    ],
)
def test_what_the_scheduler_lacks_is_named(message: str, kind: str, advice: str) -> None:
    cause = told(pending("Unschedulable", f"{UNSCHEDULABLE}{message}{PREEMPTION}"))
    assert (cause.kind, cause.has_ended) == (kind, False)
    assert advice in cause.advice
    assert "preemption" not in cause.message
    assert cause.message.startswith("Unschedulable: 0/4 nodes are available: ")


def test_a_cluster_without_nodes_takes_no_pod() -> None:
    assert told(pending("Unschedulable", "no nodes available to schedule pods")).kind == "no_node"


GPU_NODE = Node(
    "gpu-1",
    taints=({"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"},),
    allocatable={"cpu": "16", "nvidia.com/gpu": "8"},
)
LACKING_GPU = f"{UNSCHEDULABLE}1 node(s) had untolerated taint(s), 3 Insufficient nvidia.com/gpu."


def test_with_the_nodes_known_no_free_gpu_and_no_gpu_at_all_differ() -> None:
    busy = told(pending("Unschedulable", LACKING_GPU), nodes=(GPU_NODE, Node("cpu-1", allocatable={"cpu": "8"})))
    assert "the cluster has 8 nvidia.com/gpu, at most 8 on a node: wait until enough are free" in busy.advice
    assert "device_map.segment.tolerations must name the taint of its nodes, nvidia.com/gpu=present:NoSchedule" in (
        busy.advice
    )
    none = told(
        pending("Unschedulable", LACKING_GPU), nodes=(Node("amd-1", allocatable={"cpu": "8", "amd.com/gpu": "4"}),)
    )
    assert none.advice.startswith("no node has nvidia.com/gpu (the cluster has amd.com/gpu): add one, or correct")
    down = told(
        pending("Unschedulable", LACKING_GPU), nodes=(Node("g", allocatable={"nvidia.com/gpu": "1"}, is_ready=False),)
    )
    assert down.advice.startswith("no node has nvidia.com/gpu")


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        ('secret "nope" not found', "kubectl -n team create secret generic nope"),
        ('configmap "ratchet-environment" not found', "create ratchet-environment: kubectl apply --kustomize"),
        (
            "couldn't find key AWS_ACCESS_KEY_ID in Secret team/ratchet-object-store",
            "kubectl -n team edit secret ratchet-object-store",
        ),
        ("couldn't find key AWS_REGION in ConfigMap team/ratchet-environment", "edit configmap ratchet-environment"),
        (
            'container has runAsNonRoot and image will run as root (pod: "p_team(uid)", container: main)',
            "device_map.segment.image must name a numeric user",
        ),
        (
            "container has runAsNonRoot and image has non-numeric user (ratchet), cannot verify user is non-root",
            "numeric user",
        ),
        ("something new", "kubectl -n team describe pod"),
    ],
)
def test_a_setting_that_is_missing_is_named_with_the_command_that_makes_it(message: str, advice: str) -> None:
    cause = told(waiting("CreateContainerConfigError", message))
    assert (cause.kind, cause.has_ended) == ("settings", False)
    assert advice in cause.advice
    assert message in cause.message


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        (f"{RPC}{RESOLVE}reg.example/team/ratchet-base:1: not found", "push the image (make images)"),
        ("manifest for reg.example/ratchet-base:1 not found: manifest unknown", "push the image"),
        (
            f"{RPC}{RESOLVE}pull access denied, repository does not exist or may require authorization: server "
            "message: insufficient_scope: authorization failed",
            "pull secret",
        ),
        (
            f"{RPC}{RESOLVE}unexpected status from HEAD request to https://reg.example/v2/x/manifests/1: 401 "
            "Unauthorized",
            "imagePullSecrets of manifests/base/service-account.yaml",
        ),
        (
            f'{RPC}{RESOLVE}failed to do request: Head "https://reg.example/v2/": dial tcp: lookup reg.example on '
            "10.96.0.10:53: no such host",
            "does not reach the registry: correct its name (device_map.segment.image)",
        ),
        (
            f'{RPC}{RESOLVE}failed to do request: Head "https://reg.example/v2/": tls: failed to verify certificate: '
            "x509: certificate signed by unknown authority",
            "certificates",
        ),
        (f"{RPC}no match for platform in manifest: not found", "another kind of CPU"),
        (
            "rpc error: code = Unknown desc = failed to pull and unpack image: httpReadSeeker: failed open: unexpected "
            "status code 429 Too Many Requests - Server message: toomanyrequests: You have reached your pull rate "
            "limit",
            "limits pulls",
        ),
        (
            "rpc error: code = DeadlineExceeded desc = failed to pull image: context deadline exceeded",
            "kubectl -n team",
        ),
    ],
)
def test_an_image_that_cannot_be_pulled_says_why(message: str, advice: str) -> None:
    for reason in ("ErrImagePull", "ImagePullBackOff"):
        cause = told(waiting(reason, message))
        assert (cause.kind, cause.has_ended) == ("image", False)
        assert advice in cause.advice


def test_a_back_off_that_says_nothing_is_explained_by_the_event_before() -> None:
    pulled = Event("Failed", f'Failed to pull image "reg.example/team/ratchet-base:1": {RPC}{RESOLVE}not found')
    back_off = Event("BackOff", 'Back-off pulling image "reg.example/team/ratchet-base:1"')
    pod = waiting("ImagePullBackOff", 'Back-off pulling image "reg.example/team/ratchet-base:1"')
    assert "push the image" in told(pod, pulled, back_off).advice
    assert "may the node pull it?" in told(pod).advice


def test_a_name_that_is_none_and_an_image_that_is_not_loaded_are_image_troubles() -> None:
    invalid = 'Failed to apply default image tag "a b": couldn\'t parse image name "a b": invalid reference format'
    assert "correct device_map.segment.image" in told(waiting("InvalidImageName", invalid)).advice
    never = 'Container image "ratchet-segment:dev" is not present with pull policy of Never'
    assert "RATCHET_IMAGE_PULL_POLICY" in told(waiting("ErrImageNeverPull", never)).advice


def test_a_pod_that_is_simply_starting_is_nothing_to_act_on() -> None:
    scheduled = Event("Scheduled", "Successfully assigned team/p-1 to n-1")
    pulling = Event("Pulling", 'Pulling image "reg.example/team/ratchet-segment:1"')
    mount = Event("FailedMount", "MountVolume.SetUp failed for volume", is_warning=True)
    assert told(waiting("ContainerCreating"), scheduled, pulling).kind == "starting"
    assert told(waiting("PodInitializing"), mount, pulling).kind == "starting"
    assert told(Pod("p-1", "Pending")).message == "the pod has no node yet"


def test_a_node_that_is_being_added_is_waited_for_and_one_that_is_not_is_told() -> None:
    lacking = pending("Unschedulable", f"{UNSCHEDULABLE}4 Insufficient nvidia.com/gpu.")
    added = Event("TriggeredScaleUp", "pod triggered scale-up: [{gpu-pool 1->2 (max: 2)}]")
    refused = Event("NotTriggerScaleUp", "pod didn't trigger scale-up: 2 max node group size reached")
    assert told(lacking, refused, added).kind == "scaling_up"
    assert "nothing" in told(lacking, added).advice
    assert told(lacking, added, refused).kind == "accelerator"


def test_a_running_pod_and_one_that_ended_well_wait_for_nothing() -> None:
    running = ContainerState("main", "running")
    assert why(Pod("p-1", "Running", containers=(running,))) is None
    assert why(Pod("p-1", "Succeeded")) is None
    deleted = Pod("p-1", "Running", containers=(running,), is_deleted=True)
    assert told(deleted).kind == "deleted"


def test_advice_names_the_section_that_the_tasks_pods_run_by() -> None:
    assert [place_of(name) for name in ("rollout", "checkpoint-export", "critic-update-2", "step", "plan")] == [
        "device_map.rollout",
        "device_map.evaluate",
        "device_map.policy_update",
        "device_map.segment",
        "",
    ]
    assert component("policy-update-12") == "policy_update"
    cause = told(pending("Unschedulable", f"{UNSCHEDULABLE}4 Insufficient cpu.", task="preflight"))
    assert "ask for less in pipelines/bodies.py" in cause.advice
    assert "RATCHET_IMAGE_REGISTRY" in told(waiting("ErrImagePull", f"{RPC}{RESOLVE}not found", task="plan")).advice


def test_every_file_that_advice_names_is_there() -> None:
    root = Path(__file__).resolve().parents[3]
    sources = [root / "ratchet" / "cluster" / name for name in ("messages.py", "scheduling.py")]
    named = {
        path for source in sources for path in re.findall(r"(?:manifests|pipelines)/[\w./-]*\w", source.read_text())
    }
    assert len(named) >= 6
    assert [path for path in sorted(named) if not (root / path).exists()] == []
