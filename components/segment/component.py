"""Interface of the component segment; the work is in ratchet.grains.entry."""

from kfp import dsl

from components.images import image


@dsl.component(base_image=image("segment"), install_kfp_package=False)
def segment(
    root: str,
    run_id: str,
    submission_id: str,
    start: int,
    output_metrics: dsl.Output[dsl.Metrics],
    output_report: dsl.Output[dsl.Markdown],
    output_page: dsl.Output[dsl.HTML],
) -> str:
    """Run a segment of RL steps with the sampler and the trainer in memory.

    Args:
        root: Where runs lie: s3://bucket/prefix, or a folder that every pod sees.
        run_id: The run's name below the root; empty takes the submission's id. The same name again resumes the run.
        submission_id: The pipeline run that this task belongs to.
        start: First step of the segment.
        output_metrics: Numbers of this task, by name.
        output_report: What happened, for the UI.
        output_page: The segment as a page: curves, completions with their rewards, what happened.

    Returns:
        Content digest of the segment's last policy update.
    """
    from ratchet.grains import entry, program, tasks

    task = tasks.SegmentTask(root=root, run_id=run_id, submission_id=submission_id, start=start)
    return program.run("segment", entry.segment, task, metrics=output_metrics, report=output_report, page=output_page)
