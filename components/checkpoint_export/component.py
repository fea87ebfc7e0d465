"""Interface of the component checkpoint_export; the work is in ratchet.grains.entry."""

from kfp import dsl

from components.images import image


@dsl.component(base_image=image("base"), install_kfp_package=False)
def checkpoint_export(
    root: str,
    run_id: str,
    submission_id: str,
    output_metrics: dsl.Output[dsl.Metrics],
    output_report: dsl.Output[dsl.Markdown],
    output_page: dsl.Output[dsl.HTML],
    output_model: dsl.Output[dsl.Model],
) -> str:
    """Export the last policy as a Hugging Face folder, proven to reload.

    Args:
        root: Where runs lie: s3://bucket/prefix, or a folder that every pod sees.
        run_id: The run's name below the root; empty takes the submission's id. The same name again resumes the run.
        submission_id: The pipeline run that this task belongs to.
        output_metrics: Numbers of this task, by name.
        output_report: What happened, for the UI.
        output_page: The whole run as a page: curves, completions with their rewards, what happened.
        output_model: A pointer to the weights: their place and digests in its metadata.

    Returns:
        Where the Hugging Face folder is.
    """
    from ratchet.grains import entry, program, tasks

    task = tasks.ExportTask(root=root, run_id=run_id, submission_id=submission_id)
    return program.run(
        "checkpoint_export",
        entry.checkpoint_export,
        task,
        metrics=output_metrics,
        report=output_report,
        page=output_page,
        model=output_model,
    )
