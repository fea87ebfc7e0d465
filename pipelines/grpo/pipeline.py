"""GRPO as a Kubeflow pipeline, at segment grain and at stage grain.

Trap: KFP hands no data from one iteration to the next, and kfp.local replaces an outer task's output inside a loop by
the loop's item. State therefore passes through the run in object storage, and tasks find their submission by the
pipeline run's id.
"""

from kfp import dsl

from components.advantage import advantage
from components.checkpoint_export import checkpoint_export
from components.evaluate import evaluate
from components.plan import plan
from components.policy_update import policy_update
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


@dsl.pipeline(name="ratchet-grpo")
def grpo(root: str, run_id: str, config: str, total_steps: int = 100, steps_per_segment: int = 50) -> None:
    """GRPO post-training; a pod runs a segment of steps with the sampler and the trainer in memory.

    Args:
        root: Where runs lie: s3://bucket/prefix.
        run_id: The run's name. The same name again resumes the run.
        config: The run's config: YAML text, or the s3:// place of a YAML file.
        total_steps: RL steps of the whole run.
        steps_per_segment: RL steps of one segment; a run has at most 40 segments.
    """
    claimed = uncached(
        preflight(
            root=root,
            run_id=run_id,
            submission_id=JOB,
            config=config,
            total_steps=total_steps,
            steps_per_segment=steps_per_segment,
            grain="segment",
        )
    )
    prepared = uncached(preprocess(root=root, run_id=run_id, submission_id=JOB)).after(claimed)
    segments = uncached(plan(root=root, run_id=run_id, submission_id=JOB)).after(prepared)
    with dsl.ParallelFor(segments.output, parallelism=1, name="segments") as start:
        trained = uncached(segment(root=root, run_id=run_id, submission_id=JOB, start=start))
    evaluated = uncached(evaluate(root=root, run_id=run_id, submission_id=JOB, version="last")).after(trained)
    uncached(checkpoint_export(root=root, run_id=run_id, submission_id=JOB)).after(evaluated)


@dsl.pipeline(name="rl-step")
def rl_step(root: str, run_id: str, submission_id: str, step: int) -> None:
    """One RL step, a pod for each stage.

    Args:
        root: Where runs lie.
        run_id: The run's name.
        submission_id: The pipeline run that the tasks belong to.
        step: The RL step, from 1.
    """
    sampled = uncached(rollout(root=root, run_id=run_id, submission_id=submission_id, step=step))
    graded = uncached(reward(root=root, run_id=run_id, submission_id=submission_id, step=step)).after(sampled)
    scored = uncached(scores(root=root, run_id=run_id, submission_id=submission_id, step=step)).after(sampled)
    weighed = uncached(advantage(root=root, run_id=run_id, submission_id=submission_id, step=step)).after(
        graded, scored
    )
    uncached(policy_update(root=root, run_id=run_id, submission_id=submission_id, step=step)).after(weighed)


@dsl.pipeline(name="ratchet-grpo-stages")
def grpo_stages(root: str, run_id: str, config: str, total_steps: int = 10) -> None:
    """GRPO post-training; every stage of every step is a pod of its own, with its own image.

    Evaluates the base and the last policy only, whatever trainer.test_freq says.

    Args:
        root: Where runs lie: s3://bucket/prefix.
        run_id: The run's name. The same name again resumes the run.
        config: The run's config: YAML text, or the s3:// place of a YAML file.
        total_steps: RL steps of the whole run; at most 20 in one pipeline run.
    """
    claimed = uncached(
        preflight(
            root=root,
            run_id=run_id,
            submission_id=JOB,
            config=config,
            total_steps=total_steps,
            steps_per_segment=1,
            grain="stage",
        )
    )
    prepared = uncached(preprocess(root=root, run_id=run_id, submission_id=JOB)).after(claimed)
    base = uncached(evaluate(root=root, run_id=run_id, submission_id=JOB, version="base")).after(prepared)
    base.set_display_name("evaluate base")
    steps = uncached(plan(root=root, run_id=run_id, submission_id=JOB)).after(prepared)
    with dsl.ParallelFor(steps.output, parallelism=1, name="steps") as step:
        trained = uncached(rl_step(root=root, run_id=run_id, submission_id=JOB, step=step))
    evaluated = uncached(evaluate(root=root, run_id=run_id, submission_id=JOB, version="last")).after(trained)
    uncached(checkpoint_export(root=root, run_id=run_id, submission_id=JOB)).after(evaluated)
