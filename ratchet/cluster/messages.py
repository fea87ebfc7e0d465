"""What Kubernetes, its runtimes and Argo write about a pod that does not run, and what is done about it: a table.

Trap: the first rule that matches decides, so that special ones stand before general ones.
"""

import re
from dataclasses import dataclass

from ratchet.cluster.causes import Cause, Kind, shorten

_AGAIN = "submit the run again, it goes on from its last commit"
_ITSELF = "it then starts by itself"


@dataclass(frozen=True, slots=True)
class _Rule:
    kind: Kind
    pattern: str
    advice: str
    """May name groups of the pattern, {namespace}, {place} and its keys, as `keys` spells them."""


_ENDED = (
    _Rule(
        "evicted",
        r'Usage of EmptyDir volume "(?P<volume>[^"]+)" exceeds the limit "(?P<limit>[^"]+)"',
        "more than {limit} was written to the volume {volume}: raise its limit (pipelines/installation.py), compile "
        f"and upload again; then {_AGAIN}",
    ),
    _Rule(
        "evicted",
        r"(local ephemeral storage|ephemeral local storage usage)",
        "choose nodes whose disk has room for three copies of the model and a trainer state ({node_selector}); "
        f"then {_AGAIN}",
    ),
    _Rule(
        "evicted",
        r"low on resource: memory",
        "the pod used more than it had asked for: raise {memory}, so that the scheduler keeps that much free; then "
        + _AGAIN,
    ),
    _Rule(
        "evicted",
        r"low on resource: (?P<resource>[\w./-]*\w)",
        "the node ran out of {resource}: free it (kubectl describe node), or choose others with {node_selector}; "
        f"then {_AGAIN}",
    ),
    _Rule("evicted", r"^Evicted\b", f"kubectl -n {{namespace}} describe pod says what the node ran out of; {_AGAIN}"),
    _Rule(
        "out_of_memory",
        r"OOMKilled",
        "raise {memory} (it is the limit), or let less be in memory at once "
        "(actor_rollout_ref.actor.ppo_max_token_len_per_gpu, actor_rollout_ref.rollout.max_num_seqs); then " + _AGAIN,
    ),
    _Rule(
        "deadline",
        r"(^DeadlineExceeded|longer than the specified deadline|Step exceeded its deadline)",
        f"its time was over (the hours in pipelines/bodies.py), or somebody terminated the pipeline run; {_AGAIN}",
    ),
    _Rule(
        "start_error",
        r"(nvidia-container-cli|nvml error|no nvidia driver)",
        f"the node's GPU driver does not work: take the node out (kubectl cordon); then {_AGAIN}",
    ),
    _Rule(
        "start_error",
        r"(StartError|ContainerCannotRun|OCI runtime|exec: ).*(executable file not found|no such file or directory)",
        f"the image lacks the program: {{image}} must be one of Ratchet's (make images); then {_AGAIN}",
    ),
    _Rule(
        "start_error",
        r"(StartError|ContainerCannotRun|RunContainerError|OCI runtime create failed)",
        f"the container cannot be started from this image on this node: correct {{image}}; then {_AGAIN}",
    ),
    _Rule("preempted", r"(PreemptionByScheduler|^Preempted\b|preempting to accommodate)", _AGAIN),
    _Rule(
        "node_lost",
        r"(DeletionByTaintManager|Taint manager|TaintManagerEviction|NodeLost|NodeNotReady|node shutdown"
        r"|ContainerStatusUnknown|TerminationByKubelet|DeletionByPodGC)",
        f"the node went away; {_AGAIN}",
    ),
    _Rule("deleted", r"(pod deleted|EvictionByEvictionAPI|Eviction API)", f"somebody deleted the pod; {_AGAIN}"),
    _Rule(
        "rejected",
        r"(UnexpectedAdmissionError|didn't have enough resource|^OutOf(cpu|memory|pods|\w+\W\S+)|Predicate \w+ failed)",
        f"the node refused the pod after it had been chosen; {_AGAIN}",
    ),
)

