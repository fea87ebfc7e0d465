"""`ratchet`: the composition root. Each verb imports what it needs, when it needs it, so that `--help` is instant."""

from ratchet.cli import audit, champions, cluster, data, local, plan, preflight, report, status, storage, sync
from ratchet.cli.app import app, main

__all__ = [
    "app",
    "audit",
    "champions",
    "cluster",
    "data",
    "local",
    "main",
    "plan",
    "preflight",
    "report",
    "status",
    "storage",
    "sync",
]
