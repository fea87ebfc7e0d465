"""Interface of the component promote; the work is in ratchet.grains.entry."""

from kfp import dsl

from components.images import image


@dsl.component(base_image=image("base"), install_kfp_package=False)
def promote(
    root: str,
    run_id: str,
    submission_id: str,
    output_metrics: dsl.Output[dsl.Metrics],
    output_report: dsl.Output[dsl.Markdown],
    output_model: dsl.Output[dsl.Model],
) -> str:
    """Decide whether the last policy becomes the champion of its name, and record the decision with its numbers.

    Args:
        root: Where runs lie: s3://bucket/prefix, or a folder that every pod sees.
        run_id: The run's name below the root; empty takes the submission's id. The same name again resumes the run.
        submission_id: The pipeline run that this task belongs to.
        output_metrics: Numbers of this task, by name.
        output_report: What happened, for the UI.
        output_model: A pointer to the weights: their place and digests in its metadata.

    Returns:
        The verdict: promoted, refused, or "" where no champion is named.
    """
    from ratchet.grains import entry, program, tasks

    task = tasks.PromoteTask(root=root, run_id=run_id, submission_id=submission_id)
    return program.run("promote", entry.promote, task, metrics=output_metrics, report=output_report, model=output_model)
