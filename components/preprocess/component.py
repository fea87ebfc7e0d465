"""Interface of the component preprocess; the work is in ratchet.grains.entry."""

from kfp import dsl

from components.images import image


@dsl.component(base_image=image("base"), install_kfp_package=False)
def preprocess(root: str, run_id: str, submission_id: str) -> str:
    """Copy the base model into the run and commit the training and held-out prompts.

    Args:
        root: Where runs lie: s3://bucket/prefix, or a folder that every pod sees.
        run_id: The run's name below the root. The same name again resumes the run.
        submission_id: The pipeline run that this task belongs to.

    Returns:
        Content digest of the training prompts.
    """
    from ratchet.grains import entry

    return entry.preprocess(root, run_id, submission_id)
