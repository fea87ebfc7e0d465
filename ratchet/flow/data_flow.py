"""The declarative form of a run: which parts it is made of, and nothing about order or placement.

A flow is data. It names the same config keys as a YAML file, so that a run can be declared either way, and a flow can
be written down as a config and rebuilt from it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from ratchet.errors import ConfigError
from ratchet.flow import tree as trees
from ratchet.flow.advantage import Advantage, GRPOAdvantage, advantage_from_config, as_advantage
from ratchet.flow.part import Part
from ratchet.flow.policy_update import FSDPPolicyUpdate, as_policy_update
from ratchet.flow.reward import GSM8KReward, as_reward, reward_from_config
from ratchet.flow.rollout import ROLLOUTS, Rollout
from ratchet.flow.runners import find_runner

if TYPE_CHECKING:
    from ratchet.config import RunConfig

Extra: TypeAlias = "Mapping[str, Any] | str | Path | RunConfig | None"
"""The keys that no part sets: nested mappings, a YAML file, or a RunConfig, of which what was given counts."""


ROLES = ("rollout", "reward", "advantage", "policy_update")


class RLDataFlow:
    """The parts of a run.

    Example: RLDataFlow(rollout=HFRollout("./model"), reward=GSM8KReward(), advantage=GRPOAdvantage(),
    policy_update=FSDPPolicyUpdate(lr=1e-5)).

    `reward` is a reward part, or a user's object or function; `advantage` an advantage part, or a function that
    @register_advantage decorates. `code` names further Python files that register something: they travel with the run.
    """

    def __init__(
        self,
        *,
        rollout: Rollout,
        reward: Any = None,
        advantage: Any = None,
        policy_update: FSDPPolicyUpdate | None = None,
        code: Sequence[Any] = (),
    ) -> None:
        if not isinstance(rollout, Rollout):
            raise ConfigError(f"rollout is {rollout!r}: expected VLLMRollout(...) or HFRollout(...)")
        self.rollout = rollout
        self.reward = GSM8KReward() if reward is None else reward
        self.advantage: Advantage = GRPOAdvantage() if advantage is None else as_advantage(advantage)
        self.policy_update = as_policy_update(FSDPPolicyUpdate() if policy_update is None else policy_update)
        self._reward = as_reward(self.reward)
        if isinstance(self._reward, (Rollout, Advantage, FSDPPolicyUpdate)):
            raise ConfigError(f"reward is {self._reward!r}: expected a reward")
        self._code = trees.embedded([*code, *(entry for part in self.parts for entry in part.code())])

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts, as what sets config keys."""
        return (self.rollout, self._reward, self.advantage, self.policy_update)

    @property
    def live_reward(self) -> Any:
        """The user's own reward object, where one was passed."""
        return self._reward.live

    # -- config ------------------------------------------------------------------------------------------------------

    def config(self, config: Extra = None) -> "RunConfig":
        """Return the RunConfig of these parts plus `config`: a nested mapping or a YAML file of the remaining keys.

        A key that `config` sets to another value than a part's argument does is a ConfigError.
        """
        from ratchet.config.load import parse_config

        tree = trees.read(config)
        for part in self.parts:
            trees.lay_over(tree, part)
        if self._code:
            tree["code"] = trees.embedded([*(tree.get("code") or ()), *self._code])
        parsed = parse_config(tree, source="the flow")
        for part in self.parts:
            trees.check_agreement(parsed, part)
        return parsed

    def to_dict(self, config: Extra = None) -> dict[str, Any]:
        """Return the run config as plain nested mappings: what the parts set beside defaults, plus `config`.

        ConfigError where a part cannot be written down.
        """
        self.check_travels("to_dict")
        found: dict[str, Any] = self.config(config).model_dump(mode="json", exclude_unset=True)
        return found

    @classmethod
    def from_config(cls, config: "Mapping[str, Any] | RunConfig") -> Self:
        """Return the flow that a config declares; keys of no part are left out."""
        from ratchet.config.load import parse_config

        parsed: Any = parse_config(config) if isinstance(config, Mapping) else config
        stated = trees.stated(parsed)
        return cls(
            rollout=ROLLOUTS[parsed.actor_rollout_ref.rollout.name].from_config(parsed, stated),
            reward=reward_from_config(parsed, stated),
            advantage=advantage_from_config(parsed, stated),
            policy_update=FSDPPolicyUpdate.from_config(parsed, stated),
            code=[entry.model_dump() for entry in parsed.code],
        )

    from_dict = from_config

    def check_travels(self, what: str, *, roles: Sequence[str] = ROLES) -> None:
        """Raise ConfigError, which `what` begins, if a part of these roles lives in this process only."""
        for role, part in zip(ROLES, self.parts, strict=True):
            reason = part.stays_here()
            if role in roles and reason is not None:
                raise ConfigError(f"{what}: the {role} cannot leave this process. {reason}")

    # -- running -----------------------------------------------------------------------------------------------------

    def compile(self, path: str | Path, config: Extra = None, **options: Any) -> Path:
        """Write the flow as a compiled Kubeflow pipeline, its config as the default of a parameter; return the path."""
        trees.stop_if_loading()
        self.check_travels("compile")
        return find_runner("kubeflow").compile(self, path, config, **options)

    def submit(self, config: Extra = None, **options: Any) -> Any:
        """Start the flow on the Kubeflow endpoint `host=`, or KF_PIPELINES_ENDPOINT's; `run_id=` and `root=` place it.

        Returns what the client says about the pipeline run.
        """
        trees.stop_if_loading()
        self.check_travels("submit")
        return find_runner("kubeflow").submit(self, config, **options)

    # -- reading -----------------------------------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RLDataFlow):
            return NotImplemented
        if self.parts == other.parts and self._digests() == other._digests():
            return True
        # One may say what follows from the other's arguments anyway.
        try:
            return bool(self.config() == other.config())
        except ConfigError:
            return False

    def __hash__(self) -> int:
        return hash(self.rollout)

    def _digests(self) -> set[str]:
        return {entry["sha256"] for entry in self._code}

    def __repr__(self) -> str:
        rollout, reward, advantage, policy_update = self.parts
        return f"RLDataFlow({rollout=}, {reward=}, {advantage=}, {policy_update=})"

    def __str__(self) -> str:
        lines = ["RLDataFlow", *(f"  {role:14} {part!r}" for role, part in zip(ROLES, self.parts, strict=True))]
        try:
            config = self.config()
        except ConfigError as error:
            return "\n".join([*lines, f"no config yet: {error}"])
        lines += ["config, beside defaults", *(f"  {key}: {value}" for key, value in trees.flat(config))]
        graph = find_runner("local").graph(config)
        width = max(len(name) for name, _ in graph)
        lines.append("stages of a step")
        lines += [f"  {name:{width}} <- {', '.join(needs)}" if needs else f"  {name}" for name, needs in graph]
        return "\n".join(lines)
