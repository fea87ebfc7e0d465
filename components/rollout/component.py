"""Interface of the component rollout; the work is in ratchet.grains.entry."""

from kfp import dsl

from components.images import image


@dsl.component(base_image=image("rollout"), install_kfp_package=False)
def rollout(root: str, run_id: str, submission_id: str, step: int) -> str:
    """Draw a group of completions for every prompt of the step.

    Args:
        root: Where runs lie: s3://bucket/prefix, or a folder that every pod sees.
        run_id: The run's name below the root. The same name again resumes the run.
        submission_id: The pipeline run that this task belongs to.
        step: The RL step, from 1.

    Returns:
        Content digest of what was committed.
    """
    from ratchet.grains import entry

    return entry.stage("rollout", root, run_id, submission_id, step)
