"""RL post-training of language models as Kubeflow Pipelines.

Public names load on first use, so that `import ratchet` costs nothing.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "FSDPPolicyUpdate": "ratchet.flow",
    "GRPOAdvantage": "ratchet.flow",
    "GSM8KReward": "ratchet.flow",
    "HFRollout": "ratchet.flow",
    "RLDataFlow": "ratchet.flow",
    "RatchetError": "ratchet.errors",
    "RunConfig": "ratchet.config",
    "VLLMRollout": "ratchet.flow",
    "load_config": "ratchet.config",
}

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ratchet' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
