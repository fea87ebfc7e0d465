"""Environment variables that a Ratchet program sets for itself, each only where the user has not set it.

Trap: they act only before torch and transformers are loaded, so programs call this first.
"""

import logging
import os
import sys
import tempfile

from ratchet import __version__
from ratchet.redaction import HidingFormatter

logger = logging.getLogger(__name__)

_DEFAULTS = {
    # Idle OpenMP threads sleep: spinning ones make every program on a shared machine ten times slower.
    "OMP_WAIT_POLICY": "PASSIVE",
    # transformers draws a bar for each file that it reads and writes.
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    # Memory that weights and states are copied to is pinned by several threads: a second saved at the first copy.
    "PYTORCH_CUDA_ALLOC_CONF": "pinned_use_cuda_host_register:True,pinned_num_register_threads:8",
}

_COMPILE_CACHES = ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE")
"""The images put these on the volume for compiled kernels, which a cluster may leave out."""


def set_defaults() -> None:
    """Set the defaults of this process and of those it starts."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    _take_tracking_server()
    for name in _COMPILE_CACHES:
        folder = os.environ.get(name)
        if folder and not _can_write(folder):
            os.environ[name] = os.path.join(tempfile.gettempdir(), os.path.basename(os.path.normpath(folder)))
            # Without these folders the engines would fail minutes later, each with an error of its own.
            logger.warning(
                "%s: %s cannot be written; %s is used, and lost with this pod", name, folder, os.environ[name]
            )


def start_log(level: int | str) -> None:
    """Log to standard error, without secrets, at `level` unless logging has been set up before.

    Whoever has set it up, KFP in a pod for one, keeps its handlers; they write without secrets from now on.
    """
    logging.basicConfig(stream=sys.stderr, level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for handler in logging.getLogger().handlers:
        if not isinstance(handler.formatter, HidingFormatter):
            handler.setFormatter(HidingFormatter(handler.formatter or logging.Formatter()))


def set_log_level() -> None:
    """Log to the pod's log at RATCHET_LOG_LEVEL; a level that there is not is INFO."""
    start_log(logging.WARNING)
    named = os.environ.get("RATCHET_LOG_LEVEL", "INFO").upper()
    # In a pod KFP has set logging up before, and its level is not ours.
    logging.getLogger("ratchet").setLevel(logging.getLevelNamesMapping().get(named, logging.INFO))


def _take_tracking_server() -> None:
    """Use the installation's MLflow server and its credentials, unless the platform has named a server of its own."""
    if "MLFLOW_TRACKING_URI" in os.environ:
        return
    for name, value in list(os.environ.items()):
        if name.startswith("RATCHET_MLFLOW_"):
            os.environ.setdefault(name.removeprefix("RATCHET_"), value)


def code_revision() -> str:
    """Return the revision that the image was built from, or the version where no image says one."""
    return os.environ.get("RATCHET_REVISION") or __version__


def _can_write(folder: str) -> bool:
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)
