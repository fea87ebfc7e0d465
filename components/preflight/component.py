"""Interface of the component preflight; the work is in ratchet.grains.entry."""

from typing import Any, NamedTuple

from kfp import dsl

from components.images import image


@dsl.component(base_image=image("base"), install_kfp_package=False)
def preflight(
    root: str,
    run_id: str,
    submission_id: str,
    config: str,
    output_report: dsl.Output[dsl.Markdown],
    grain: str = "segment",
    total_steps: int = 0,
    steps_per_segment: int = 0,
    device_map: dict[str, Any] = {},
    champion: str = "",
    min_accuracy: float = 0.0,
    from_champion: bool = False,
    images: dict[str, str] = {},
    has_critic: bool = True,
) -> NamedTuple(  # type: ignore[valid-type]
    "Preflight",
    [
        ("Output", str),
        ("image", str),
        ("accelerator_type", str),
        ("accelerator_count", str),
        ("cpu", str),
        ("memory", str),
        ("node_selector", dict[str, str]),
        ("tolerations", list[dict[str, Any]]),
    ],
):
    """Refuse what cannot work, create the run or find it, and claim it for this submission.

    Args:
        root: Where runs lie: s3://bucket/prefix, or a folder that every pod sees.
        run_id: The run's name below the root; empty takes the submission's id. The same name again resumes the run.
        submission_id: The pipeline run that this task belongs to.
        config: The run's config: YAML text, or the place of a YAML file (s3:// or a path).
        output_report: What happened, for the UI.
        grain: How long a process lasts: stage, step or segment.
        total_steps: RL steps of the whole run; 0 takes what the config says.
        steps_per_segment: RL steps of one segment; 0 takes what the config says.
        device_map: Stage -> what its pod asks for, over the config's section device_map.
        champion: Name that the policy may become the champion of; empty promotes nothing.
        min_accuracy: Held-out accuracy below which nothing is promoted.
        from_champion: Start from the champion's weights; do nothing where the data are those of the last decision.
        images: Image of each stage, where device_map and config name none.
        has_critic: Whether the pipeline has a task that trains a critic.

    Returns:
        "train", "finished" or "unchanged", and where evaluation and export run.
    """
    from ratchet.grains import entry, program, tasks

    task = tasks.PreflightTask(
        root=root,
        run_id=run_id,
        submission_id=submission_id,
        config=config,
        grain=grain,
        total_steps=total_steps,
        steps_per_segment=steps_per_segment,
        device_map=device_map,
        champion=champion,
        min_accuracy=min_accuracy,
        from_champion=from_champion,
        images=images,
        has_critic=has_critic,
    )
    return program.run("preflight", entry.preflight, task, report=output_report)
