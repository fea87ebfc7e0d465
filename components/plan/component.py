"""Interface of the component plan; the work is in ratchet.grains.entry."""

from kfp import dsl

from components.images import image


@dsl.component(base_image=image("base"), install_kfp_package=False)
def plan(
    root: str,
    run_id: str,
    submission_id: str,
) -> list[dict]:  # type: ignore[type-arg]
    """List what is still to run: the first step of every segment (at stage grain every step) and where its pods run.

    Args:
        root: Where runs lie: s3://bucket/prefix, or a folder that every pod sees.
        run_id: The run's name below the root; empty takes the submission's id. The same name again resumes the run.
        submission_id: The pipeline run that this task belongs to.

    Returns:
        One entry for each iteration: its first step, and where its pods run.
    """
    from ratchet.grains import entry, program, tasks

    task = tasks.PlanTask(root=root, run_id=run_id, submission_id=submission_id)
    return program.run("plan", entry.plan, task)
