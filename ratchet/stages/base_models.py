"""Version 0 of policy and critic: the base models are copied into the run once, as what step 0's updates publish.

Later stages read weights, config and tokenizer from the run alone, wherever they run.
"""

import shutil
from abc import abstractmethod
from pathlib import Path

from ratchet.config import RunConfig
from ratchet.errors import ConfigError, EngineError, StoreError, StoreUnavailableError
from ratchet.stages.base import Context, Input, Result, Stage
from ratchet.store.artifacts import scratch, write_folder
from ratchet.store.manifest import digest_of, sha256_files
from ratchet.store.run import CRITIC_UPDATE, POLICY_UPDATE, Run


class CopiedModel(Stage):
    """Copy a model folder (safetensors, config, tokenizer, chat template) into the run."""

    role: str

    def inputs(self, run: Run, config: RunConfig, step: int | None) -> dict[str, Input]:
        return {}

    def outside_inputs(self, config: RunConfig) -> dict[str, str] | None:
        digest = model_digest(self.path(config))
        return None if digest is None else {"base_model": digest}

    def compute(self, context: Context) -> Result:
        from ratchet.engines.model_source import resolve_model_folder

        folder = resolve_model_folder(self.path(context.config))
        self.check(folder)
        with scratch() as copy:
            self.write(context.config, folder, copy)
            artifact = write_folder(context.store, f"{context.folder}/{self.role}", copy, is_given=True)
            context.residents.keep_folder(self.role, artifact.digest, copy)
        return Result(outputs={self.role: artifact}, policy_version=0)

    @abstractmethod
    def path(self, config: RunConfig) -> str:
        """Return the model's place; ConfigError where none is set."""

    def check(self, folder: Path) -> None:
        """Raise where the model cannot be used for its role."""

    def write(self, config: RunConfig, folder: Path, target: Path) -> None:
        """Write the run's own copy of the model in `folder` to `target`."""
        for path in _kept(folder):
            shutil.copyfile(path, target / path.name)


class BasePolicy(CopiedModel):
    """Policy version 0. Of a run that trains a reward model it is a classifier: a causal model gets a head."""

    name = POLICY_UPDATE
    role = "policy"

    def keys(self, config: RunConfig) -> tuple[str, ...]:
        return ("algorithm.objective", "trainer.seed") if _is_reward_model(config) else ()

    def path(self, config: RunConfig) -> str:
        path = config.actor_rollout_ref.model.path
        if not path:
            raise ConfigError(
                "actor_rollout_ref.model.path is not set: expected a Hugging Face id, a local folder or s3://bucket/folder"
            )
        return path

    def check(self, folder: Path) -> None:
        from ratchet.engines.model import load_tokenizer

        load_tokenizer(folder)  # a model that cannot be prompted must not become the run's policy

    def write(self, config: RunConfig, folder: Path, target: Path) -> None:
        from ratchet.engines.model import is_classifier, load_config

        has_head = is_classifier(load_config(folder))
        if not _is_reward_model(config):
            if has_head:
                raise EngineError(
                    f"{self.path(config)} is a sequence classifier, such as a reward model: expected a causal language "
                    f"model for algorithm.objective={config.algorithm.objective}"
                )
            super().write(config, folder, target)
        elif has_head:
            from ratchet.engines.reward_model import check_reward_model

            check_reward_model(folder)
            super().write(config, folder, target)
        else:
            from ratchet.engines.classifier_folder import make_classifier_folder

            make_classifier_folder(folder, target, seed=config.trainer.seed)


class BaseCritic(CopiedModel):
    """Critic version 0: the backbone; a value head that the folder lacks is added when the critic is opened."""

    name = CRITIC_UPDATE
    role = "critic"

    def path(self, config: RunConfig) -> str:
        return config.critic.model.path or BasePolicy().path(config)


def _is_reward_model(config: RunConfig) -> bool:
    return config.algorithm.objective == "reward_model"


def model_digest(path: str) -> str | None:
    """Return the digest of a model's files, wherever they are; None where there are none (any more).

    That of a folder that a run exported is the digest that the run committed. Storage that does not answer is an error.
    """
    from ratchet.engines.model_source import resolve_model_folder

    try:
        folder = resolve_model_folder(path)
    except StoreUnavailableError:
        raise
    except (EngineError, StoreError):
        return None
    return digest_of({path.name: sha256 for path, sha256 in sha256_files(_kept(folder)).items()})


def _kept(folder: Path) -> list[Path]:
    """The model's own weights and what is text; some folders hold a second copy of the weights in another format."""
    from ratchet.engines.model_folder import TEXTS, weight_files

    texts = [path for path in folder.iterdir() if path.suffix in TEXTS and path.is_file()]
    return sorted([*weight_files(folder), *texts])
