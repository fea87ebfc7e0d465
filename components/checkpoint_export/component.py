"""Interface of the component checkpoint_export; the work is in ratchet.grains.entry."""

from kfp import dsl

from components.images import image


@dsl.component(base_image=image("train"), install_kfp_package=False)
def checkpoint_export(root: str, run_id: str, submission_id: str) -> str:
    """Publish the last policy as a Hugging Face folder, after reloading it and comparing log-probs.

    Args:
        root: Where runs lie: s3://bucket/prefix, or a folder that every pod sees.
        run_id: The run's name below the root. The same name again resumes the run.
        submission_id: The pipeline run that this task belongs to.

    Returns:
        Where the folder is.
    """
    from ratchet.grains import entry

    return entry.checkpoint_export(root, run_id, submission_id)
