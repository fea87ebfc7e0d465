"""SFT and RL in one update, as a Kubeflow pipeline."""

from typing import Any

from kfp import dsl

from pipelines.bodies import train_in_segments
from pipelines.defaults import ROOT, config_text

_CONFIG = config_text("hybrid")


@dsl.pipeline(name="ratchet-hybrid")
def hybrid(
    root: str = ROOT,
    run_id: str = "",
    config: str = _CONFIG,
    total_steps: int = 0,
    steps_per_segment: int = 0,
    champion: str = "",
    min_accuracy: float = 0.0,
    device_map: dict[str, Any] = {},
) -> None:
    """Rewards and examples in one update; a pod runs a segment of steps with sampler and trainer in memory.

    Args:
        root: Where runs lie: s3://bucket/prefix.
        run_id: The run's name. The same name again resumes the run; empty takes the pipeline run's id.
        config: The run's config: YAML text, or the s3:// place of a YAML file. It sets algorithm.objective to hybrid.
        total_steps: Steps of the whole run; 0 takes what the config says.
        steps_per_segment: Steps of one segment, at most 40 segments in a run; 0 takes what the config says.
        champion: Name that the policy may become the champion of; empty promotes nothing.
        min_accuracy: Held-out accuracy (0 to 1) below which nothing is promoted.
        device_map: What pods ask for, over the config: {"segment": {"accelerator_count": 1}, "evaluate": ...}.
    """
    train_in_segments(locals())
