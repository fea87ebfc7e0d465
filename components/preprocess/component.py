"""Interface of the component preprocess; the work is in ratchet.grains.entry."""

from kfp import dsl

from components.images import image


@dsl.component(base_image=image("base"), install_kfp_package=False)
def preprocess(
    root: str,
    run_id: str,
    submission_id: str,
    output_metrics: dsl.Output[dsl.Metrics],
) -> str:
    """Commit policy version 0 and the prompts.

    Args:
        root: Where runs lie: s3://bucket/prefix, or a folder that every pod sees.
        run_id: The run's name below the root; empty takes the submission's id. The same name again resumes the run.
        submission_id: The pipeline run that this task belongs to.
        output_metrics: Numbers of this task, by name.

    Returns:
        Content digest of the training prompts.
    """
    from ratchet.grains import entry, program, tasks

    task = tasks.PreprocessTask(root=root, run_id=run_id, submission_id=submission_id)
    return program.run("preprocess", entry.preprocess, task, metrics=output_metrics)
