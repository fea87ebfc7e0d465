"""Policy version 0: the base model is copied into the run once, as what `policy_update` of step 0 publishes.

Later stages read weights, config and tokenizer from the run alone, wherever they run.
"""

import shutil
from pathlib import Path

from ratchet.config import RunConfig
from ratchet.errors import ConfigError, EngineError
from ratchet.stages.base import Context, Input, Result, Stage
from ratchet.store.artifacts import scratch, write_folder
from ratchet.store.manifest import digest_of, sha256_file
from ratchet.store.run import POLICY_UPDATE, Run

_KEPT = (".json", ".jinja", ".model", ".txt")


class BasePolicy(Stage):
    """Copy the model folder (safetensors, config, tokenizer, chat template) into the run."""

    name = POLICY_UPDATE
    config_keys = ()

    def inputs(self, run: Run, config: RunConfig, step: int | None) -> dict[str, Input]:
        return {}

    def outside_inputs(self, config: RunConfig) -> dict[str, str] | None:
        from ratchet.engines.model import resolve_model_folder

        try:
            folder = resolve_model_folder(_path(config))
        except EngineError:
            return None
        files = {path.name: sha256_file(path) for path in _kept(folder)}
        return {"base_model": digest_of(files)}

    def compute(self, context: Context) -> Result:
        from ratchet.engines.model import load_tokenizer, resolve_model_folder

        folder = resolve_model_folder(_path(context.config))
        load_tokenizer(folder)  # a model that cannot be prompted must not become the run's policy
        with scratch() as copy:
            for path in _kept(folder):
                shutil.copyfile(path, copy / path.name)
            policy = write_folder(context.store, f"{context.folder}/policy", copy)
        return Result(outputs={"policy": policy}, policy_version=0)


def _kept(folder: Path) -> list[Path]:
    """The model's own weights and what is text; some folders hold a second copy of the weights in another format."""
    from ratchet.engines.model import weight_files

    texts = [path for path in folder.iterdir() if path.suffix in _KEPT and path.is_file()]
    return sorted([*weight_files(folder), *texts])


def _path(config: RunConfig) -> str:
    path = config.actor_rollout_ref.model.path
    if not path:
        raise ConfigError("actor_rollout_ref.model.path is not set: expected a Hugging Face id or a local folder")
    return path
