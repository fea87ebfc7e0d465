"""A run is submitted once: what works on it is named, what is complete stays so, and anything else is gone on with.

Trap: object storage is often reachable from the pods only. What cannot be seen from here is no error: preflight, the
first task of every pipeline, asks again.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from pipelines.api import Api
from pipelines.configs import read_config
from pipelines.packages import Package
from pipelines.runs import PipelineRun, active_runs, start_run
from ratchet.config import RunConfig, parse_config, semantic
from ratchet.errors import ConfigError, RatchetError
from ratchet.grains.placement import config_overrides
from ratchet.store.layout import check_champion_name, check_run_id

logger = logging.getLogger(__name__)

What = Literal["started", "active", "complete"]


_WHOLE = ("total_steps", "steps_per_segment")
_CHANGING = (*_WHOLE, "device_map", "champion", "min_accuracy")
"""Parameters that change the config."""


@dataclass(frozen=True, kw_only=True)
class Submission:
    """What came of submitting a run."""

    pipeline_run_id: str
    """Kubeflow's id of the pipeline run; empty where none was needed."""
    run: str
    """Where its results lie: ROOT/RUN-ID."""
    url: str
    """Its page."""
    what: What = "started"
    """started; active: a pipeline run works on it already; complete: there is nothing left to do."""
    state: str = "PENDING"
    """The pipeline run's."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """A run that is to be submitted or scheduled: a pipeline's parameters, checked, and what they say."""

    package: Package
    values: Mapping[str, Any]
    config: RunConfig | None
    """The run's config, where it can be read from here."""

    @property
    def root(self) -> str:
        """Where the run lies."""
        return str(self.values.get("root") or self.package.value("root", self.values) or "")

    @property
    def run_id(self) -> str:
        """The run's name; empty where each pipeline run gives its own."""
        return str(self.values.get("run_id") or "")

    @cached_property
    def effective(self) -> RunConfig | None:
        """The config with what the other parameters change in it, as preflight reads it; ConfigError if it is none."""
        if "config" not in self.package.parameters:
            return None
        given = {name: self.package.value(name, self.values) for name in _CHANGING}
        # In a compiled pipeline a default is 3.0 where 3 was written.
        stated: dict[str, Any] = {name: int(one) if name in _WHOLE else one for name, one in given.items() if one}
        tree = self.config.model_dump(mode="json", exclude_unset=True) if self.config is not None else {}
        if self.config is None:
            stated = {name: value for name, value in stated.items() if name not in _WHOLE}
        # What there is to warn of was said when the config was read.
        found = parse_config(tree, config_overrides(**stated), source="the config with the parameters", is_quiet=True)
        name = found.promotion.name
        if name:
            check_champion_name(name)
        if self.config is None:
            return None
        if name and not found.data.val_files:
            raise ConfigError(
                f"champion {name!r} (promotion.name): data.val_files is not set, and without held-out prompts nothing "
                "can be promoted"
            )
        return found

    @property
    def experiment(self) -> str:
        """Kubeflow's experiment, unless one is named: the project."""
        return self.config.trainer.project_name if self.config is not None else "ratchet"


def order(
    package: Package,
    parameters: Mapping[str, Any],
    *,
    config: str | None = None,
    overrides: Sequence[str] = (),
    root: str | None = None,
    run_id: str | None = None,
    is_named_by_config: bool = True,
) -> Order:
    """Put a pipeline's parameters together: those given, and root, run id and config.

    A config says where its run lies, and, if `is_named_by_config`, what it is called, unless they are given. Everything
    that can be known to be wrong from here is a ConfigError.
    """
    values = dict(parameters)
    for name, value in (("config", config), ("root", root), ("run_id", run_id)):
        if value is not None and values.get(name, value) != value:
            raise ConfigError(f"parameter {name} is given twice: {values[name]!r} and {value!r}")
        if value is not None:
            values[name] = value
    parsed = None
    if "config" in package.parameters:
        source = str(package.value("config", values) or "")
        text, parsed = read_config(source, overrides)
        if "config" in values or overrides:
            values["config"] = text
            values = _stated(parsed, package, is_named_by_config) | values
    elif overrides:
        raise ConfigError(f"pipeline {package.name} has no parameter config that {overrides[0]!r} could be said in")
    package.check(values)
    found = Order(package=package, values=values, config=parsed)
    # Refuses what the parameters make of it.
    _ = found.effective
    if "root" in package.parameters and "://" not in found.root and not found.root.startswith("/"):
        raise ConfigError(f"root {found.root!r}: the pods must find it: expected s3://bucket/prefix")
    return found


def submit(
    api: Api,
    ordered: Order,
    *,
    experiment: str,
    service_account: str | None = None,
    pipeline_root: str | None = None,
    is_forced: bool = False,
    is_complete: Callable[[Order], bool] | None = None,
) -> Submission:
    """Start a pipeline run unless one works on the run already, or the run is complete (`is_complete`).

    `is_forced` starts another, which takes the run over from whoever works on it.
    """
    if not ordered.run_id:
        raise ConfigError("submit: pass run_id= (--run-id), or set trainer.experiment_name in the config")
    run_id = check_run_id(ordered.run_id)
    # A flow's order was not made by `order`.
    _ = ordered.effective
    run = f"{ordered.root.rstrip('/')}/{run_id}"
    if not is_forced:
        active = active_runs(api, run_id, ordered.root)
        if active:
            return _submission(active[0], run, "active")
        if is_complete is not None and is_complete(ordered):
            return Submission(pipeline_run_id="", run=run, url="", what="complete", state="SUCCEEDED")
    started = start_run(
        api,
        ordered.package,
        ordered.values,
        name=run_id,
        experiment=experiment,
        service_account=service_account,
        pipeline_root=pipeline_root,
    )
    return _submission(started, run, "started")


def is_complete(ordered: Order) -> bool:
    """Whether the run has everything that its config asks for, as far as its storage can be read from here.

    A run that exists with another config, or with more steps, is a ConfigError as in preflight.
    """
    config = ordered.effective
    if config is None:
        return False
    from ratchet.grains.loop import is_finished
    from ratchet.stages.settings import total_steps
    from ratchet.store import layout
    from ratchet.store.run import Run, check_same

    try:
        run = Run(ordered.root, ordered.run_id)
        if run.store.size(layout.RUN) is None:
            return False
        existing, last, is_done = run.semantic(), run.last_step(), is_finished(run, config)
        # Where a step is committed, so are the prompts, from which the epochs make steps.
        total = total_steps(run, config) if last else 0
    except (RatchetError, OSError) as error:
        logger.info("cannot see from here whether %s/%s is complete: %s", ordered.root, ordered.run_id, error)
        return False
    check_same(run.uri, existing, semantic(config))
    if last > total:
        raise ConfigError(
            f"run {run.uri} has committed {last} steps, and this submission asks for {total} in all; a run may grow, "
            "never shrink: raise total_steps (trainer.total_training_steps), or use another run id"
        )
    return is_done


def _stated(config: RunConfig | None, package: Package, is_named: bool) -> dict[str, Any]:
    """Return the parameters that a config says itself."""
    if config is None:
        return {}
    trainer, stated = config.trainer, config.trainer.model_fields_set
    keys = {"root": "default_local_dir", **({"run_id": "experiment_name"} if is_named else {})}
    return {name: getattr(trainer, key) for name, key in keys.items() if key in stated and name in package.parameters}


def _submission(run: PipelineRun, place: str, what: What) -> Submission:
    return Submission(pipeline_run_id=run.id, run=place, url=run.url, what=what, state=run.state)
