"""Supervised fine-tuning as a Kubeflow pipeline."""

from typing import Any

from kfp import dsl

from pipelines.bodies import train_in_segments
from pipelines.defaults import ROOT, config_text

_CONFIG = config_text("sft")


@dsl.pipeline(name="ratchet-sft")
def sft(
    root: str = ROOT,
    run_id: str = "",
    config: str = _CONFIG,
    total_steps: int = 0,
    steps_per_segment: int = 0,
    device_map: dict[str, Any] = {},
) -> None:
    """Supervised fine-tuning on chosen completions; a pod runs a segment of steps with the trainer in memory.

    Args:
        root: Where runs lie: s3://bucket/prefix.
        run_id: The run's name. The same name again resumes the run; empty takes the pipeline run's id.
        config: The run's config: YAML text, or the s3:// place of a YAML file. It sets algorithm.objective to sft.
        total_steps: Steps of the whole run; 0 takes what the config says.
        steps_per_segment: Steps of one segment, at most 40 segments in a run; 0 takes what the config says.
        device_map: What pods ask for, over the config: {"segment": {"accelerator_count": 1}, "evaluate": ...}.
    """
    train_in_segments(locals())
