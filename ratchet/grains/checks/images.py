"""Whether the pods' images can hold what their stages import.

Trap: from inside one pod no other image can be looked into. What is known of the project's own images is written down
here; of an image that somebody else built only the pod itself can tell, unless it is this pod's own.
"""

import importlib.util
import os
import re
from collections.abc import Iterator

from ratchet.config import RunConfig
from ratchet.grains.checks.finding import Finding, PipelineFacts

WITH_VLLM = ("rollout", "segment")
"""The project's images that hold vLLM; the others are base and train."""

_OWN = re.compile(r"(?:^|/)ratchet-(base|rollout|train|segment)$")
_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REFERENCE = re.compile(
    rf"(?P<name>(?:[A-Za-z0-9.-]+(?::[0-9]+)?/)?{_COMPONENT}(?:/{_COMPONENT})*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}))?(?:@(?P<digest>[a-z0-9]+:[0-9a-f]{32,}))?"
)


def image_findings(config: RunConfig, facts: PipelineFacts) -> Iterator[Finding]:
    """Each pod's image: its form, and whether it has the sampler that the config names."""
    needs_vllm = config.actor_rollout_ref.rollout.name == "vllm" and not config.is_offline
    if not facts.on_cluster:
        yield from _here(needs_vllm)
        return
    images = {place: placement.image for place, placement in facts.placements.items() if placement.image}
    found = list(_forms(images))
    samples = ["rollout" if facts.grain == "stage" else "segment", *(["evaluate"] if config.data.val_files else [])]
    if needs_vllm:
        for place in samples:
            if place in images:
                found += _samples(place, images[place], facts)
    for place, placement in facts.placements.items():
        if role_of(placement.image) == "base" and placement.accelerator_count:
            found.append(
                Finding(
                    "image",
                    "warning",
                    f"device_map.{place} asks for accelerators in the image {placement.image}, whose torch may be "
                    "built for a CPU: use the image train, rollout or segment",
                )
            )
    if not images:
        yield Finding("image", "unknown", "which images the pods run in is said when the pipeline is compiled")
        return
    yield from found or [Finding("image", "ok", "each stage's image has what the config asks of it")]


def _here(needs_vllm: bool) -> Iterator[Finding]:
    if not needs_vllm:
        yield Finding("image", "ok", "everything runs in this environment")
    elif importlib.util.find_spec("vllm") is None:
        yield Finding(
            "image",
            "error",
            "actor_rollout_ref.rollout.name is vllm, and this environment has no vLLM: install it, or sample with "
            "actor_rollout_ref.rollout.name=hf",
        )
    else:
        yield Finding("image", "ok", "this environment has vLLM")


def _forms(images: dict[str, str]) -> Iterator[Finding]:
    for place, image in images.items():
        key = f"device_map.{place}.image"
        match = _REFERENCE.fullmatch(image)
        if match is None:
            yield Finding(
                "image", "error", f"{key} is {image!r}: expected REGISTRY/NAME:TAG or REGISTRY/NAME@sha256:..."
            )
        elif not match["digest"] and match["tag"] in (None, "latest"):
            yield Finding(
                "image",
                "warning",
                f"{key} is {image}, which may be another image tomorrow: name a tag of its own, or the digest",
            )


def _samples(place: str, image: str, facts: PipelineFacts) -> Iterator[Finding]:
    """Whether the image in which vLLM is to sample has it."""
    role = role_of(image)
    if facts.in_pod and image == os.environ.get("RATCHET_IMAGE"):
        if importlib.util.find_spec("vllm") is None:
            yield Finding(
                "image",
                "error",
                f"actor_rollout_ref.rollout.name is vllm, and device_map.{place}.image is this pod's {image}, without "
                "vLLM: use another image, or sample with actor_rollout_ref.rollout.name=hf",
            )
    elif role in WITH_VLLM:
        return
    elif role is not None:
        yield Finding(
            "image",
            "error",
            f"actor_rollout_ref.rollout.name is vllm, and device_map.{place}.image is {image}, which has no vLLM: use "
            "the image rollout or segment, or sample with actor_rollout_ref.rollout.name=hf",
        )
    else:
        yield Finding(
            "image",
            "unknown",
            f"whether {image} (device_map.{place}.image) has vLLM cannot be seen from here; without it the first "
            "rollout fails",
        )


def role_of(image: str) -> str | None:
    """Return which of the project's images this is: by its name, or, of this pod's own, as that says of itself."""
    match = _REFERENCE.fullmatch(image)
    own = _OWN.search(match["name"]) if match else None
    if own is not None:
        return own[1]
    # A registry may hold it under another name.
    is_own = image != "" and image == os.environ.get("RATCHET_IMAGE")
    return os.environ.get("RATCHET_IMAGE_ROLE") or None if is_own else None
