"""Recurring post-training: the champion learns from new data, and what it becomes is let through or not."""

from typing import Any

from kfp import dsl

from pipelines.bodies import train_in_segments
from pipelines.defaults import ROOT, config_text

_CONFIG = config_text("grpo")


@dsl.pipeline(name="ratchet-nightly")
def nightly(
    root: str = ROOT,
    run_id: str = "",
    config: str = _CONFIG,
    total_steps: int = 0,
    steps_per_segment: int = 0,
    champion: str = "policy",
    min_accuracy: float = 0.0,
    device_map: dict[str, Any] = {},
) -> None:
    """Start from the champion, train on the data as they are now, evaluate, and promote what is better.

    Does nothing where data and config are those of the last decision on this champion. The first run starts from the
    model that the config names.

    Args:
        root: Where runs lie: s3://bucket/prefix.
        run_id: The run's name. The same name again resumes the run; empty takes the pipeline run's id.
        config: The run's config: YAML text, or the s3:// place of a YAML file.
        total_steps: RL steps of the whole run; 0 takes what the config says.
        steps_per_segment: RL steps of one segment, at most 40 segments in a run; 0 takes what the config says.
        champion: Name of the champion to start from and to succeed.
        min_accuracy: Held-out accuracy (0 to 1) below which nothing is promoted.
        device_map: What pods ask for, over the config: {"segment": {"accelerator_count": 1}, "evaluate": ...}.
    """
    train_in_segments({**locals(), "from_champion": True})
