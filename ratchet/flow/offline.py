"""Learning from examples: what a flow's policy update is where nothing is sampled and nothing graded.

Each is an objective of its own and names its model, since there is no rollout that would.
"""

from typing import TYPE_CHECKING, Any, ClassVar

from ratchet.errors import ConfigError
from ratchet.flow.part import Part, part, sets
from ratchet.flow.policy_update import PolicyUpdate

if TYPE_CHECKING:
    from ratchet.config import RunConfig

_DPO = "algorithm.dpo"


@part
class OfflineUpdate(PolicyUpdate):
    """What updates from examples take beside every update's arguments."""

    name_key: ClassVar[str | None] = "algorithm.objective"
    # By name alone, since DPOPolicyUpdate(0.1) is one with that beta.
    lr: float = sets("actor_rollout_ref.actor.optim.lr", default=1e-6, kw_only=True)
    grad_clip: float = sets("actor_rollout_ref.actor.grad_clip", default=1.0, kw_only=True)
    ppo_epochs: int = sets("actor_rollout_ref.actor.ppo_epochs", default=1, kw_only=True)
    model: str = sets("actor_rollout_ref.model.path", default="", kw_only=True)
    """Hub id, local folder or s3:// folder to start from: weights, tokenizer and chat template."""
    max_prompt_length: int = sets("data.max_prompt_length", default=512, kw_only=True)
    """Most tokens of a prompt."""
    max_tokens: int = sets("data.max_response_length", default=512, kw_only=True)
    """Most tokens of a chosen or rejected completion."""


@part
class SFTPolicyUpdate(OfflineUpdate):
    """Supervised fine-tuning on `chosen`: the mean negative log-likelihood of what the assistant wrote."""

    name: ClassVar[str] = "sft"


@part
class DPOPolicyUpdate(OfflineUpdate):
    """Direct preference optimisation on `chosen` and `rejected` (https://arxiv.org/abs/2305.18290)."""

    name: ClassVar[str] = "dpo"
    beta: float = sets(f"{_DPO}.beta", default=0.1)
    """How much a difference of log-ratios counts; the larger, the closer the policy stays to the reference."""
    loss_type: str = sets(f"{_DPO}.loss_type", default="sigmoid", kw_only=True)
    """sigmoid, ipo or hinge."""
    label_smoothing: float = sets(f"{_DPO}.label_smoothing", default=0.0, kw_only=True)
    """sigmoid: share of the preferences that are taken to be the wrong way round."""
    reference_free: bool = sets(f"{_DPO}.reference_free", default=False, kw_only=True)
    """Take the reference's log-probs as 0."""
    length_normalized: bool = sets(f"{_DPO}.length_normalized", default=False, kw_only=True)
    """Divide the log-probs of a completion by its tokens."""


@part
class RewardModelUpdate(OfflineUpdate):
    """A reward model from `chosen` and `rejected`: a sequence classifier, by Bradley-Terry's likelihood.

    `model` is a classifier of one label, or a causal language model that is made one. The export is what
    `RewardModel(path)` takes.
    """

    name: ClassVar[str] = "reward_model"


@part
class DPOAdvantage(Part):
    """What stands in for an advantage beside DPOPolicyUpdate: the preference of a pair, which is in its loss."""

    name: ClassVar[str] = "dpo"


_UPDATES: dict[str, type[OfflineUpdate]] = {
    one.name: one for one in (SFTPolicyUpdate, DPOPolicyUpdate, RewardModelUpdate)
}


def offline_update(config: "RunConfig", stated: frozenset[str]) -> OfflineUpdate:
    """Return the update that a config with an offline objective declares."""
    return _UPDATES[config.algorithm.objective].from_config(config, stated)


def check_offline(update: OfflineUpdate, *, rollout: Any, reward: Any, advantage: Any) -> DPOAdvantage | None:
    """Return the flow's advantage beside `update`; ConfigError where a part is passed that it has no use for."""
    name, is_dpo = type(update).__name__, isinstance(update, DPOPolicyUpdate)
    if rollout is not None:
        online = " (online DPO, whose pairs are sampled, is not there yet)" if is_dpo else ""
        raise ConfigError(
            f"rollout is {rollout!r}, and {name} learns from the examples of data.train_files{online}: pass "
            f"rollout=None, and the model as {name}(model=...)"
        )
    if reward is not None:
        raise ConfigError(f"reward is {reward!r}, and {name} grades nothing: leave reward out")
    if advantage is not None and not (is_dpo and isinstance(advantage, DPOAdvantage)):
        takes = "DPOAdvantage() or none" if is_dpo else "none"
        raise ConfigError(f"advantage is {advantage!r}, and {name} takes {takes}: leave advantage out")
    return DPOAdvantage() if is_dpo else None