_REFUSED = (
    _Rule(
        "quota",
        r"exceeded quota: (?P<quota>[\w.-]+)",
        "wait until others are done, raise the quota (kubectl -n {namespace} edit resourcequota {quota}), or ask for "
        "less in {place}; the pod is tried again by itself",
    ),
    _Rule(
        "quota",
        r"failed quota: (?P<quota>[\w.-]+): must specify (?P<keys>\S*\w)",
        "quota {quota} admits only pods that state {keys}: give the namespace a LimitRange with defaults; then "
        + _AGAIN,
    ),
    _Rule(
        "quota",
        r"(maximum|minimum) [\w./-]+ (usage|limit) per (Container|Pod)",
        "the namespace's LimitRange forbids it (kubectl -n {namespace} get limitrange): change that, or {place}; then "
        + _AGAIN,
    ),
    _Rule(
        "forbidden",
        r"violates PodSecurity",
        "the namespace's Pod Security Standard forbids the fields that the message names: compile with these pipelines "
        "and leave their security settings alone",
    ),
    _Rule(
        "forbidden",
        r'serviceaccounts? "(?P<account>[^"]+)" not found',
        "kubectl apply --kustomize manifests/overlays/cluster makes the account {account} that pods run as",
    ),
)

_SETTINGS = (
    _Rule(
        "settings",
        r"couldn't find key \S+ in Secret \S+?/(?P<secret>[^\s/,;)]+)",
        f"add the key: kubectl -n {{namespace}} edit secret {{secret}} (manifests/README.md); {_ITSELF}",
    ),
    _Rule(
        "settings",
        r"couldn't find key \S+ in ConfigMap \S+?/(?P<map>[^\s/,;)]+)",
        f"add the key: kubectl -n {{namespace}} edit configmap {{map}} (manifests/base/environment.yaml); {_ITSELF}",
    ),
    _Rule(
        "settings",
        r'secrets? "(?P<secret>[^"]+)" not found',
        "create it: kubectl -n {namespace} create secret generic {secret} --from-literal=KEY=VALUE "
        f"(manifests/README.md); {_ITSELF}",
    ),
    _Rule(
        "settings",
        r'config ?maps? "(?P<map>[^"]+)" not found',
        "create {map}: kubectl apply --kustomize manifests/overlays/cluster has ratchet-environment; " + _ITSELF,
    ),
    _Rule(
        "settings",
        r"runAsNonRoot and image (will run as root|has non-numeric user)",
        "{image} must name a numeric user other than 0, as Ratchet's images do; terminate the run and submit it "
        "again with such an image",
    ),
    _Rule(
        "settings",
        r"(CreateContainerConfigError|CreateContainerError)",
        "kubectl -n {namespace} describe pod says which setting of the container is wrong",
    ),
)

_VOLUMES = (
    _Rule(
        "volume",
        r'persistentvolumeclaims? "(?P<claim>[^"]+)" (not found|is being deleted)',
        "create {claim} (manifests/addons/compile-cache), or compile without RATCHET_COMPILE_CACHE_CLAIM and submit "
        "again",
    ),
    _Rule(
        "volume",
        r"(unbound immediate PersistentVolumeClaims|find available persistent volumes|non-existent persistentvolume)",
        "the claim has no volume (kubectl -n {namespace} get pvc): name a storage class that makes one in "
        "manifests/addons/compile-cache/claim.yaml",
    ),
    _Rule(
        "volume",
        r"volume node affinity conflict",
        "the claim's volume lies in another zone than the nodes that fit: use a storage class with "
        "volumeBindingMode: WaitForFirstConsumer, or name that zone in {node_selector}",
    ),
    _Rule(
        "volume",
        r"(Multi-Attach error|already exclusively attached)",
        "another pod on another node holds the volume: wait for it, or use the access mode ReadWriteMany "
        "(manifests/addons/compile-cache/claim.yaml)",
    ),
    _Rule(
        "volume",
        r"(MountVolume\.\w+ failed|FailedMount|FailedAttachVolume|Unable to attach or mount volumes)",
        "the volume cannot be mounted: look at its claim (kubectl -n {namespace} get pvc) and the node's storage "
        "driver",
    ),
)

