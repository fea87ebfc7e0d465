"""GRPO and every other objective without a critic as a Kubeflow pipeline, at segment grain and at stage grain."""

from kfp import dsl

from components.policy_update import policy_update
from pipelines.bodies import sample_and_weigh, train_in_segments, train_in_stages, uncached


@dsl.pipeline(name="ratchet-grpo")
def grpo(root: str, run_id: str, config: str, total_steps: int = 100, steps_per_segment: int = 50) -> None:
    """GRPO post-training; a pod runs a segment of steps with the sampler and the trainer in memory.

    Args:
        root: Where runs lie: s3://bucket/prefix.
        run_id: The run's name. The same name again resumes the run.
        config: The run's config: YAML text, or the s3:// place of a YAML file.
        total_steps: RL steps of the whole run; 0 takes what the config says.
        steps_per_segment: RL steps of one segment; a run has at most 40 segments.
    """
    train_in_segments(root, run_id, config, total_steps, steps_per_segment)


@dsl.pipeline(name="rl-step")
def rl_step(root: str, run_id: str, submission_id: str, step: int) -> None:
    """One RL step, a pod for each stage.

    Args:
        root: Where runs lie.
        run_id: The run's name.
        submission_id: The pipeline run that the tasks belong to.
        step: The RL step, from 1.
    """
    weighed = sample_and_weigh(root, run_id, submission_id, step)
    uncached(policy_update(root=root, run_id=run_id, submission_id=submission_id, step=step)).after(weighed)


@dsl.pipeline(name="ratchet-grpo-stages")
def grpo_stages(root: str, run_id: str, config: str, total_steps: int = 10) -> None:
    """GRPO post-training; every stage of every step is a pod of its own, with its own image.

    Evaluates the base and the last policy only, whatever trainer.test_freq says.

    Args:
        root: Where runs lie: s3://bucket/prefix.
        run_id: The run's name. The same name again resumes the run.
        config: The run's config: YAML text, or the s3:// place of a YAML file.
        total_steps: RL steps of the whole run, at most 20 in one pipeline run; 0 takes what the config says.
    """
    train_in_stages(root, run_id, config, total_steps, rl_step, has_critic=False)
