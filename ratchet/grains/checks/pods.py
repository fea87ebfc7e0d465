"""What pods need of the cluster: secrets, settings, volumes, and nodes that can take them.

Trap: Kubernetes says nothing of a pod that cannot start; it waits for ever. And what this account may not read is not
missing: that is "unknown", never an error.
"""

import os
from collections.abc import Iterator, Mapping

from ratchet.cluster.fitting import Misfit, Request, misfit
from ratchet.cluster.kube import Cluster
from ratchet.config import RunConfig
from ratchet.config.cluster import PlacementConfig
from ratchet.errors import ClusterError, NotAllowedError
from ratchet.grains.checks.finding import Finding, Level, PipelineFacts

OBJECT_STORE, TOKENS = "ratchet-object-store", "ratchet-tokens"
KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
REWARD_TOKEN = "RATCHET_REWARD_TOKEN"
ON_DEMAND = "RATCHET_NODES_ON_DEMAND"
"""Key of the config map: "true" where an autoscaler adds nodes that are not there yet."""

_ROLES = ("AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_FULL_URI")
"""Variables by which a cluster gives pods credentials without a secret."""
_AUTOSCALED = "karpenter.sh/nodepool"


class Pods:
    """What the Kubernetes API says about the pods that a run will have."""

    def __init__(self, config: RunConfig, root: str, facts: PipelineFacts) -> None:
        self.settings: dict[str, str] | None = None
        """The pods' config map, once it was read."""
        self._config, self._root, self._facts = config, root, facts

    def findings(self) -> Iterator[Finding]:
        """Everything that can be asked. Stops where the API does not answer."""
        if not self._facts.on_cluster:
            yield Finding("cluster", "unknown", "no cluster is asked: this is no pod, and tasks run here")
            return
        try:
            cluster = Cluster.open(namespace=self._facts.namespace or None)
            for check in (self._settings, self._secrets, self._claim, self._nodes):
                try:
                    yield from check(cluster)
                except NotAllowedError as error:
                    yield Finding(check.__name__.strip("_"), "unknown", str(error))
        except ClusterError as error:
            yield Finding("cluster", "unknown", str(error))

    def _settings(self, cluster: Cluster) -> Iterator[Finding]:
        name = self._facts.config_map
        found = cluster.config_map(name)
        if found is not None:
            self.settings = found
            yield Finding("settings", "ok", f"config map {name}: {', '.join(sorted(found)) or 'empty'}")
            return
        self.settings = {}
        # In a pod the bucket has been reached with what the pods have; from elsewhere, with settings that they lack.
        is_needed = not self._facts.in_pod and self._root.startswith("s3://") and bool(_endpoint())
        here = f", AWS_ENDPOINT_URL={_endpoint()} among them" if is_needed else ""
        yield Finding(
            "settings",
            "error" if is_needed else "warning",
            f"no config map {name} in namespace {cluster.namespace}: pods get none of its variables{here}; create it "
            "(manifests/base/environment.yaml)",
        )

    def _secrets(self, cluster: Cluster) -> Iterator[Finding]:
        needed: dict[str, tuple[str, ...]] = {}
        if self._reads_s3() and not _has_credentials(self._facts):
            needed[OBJECT_STORE] = KEYS
        asks_a_service = not {"api", "judge"}.isdisjoint(self._config.reward_weights)
        variable = self._config.reward_model.auth_env if asks_a_service else ""
        if variable == REWARD_TOKEN:
            needed[TOKENS] = (REWARD_TOKEN,)
        elif variable and not (self._facts.in_pod and os.environ.get(variable)):
            yield Finding(
                "secrets",
                "error",
                f"reward_model.auth_env is {variable}, which pods do not get: put the header's value into the secret "
                f"{TOKENS} under {REWARD_TOKEN}, and set reward_model.auth_env={REWARD_TOKEN}",
            )
        for name in self._facts.secrets:
            try:
                yield _secret(cluster, name, needed.get(name, ()))
            except NotAllowedError as error:
                # What no check needs to know is no reason to ask for a right.
                if name in needed:
                    yield Finding("secrets", "unknown", str(error))

    def _reads_s3(self) -> bool:
        data, model = self._config.data, self._config.actor_rollout_ref.model
        return any(place.startswith("s3://") for place in (self._root, model.path, data.train_files, data.val_files))

    def _claim(self, cluster: Cluster) -> Iterator[Finding]:
        claim = self._facts.claim
        if not claim:
            return
        if cluster.claim_exists(claim):
            yield Finding("claim", "ok", f"volume claim {claim}")
        else:
            yield Finding(
                "claim",
                "error",
                f"no volume claim {claim} in namespace {cluster.namespace}, which pods with a model mount: they would "
                "wait for ever; create it (manifests/addons/compile-cache), or compile without "
                "RATCHET_COMPILE_CACHE_CLAIM",
            )

    def _nodes(self, cluster: Cluster) -> Iterator[Finding]:
        if not self._facts.placements:
            return
        nodes = cluster.nodes()
        on_demand = (self.settings or {}).get(ON_DEMAND, "").lower() == "true"
        on_demand = on_demand or any(_AUTOSCALED in node.labels for node in nodes)
        for places, placement in _alike(self._facts.placements):
            found = misfit(nodes, _request(placement), places[0])
            if found is None:
                yield Finding("nodes", "ok", f"a node can take {' and '.join(places)}")
            else:
                yield _unplaced(found, places, placement, on_demand=on_demand)


