"""What pipelines are put together from: the tasks before, within and after the loop over steps.

Preflight decides whether there is work, plan what it is and where it runs; nothing after preflight runs for a run that
is complete. Traps: KFP hands no data from one iteration to the next, so that state passes through the run in object
storage, and tasks find their submission by the pipeline run's id. A task takes resources at run time from the inputs of
its own pipeline only, hence the pipelines of one or a few tasks below. kfp.local replaces an outer task's output inside
a loop by the loop's item, and finds what a condition reads only under the name Output.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

from kfp import dsl

from components.advantage import advantage
from components.checkpoint_export import checkpoint_export
from components.critic_update import critic_update
from components.evaluate import evaluate
from components.images import image
from components.plan import plan
from components.policy_update import policy_update
from components.preflight import preflight
from components.preprocess import preprocess
from components.promote import promote
from components.reward import reward
from components.rollout import rollout
from components.scores import scores
from components.segment import segment
from components.step import step
from pipelines import installation
from pipelines.installation import PLACEMENT, place, settle

JOB = dsl.PIPELINE_JOB_ID_PLACEHOLDER
IMAGES = {
    "segment": image("segment"),
    "rollout": image("rollout"),
    "scores": image("train"),
    "policy_update": image("train"),
    "evaluate": image("rollout"),
}
"""Entry of device_map -> the image of its pods where nothing else is asked for."""

Values = Mapping[str, Any]
_RUN = {"root": str, "run_id": str, "submission_id": str}


def train_in_segments(parameters: Values) -> None:
    """Add the tasks of a run whose pods each train a segment of steps.

    `parameters` are the pipeline's by name, as `locals()` has them in its first line: those of preflight, root and
    run_id among them.
    """
    run, claimed = _run_of(parameters), _preflight(parameters, grain="segment", has_critic=True)
    with dsl.If(claimed.outputs["Output"] == "train", name="work"):
        segments = _plan(run, after=_preprocess(run))
        with dsl.ParallelFor(segments.output, parallelism=1, name="segments") as item:
            trained = _uncached(_segment(**run, submission_id=JOB, **_given(item, "start", "segment")))
        _finish(run, claimed, after=trained)


def train_in_steps(parameters: Values) -> None:
    """Add the tasks of a run whose pods each run one RL step, for nodes that may be taken away at any time."""
    run, claimed = _run_of(parameters), _preflight(parameters, grain="step", has_critic=True)
    with dsl.If(claimed.outputs["Output"] == "train", name="work"):
        steps = _plan(run, after=_preprocess(run))
        with dsl.ParallelFor(steps.output, parallelism=1, name="steps") as item:
            trained = _uncached(_whole_step(**run, submission_id=JOB, **_given(item, "start", "segment")))
        _finish(run, claimed, after=trained)


def train_in_stages(parameters: Values, *, step: Literal["grpo", "ppo", "offline"]) -> None:
    """Add the tasks of a run whose pods each run one stage of a step of that kind; but for ppo, preflight refuses a
    config that has a critic.

    The base is evaluated before anything is trained: a run's last task must be the one that ends it.
    """
    run, claimed = _run_of(parameters), _preflight(parameters, grain="stage", has_critic=step == "ppo")
    with dsl.If(claimed.outputs["Output"] == "train", name="work"):
        prepared = _preprocess(run)
        base = _uncached(_evaluation(**run, submission_id=JOB, version="base", **_where(claimed))).after(prepared)
        base.set_display_name("evaluate base")
        steps = _plan(run, after=base)
        one_step, placed = _STEPS[step]
        with dsl.ParallelFor(steps.output, parallelism=1, name="steps") as item:
            trained = _uncached(one_step(**run, submission_id=JOB, **_given(item, "start", *placed)))
        _finish(run, claimed, after=trained)


def _run_of(parameters: Values) -> Values:
    """Return what names the run, which every task is told."""
    return {name: parameters[name] for name in ("root", "run_id")}


def _preflight(parameters: Values, *, grain: str, has_critic: bool) -> dsl.PipelineTask:
    task = preflight(
        **{"from_champion": False, "champion": "", "min_accuracy": 0.0, **parameters},
        submission_id=JOB,
        grain=grain,
        has_critic=has_critic,
        images=IMAGES,
    )
    claim = installation.compile_cache_claim()
    if claim:
        # Preflight asks whether it is there; other pods would wait for it.
        task.set_env_variable("RATCHET_COMPILE_CACHE_CLAIM", claim)
    return _light(task, hours=1)


def _preprocess(run: Values) -> dsl.PipelineTask:
    return _light(preprocess(**run, submission_id=JOB), hours=12)


def _plan(run: Values, *, after: dsl.PipelineTask) -> dsl.PipelineTask:
    return _light(plan(**run, submission_id=JOB), hours=1).after(after)


def _finish(run: Values, claimed: dsl.PipelineTask, *, after: dsl.PipelineTask) -> None:
    _uncached(_ending(**run, submission_id=JOB, **_where(claimed))).after(after)


def _uncached(task: dsl.PipelineTask) -> dsl.PipelineTask:
    return task.set_caching_options(False)


def _light(task: dsl.PipelineTask, *, hours: int) -> dsl.PipelineTask:
    """A task without an accelerator, in the image base."""
    settle(task, hours=hours)
    task.set_env_variable("RATCHET_IMAGE", image("base"))
    return task.set_cpu_request("250m").set_memory_request("1Gi")


def _given(item: Any, start: str, *stages: str) -> dict[str, Any]:
    """Return what an item of plan's list tells the pipeline within the loop."""
    return {start: getattr(item, start)} | {name: getattr(item, name) for name in _placed(*stages)}


