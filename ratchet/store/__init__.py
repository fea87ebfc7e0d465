"""Object storage, and the layout, manifests and ownership of a run in it."""

from ratchet.store.objects import ObjectInfo, ObjectNotFoundError, ObjectStore, open_store

__all__ = ["ObjectInfo", "ObjectNotFoundError", "ObjectStore", "open_store"]
