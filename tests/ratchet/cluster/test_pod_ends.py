"""What ended a pod, and what is told of pods that were never made or hang between node and container."""

import pytest

from ratchet.cluster.records import Condition, Event, Pod
from ratchet.cluster.waiting import why_of
from tests.ratchet.cluster.pods import RUNC, UNSCHEDULABLE, ended, failed, pending, told, waiting


def test_a_queue_that_has_not_admitted_the_pod_is_waited_for() -> None:
    cause = told(pending("SchedulingGated", "Scheduling is blocked due to non-empty scheduling gates"))
    assert cause.kind == "admission"
    assert "kubectl -n team get localqueues" in cause.advice


@pytest.mark.parametrize(
    ("message", "kind", "advice"),
    [
        (
            'pods "wf-1" is forbidden: exceeded quota: default-t7sw8, requested: limits.cpu=700m, used: '
            "limits.cpu=1400m, limited: limits.cpu=2",
            "quota",
            "kubectl -n team edit resourcequota default-t7sw8",
        ),
        (
            'pods "wf-1" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=1, used: '
            "requests.nvidia.com/gpu=4, limited: requests.nvidia.com/gpu=4",
            "quota",
            "ask for less in device_map.segment",
        ),
        (
            'pods "wf-1" is forbidden: failed quota: q1: must specify limits.cpu,limits.memory,requests.cpu',
            "quota",
            "admits only pods that state limits.cpu,limits.memory,requests.cpu: give the namespace a LimitRange",
        ),
        (
            'pods "wf-1" is forbidden: maximum memory usage per Container is 4Gi, but limit is 8Gi',
            "quota",
            "kubectl -n team get limitrange",
        ),
        (
            'pods "wf-1" is forbidden: violates PodSecurity "restricted:latest": allowPrivilegeEscalation != false',
            "forbidden",
            "Pod Security Standard",
        ),
        (
            'pods "wf-1" is forbidden: error looking up service account team/ratchet-runner: serviceaccount '
            '"ratchet-runner" not found',
            "forbidden",
            "makes the account ratchet-runner",
        ),
    ],
)
def test_a_pod_that_was_never_made_is_explained_by_argos_message(message: str, kind: str, advice: str) -> None:
    cause = why_of(message, "segment", namespace="team")
    assert cause is not None
    assert cause.kind == kind
    assert advice in cause.advice


@pytest.mark.parametrize(
    ("event", "kind", "advice"),
    [
        (
            Event("FailedMount", 'MountVolume.SetUp failed for volume "cache" : secret "x" not found', is_warning=True),
            "settings",
            "create secret generic x",
        ),
        (
            Event(
                "FailedMount",
                "Unable to attach or mount volumes: unmounted volumes=[cache], unattached volumes=[], failed to "
                "process volumes=[]: timed out waiting for the condition",
                is_warning=True,
            ),
            "volume",
            "storage driver",
        ),
        (
            Event(
                "FailedAttachVolume",
                'Multi-Attach error for volume "pvc-1" Volume is already used by pod(s) wf-0',
                is_warning=True,
            ),
            "volume",
            "ReadWriteMany",
        ),
        (
            Event(
                "FailedCreatePodSandBox",
                "Failed to create pod sandbox: rpc error: code = Unknown desc = failed to setup network for sandbox",
                is_warning=True,
            ),
            "sandbox",
            "kubectl cordon",
        ),
    ],
)
def test_a_container_that_is_being_created_for_long_is_explained_by_events(
    event: Event, kind: str, advice: str
) -> None:
    cause = told(waiting("ContainerCreating"), Event("Scheduled", "Successfully assigned team/p-1 to n-1"), event)
    assert cause.kind == kind
    assert advice in cause.advice


