"""Engines that outlive a stage: the sampler, the trainer and the scorers of one process.

Trap: an engine's weights are known by the digest of the committed policy they came from; whatever is asked for another
digest loads it first, so that a stale engine can never be used.
"""

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratchet.config import RunConfig
from ratchet.stages.base import Input
from ratchet.store.artifacts import read_folder, scratch
from ratchet.store.run import POLICY_UPDATE, Run

if TYPE_CHECKING:
    import torch

    from ratchet.engines.sampler import Sampler
    from ratchet.engines.scorer import Scorer
    from ratchet.engines.trainer import Trainer

logger = logging.getLogger(__name__)

_WEIGHTS = ".safetensors"
_INDEX = "model.safetensors.index.json"


class Residents:
    """Holds engines, opens them on first use, and brings them to the policy that is asked for."""

    def __init__(self, run: Run, config: RunConfig, *, shared_folder: Path | None = None) -> None:
        self.run = run
        self.config = config
        self._shared_folder = shared_folder
        self.trainer: Trainer | None = None
        self._sampler: Sampler | None = None
        self._scorers: dict[str, Scorer] = {}
        self._held: dict[str, str] = {}
        self._fresh: tuple[str, dict[str, torch.Tensor]] | None = None
        self._folder: Path | None = None
        self._tokenizer: Any = None

    @property
    def is_main(self) -> bool:
        """Whether this process is rank 0, or alone; the others compute with it and write nothing."""
        return os.environ.get("RANK", "0") == "0"

    @contextmanager
    def state_folder(self) -> Iterator[Path]:
        """Yield a local folder that every rank of this node sees, to write the trainer's state to."""
        if self._shared_folder is not None:
            yield self._shared_folder
        else:
            with scratch() as folder:
                yield folder

    @property
    def device(self) -> str:
        """ "cuda" while an engine holds a GPU, else "cpu"."""
        if self.trainer is None and self._sampler is None and not self._scorers:
            return "cpu"
        return self.torch_device()

    def torch_device(self) -> str:
        """Return the device that the config asks for, "auto" resolved."""
        from ratchet.engines.model import torch_device

        return torch_device(self.config.trainer.device).type

    def sampler(self, policy: Input) -> "Sampler":
        """Return the sampler with the weights of `policy`."""
        if self._sampler is None:
            from ratchet.engines.open_sampler import open_sampler
            from ratchet.stages.settings import sampler_settings

            settings = sampler_settings(self.config, self.torch_device())
            self._sampler = open_sampler(
                self.config.actor_rollout_ref.rollout.name, self.model_folder(policy), **settings
            )
            self._held["sampler"] = policy.digest
        elif self._held["sampler"] != policy.digest:
            self._sampler.load_weights(self.weights(policy))
            self._held["sampler"] = policy.digest
        return self._sampler

    def scorer(self, role: str, policy: Input) -> "Scorer":
        """Return the scorer of `role` ("policy" or "reference") with the weights of `policy`."""
        if role not in self._scorers:
            from ratchet.engines.scorer import Scorer
            from ratchet.stages.settings import scorer_settings

            settings = scorer_settings(self.config, self.torch_device())
            self._scorers[role] = Scorer.from_folder(self.model_folder(policy), **settings)
        elif self._held[role] != policy.digest:
            self._scorers[role].load_weights(dict(self.weights(policy)))
        self._held[role] = policy.digest
        return self._scorers[role]

    def tokenizer(self) -> Any:
        """Return the tokenizer of policy version 0, which is every version's."""
        if self._tokenizer is None:
            from ratchet.engines.model import load_tokenizer

            self._tokenizer = load_tokenizer(self.base_folder())
        return self._tokenizer

    def publish(self, digest: str, weights: "dict[str, torch.Tensor]") -> None:
        """Keep the weights just published under `digest`, so that the sampler need not read them back."""
        self._fresh = (digest, weights)

    def weights(self, policy: Input) -> "Iterator[tuple[str, torch.Tensor]]":
        """Yield the weights of `policy` under their Hugging Face names, from memory where they are there."""
        if self._fresh is not None and self._fresh[0] == policy.digest:
            yield from self._fresh[1].items()
            return
        from safetensors import safe_open

        from ratchet.engines.model import weight_files

        for path in weight_files(self.model_folder(policy)):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - a safetensors file is no mapping
                    yield name, file.get_tensor(name)

    def model_folder(self, policy: Input) -> Path:
        """Return a local Hugging Face folder with the weights of `policy`; config and tokenizer are version 0's."""
        target = self._cache() / policy.digest
        if target.is_dir():
            return target
        partial = target.with_suffix(".partial")
        if policy.manifest.content.step == 0:
            shutil.rmtree(partial, ignore_errors=True)
        else:
            base = self.base_folder()
            self._evict(keep=base)
            partial.mkdir(parents=True)
            for path in base.iterdir():
                if path.suffix != _WEIGHTS and path.name != _INDEX:
                    shutil.copyfile(path, partial / path.name)
        read_folder(self.run.store, policy.artifact, partial)
        partial.replace(target)
        return target

    def base_folder(self) -> Path:
        """Return a local Hugging Face folder of policy version 0."""
        return self.model_folder(Input(self.run.require(POLICY_UPDATE, 0), "policy"))

    def drop(self) -> None:
        """Close every engine and forget everything held in memory; the next use starts from what is committed."""
        # The sampler last: where vLLM made the process group that the trainer joined, closing it ends the group.
        for engine in (self.trainer, *self._scorers.values(), self._sampler):
            if engine is not None:
                engine.close()
        self._sampler, self.trainer, self._fresh = None, None, None
        self._scorers.clear()
        self._held.clear()

    def close(self) -> None:
        """Drop everything and delete the local copies."""
        self.drop()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _cache(self) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="ratchet-models-", dir=os.environ.get("RATCHET_SCRATCH")))
        return self._folder

    def _evict(self, keep: Path) -> None:
        for path in self._cache().iterdir():
            if path != keep:
                shutil.rmtree(path)
