"""Environment variables that a Ratchet program sets for itself, each only where the user has not set it.

Trap: they act only before torch and transformers are loaded, so programs call this first.
"""

import os

_DEFAULTS = {
    # Idle OpenMP threads sleep: spinning ones make every program on a shared machine ten times slower.
    "OMP_WAIT_POLICY": "PASSIVE",
    # transformers draws a bar for each file that it reads and writes.
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}


def set_defaults() -> None:
    """Set the defaults of this process and of those it starts."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
