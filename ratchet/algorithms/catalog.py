"""Every advantage estimator and policy loss by name: where its function is, and what a run must provide for it.

Trap: this module imports no torch, so that a config can be checked and a graph derived without it; functions are
imported when they are first used. Users add entries with a decorator; a name is taken once.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, TypeVar, get_args

Need = Literal["group", "values", "greedy_rewards", "sum_pi_squared", "reward_parts"]
"""What an estimator reads beside rewards: other completions of the prompt, a critic's values, the reward of a greedy
completion a prompt, the sum of squared probabilities at each token, the reward's parts."""

LossAggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Entry:
    """One named algorithm."""

    name: str
    home: str | Callable[..., Any]
    """`module:name` of the function, or the function."""
    needs: frozenset[str] = frozenset()
    loss_agg_mode: LossAggMode | None = None
    """Policy losses: the one aggregation that the loss is defined with; None takes the configured one."""
    select: str | Callable[..., Any] | None = None
    """Policy losses: the function that picks tokens of a whole mini-batch before any of it is trained on."""

    def function(self) -> Callable[..., Any]:
        """Return the function, importing its module."""
        return _resolve(self.home)

    def selection(self) -> Callable[..., Any] | None:
        """Return the function that picks tokens over a mini-batch, or None."""
        return None if self.select is None else _resolve(self.select)


class Catalog:
    """Names of one kind of algorithm."""

    def __init__(self, kind: str, entries: Iterable[Entry], aliases: Mapping[str, str] | None = None) -> None:
        self.kind = kind
        self._entries = {entry.name: entry for entry in entries}
        self._aliases = dict(aliases or {})

    def names(self) -> list[str]:
        """Every name, in order."""
        return sorted(self._entries)

    def get(self, name: str) -> Entry:
        """Return the entry of a name or alias; ValueError names the nearest where there is none."""
        entry = self._entries.get(self._aliases.get(name, name))
        if entry is None:
            near = difflib.get_close_matches(name, self._entries, n=1, cutoff=0.0)[0]
            raise ValueError(f"no {self.kind} {name!r}; the nearest is {near}, all are {', '.join(self.names())}")
        return entry

    def add(self, entry: Entry) -> None:
        """Add an entry; ValueError where the name belongs to another function."""
        known = self._entries.get(entry.name)
        if entry.name in self._aliases or (known is not None and not _is_reloaded(known.home, entry.home)):
            raise ValueError(f"the {self.kind} {entry.name!r} exists already; choose another name")
        self._entries[entry.name] = entry


_ADVANTAGE = "ratchet.algorithms.advantage"
_TOKEN = "ratchet.algorithms.advantage_token"
_OPTIMAL = "ratchet.algorithms.optimal_baseline"
_LOSSES = "ratchet.algorithms.losses"

_GROUP: frozenset[str] = frozenset({"group"})

ADVANTAGES = Catalog(
    "advantage estimator",
    [
        Entry("gae", f"{_TOKEN}:gae", frozenset({"values"})),
        Entry("grpo", f"{_ADVANTAGE}:grpo", _GROUP),
        Entry("grpo_vectorized", f"{_ADVANTAGE}:grpo_vectorized", _GROUP),
        Entry("grpo_passk", f"{_ADVANTAGE}:grpo_passk", _GROUP),
        Entry("gdpo", f"{_ADVANTAGE}:gdpo", _GROUP | {"reward_parts"}),
        Entry("rloo", f"{_ADVANTAGE}:rloo", _GROUP),
        Entry("rloo_vectorized", f"{_ADVANTAGE}:rloo_vectorized", _GROUP),
        Entry("reinforce_plus_plus", f"{_TOKEN}:reinforce_plus_plus"),
        Entry("reinforce_plus_plus_baseline", f"{_ADVANTAGE}:reinforce_plus_plus_baseline", _GROUP),
        Entry("remax", f"{_TOKEN}:remax", frozenset({"greedy_rewards"})),
        Entry("opo", f"{_ADVANTAGE}:opo", _GROUP),
        Entry("gpg", f"{_ADVANTAGE}:gpg", _GROUP),
        Entry("optimal_token_baseline", f"{_OPTIMAL}:optimal_token_baseline", _GROUP | {"sum_pi_squared"}),
        Entry("tir_optimal_token_baseline", f"{_OPTIMAL}:tir_optimal_token_baseline", _GROUP | {"sum_pi_squared"}),
    ],
)

POLICY_LOSSES = Catalog(
    "policy loss",
    [
        Entry("vanilla", f"{_LOSSES}:ppo_clip"),
        Entry("gspo", f"{_LOSSES}_sequence:gspo", loss_agg_mode="seq-mean-token-mean"),
        Entry("cispo", f"{_LOSSES}:cispo"),
        Entry("sapo", f"{_LOSSES}:sapo", loss_agg_mode="seq-mean-token-mean"),
        Entry("gpg", f"{_LOSSES}:gpg"),
        Entry("clip_cov", f"{_LOSSES}_covariance:clip_cov", select=f"{_LOSSES}_covariance:select_clip_cov"),
        Entry("kl_cov", f"{_LOSSES}_covariance:kl_cov", select=f"{_LOSSES}_covariance:select_kl_cov"),
        Entry("geo_mean", f"{_LOSSES}_sequence:geo_mean", loss_agg_mode="seq-mean-token-mean"),
        Entry("dppo_tv", f"{_LOSSES}:dppo_tv"),
        Entry("dppo_kl", f"{_LOSSES}:dppo_kl"),
        Entry("dro", f"{_LOSSES}:dro"),
    ],
    aliases={"ppo_clip": "vanilla", "gmpo": "geo_mean"},
)


def register_advantage(name: str, *, needs: Iterable[Need] = ()) -> Callable[[Function], Function]:
    """Register `function(batch: AdvantageBatch, options: AdvantageOptions) -> (advantages, returns)` under `name`."""

    def register(function: Function) -> Function:
        ADVANTAGES.add(Entry(name, function, frozenset(needs)))
        return function

    return register


def register_policy_loss(name: str, *, loss_agg_mode: LossAggMode | None = None) -> Callable[[Function], Function]:
    """Register `function(batch: LossBatch, options: LossOptions) -> (loss per token, metrics per token)`."""
    if loss_agg_mode is not None and loss_agg_mode not in get_args(LossAggMode):
        raise ValueError(f"expected a loss_agg_mode of {', '.join(get_args(LossAggMode))}, got {loss_agg_mode!r}")

    def register(function: Function) -> Function:
        POLICY_LOSSES.add(Entry(name, function, loss_agg_mode=loss_agg_mode))
        return function

    return register


def _resolve(home: str | Callable[..., Any]) -> Callable[..., Any]:
    if not isinstance(home, str):
        return home
    module, _, name = home.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), name)
    return found


def _is_reloaded(old: str | Callable[..., Any], new: str | Callable[..., Any]) -> bool:
    """Whether `new` is the same function imported again: a user's file may be read under two module names."""
    code = getattr(old, "__code__", None)
    return code is not None and code.co_code == getattr(new, "__code__", code).co_code and _name(old) == _name(new)


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", "")
