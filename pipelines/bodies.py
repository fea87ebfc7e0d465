"""What pipelines are put together from: the tasks before, within and after the loop over steps.

Trap: KFP hands no data from one iteration to the next, and kfp.local replaces an outer task's output inside a loop by
the loop's item. State therefore passes through the run in object storage, and tasks find their submission by the
pipeline run's id.
"""

from collections.abc import Callable
from typing import Any

from kfp import dsl

from components.advantage import advantage
from components.checkpoint_export import checkpoint_export
from components.evaluate import evaluate
from components.plan import plan
from components.preflight import preflight
from components.preprocess import preprocess
from components.reward import reward
from components.rollout import rollout
from components.scores import scores
from components.segment import segment

JOB = dsl.PIPELINE_JOB_ID_PLACEHOLDER


def uncached(task: dsl.PipelineTask) -> dsl.PipelineTask:
    """Turn KFP's cache off: it knows names and parameters, not what is in the run."""
    return task.set_caching_options(False)


def train_in_segments(root: Any, run_id: Any, config: Any, total_steps: Any, steps_per_segment: Any) -> None:
    """Add the tasks of a run whose pods each train a segment of steps."""
    prepared = _prepare(root, run_id, config, total_steps, steps_per_segment, grain="segment", has_critic=True)
    segments = uncached(plan(root=root, run_id=run_id, submission_id=JOB)).after(prepared)
    with dsl.ParallelFor(segments.output, parallelism=1, name="segments") as start:
        trained = uncached(segment(root=root, run_id=run_id, submission_id=JOB, start=start))
    _finish(root, run_id, trained)


def train_in_stages(
    root: Any, run_id: Any, config: Any, total_steps: Any, one_step: Callable[..., Any], *, has_critic: bool
) -> None:
    """Add the tasks of a run whose pods each run one stage.

    `one_step` is the pipeline of a step; without a critic in it, preflight refuses a config that needs one.
    """
    prepared = _prepare(root, run_id, config, total_steps, 1, grain="stage", has_critic=has_critic)
    base = uncached(evaluate(root=root, run_id=run_id, submission_id=JOB, version="base")).after(prepared)
    base.set_display_name("evaluate base")
    # The base is evaluated before anything is trained: a run's last task must be the one that ends it.
    steps = uncached(plan(root=root, run_id=run_id, submission_id=JOB)).after(base)
    with dsl.ParallelFor(steps.output, parallelism=1, name="steps") as step:
        trained = uncached(one_step(root=root, run_id=run_id, submission_id=JOB, step=step))
    _finish(root, run_id, trained)


def sample_and_weigh(root: Any, run_id: Any, submission_id: Any, step: Any) -> dsl.PipelineTask:
    """Add the tasks of a step up to its advantages; return the last one."""
    sampled = uncached(rollout(root=root, run_id=run_id, submission_id=submission_id, step=step))
    graded = uncached(reward(root=root, run_id=run_id, submission_id=submission_id, step=step)).after(sampled)
    scored = uncached(scores(root=root, run_id=run_id, submission_id=submission_id, step=step)).after(sampled)
    weighed = uncached(advantage(root=root, run_id=run_id, submission_id=submission_id, step=step))
    return weighed.after(graded, scored)


def _prepare(
    root: Any, run_id: Any, config: Any, total_steps: Any, steps_per_segment: Any, *, grain: str, has_critic: bool
) -> dsl.PipelineTask:
    claimed = uncached(
        preflight(
            root=root,
            run_id=run_id,
            submission_id=JOB,
            config=config,
            total_steps=total_steps,
            steps_per_segment=steps_per_segment,
            grain=grain,
            has_critic=has_critic,
        )
    )
    return uncached(preprocess(root=root, run_id=run_id, submission_id=JOB)).after(claimed)


def _finish(root: Any, run_id: Any, trained: dsl.PipelineTask) -> None:
    evaluated = uncached(evaluate(root=root, run_id=run_id, submission_id=JOB, version="last")).after(trained)
    uncached(checkpoint_export(root=root, run_id=run_id, submission_id=JOB)).after(evaluated)
