"""What a pipeline's parameters change in a run's config, above all where its pods run, and what KFP is told of that."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ratchet.config import RunConfig
from ratchet.config.cluster import PlacementConfig
from ratchet.errors import ConfigError
from ratchet.store.objects import ObjectNotFoundError, open_store

PLACED = {"segment": ("segment",), "step": ("segment",), "stage": ("rollout", "scores", "policy_update")}
"""Grain -> the entries of device_map that the pods within the loop over steps run by."""

PLACE_OF_STAGE = {
    "rollout": "rollout",
    "policy_scores": "scores",
    "reference_scores": "scores",
    "values": "scores",
    "critic_update": "policy_update",
    "policy_update": "policy_update",
}
"""Stage -> the entry that its own pod runs by, at stage grain; the others ask for no accelerator."""


def config_overrides(
    *,
    total_steps: int = 0,
    steps_per_segment: int = 0,
    grain: str = "",
    device_map: Mapping[str, Any] | None = None,
    champion: str = "",
    min_accuracy: float = 0.0,
) -> list[str]:
    """Return the config overrides that a pipeline's parameters stand for; what is empty or 0 is the config's to say."""
    stated = {
        "trainer.total_training_steps": total_steps,
        "trainer.steps_per_segment": steps_per_segment,
        "trainer.grain": grain,
        "promotion.name": champion,
        "promotion.min_accuracy": min_accuracy,
    }
    # As JSON, since a champion may be called 7.
    return [f"{key}={json.dumps(value)}" for key, value in stated.items() if value] + list(overrides(device_map or {}))


def overrides(device_map: Mapping[str, Any]) -> Iterator[str]:
    """Yield the config overrides that a pipeline's parameter device_map stands for."""
    for stage, asked in device_map.items():
        if not isinstance(asked, Mapping):
            raise ConfigError(f"device_map.{stage}: expected a mapping such as {{cpu: 4, memory: 16Gi}}, got {asked!r}")
        for name, value in asked.items():
            yield f"device_map.{stage}.{name}={json.dumps(value)}"


def stored_text(place: str) -> str:
    """Return the text of a config in object storage; ConfigError where there is none, StoreError where none is read."""
    folder, _, name = place.rpartition("/")
    try:
        return open_store(folder).get(name).decode()
    except ObjectNotFoundError as error:
        raise ConfigError(f"there is no config at {place}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read the config {place}: it is not UTF-8 ({error})") from error


def with_images(config: RunConfig, images: Mapping[str, str]) -> RunConfig:
    """Return the config with `images` (entry of device_map -> reference) where it names none."""
    filled = {
        stage: placement.model_copy(update={"image": placement.image or images.get(stage, "")})
        for stage, placement in config.device_map
    }
    return config.model_copy(update={"device_map": config.device_map.model_copy(update=filled)})


def kfp_values(placement: PlacementConfig) -> dict[str, Any]:
    """Return what a task asks for in the types that KFP takes at run time: amounts as text.

    Without accelerators the type is empty too, so that the pod names no such resource.
    """
    count = placement.accelerator_count
    return {
        "image": placement.image,
        "accelerator_type": placement.accelerator_type if count else "",
        "accelerator_count": str(count),
        "cpu": placement.cpu,
        "memory": placement.memory,
        "node_selector": dict(placement.node_selector),
        "tolerations": [one.model_dump(exclude_none=True) for one in placement.tolerations],
    }


def iteration(config: RunConfig, start: int) -> dict[str, Any]:
    """Return what one iteration of the loop over steps is told: its first step, and where each of its pods runs."""
    told: dict[str, Any] = {"start": start}
    for stage in PLACED[config.trainer.grain]:
        values = kfp_values(getattr(config.device_map, stage))
        told |= {f"{stage}_{name}": value for name, value in values.items()}
    return told
