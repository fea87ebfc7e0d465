"""The runner `kubeflow`: a flow becomes a compiled pipeline with its config as a parameter's default, and a run of it.

Trap: a parameter travels as one argument of a process, which Linux limits to 128 KiB; a config whose code is larger is
refused here, and not by a pod that cannot start.
"""

import json
import os
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kfp import Client, compiler, dsl
from urllib3.exceptions import HTTPError

from pipelines.grpo.pipeline import grpo, grpo_stages
from pipelines.ppo.pipeline import ppo, ppo_stages
from ratchet.config import RunConfig
from ratchet.errors import ConfigError

ENDPOINT = "KF_PIPELINES_ENDPOINT"
MAX_CONFIG_BYTES = 96 * 1024

_IN_CLUSTER = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_PIPELINES = {(False, False): grpo, (False, True): grpo_stages, (True, False): ppo, (True, True): ppo_stages}
"""(needs a critic, runs a pod for each stage) -> pipeline."""


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A pipeline run that was started."""

    pipeline_run_id: str
    """Kubeflow's id of it."""
    run: str
    """Where its results lie: ROOT/RUN-ID."""
    url: str
    """Its page."""


def compile_flow(flow: Any, path: str | Path, config: Any = None) -> Path:
    """Write the pipeline of an RLDataFlow to `path`, and return that.

    `config` holds the keys of no part. What it says of trainer.total_training_steps, steps_per_segment,
    default_local_dir and experiment_name are the parameters' defaults; trainer.grain chooses the pipeline. The same
    flow gives the same file.
    """
    parsed = flow.config(config)
    pipeline = _pipeline(parsed)
    compiler.Compiler().compile(pipeline, str(path), pipeline_parameters=_parameters(parsed, pipeline))
    return Path(path)


def submit_flow(
    flow: Any,
    config: Any = None,
    *,
    host: str | None = None,
    root: str | None = None,
    run_id: str | None = None,
    namespace: str | None = None,
    experiment: str | None = None,
) -> Submission:
    """Start the pipeline of an RLDataFlow on a Kubeflow endpoint: `host`, or KF_PIPELINES_ENDPOINT's, or the pod's own.

    `root` and `run_id` say where the run lies (trainer.default_local_dir and trainer.experiment_name where the config
    has them); the same again resumes it. `experiment` is Kubeflow's, trainer.project_name where it is not given.
    """
    host = host or os.environ.get(ENDPOINT)
    if not host and not _IN_CLUSTER.is_file():
        raise ConfigError(f"no Kubeflow endpoint is configured: pass host=, or set {ENDPOINT} (http://HOST:PORT)")
    parsed = flow.config(config)
    stated = _parameters(parsed, _pipeline(parsed))
    place = {"root": root or stated.get("root"), "run_id": run_id or stated.get("run_id")}
    for name, key in (("root", "trainer.default_local_dir"), ("run_id", "trainer.experiment_name")):
        if not place[name]:
            raise ConfigError(
                f"submit: pass {name}=, or set {key} in the config: the pods must know where the run lies"
            )
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        # The client warns about servers older than any that is supported here.
        warnings.simplefilter("ignore", FutureWarning)
        package = compile_flow(flow, Path(folder) / "pipeline.yaml", config)
        try:
            started = Client(
                host=host, **({"namespace": namespace} if namespace else {})
            ).create_run_from_pipeline_package(
                str(package),
                arguments=place,
                run_name=place["run_id"],
                experiment_name=experiment or parsed.trainer.project_name,
                namespace=namespace,
                enable_caching=False,
            )
        except HTTPError as error:
            raise ConfigError(f"cannot reach the Kubeflow endpoint {host or 'of this cluster'}: {error}") from error
    url = f"{(host or '').rstrip('/')}/#/runs/details/{started.run_id}"
    return Submission(
        pipeline_run_id=started.run_id, run=f"{str(place['root']).rstrip('/')}/{place['run_id']}", url=url
    )


class KubeflowRunner:
    """Runs flows on a cluster."""

    def compile(self, flow: Any, path: str | Path, config: Any, **options: Any) -> Path:
        """See `compile_flow`."""
        return compile_flow(flow, path, config, **options)

    def submit(self, flow: Any, config: Any, **options: Any) -> Submission:
        """See `submit_flow`."""
        return submit_flow(flow, config, **options)


def _pipeline(config: RunConfig) -> dsl.base_component.BaseComponent:
    return _PIPELINES[config.critic_is_needed, config.trainer.grain == "stage"]


def _parameters(config: RunConfig, pipeline: Any) -> dict[str, Any]:
    """Return the defaults that the config gives to the pipeline's parameters."""
    trainer, stated = config.trainer, config.trainer.model_fields_set
    text = _one_line(config.model_dump(mode="json", exclude_unset=True))
    if len(text.encode()) > MAX_CONFIG_BYTES:
        raise ConfigError(
            f"the config with its code has {len(text.encode())} bytes, and a pipeline's parameter holds "
            f"{MAX_CONFIG_BYTES}: put it as a YAML file into object storage, compile the pipeline without a flow, and "
            "give the parameter config the file's s3:// place"
        )
    # Without a number of steps the epochs decide, once the data are read.
    found: dict[str, Any] = {"config": text, "total_steps": trainer.total_training_steps or 0}
    names = {
        "steps_per_segment": "steps_per_segment",
        "root": "default_local_dir",
        "run_id": "experiment_name",
    }
    for name, key in names.items():
        if key in stated and name in pipeline.component_spec.inputs and getattr(trainer, key) is not None:
            found[name] = getattr(trainer, key)
    return found


def _one_line(tree: dict[str, Any]) -> str:
    """Return nested mappings as YAML of one line of ASCII: the compiler writes defaults into comments, too."""
    # JSON would write characters beyond U+FFFF as two surrogates, which YAML does not put together.
    text = json.dumps(tree, sort_keys=True, ensure_ascii=False)
    return "".join(one if " " <= one <= "~" else _escape(ord(one)) for one in text)


def _escape(code: int) -> str:
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