def _where(claimed: dsl.PipelineTask) -> dict[str, Any]:
    return {f"evaluate_{name}": claimed.outputs[name] for name in PLACEMENT}


def _placed(*stages: str) -> dict[str, type]:
    return {f"{stage}_{name}": kind for stage in stages for name, kind in PLACEMENT.items()}


def _pipeline(name: str, inputs: Mapping[str, type], body: Callable[[Values], None]) -> Any:
    """Return the pipeline of that name: `body` gets its inputs by name.

    KFP reads a pipeline's inputs from its signature, which here follows from the stages that are placed.
    """

    def function(*values: Any) -> None:
        body(dict(zip(inputs, values, strict=True)))

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(name, kind, annotation=type_) for name, type_ in inputs.items()])
    function.__signature__ = signature  # type: ignore[attr-defined]
    function.__name__, function.__doc__ = name.replace("-", "_"), body.__doc__
    return dsl.pipeline(name=name)(function)


def _base(given: Values) -> dict[str, Any]:
    return {name: given[name] for name in _RUN}


def _segment_body(given: Values) -> None:
    """Run one segment of steps."""
    place(segment(**_base(given), start=given["start"]), given, "segment", hours=24 * 7)


def _step_body(given: Values) -> None:
    """Run one step in one pod."""
    place(step(**_base(given), step=given["start"]), given, "segment", hours=24)


def _weigh(given: Values) -> dsl.PipelineTask:
    at = {**_base(given), "step": given["start"]}
    sampled = place(rollout(**at), given, "rollout", hours=24)
    graded = _light(reward(**at), hours=24).after(sampled)
    scored = place(scores(**at), given, "scores", hours=24).after(sampled)
    return _light(advantage(**at), hours=12).after(graded, scored)


def _grpo_body(given: Values) -> None:
    """Run one step without a critic, a pod for each stage."""
    weighed = _weigh(given)
    place(policy_update(**_base(given), step=given["start"]), given, "policy_update", hours=24).after(weighed)


def _ppo_body(given: Values) -> None:
    """Run one step with a critic, a pod for each stage."""
    at = {**_base(given), "step": given["start"]}
    weighed = _weigh(given)
    learned = place(critic_update(**at), given, "policy_update", hours=24).after(weighed)
    place(policy_update(**at), given, "policy_update", hours=24).after(learned)


def _offline_body(given: Values) -> None:
    """Run one step on examples, a pod for each stage."""
    at = {**_base(given), "step": given["start"]}
    scored = place(scores(**at), given, "scores", hours=24)
    place(policy_update(**at), given, "policy_update", hours=24).after(scored)


def _evaluation_body(given: Values) -> None:
    """Evaluate one policy version."""
    place(evaluate(**_base(given), version=given["version"]), given, "evaluate", hours=24)


def _ending_body(given: Values) -> None:
    """Evaluate and export the last policy, and decide on its promotion."""
    evaluated = place(evaluate(**_base(given), version="last"), given, "evaluate", hours=24)
    exported = place(checkpoint_export(**_base(given)), given, "evaluate", hours=12).after(evaluated)
    _light(promote(**_base(given)), hours=1).after(exported)


_SAMPLED, _OFFLINE = ("rollout", "scores", "policy_update"), ("scores", "policy_update")
_segment = _pipeline("segment-placed", {**_RUN, "start": int, **_placed("segment")}, _segment_body)
_whole_step = _pipeline("step-placed", {**_RUN, "start": int, **_placed("segment")}, _step_body)
_STEPS = {
    "grpo": (_pipeline("grpo-step", {**_RUN, "start": int, **_placed(*_SAMPLED)}, _grpo_body), _SAMPLED),
    "ppo": (_pipeline("ppo-step", {**_RUN, "start": int, **_placed(*_SAMPLED)}, _ppo_body), _SAMPLED),
    "offline": (_pipeline("offline-step", {**_RUN, "start": int, **_placed(*_OFFLINE)}, _offline_body), _OFFLINE),
}
"""Kind of step -> its pipeline, and the stages whose pods are placed."""
_evaluation = _pipeline("evaluation", {**_RUN, "version": str, **_placed("evaluate")}, _evaluation_body)
_ending = _pipeline("ending", {**_RUN, **_placed("evaluate")}, _ending_body)
