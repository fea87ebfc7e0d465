"""Interface of the component scores; the work is in ratchet.grains.entry."""

from kfp import dsl

from components.images import image


@dsl.component(base_image=image("train"), install_kfp_package=False)
def scores(root: str, run_id: str, submission_id: str, step: int) -> str:
    """Score the step's rollouts under the reference or the policy, where the objective needs it.

    Args:
        root: Where runs lie: s3://bucket/prefix, or a folder that every pod sees.
        run_id: The run's name below the root. The same name again resumes the run.
        submission_id: The pipeline run that this task belongs to.
        step: The RL step, from 1.

    Returns:
        Content digests of what was committed; empty where nothing is needed.
    """
    from ratchet.grains import entry

    return entry.scores(root, run_id, submission_id, step)