def _secret(cluster: Cluster, name: str, needed: tuple[str, ...]) -> Finding:
    there = cluster.secret_keys(name)
    if there is None:
        if not needed:
            return Finding("secrets", "ok", f"no secret {name}; nothing in this config needs it")
        literals = " ".join(f"--from-literal={key}=..." for key in needed)
        return Finding(
            "secrets",
            "error",
            f"no secret {name} in namespace {cluster.namespace}, and the run needs {' and '.join(needed)}: kubectl -n "
            f"{cluster.namespace} create secret generic {name} {literals}",
        )
    missing = [key for key in needed if key not in there]
    if missing:
        return Finding(
            "secrets",
            "error",
            f"secret {name} in namespace {cluster.namespace} has no {' and no '.join(missing)}, which the run needs; "
            f"it has {', '.join(sorted(there)) or 'no keys'}",
        )
    return Finding("secrets", "ok", f"secret {name}: {', '.join(sorted(there)) or 'no keys'}")


def _unplaced(found: Misfit, places: list[str], placement: PlacementConfig, *, on_demand: bool) -> Finding:
    level: Level = "error"
    hint = ""
    if on_demand:
        level, hint = "warning", " (no error, since this cluster adds nodes on demand)"
    elif found.taints and set(found.taints) <= {placement.accelerator_type}:
        # Where ExtendedResourceToleration is on, every pod that asks for an accelerator tolerates its taint.
        level, hint = "warning", " (no error, since some clusters add it to pods that ask for the accelerator)"
    also = f"; the same holds for {' and '.join(places[1:])}" if len(places) > 1 else ""
    return Finding("nodes", level, f"{places[0]}: {found.message}{also}{hint}")


def _alike(placements: Mapping[str, PlacementConfig]) -> list[tuple[list[str], PlacementConfig]]:
    """Sections that ask for the same, each with its own image or not."""
    groups: list[tuple[list[str], PlacementConfig]] = []
    for place, placement in placements.items():
        for names, other in groups:
            if _request(other) == _request(placement):
                names.append(f"device_map.{place}")
                break
        else:
            groups.append(([f"device_map.{place}"], placement))
    return groups


def _request(placement: PlacementConfig) -> Request:
    return Request(
        accelerator_type=placement.accelerator_type if placement.accelerator_count else "",
        accelerator_count=placement.accelerator_count,
        cpu=placement.cpu,
        memory=placement.memory,
        node_selector=placement.node_selector,
        tolerations=[one.model_dump(exclude_none=True) for one in placement.tolerations],
    )


def _has_credentials(facts: PipelineFacts) -> bool:
    """Whether this pod, and so every other, gets credentials for object storage."""
    return facts.in_pod and (all(map(os.environ.get, KEYS)) or any(map(os.environ.get, _ROLES)))


def _endpoint() -> str:
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
