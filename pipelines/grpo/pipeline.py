"""GRPO and every other objective without a critic as a Kubeflow pipeline, at each grain."""

from typing import Any

from kfp import dsl

from pipelines.bodies import train_in_segments, train_in_stages, train_in_steps
from pipelines.defaults import ROOT, config_text

_CONFIG = config_text("grpo")


@dsl.pipeline(name="ratchet-grpo")
def grpo(
    root: str = ROOT,
    run_id: str = "",
    config: str = _CONFIG,
    total_steps: int = 0,
    steps_per_segment: int = 0,
    champion: str = "",
    min_accuracy: float = 0.0,
    device_map: dict[str, Any] = {},
) -> None:
    """GRPO post-training; a pod runs a segment of steps with the sampler and the trainer in memory.

    Args:
        root: Where runs lie: s3://bucket/prefix.
        run_id: The run's name. The same name again resumes the run; empty takes the pipeline run's id.
        config: The run's config: YAML text, or the s3:// place of a YAML file.
        total_steps: RL steps of the whole run; 0 takes what the config says.
        steps_per_segment: RL steps of one segment, at most 40 segments in a run; 0 takes what the config says.
        champion: Name that the policy may become the champion of; empty promotes nothing.
        min_accuracy: Held-out accuracy (0 to 1) below which nothing is promoted.
        device_map: What pods ask for, over the config: {"segment": {"accelerator_count": 1}, "evaluate": ...}.
    """
    train_in_segments(locals())


@dsl.pipeline(name="ratchet-grpo-steps")
def grpo_steps(
    root: str = ROOT,
    run_id: str = "",
    config: str = _CONFIG,
    total_steps: int = 0,
    champion: str = "",
    min_accuracy: float = 0.0,
    device_map: dict[str, Any] = {},
) -> None:
    """GRPO post-training; every step is a pod of its own, for nodes that may be taken away at any time.

    Args:
        root: Where runs lie: s3://bucket/prefix.
        run_id: The run's name. The same name again resumes the run; empty takes the pipeline run's id.
        config: The run's config: YAML text, or the s3:// place of a YAML file.
        total_steps: RL steps of the whole run, at most 40 in one pipeline run; 0 takes what the config says.
        champion: Name that the policy may become the champion of; empty promotes nothing.
        min_accuracy: Held-out accuracy (0 to 1) below which nothing is promoted.
        device_map: What pods ask for, over the config: {"segment": {"accelerator_count": 1}, "evaluate": ...}.
    """
    train_in_steps({**locals(), "steps_per_segment": 1})


@dsl.pipeline(name="ratchet-grpo-stages")
def grpo_stages(
    root: str = ROOT,
    run_id: str = "",
    config: str = _CONFIG,
    total_steps: int = 0,
    champion: str = "",
    min_accuracy: float = 0.0,
    device_map: dict[str, Any] = {},
) -> None:
    """GRPO post-training; every stage of every step is a pod of its own, with its own image and resources.

    Evaluates the base and the last policy only, whatever trainer.test_freq says.

    Args:
        root: Where runs lie: s3://bucket/prefix.
        run_id: The run's name. The same name again resumes the run; empty takes the pipeline run's id.
        config: The run's config: YAML text, or the s3:// place of a YAML file.
        total_steps: RL steps of the whole run, at most 20 in one pipeline run; 0 takes what the config says.
        champion: Name that the policy may become the champion of; empty promotes nothing.
        min_accuracy: Held-out accuracy (0 to 1) below which nothing is promoted.
        device_map: What pods ask for, over the config, by rollout, scores, policy_update and evaluate:
            {"rollout": {"accelerator_count": 1}, ...}.
    """
    train_in_stages({**locals(), "steps_per_segment": 1}, step="grpo")
