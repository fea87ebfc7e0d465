"""Interface of the component rollout; the work is in ratchet.grains.entry."""

from kfp import dsl

from components.images import image


@dsl.component(base_image=image("rollout"), install_kfp_package=False)
def rollout(
    root: str,
    run_id: str,
    submission_id: str,
    step: int,
    output_metrics: dsl.Output[dsl.Metrics],
) -> str:
    """Sample the completions of one RL step from the policy of the step before.

    Args:
        root: Where runs lie: s3://bucket/prefix, or a folder that every pod sees.
        run_id: The run's name below the root; empty takes the submission's id. The same name again resumes the run.
        submission_id: The pipeline run that this task belongs to.
        step: The RL step, from 1.
        output_metrics: Numbers of this task, by name.

    Returns:
        Content digest of the stage.
    """
    from ratchet.grains import entry, program, tasks

    task = tasks.StageTask(root=root, run_id=run_id, submission_id=submission_id, step=step)
    return program.run("rollout", entry.stage, task, name="rollout", metrics=output_metrics)
