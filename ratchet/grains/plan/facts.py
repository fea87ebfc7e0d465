"""What a plan is made from: the model's shape and the lengths of the texts, without weights and before a run exists."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from transformers import PreTrainedConfig

from ratchet.config import RunConfig
from ratchet.data.order import batch_positions, steps_per_epoch
from ratchet.data.parquet import to_bytes
from ratchet.errors import ConfigError
from ratchet.grains.plan.memory import weight_sizes
from ratchet.rewards.graders import Grader
from ratchet.stages.graph import data_stages

_MOST_READ = 8192
"""Texts that are tokenised; of more, as many that lie evenly among them stand for the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """The shape of a model, and the folder that it comes from."""

    config: PreTrainedConfig
    num_parameters: int
    num_tensors: int
    folder_bytes: int
    """Of its weights and texts as they lie in the folder, or would: the run's copy of version 0."""
    texts_bytes: int
    """Of everything but the weights."""
    dtype: str
    """Of the folder's weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """The texts of one split: prompts, or examples."""

    ids: Sequence[str]
    prompts: np.ndarray
    """int64: tokens of each prompt."""
    completions: np.ndarray | None = None
    """int64: tokens of each example's completions, chosen and rejected together; None where they are sampled."""
    sides: int = 1
    """Completions of an example."""
    table_bytes: int
    token_ids: Sequence[Sequence[int]] = ()
    """Some of the prompts, as ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Everything that a plan reads beside the config."""

    policy: Model
    critic: Model | None
    splits: dict[str, Split] = field(default_factory=dict)
    """train, and val and sft where there are any."""
    tokenizer: Any = None

    @property
    def train(self) -> Split:
        """What is trained on."""
        return self.splits["train"]

    def total_steps(self, config: RunConfig) -> int:
        """Return the steps of the whole run."""
        per_epoch = steps_per_epoch(len(self.train.ids), config.data.train_batch_size)
        return config.trainer.total_training_steps or config.trainer.total_epochs * per_epoch

    def positions(self, config: RunConfig, step: int) -> list[int]:
        """Return which training rows a step takes."""
        data = config.data
        return batch_positions(
            step, self.train.ids, data.train_batch_size, seed=config.trainer.seed, shuffle=data.shuffle
        )


def read_facts(config: RunConfig) -> Facts:
    """Read the model's configuration and tokenizer and the data; ConfigError, DataError or EngineError as a run's."""
    from ratchet.engines.model import load_tokenizer, resolve_tokenizer_folder

    path = config.actor_rollout_ref.model.path
    if not path:
        raise ConfigError("actor_rollout_ref.model.path is not set: expected a Hugging Face id or a model's folder")
    folder = resolve_tokenizer_folder(path)
    policy, tokenizer = _model(folder, config.algorithm.objective == "reward_model"), load_tokenizer(folder)
    critic = None
    if config.critic_is_needed:
        own = config.critic.model.path
        critic = _model(resolve_tokenizer_folder(own) if own else folder, True)
    splits: dict[str, Split] = {stage.split: _split(stage, config, tokenizer) for stage in data_stages(config)}
    return Facts(policy=policy, critic=critic, splits=splits, tokenizer=tokenizer)


def _model(folder: Path, has_values: bool) -> Model:
    from ratchet.engines.model import load_config
    from ratchet.engines.model_folder import TEXTS

    config = load_config(folder)
    sizes = weight_sizes(config, "values" if has_values else "policy")
    count = sum(sizes.values())
    dtype = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    texts = sum(path.stat().st_size for path in folder.iterdir() if path.suffix in TEXTS and path.is_file())
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    width = 4 if dtype == "float32" else 2
    return Model(
        config=config,
        num_parameters=count,
        num_tensors=len(sizes),
        folder_bytes=texts + (stored or width * count),
        texts_bytes=texts,
        dtype=dtype,
    )


def _split(stage: Any, config: RunConfig, tokenizer: Any) -> Split:
    from ratchet.engines.model import chat_prompts_ids

    usable = stage.usable(config, tokenizer, Grader({}) if stage.is_graded else None)
    table: pa.Table = usable.made.table()
    ids = [row_id for row_id, _ in usable.rows]
    if "prompt_token_ids" in table.column_names:
        lengths = {name: _lengths(table, name) for name in ("prompt", "chosen", "rejected")}
        has_pairs = bool(lengths["rejected"].any())
        return Split(
            ids=ids,
            prompts=lengths["prompt"],
            completions=lengths["chosen"] + lengths["rejected"],
            sides=1 + has_pairs,
            table_bytes=len(to_bytes(table)),
            token_ids=table["prompt_token_ids"].slice(0, 64).to_pylist(),
        )
    step = math.ceil(len(ids) / _MOST_READ)
    read = chat_prompts_ids(tokenizer, [row.prompt for _, row in usable.rows[::step]])
    lengths_read = np.repeat([len(one) for one in read], step)[: len(ids)]
    return Split(ids=ids, prompts=lengths_read, table_bytes=len(to_bytes(table)), token_ids=read[:64])


def _lengths(table: pa.Table, name: str) -> np.ndarray:
    counts = pc.fill_null(pc.list_value_length(table[f"{name}_token_ids"]), 0)
    return np.asarray(counts.to_numpy(), dtype=np.int64)
