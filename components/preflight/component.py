"""Interface of the component preflight; the work is in ratchet.grains.entry."""

from kfp import dsl

from components.images import image


@dsl.component(base_image=image("base"), install_kfp_package=False)
def preflight(
    root: str,
    run_id: str,
    submission_id: str,
    config: str,
    total_steps: int,
    steps_per_segment: int,
    grain: str,
    has_critic: bool,
) -> str:
    """Check the root and the config, create the run or find it, and claim it for this submission.

    Args:
        root: Where runs lie: s3://bucket/prefix, or a folder that every pod sees.
        run_id: The run's name below the root. The same name again resumes the run.
        submission_id: The pipeline run that this task belongs to.
        config: The run's config: YAML text, or the place of a YAML file (s3:// or a path).
        total_steps: RL steps of the whole run; 0 takes what the config says.
        steps_per_segment: RL steps of one segment.
        grain: How long a process lasts: stage, step or segment.
        has_critic: Whether the pipeline has a task that trains a critic.

    Returns:
        Where the run is.
    """
    from ratchet.grains import entry

    overrides = [
        *([f"trainer.total_training_steps={total_steps}"] if total_steps else []),
        f"trainer.steps_per_segment={steps_per_segment}",
        f"trainer.grain={grain}",
    ]
    return entry.preflight(root, run_id, submission_id, config, overrides, has_critic=has_critic)
