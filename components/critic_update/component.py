"""Interface of the component critic_update; the work is in ratchet.grains.entry."""

from kfp import dsl

from components.images import image


@dsl.component(base_image=image("train"), install_kfp_package=False)
def critic_update(root: str, run_id: str, submission_id: str, step: int) -> str:
    """Train the critic on the step and publish its next version, where the objective has one.

    Args:
        root: Where runs lie: s3://bucket/prefix, or a folder that every pod sees.
        run_id: The run's name below the root. The same name again resumes the run.
        submission_id: The pipeline run that this task belongs to.
        step: The RL step, from 1.

    Returns:
        Content digest of what was committed; empty where there is no critic.
    """
    from ratchet.grains import entry

    return entry.stage("critic_update", root, run_id, submission_id, step)
