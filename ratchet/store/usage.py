"""How much of a run is what: policies, trainer states, tables, what dead attempts left."""

from ratchet.store.chain import Chain
from ratchet.store.retired import TRAINER_STATE, by_role

KINDS = {"policy": "policies", "critic": "critics", "export": "exports", TRAINER_STATE: "trainer states"}
"""Role -> kind; every other role is that of a table."""


def usage(chain: Chain) -> dict[str, int]:
    """Return kind -> bytes, the largest first; together they are everything below the run."""
    kind_of: dict[str, str] = {}
    for place, manifest in chain.manifests.items():
        for role, artifact in by_role(manifest).items():
            kind = "being deleted" if (place, role) in chain.retired else KINDS.get(role, "tables")
            folder, entries = artifact.stored
            kind_of |= {f"{folder}/{entry.path}": kind for entry in entries}
    kind_of |= {info.key: "leftovers of attempts" for one in chain.leftovers for info in one.objects}
    sizes: dict[str, int] = {}
    for info in (*chain.objects.values(), *chain.unfinished):
        kind = kind_of.get(info.key, "manifests and records")
        sizes[kind] = sizes.get(kind, 0) + info.size
    return dict(sorted(sizes.items(), key=lambda item: (-item[1], item[0])))


def in_words(sizes: dict[str, int]) -> str:
    """Return the kinds with their sizes, the largest first."""
    return ", ".join(f"{kind} {readable(size)}" for kind, size in sizes.items()) or "nothing"


def readable(size: float) -> str:
    """Return a number of bytes for people."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
