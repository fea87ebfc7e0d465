"""Interface of the component evaluate; the work is in ratchet.grains.entry."""

from kfp import dsl

from components.images import image


@dsl.component(base_image=image("rollout"), install_kfp_package=False)
def evaluate(
    root: str,
    run_id: str,
    submission_id: str,
    output_metrics: dsl.Output[dsl.Metrics],
    output_report: dsl.Output[dsl.Markdown],
    version: str = "last",
) -> str:
    """Measure the held-out accuracy of one policy version.

    Args:
        root: Where runs lie: s3://bucket/prefix, or a folder that every pod sees.
        run_id: The run's name below the root; empty takes the submission's id. The same name again resumes the run.
        submission_id: The pipeline run that this task belongs to.
        output_metrics: Numbers of this task, by name.
        output_report: What happened, for the UI.
        version: Which one: base, last, or the step that published it.

    Returns:
        Content digest of the evaluation; "" without held-out prompts.
    """
    from ratchet.grains import entry, program, tasks

    task = tasks.EvaluateTask(root=root, run_id=run_id, submission_id=submission_id, version=version)
    return program.run("evaluate", entry.evaluate, task, metrics=output_metrics, report=output_report)
