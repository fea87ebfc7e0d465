"""Interface of the component plan; the work is in ratchet.grains.entry."""

from typing import List  # noqa: UP035 - KFP reads typing.List

from kfp import dsl

from components.images import image


@dsl.component(base_image=image("base"), install_kfp_package=False)
def plan(root: str, run_id: str, submission_id: str) -> List[int]:  # noqa: UP006 - KFP reads typing.List
    """List the segments that are still to run.

    Args:
        root: Where runs lie: s3://bucket/prefix, or a folder that every pod sees.
        run_id: The run's name below the root. The same name again resumes the run.
        submission_id: The pipeline run that this task belongs to.

    Returns:
        The first step of each segment; at stage grain, each step.
    """
    from ratchet.grains import entry

    return entry.plan(root, run_id, submission_id)