_IMAGES = (
    _Rule(
        "image",
        r"(pull rate limit|toomanyrequests|429 Too Many Requests)",
        "the registry limits pulls: wait (it is tried again by itself), or copy the image elsewhere and name that in "
        "{image}",
    ),
    _Rule(
        "image",
        r"(insufficient_scope|authorization failed|no basic auth credentials|pull access denied|401 Unauthorized"
        r"|403 Forbidden|[uU]nauthorized|access to the resource is denied|denied: )",
        "give the service account a pull secret (imagePullSecrets of manifests/base/service-account.yaml), or correct "
        "the name in {image}",
    ),
    _Rule(
        "image",
        r"(no such host|connection refused|i/o timeout|no route to host|x509:|HTTP response to HTTPS"
        r"|failed to do request)",
        "the node does not reach the registry: correct its name ({image}), or the node's network and certificates",
    ),
    _Rule(
        "image", r"no space left on device", "the node's disk is full: take the node out (kubectl cordon), or clean it"
    ),
    _Rule(
        "image",
        r"no match for platform",
        "the image is for another kind of CPU: build it for the nodes' platform, or choose nodes by {node_selector}",
    ),
    _Rule(
        "image",
        r"(InvalidImageName|invalid reference format|couldn't parse image)",
        "correct {image}, terminate the run and submit it again",
    ),
    _Rule(
        "image",
        r"(ErrImageNeverPull|pull policy of Never)",
        "load the image onto the node, or compile without RATCHET_IMAGE_PULL_POLICY=Never",
    ),
    _Rule(
        "image",
        r"(manifest unknown|not found|NotFound|does not exist)",
        "push the image (make images), which is then found by itself, or correct {image}",
    ),
    _Rule(
        "image",
        r"(ErrImagePull|ImagePullBackOff|Back-off pulling image|Failed to pull image|RegistryUnavailable)",
        "is {image} right, and may the node pull it? kubectl -n {namespace} describe pod has the registry's answer",
    ),
)

_BEFORE_AND_AFTER = (
    _Rule(
        "admission",
        r"(SchedulingGated|non-empty scheduling gates)",
        "its queue has not admitted it (kubectl -n {namespace} get workloads): it starts by itself once there is room; "
        "the queue that RATCHET_QUEUE named must exist (kubectl -n {namespace} get localqueues)",
    ),
    _Rule(
        "sandbox",
        r"(FailedCreatePodSandBox|NetworkNotReady|network is not ready)",
        "the node cannot set up the pod's network: take the node out (kubectl cordon) if this lasts",
    ),
)

_OF_IMAGES = re.compile(r"(?i)image|registry|pull")


def keys(place: str) -> dict[str, str]:
    """Return how what a pod asks for is spelled: as keys of its section `place`, or where tasks without one have it."""
    names = ("accelerator_type", "accelerator_count", "cpu", "memory", "node_selector", "tolerations", "image")
    if place:
        return {name: f"{place}.{name}" for name in names} | {"place": place}
    spelled = {name: f"{name} in pipelines/bodies.py" for name in names}
    return spelled | {"place": "pipelines/bodies.py", "image": "RATCHET_IMAGE_REGISTRY (and compile again)"}


def read(text: str, *, place: str, namespace: str) -> Cause | None:
    """Return the cause that a message states, None where it states none that is known.

    `text` is "<reason>: <message>", or what Argo says of a node. `place` is the config section that says what the pod
    asks for, "" where there is none.
    """
    known = keys(place) | {"namespace": namespace}
    images = _IMAGES if _OF_IMAGES.search(text) else ()
    for rule in (*_ENDED, *_REFUSED, *_SETTINGS, *_VOLUMES, *images, *_BEFORE_AND_AFTER):
        match = re.search(rule.pattern, text)
        if match:
            return Cause(rule.kind, shorten(text), rule.advice.format(**known, **match.groupdict()))
    return None
