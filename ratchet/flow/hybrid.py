"""HybridDataFlow: one update that learns from rewards and imitates examples.

Trap: the two tasks train one policy, with one optimizer. What the SFT task may say of its own is its examples and a
learning rate, which scales their loss.
"""

import os
from collections.abc import Sequence
from dataclasses import field
from typing import Any, ClassVar, Self

from ratchet.errors import ConfigError
from ratchet.flow.base import DataFlow
from ratchet.flow.data_flow import rl_advantage, rl_parts, rl_reward
from ratchet.flow.offline import OfflineUpdate
from ratchet.flow.part import Part, part, sets
from ratchet.flow.policy_update import as_policy_update
from ratchet.flow.rollout import Rollout

_MODEL = "actor_rollout_ref.model.path"
_HYBRID = "algorithm.hybrid"


@part
class Task(Part):
    """What both tasks take."""

    model: str = sets(_MODEL, default="", kw_only=True)
    """Hub id, local folder or s3:// folder of the policy, which is one; the rollout names it, too."""

    def __post_init__(self) -> None:
        dataset = getattr(self, "dataset", None)
        if isinstance(dataset, os.PathLike):
            object.__setattr__(self, "dataset", os.fspath(dataset))
        elif not isinstance(dataset, str) or not dataset:
            raise ConfigError(
                f"{type(self).__name__}: dataset is {dataset!r:.80}: expected a file, a folder or a dataset id, as "
                "data.train_files takes them (ratchet.data.frames.to_training_set writes a data frame as a file)"
            )


@part
class SFTTask(Task):
    """Imitate the `chosen` of these examples."""

    name: ClassVar[str] = "sft"
    dataset: Any = sets(f"{_HYBRID}.sft_files")
    lr: float | None = sets(f"{_HYBRID}.sft_lr", default=None)
    """Learning rate of the examples, whose loss is scaled by its ratio to the update's; the update's where it is not
    given."""


@part
class RLTask(Task):
    """Learn from rewards on these prompts; the parts are those of RLDataFlow.

    Without a `rollout` the config says how completions are sampled, and without a `reward` what grades them.
    """

    name: ClassVar[str] = "rl"
    dataset: Any = sets("data.train_files")
    rollout: Rollout | None = field(default=None, kw_only=True)
    reward: Any = field(default=None, kw_only=True)
    advantage: Any = field(default=None, kw_only=True)
    policy_update: Any = field(default=None, kw_only=True)


@part
class Mix(Part):
    """How the two tasks share an update."""

    name: ClassVar[str] = "hybrid"
    name_key: ClassVar[str | None] = "algorithm.objective"
    mix_ratio: float = sets(f"{_HYBRID}.mix_ratio", default=0.3)


def _without_parts(task: RLTask) -> RLTask:
    """Return the task with its prompts and model alone; its parts are roles of the flow."""
    return RLTask(task.dataset, model=task.model) if task.model else RLTask(task.dataset)


class HybridDataFlow(DataFlow):
    """SFT and RL in one update.

    Example: HybridDataFlow(sft_task=SFTTask("demos.jsonl"), rl_task=RLTask("train.parquet",
    rollout=HFRollout("./model"), advantage=GRPOAdvantage()), mix_ratio=0.3).

    Of the loss tokens of a step, `mix_ratio` come from the SFT task, and the loss is
    `(1 - mix_ratio) * L_rl + mix_ratio * L_sft`, each the mean over its own tokens.
    """

    def __init__(self, *, sft_task: SFTTask, rl_task: RLTask, mix_ratio: float = 0.3, code: Sequence[Any] = ()) -> None:
        for name, task, kind in (("sft_task", sft_task, SFTTask), ("rl_task", rl_task, RLTask)):
            if not isinstance(task, kind):
                raise ConfigError(f"{name} is {task!r}: expected {kind.__name__}(dataset, ...)")
        self.sft_task, self.rl_task, self.mix_ratio = sft_task, rl_task, mix_ratio
        self.rollout, self.reward = rl_task.rollout, rl_task.reward
        if self.rollout is not None and not isinstance(self.rollout, Rollout):
            raise ConfigError(f"rollout is {self.rollout!r}: expected VLLMRollout(...) or HFRollout(...)")
        self.advantage = rl_advantage(rl_task.advantage)
        self.policy_update = as_policy_update(rl_task.policy_update)
        if isinstance(self.policy_update, OfflineUpdate):
            raise ConfigError(
                f"policy_update is {self.policy_update!r}: an RLTask learns from rewards, by FSDPPolicyUpdate(...)"
            )
        graded = None if self.reward is None else rl_reward(self.reward)
        self.live_reward = None if graded is None else graded.live
        self._check_one_model()
        parts: dict[str, Part | None] = {
            "mix": Mix(mix_ratio=mix_ratio),
            "sft_task": sft_task,
            "rl_task": _without_parts(rl_task),
            "rollout": self.rollout,
            "reward": graded,
            "advantage": self.advantage,
            "policy_update": self.policy_update,
        }
        self._hold("hybrid", parts, code)

    def _check_one_model(self) -> None:
        named = {
            "SFTTask": self.sft_task.model,
            "RLTask": self.rl_task.model,
            "the rollout": self.rollout.model if self.rollout is not None else "",
        }
        said = {who: model for who, model in named.items() if model}
        if len(set(said.values())) > 1:
            listed = ", ".join(f"{who} says {model!r}" for who, model in said.items())
            raise ConfigError(f"HybridDataFlow trains one policy, and {listed}: name one model, once")

    @classmethod
    def _declared(cls, config: Any, stated: frozenset[str]) -> Self:
        if config.algorithm.objective != "hybrid":
            raise ConfigError(
                f"algorithm.objective is {config.algorithm.objective}, not hybrid: RLDataFlow.from_config reads it"
            )
        if not config.data.train_files:
            raise ConfigError("data.train_files names no prompts: expected those of the RL task")
        # The rollout names the model.
        sft = SFTTask.from_config(config, stated, without=frozenset({"model"}))
        parts = rl_parts(config, stated)
        code = [entry.model_dump() for entry in config.code]
        rl = RLTask(config.data.train_files, **parts)
        return cls(sft_task=sft, rl_task=rl, mix_ratio=config.algorithm.hybrid.mix_ratio, code=code)

    def __repr__(self) -> str:
        return f"HybridDataFlow(sft_task={self.sft_task!r}, rl_task={self.rl_task!r}, mix_ratio={self.mix_ratio})"
