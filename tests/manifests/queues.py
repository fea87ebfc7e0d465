"""Kueue's kinds (v1beta2) as far as manifests/ uses them, as JSON schemas; Kubernetes' own schemas do not know them."""

from typing import Any

KUEUE = "kueue.x-k8s.io/v1beta2"
AMOUNT = {"type": ["string", "integer"], "pattern": "^[0-9]+(\\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$"}
NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"}
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}


def fields(required: tuple[str, ...] = (), /, **known: Any) -> dict[str, Any]:
    """An object with these fields and no others."""
    return {"type": "object", "properties": known, "required": list(required), "additionalProperties": False}


def items(of: dict[str, Any], most: int) -> dict[str, Any]:
    return {"type": "array", "items": of, "minItems": 1, "maxItems": most}


def kind(name: str, spec: dict[str, Any], *, required: tuple[str, ...] = ("spec",)) -> dict[str, Any]:
    metadata = fields(("name",), name=NAME, namespace=NAME, labels=TEXTS, annotations=TEXTS)
    top = ("apiVersion", "kind", "metadata", *required)
    return fields(top, apiVersion={"const": KUEUE}, kind={"const": name}, metadata=metadata, spec=spec)


RESOURCE = fields(("name", "nominalQuota"), name={"type": "string"}, nominalQuota=AMOUNT, borrowingLimit=AMOUNT)
FLAVOR = fields(("name", "resources"), name=NAME, resources=items(RESOURCE, 64))
GROUP = fields(
    ("coveredResources", "flavors"), coveredResources=items({"type": "string"}, 64), flavors=items(FLAVOR, 64)
)
PREEMPTION = fields(
    withinClusterQueue={"enum": ["Never", "LowerPriority", "LowerOrNewerEqualPriority"]},
    reclaimWithinCohort={"enum": ["Never", "LowerPriority", "Any"]},
)
QUEUES = {
    "ResourceFlavor": kind("ResourceFlavor", fields(nodeLabels=TEXTS), required=()),
    "ClusterQueue": kind(
        "ClusterQueue",
        fields(
            cohortName=NAME,
            namespaceSelector=fields(matchLabels=TEXTS),
            preemption=PREEMPTION,
            queueingStrategy={"enum": ["StrictFIFO", "BestEffortFIFO"]},
            resourceGroups=items(GROUP, 16),
        ),
    ),
    "LocalQueue": kind("LocalQueue", fields(("clusterQueue",), clusterQueue=NAME)),
}
