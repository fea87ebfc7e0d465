"""DPO as a Kubeflow pipeline at segment grain, and at stage grain for every objective that samples nothing."""

from typing import Any

from kfp import dsl

from pipelines.bodies import train_in_segments, train_in_stages
from pipelines.defaults import ROOT, config_text

_CONFIG = config_text("dpo")


@dsl.pipeline(name="ratchet-dpo")
def dpo(
    root: str = ROOT,
    run_id: str = "",
    config: str = _CONFIG,
    total_steps: int = 0,
    steps_per_segment: int = 0,
    champion: str = "",
    min_accuracy: float = 0.0,
    device_map: dict[str, Any] = {},
) -> None:
    """Direct preference optimisation; a pod runs a segment of steps with trainer and reference in memory.

    Args:
        root: Where runs lie: s3://bucket/prefix.
        run_id: The run's name. The same name again resumes the run; empty takes the pipeline run's id.
        config: The run's config: YAML text, or the s3:// place of a YAML file. It sets algorithm.objective to dpo.
        total_steps: Steps of the whole run; 0 takes what the config says.
        steps_per_segment: Steps of one segment, at most 40 segments in a run; 0 takes what the config says.
        champion: Name that the policy may become the champion of; empty promotes nothing.
        min_accuracy: Held-out preference accuracy (0 to 1) below which nothing is promoted.
        device_map: What pods ask for, over the config: {"segment": {"accelerator_count": 1}, "evaluate": ...}.
    """
    train_in_segments(locals())


@dsl.pipeline(name="ratchet-dpo-stages")
def dpo_stages(
    root: str = ROOT,
    run_id: str = "",
    config: str = _CONFIG,
    total_steps: int = 0,
    champion: str = "",
    min_accuracy: float = 0.0,
    device_map: dict[str, Any] = {},
) -> None:
    """Direct preference optimisation; every stage of every step is a pod of its own: the reference, and the update.

    Serves sft and reward_model, too, which score no reference. Evaluates the base and the last policy only, whatever
    trainer.test_freq says.

    Args:
        root: Where runs lie: s3://bucket/prefix.
        run_id: The run's name. The same name again resumes the run; empty takes the pipeline run's id.
        config: The run's config: YAML text, or the s3:// place of a YAML file. It sets algorithm.objective to dpo.
        total_steps: Steps of the whole run, at most 20 in one pipeline run; 0 takes what the config says.
        champion: Name that the policy may become the champion of; empty promotes nothing.
        min_accuracy: Held-out preference accuracy (0 to 1) below which nothing is promoted.
        device_map: What pods ask for, over the config, by scores, policy_update and evaluate:
            {"policy_update": {"accelerator_count": 1}, ...}.
    """
    train_in_stages({**locals(), "steps_per_segment": 1}, step="offline")