@pytest.mark.parametrize(
    ("pod", "kind", "advice"),
    [
        (ended("OOMKilled", 137), "out_of_memory", "raise device_map.segment.memory"),
        # Seen on a server: the launcher's own code, the kernel's reason.
        (ended("OOMKilled", 1), "out_of_memory", "raise device_map.segment.memory"),
        (
            ended("StartError", 128, f'{RUNC}exec: "python": executable file not found in $PATH: unknown'),
            "start_error",
            "device_map.segment.image must be one of Ratchet's",
        ),
        (
            ended(
                "StartError",
                128,
                f"{RUNC}error during container init: mkdir /src: not a directory: unknown",
                name="init",
                is_init=True,
            ),
            "start_error",
            "cannot be started from this image",
        ),
        (
            ended(
                "StartError", 128, f"{RUNC}nvidia-container-cli: initialization error: nvml error: driver not loaded"
            ),
            "start_error",
            "GPU driver",
        ),
        (
            failed(
                "Evicted",
                "The node was low on resource: memory. Threshold quantity: 100Mi, available: 4532Ki. "
                "Container main was using 12Gi, request is 4Gi, has larger consumption of memory. ",
            ),
            "evicted",
            "raise device_map.segment.memory",
        ),
        (
            failed(
                "Evicted",
                "The node was low on resource: ephemeral-storage. Container main was using 16372Ki, which "
                "exceeds its request of 0.",
            ),
            "evicted",
            "ran out of ephemeral-storage",
        ),
        (
            failed("Evicted", 'Usage of EmptyDir volume "shared-memory" exceeds the limit "64Mi". '),
            "evicted",
            "more than 64Mi was written to the volume shared-memory",
        ),
        (
            failed("Evicted", "Pod ephemeral local storage usage exceeds the total limit of containers 2Gi. "),
            "evicted",
            "three copies of the model",
        ),
        (
            failed("Evicted", 'Container main exceeded its local ephemeral storage limit "1Gi". '),
            "evicted",
            "three copies of the model",
        ),
        (
            failed("DeadlineExceeded", "Pod was active on the node longer than the specified deadline"),
            "deadline",
            "submit the run again",
        ),
        (failed("Terminated", "Pod was terminated in response to imminent node shutdown."), "node_lost", "went away"),
        (
            failed(
                "UnexpectedAdmissionError",
                "Allocate failed due to no healthy devices present; cannot allocate "
                "unhealthy devices nvidia.com/gpu, which is unexpected",
            ),
            "rejected",
            "submit the run again",
        ),
        (
            failed(
                "OutOfnvidia.com/gpu",
                "Pod was rejected: Node didn't have enough resource: nvidia.com/gpu, "
                "requested: 1, used: 8, capacity: 8",
            ),
            "rejected",
            "refused the pod",
        ),
        (
            ended(
                "Error",
                137,
                conditions=(
                    Condition(
                        "DisruptionTarget",
                        True,
                        "PreemptionByScheduler",
                        "default-scheduler: preempting to accommodate a higher priority pod",
                    ),
                ),
            ),
            "preempted",
            "submit the run",
        ),
        (
            ended(
                "Error",
                143,
                conditions=(
                    Condition(
                        "DisruptionTarget",
                        True,
                        "DeletionByTaintManager",
                        "Taint manager: deleting due to NoExecute taint",
                    ),
                ),
            ),
            "node_lost",
            "submit the run again",
        ),
        (
            ended(
                "Error",
                143,
                conditions=(Condition("DisruptionTarget", True, "EvictionByEvictionAPI", "Eviction API: evicting"),),
            ),
            "deleted",
            "submit the run again",
        ),
        (
            ended("ContainerStatusUnknown", 137, "The container could not be located when the pod was terminated"),
            "node_lost",
            "submit the run again",
        ),
        (ended("Error", 137), "killed", "killed from outside"),
        (ended("Error", 1, "failed to execute component"), "exit", "its log says why"),
        (failed("", ""), "exit", "its log"),
    ],
)
def test_what_ended_a_pod_is_named(pod: Pod, kind: str, advice: str) -> None:
    cause = told(pod)
    assert (cause.kind, cause.has_ended) == (kind, True)
    assert advice in cause.advice


def test_the_end_of_a_pod_is_never_explained_by_what_it_waited_for_before() -> None:
    pod = ended("Error", 1, conditions=(Condition("PodScheduled", True, "", ""),))
    waited = Event("FailedScheduling", f"{UNSCHEDULABLE}4 Insufficient cpu.", is_warning=True)
    assert told(pod, waited).kind == "exit"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("main: OOMKilled (exit code 1)", "out_of_memory"),
        ("pod deleted", "deleted"),
        ("Unschedulable: 0/1 nodes are available: 1 Insufficient nvidia.com/gpu", "accelerator"),
        ('secret "nope" not found', "settings"),
        ("Step exceeded its deadline", "deadline"),
        (f"StartError (exit code 128): {RUNC}error during container init: mkdir /src: not a directory", "start_error"),
        ("Pod Node didn't have enough resource: pods, requested: 1, used: 44, capacity: 44", "rejected"),
        ('Usage of EmptyDir volume "scratch" exceeds the limit "1Gi". ', "evicted"),
    ],
)
def test_argos_messages_about_a_node_say_the_same(text: str, kind: str) -> None:
    cause = why_of(text, "segment")
    assert cause is not None
    assert cause.kind == kind


def test_a_message_that_nobody_knows_is_no_cause() -> None:
    assert why_of("Error (exit code 1)") is None
    assert why_of("") is None
    assert why_of("OutOfRange: a program's own words") is None


def test_long_messages_are_shortened_to_one_line() -> None:
    cause = told(ended("StartError", 128, f"{RUNC}\n" + "x" * 2000))
    assert len(cause.message) == 400
    assert "\n" not in cause.message
