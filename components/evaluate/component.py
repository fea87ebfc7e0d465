"""Interface of the component evaluate; the work is in ratchet.grains.entry."""

from kfp import dsl

from components.images import image


@dsl.component(base_image=image("rollout"), install_kfp_package=False)
def evaluate(root: str, run_id: str, submission_id: str, version: str) -> str:
    """Measure held-out accuracy of a policy version, with its confidence interval.

    Args:
        root: Where runs lie: s3://bucket/prefix, or a folder that every pod sees.
        run_id: The run's name below the root. The same name again resumes the run.
        submission_id: The pipeline run that this task belongs to.
        version: base, last, or a step.

    Returns:
        Content digest of the evaluation; empty where there is nothing to evaluate.
    """
    from ratchet.grains import entry

    return entry.evaluate(root, run_id, submission_id, version)
