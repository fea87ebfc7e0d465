"""What `make e2e` was told, and what pods are told in turn: endpoint, image, root, keys, settings.

Trap: what reaches object storage from here need not reach it from a pod, where 127.0.0.1 is the pod itself; the
variables RATCHET_E2E_POD_* say what pods must use.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

REPOSITORY = Path(__file__).resolve().parents[2]
NEEDED = ("KF_PIPELINES_ENDPOINT", "RATCHET_IMAGE", "RATCHET_ROOT")

OBJECT_STORE, TOKENS, SETTINGS = "ratchet-object-store", "ratchet-tokens", "ratchet-environment"
"""Names by which pods take their keys and settings (pipelines/installation.py)."""
THREADS = "OMP_NUM_THREADS"
"""Sums of floats depend on it: the same number here and in pods gives the same bits."""
_POD = "RATCHET_E2E_POD_"
_MLFLOW_KEYS = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The variables of one run of the suite."""

    endpoint: str
    image: str
    root: str
    """RATCHET_ROOT, s3://bucket/prefix; every run of the suite has a folder of its own below it."""
    namespace: str
    """Where pods of runs are: RATCHET_NAMESPACE."""
    model: str
    """RATCHET_MODEL; empty where the suite makes one."""
    patience: float
    """Factor of every time limit: RATCHET_E2E_PATIENCE."""

    @classmethod
    def read(cls, variables: Mapping[str, str]) -> "Environment":
        """Read the variables; ValueError names those that are missing, or what is wrong with one."""
        missing = [name for name in NEEDED if not variables.get(name)]
        if missing:
            raise ValueError(
                f"no live server: set {', '.join(missing)}, as in make e2e KF_PIPELINES_ENDPOINT=http://HOST:PORT "
                "RATCHET_IMAGE=REFERENCE RATCHET_ROOT=s3://BUCKET/PREFIX (tests/e2e/README.md)"
            )
        root = variables["RATCHET_ROOT"].rstrip("/")
        if urlsplit(root).scheme != "s3" or not urlsplit(root).netloc:
            raise ValueError(
                f"RATCHET_ROOT is {root!r}: expected s3://BUCKET/PREFIX, which pods and this machine reach"
            )
        return cls(
            endpoint=variables["KF_PIPELINES_ENDPOINT"],
            image=variables["RATCHET_IMAGE"],
            root=root,
            namespace=variables.get("RATCHET_NAMESPACE") or variables.get("KF_PIPELINES_NAMESPACE") or "kubeflow",
            model=variables.get("RATCHET_MODEL", ""),
            patience=float(variables.get("RATCHET_E2E_PATIENCE") or 1.0),
        )

    def of_commands(self) -> dict[str, str]:
        """Return the environment of the command line: pipelines are compiled for the image under test."""
        return {
            **os.environ,
            "KF_PIPELINES_ENDPOINT": self.endpoint,
            # Where the endpoint has no profiles this is not used.
            "KF_PIPELINES_NAMESPACE": self.namespace,
            "RATCHET_IMAGE": self.image,
            # The image is often loaded into the node, and no registry has it.
            "RATCHET_IMAGE_PULL_POLICY": os.environ.get("RATCHET_IMAGE_PULL_POLICY") or "IfNotPresent",
            "HF_HUB_OFFLINE": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "PYTHONUNBUFFERED": "1",
        }


def object_store_keys() -> dict[str, str]:
    """Return the credentials that boto3 finds here, by the names that pods get them under; empty if there are none."""
    import boto3

    found = boto3.session.Session().get_credentials()
    if found is None:
        return {}
    keys = found.get_frozen_credentials()
    named = {"AWS_ACCESS_KEY_ID": keys.access_key, "AWS_SECRET_ACCESS_KEY": keys.secret_key}
    return {name: value for name, value in {**named, "AWS_SESSION_TOKEN": keys.token}.items() if value}


def tokens(variables: Mapping[str, str]) -> dict[str, str]:
    """Return what MLflow asks for, where it asks for anything."""
    return {name: variables[name] for name in _MLFLOW_KEYS if variables.get(name)}


def pod_settings(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that pods need to work where this process works."""
    region = variables.get("AWS_REGION") or variables.get("AWS_DEFAULT_REGION")
    endpoint = variables.get("AWS_ENDPOINT_URL_S3") or variables.get("AWS_ENDPOINT_URL")
    wanted = {
        "AWS_ENDPOINT_URL": variables.get(f"{_POD}AWS_ENDPOINT_URL") or endpoint,
        "AWS_REGION": region or "us-east-1",
        "MLFLOW_TRACKING_URI": variables.get(f"{_POD}MLFLOW_TRACKING_URI") or variables.get("MLFLOW_TRACKING_URI"),
        THREADS: "1",
        "HF_HUB_OFFLINE": "1",
    }
    is_remote = (wanted["MLFLOW_TRACKING_URI"] or "").startswith(("http://", "https://"))
    return {name: value for name, value in wanted.items() if value and (name != "MLFLOW_TRACKING_URI" or is_remote)}


def is_this_machine(address: str) -> bool:
    """Whether an address would mean the pod itself to a pod."""
    return (urlsplit(address).hostname or "") in ("localhost", "127.0.0.1", "::1", "0.0.0.0")
