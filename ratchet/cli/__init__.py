"""`ratchet`: the composition root. Each verb imports what it needs, when it needs it, so that `--help` is instant."""

from ratchet.cli import champions, cluster, data, local, preflight, status, storage
from ratchet.cli.app import app, main

__all__ = ["app", "champions", "cluster", "data", "local", "main", "preflight", "status", "storage"]
