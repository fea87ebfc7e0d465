"""Names of the images that components run in; one folder each in images/."""

import os

VERSION = "0.1.0"


def image(name: str) -> str:
    """Return the image `name`: RATCHET_IMAGE for all components where it is set, else the project's own."""
    registry = os.environ.get("RATCHET_IMAGE_REGISTRY", "localhost")
    return os.environ.get("RATCHET_IMAGE") or f"{registry}/ratchet-{name}:{VERSION}"
