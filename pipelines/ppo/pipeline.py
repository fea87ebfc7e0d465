"""PPO, whose advantages come from a critic, as a Kubeflow pipeline at segment grain and at stage grain."""

from typing import Any

from kfp import dsl

from pipelines.bodies import train_in_segments, train_in_stages
from pipelines.defaults import ROOT, config_text

_CONFIG = config_text("ppo")


@dsl.pipeline(name="ratchet-ppo")
def ppo(
    root: str = ROOT,
    run_id: str = "",
    config: str = _CONFIG,
    total_steps: int = 0,
    steps_per_segment: int = 0,
    champion: str = "",
    min_accuracy: float = 0.0,
    device_map: dict[str, Any] = {},
) -> None:
    """PPO post-training; a pod runs a segment of steps with the sampler and both trainers in memory.

    Args:
        root: Where runs lie: s3://bucket/prefix.
        run_id: The run's name. The same name again resumes the run; empty takes the pipeline run's id.
        config: The run's config: YAML text, or the s3:// place of a YAML file. It sets algorithm.adv_estimator to gae.
        total_steps: RL steps of the whole run; 0 takes what the config says.
        steps_per_segment: RL steps of one segment, at most 40 segments in a run; 0 takes what the config says.
        champion: Name that the policy may become the champion of; empty promotes nothing.
        min_accuracy: Held-out accuracy (0 to 1) below which nothing is promoted.
        device_map: What pods ask for, over the config: {"segment": {"accelerator_count": 1}, "evaluate": ...}.
    """
    train_in_segments(locals())


@dsl.pipeline(name="ratchet-ppo-stages")
def ppo_stages(
    root: str = ROOT,
    run_id: str = "",
    config: str = _CONFIG,
    total_steps: int = 0,
    champion: str = "",
    min_accuracy: float = 0.0,
    device_map: dict[str, Any] = {},
) -> None:
    """PPO post-training; every stage of every step is a pod of its own, with its own image and resources.

    Evaluates the base and the last policy only, whatever trainer.test_freq says.

    Args:
        root: Where runs lie: s3://bucket/prefix.
        run_id: The run's name. The same name again resumes the run; empty takes the pipeline run's id.
        config: The run's config: YAML text, or the s3:// place of a YAML file. It sets algorithm.adv_estimator to gae.
        total_steps: RL steps of the whole run, at most 20 in one pipeline run; 0 takes what the config says.
        champion: Name that the policy may become the champion of; empty promotes nothing.
        min_accuracy: Held-out accuracy (0 to 1) below which nothing is promoted.
        device_map: What pods ask for, over the config, by rollout, scores, policy_update and evaluate:
            {"rollout": {"accelerator_count": 1}, ...}.
    """
    train_in_stages({**locals(), "steps_per_segment": 1}, step="ppo")
