"""The runner `kubeflow`: what the command line and flows ask of a cluster, in one place.

A flow becomes a compiled pipeline whose config is a parameter's default, so that the file says everything. A pipeline
by name takes its parameters at run time. Trap: importing a pipeline takes seconds, so that only what needs one does.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines import client, runs, schedules, submissions, uploads
from pipelines.api import ENDPOINT
from pipelines.configs import MAX_CONFIG_BYTES, parameter_text
from pipelines.packages import Package, Pipeline, find_package, parse_package
from pipelines.runs import PipelineRun
from pipelines.schedules import Change, Schedule, Trigger
from pipelines.submissions import Order, Submission
from pipelines.uploads import Upload
from ratchet.config import RunConfig
from ratchet.errors import ConfigError

__all__ = ["ENDPOINT", "MAX_CONFIG_BYTES", "KubeflowRunner", "Submission", "compile_flow", "submit_flow"]

Hearing = Callable[[PipelineRun], None]


def compile_flow(flow: Any, path: str | Path, config: Any = None) -> Path:
    """Write the pipeline of a flow to `path`, and return that.

    `config` holds the keys of no part. What it says of trainer.total_training_steps, steps_per_segment,
    default_local_dir and experiment_name are the parameters' defaults; trainer.grain chooses the pipeline. The same
    flow gives the same file.
    """
    from kfp import compiler

    parsed = flow.config(config)
    pipeline = _pipeline(parsed)
    compiler.Compiler().compile(pipeline, str(path), pipeline_parameters=_parameters(parsed, pipeline))
    return Path(path)


def submit_flow(
    flow: Any,
    config: Any = None,
    *,
    root: str | None = None,
    run_id: str | None = None,
    experiment: str | None = None,
    service_account: str | None = None,
    force: bool = False,
    **connection: Any,
) -> Submission:
    """Start the pipeline of a flow on a Kubeflow endpoint: `host`, or KF_PIPELINES_ENDPOINT's, or the pod's own.

    `root` and `run_id` say where the run lies (trainer.default_local_dir and trainer.experiment_name where the config
    has them); the same again resumes it, and does nothing while a pipeline run works on it, unless `force`d.
    `experiment` is Kubeflow's, trainer.project_name where it is not given. `connection` is `client.open_api`'s: host,
    namespace, kube_context, token_file, ca_cert, verify_ssl.
    """
    parsed = flow.config(config)
    stated = _parameters(parsed, _pipeline(parsed))
    place = {"root": root or stated.get("root"), "run_id": run_id or stated.get("run_id")}
    for name, key in (("root", "trainer.default_local_dir"), ("run_id", "trainer.experiment_name")):
        if not place[name]:
            raise ConfigError(
                f"submit: pass {name}=, or set {key} in the config: the pods must know where the run lies"
            )
    with tempfile.TemporaryDirectory() as folder:
        written = compile_flow(flow, Path(folder) / "pipeline.yaml", config)
        package = parse_package(written.read_text(encoding="utf-8"), "the flow")
    package.check(place)
    return submissions.submit(
        client.open_api(**connection),
        Order(package=package, values=place, config=parsed),
        experiment=experiment or parsed.trainer.project_name,
        service_account=service_account,
        is_forced=force,
        is_complete=submissions.is_complete,
    )


class KubeflowRunner:
    """Runs flows and pipelines on a cluster.

    `connection` is `pipelines.client.open_api`'s: host, namespace, kube_context, token_file, ca_cert, verify_ssl.
    `pipeline` is a short name (grpo, dpo, nightly, ...) or the path of a compiled pipeline.
    """

    def compile(self, flow: Any, path: str | Path, config: Any, **options: Any) -> Path:
        """See `compile_flow`."""
        return compile_flow(flow, path, config, **options)

    def submit(self, flow: Any, config: Any, **options: Any) -> Submission:
        """See `submit_flow`."""
        return submit_flow(flow, config, **options)

    def compile_pipeline(self, pipeline: str, path: str | Path) -> Package:
        """Write a pipeline's YAML, as this installation compiles it."""
        package = find_package(pipeline)
        try:
            Path(path).write_text(package.text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write the pipeline to {path}: {error.strerror}") from error
        return package

    def upload(self, pipeline: str, *, version: str | None = None, **connection: Any) -> Upload:
        """See `pipelines.uploads.upload`."""
        package = find_package(pipeline)
        return uploads.upload(client.open_api(**connection), package, version=version)

    def submit_pipeline(
        self,
        pipeline: str,
        pairs: Sequence[str] = (),
        *,
        parameters: Mapping[str, Any] | None = None,
        config: str | None = None,
        root: str | None = None,
        run_id: str | None = None,
        experiment: str | None = None,
        service_account: str | None = None,
        pipeline_root: str | None = None,
        force: bool = False,
        **connection: Any,
    ) -> Submission:
        """Submit a run of a pipeline; the same run id again goes on with it. See `submissions.submit`.

        `pairs` are `parameter=value` texts, and `section.key=value` overrides of the config.
        """
        found = _order(find_package(pipeline), pairs, parameters, config=config, root=root, run_id=run_id)
        return submissions.submit(
            client.open_api(**connection),
            found,
            experiment=experiment or found.experiment,
            service_account=service_account,
            pipeline_root=pipeline_root,
            is_forced=force,
            is_complete=submissions.is_complete,
        )

    def schedule(
        self,
        pipeline: str,
        pairs: Sequence[str] = (),
        *,
        name: str | None = None,
        cron: str | None = None,
        every: int | None = None,
        keep_alive: bool = False,
        start: str | None = None,
        end: str | None = None,
        disabled: bool = False,
        parameters: Mapping[str, Any] | None = None,
        config: str | None = None,
        root: str | None = None,
        run_id: str | None = None,
        experiment: str | None = None,
        service_account: str | None = None,
        pipeline_root: str | None = None,
        force: bool = False,
        **connection: Any,
    ) -> Change:
        """Schedule runs of a pipeline. See `schedules.schedule`.

        `keep_alive` submits one run again every `every` minutes, from now on, as long as the schedule is there; it goes
        by no `cron`.
        """
        trigger = Trigger(cron=cron, minutes=every, start=start, end=end, is_at_once=keep_alive)
        package = find_package(pipeline)
        # What a config calls its run is the same at every turn: meant where one run is kept alive, else not.
        ordered = _order(
            package, pairs, parameters, config=config, root=root, run_id=run_id, is_named_by_config=keep_alive
        )
        if keep_alive and (not ordered.run_id or "{" in ordered.run_id):
            raise ConfigError("--keep-alive submits one run again and again: pass its --run-id")
        named = name or (ordered.run_id if keep_alive else package.name)
        return schedules.schedule(
            client.open_api(**connection),
            package,
            name=named,
            values=ordered.values,
            trigger=trigger,
            experiment=experiment or ordered.experiment,
            service_account=service_account,
            pipeline_root=pipeline_root,
            is_enabled=not disabled,
            is_forced=force,
        )

    def schedules(self, **connection: Any) -> list[Schedule]:
        """Return the endpoint's schedules, newest first."""
        return schedules.schedules(client.open_api(**connection))

    def unschedule(self, name: str, *, disable: bool = False, **connection: Any) -> list[Schedule]:
        """Delete a schedule, or keep it from starting runs; return what it was, or is."""
        return schedules.unschedule(client.open_api(**connection), name, only_disable=disable)

    def terminate(self, run: str, *, delete: bool = False, **connection: Any) -> list[PipelineRun]:
        """End the pipeline runs that work on a run (ROOT/RUN-ID, a run id, a pipeline run's id); return what they were.

        `delete` deletes them, for those that do not end.
        """
        api = client.open_api(**connection)
        found = runs.find_active(api, run)
        for one in found:
            runs.delete_run(api, one) if delete else runs.terminate_run(api, one)
        return found

    def kfp_run(self, pipeline_run_id: str, **connection: Any) -> PipelineRun:
        """Return one pipeline run with its tasks."""
        return runs.get_run(client.open_api(**connection), pipeline_run_id)

    def active_runs(self, run: str, **connection: Any) -> list[PipelineRun]:
        """Return the pipeline runs that work on a run now, newest first; `run` as for `terminate`."""
        return runs.find_active(client.open_api(**connection), run)

    def wait(self, pipeline_run_id: str, *, listener: Hearing | None = None, **connection: Any) -> PipelineRun:
        """Return a pipeline run once it has ended. See `runs.wait_for`."""
        return runs.wait_for(client.open_api(**connection), pipeline_run_id, listener=listener)


def _order(package: Package, pairs: Sequence[str], parameters: Mapping[str, Any] | None, **stated: Any) -> Order:
    # A config's keys lie in sections; a parameter's name has no dot.
    overrides = [pair for pair in pairs if "." in pair.partition("=")[0]]
    read = package.read(pair for pair in pairs if pair not in overrides)
    given = {**read, **(parameters or {})}
    return submissions.order(package, given, overrides=overrides, **stated)


def _pipeline(config: RunConfig) -> Pipeline:
    """Return the pipeline of the config's objective and grain; where a pod runs whole steps, the step decides."""
    # Imported here: importing a pipeline compiles what it is made of, which takes seconds.
    from pipelines.dpo.pipeline import dpo, dpo_stages
    from pipelines.grpo.pipeline import grpo, grpo_stages, grpo_steps
    from pipelines.hybrid.pipeline import hybrid
    from pipelines.ppo.pipeline import ppo, ppo_stages
    from pipelines.reward_model.pipeline import reward_model
    from pipelines.sft.pipeline import sft

    if config.trainer.grain == "step":
        return grpo_steps
    if config.trainer.grain == "stage":
        sampled = ppo_stages if config.critic_is_needed else grpo_stages
        return dpo_stages if config.is_offline else sampled
    own = {"sft": sft, "dpo": dpo, "reward_model": reward_model, "hybrid": hybrid}
    return own.get(config.algorithm.objective, ppo if config.critic_is_needed else grpo)


def _parameters(config: RunConfig, pipeline: Any) -> dict[str, Any]:
    """Return the defaults that the config gives to the pipeline's parameters."""
    trainer, stated = config.trainer, config.trainer.model_fields_set
    # Without a number of steps the epochs decide, once the data are read.
    found: dict[str, Any] = {
        "config": parameter_text(config.model_dump(mode="json", exclude_unset=True)),
        "total_steps": trainer.total_training_steps or 0,
    }
    names = {
        "steps_per_segment": "steps_per_segment",
        "root": "default_local_dir",
        "run_id": "experiment_name",
    }
    for name, key in names.items():
        if key in stated and name in pipeline.component_spec.inputs and getattr(trainer, key) is not None:
            found[name] = getattr(trainer, key)
    return found
