"""What grades the completions: Ratchet's rules, a model, an endpoint, a judge, a user's own code, or several."""

from collections.abc import Iterable
from dataclasses import field
from hashlib import sha256
from typing import Any, ClassVar, Self

from ratchet.errors import ConfigError
from ratchet.flow.part import Part, declared, part, plain, sets
from ratchet.flow.user_object import StaysHere, Written, name_of, write_down

_SECTION = "reward_model"
_HOOK = "custom_reward_function"
_BUFFER = f"{_SECTION}.overlong_buffer"
_JUDGE = f"{_SECTION}.judge"
_LIVE = "<live>"
"""As in ratchet.config.user_code, which is not imported to declare a flow."""


@part
class Reward(Part):
    """What all rewards take."""

    name_key: ClassVar[str | None] = f"{_SECTION}.type"
    num_examine: int = sets(f"{_SECTION}.num_examine", default=0, kw_only=True)
    """Completions of each data_source that are printed with their reward, in every step."""
    overlong_buffer_len: int | None = field(default=None, kw_only=True)
    """DAPO's soft penalty on length: it grows over so many tokens before the limit; None is none."""
    overlong_penalty_factor: float = sets(f"{_BUFFER}.penalty_factor", default=1.0, kw_only=True)

    def keys(self, *, given_only: bool = False) -> dict[str, Any]:
        found = super().keys(given_only=given_only)
        if self.overlong_buffer_len is not None:
            found |= {f"{_BUFFER}.enable": True, f"{_BUFFER}.len": self.overlong_buffer_len}
        elif "overlong_buffer_len" in self.given or not given_only:
            found |= {f"{_BUFFER}.enable": False}
        return found

    @classmethod
    def arguments(cls, value: Any) -> dict[str, Any]:
        length = value(f"{_BUFFER}.len") if value(f"{_BUFFER}.enable") else None
        return super().arguments(value) | {"overlong_buffer_len": length}


@part
class GSM8KReward(Reward):
    """The rule of each row's data_source; `mode` says how an answer is read from a GSM8K completion."""

    name: ClassVar[str] = "rule"
    mode: str = sets(f"{_SECTION}.gsm8k_mode", default="default")
    rule: str = sets(f"{_SECTION}.rule", default="")
    """Grade every row by `gsm8k` or `math`, whatever its data_source."""


RuleReward = GSM8KReward
"""The same under the name that says what it does for other data sources, registered ones among them."""


@part
class RewardModel(Reward):
    """A Hugging Face sequence classifier with one label, or a model with a reward head."""

    name: ClassVar[str] = "model"
    path: str = sets(f"{_SECTION}.path")
    dtype: str = sets(f"{_SECTION}.dtype", default="bfloat16")
    max_token_len_per_gpu: int = sets(f"{_SECTION}.max_token_len_per_gpu", default=16384)
    """Token budget of one forward pass."""


@part
class Service(Reward):
    """What rewards from an endpoint take."""

    concurrency: int = sets(f"{_SECTION}.concurrency", default=32, kw_only=True)
    """Requests under way at once."""
    timeout: float = sets(f"{_SECTION}.timeout", default=60.0, kw_only=True)
    """Seconds for one request."""
    retries: int = sets(f"{_SECTION}.retries", default=3, kw_only=True)
    auth_env: str = sets(f"{_SECTION}.auth_env", default="", kw_only=True)
    """Environment variable with the Authorization header's value; the value itself is in no config."""


@part
class RewardAPI(Service):
    """An HTTP endpoint (docs/rewards.md has the request and the response)."""

    name: ClassVar[str] = "api"
    url: str = sets(f"{_SECTION}.url")
    batch_size: int = sets(f"{_SECTION}.batch_size", default=64)


@part
class JudgeReward(Service):
    """A language model as judge, behind an endpoint that speaks OpenAI's chat completions (docs/rewards.md)."""

    name: ClassVar[str] = "judge"
    url: str = sets(f"{_JUDGE}.url")
    """Address of the API, such as http://host:8000/v1."""
    model: str = sets(f"{_JUDGE}.model", default="")
    """The name that the endpoint knows the model by."""
    prompt: str | None = sets(f"{_JUDGE}.prompt", default=None)
    """What it is asked, with {prompt}, {completion} and {ground_truth}; the config's default where it is not given."""
    pattern: str | None = sets(f"{_JUDGE}.pattern", default=None, kw_only=True)
    """Regular expression whose first group is the number; the config's default where it is not given."""
    scale: tuple[float, float] = sets(f"{_JUDGE}.scale", default=(0.0, 10.0), kw_only=True)
    """The numbers that become the rewards 0 and 1."""
    max_tokens: int = sets(f"{_JUDGE}.max_tokens", default=512, kw_only=True)
    temperature: float = sets(f"{_JUDGE}.temperature", default=0.0, kw_only=True)

    def keys(self, *, given_only: bool = False) -> dict[str, Any]:
        return {key: value for key, value in super().keys(given_only=given_only).items() if value is not None}

    @classmethod
    def arguments(cls, value: Any) -> dict[str, Any]:
        from ratchet.config.rewards import JudgeConfig

        usual, found = JudgeConfig(), super().arguments(value)
        return found | {name: None for name in ("prompt", "pattern") if found[name] == getattr(usual, name)}


class CustomReward(Part):
    """A reward of the user's own, by path and name: verl's hook, or what grades a DataProto.

    Further keyword arguments go to the function with every call, or to the class when its object is made.
    """

    name: ClassVar[str] = "custom"
    name_key: ClassVar[str | None] = f"{_SECTION}.type"

    def __init__(self, path: str, name: str = "compute_score", **reward_kwargs: Any) -> None:
        self.path, self.function, self.reward_kwargs = str(path), name, reward_kwargs
        self._refusal: str | None = None
        self._code: list[dict[str, str]] | None = None
        self._num_examine = 0

    @classmethod
    def of(cls, thing: Any, num_examine: int = 0) -> Self:
        """Return the reward for an object that was passed itself."""
        try:
            written: Written | None = write_down(thing)
            refusal = None
        except StaysHere as error:
            written, refusal = None, str(error)
        made = cls(written.code["path"] if written else _LIVE, written.name if written else name_of(thing))
        made.reward_kwargs, made._num_examine = written.arguments if written else {}, num_examine
        made.live, made._refusal, made._code = thing, refusal, [written.code if written else _note(refusal)]
        return made

    def keys(self, *, given_only: bool = False) -> dict[str, Any]:
        found = super().keys(given_only=given_only)
        if self._num_examine:
            found[f"{_SECTION}.num_examine"] = self._num_examine
        arguments = plain(self.reward_kwargs)
        return found | {
            f"{_HOOK}.path": self.path,
            f"{_HOOK}.name": self.function,
            f"{_HOOK}.reward_kwargs": arguments,
        }

    def code(self) -> list[dict[str, str]]:
        if self._code is None:
            from ratchet.config.user_code import read_code

            self._code = [read_code(self.path)]
        return self._code

    def stays_here(self) -> str | None:
        return self._refusal

    @classmethod
    def from_config(
        cls, config: Any, stated: frozenset[str] = frozenset(), *, without: frozenset[str] = frozenset()
    ) -> Self:
        hook = config.custom_reward_function
        made = cls(hook.path, hook.name)
        # Not as keywords: a function may have parameters called path and name.
        made.reward_kwargs = plain(hook.reward_kwargs)
        made._code = [entry.model_dump() for entry in config.code if entry.path == hook.path]
        made._num_examine = 0 if without else config.reward_model.num_examine
        if hook.path == _LIVE:
            made._refusal = f"the reward {hook.name} was a live object in the process that made this config"
        return made

    def __repr__(self) -> str:
        if self.live is not None:
            return name_of(self.live)
        given = [
            repr(self.path),
            repr(self.function),
            *(f"{key}={value!r}" for key, value in self.reward_kwargs.items()),
        ]
        return f"CustomReward({', '.join(given)})"


@part
class WeightedReward(Reward):
    """Several rewards at once: `WeightedReward([(GSM8KReward(), 1.0), (RewardModel("./rm"), 0.5)])`.

    The reward is the weighted sum; `reward_breakdown` keeps each one before its weight. Each kind may come once.
    """

    name: ClassVar[str] = "weighted"
    name_key: ClassVar[str | None] = None
    parts: Iterable[tuple[Any, float]] = ()

    def __post_init__(self) -> None:
        parts = tuple((as_reward(one), float(weight)) for one, weight in self.parts)
        kinds = [one.name for one, _ in parts]
        if not parts or len(set(kinds)) < len(kinds) or WeightedReward.name in kinds:
            raise ConfigError(f"WeightedReward: expected one reward or more, each of another kind, not {kinds}")
        for one, _ in parts:
            shared = sorted(one.given & SHARED)
            if shared:
                raise ConfigError(f"WeightedReward: give {shared[0]} to it, not to {type(one).__name__}")
        said: dict[str, Any] = {}
        for one, _ in parts:
            for key, value in one.keys(given_only=True).items():
                if said.setdefault(key, value) != value and not key.startswith(_NOT_OF_ONE):
                    raise ConfigError(
                        f"WeightedReward: {key} is one for all, and its rewards say {said[key]} and {value}"
                    )
        object.__setattr__(self, "parts", parts)
        object.__setattr__(self, "live", next((one.live for one, _ in parts if one.live is not None), None))

    def keys(self, *, given_only: bool = False) -> dict[str, Any]:
        found = {f"{_SECTION}.weights": {one.name: weight for one, weight in self.parts}}
        shared = {one.metadata.get("key") for one in declared(Reward)}
        for one, _ in self.parts:
            own, given = one.keys(given_only=given_only), one.keys(given_only=True)
            for key, value in own.items():
                is_own = key not in shared and not key.startswith(_NOT_OF_ONE)
                if is_own and (key in given or key not in found):
                    found[key] = value
        return super().keys(given_only=given_only) | found

    def code(self) -> list[dict[str, str]]:
        return [entry for one, _ in self.parts for entry in one.code()]

    def stays_here(self) -> str | None:
        return next(filter(None, (one.stays_here() for one, _ in self.parts)), None)

    @classmethod
    def from_config(
        cls, config: Any, stated: frozenset[str] = frozenset(), *, without: frozenset[str] = frozenset()
    ) -> Self:
        common = Reward.from_config(config, stated)
        shared = {name: getattr(common, name) for name in common.given}
        weights = config.reward_model.weights.items()
        parts = [(_KINDS[kind].from_config(config, stated, without=SHARED), weight) for kind, weight in weights]
        return cls(parts, **shared)


SHARED = frozenset({"num_examine", "overlong_buffer_len", "overlong_penalty_factor"})
_NOT_OF_ONE = (f"{_SECTION}.type", _BUFFER)
_KINDS: dict[str, type[Part]] = {
    one.name: one for one in (GSM8KReward, RewardModel, RewardAPI, JudgeReward, CustomReward)
}


def as_reward(thing: Any) -> Part:
    """Return the reward part that stands for what was passed to a flow."""
    if isinstance(thing, Part):
        return thing
    if isinstance(thing, type) or not callable(thing):
        what = f"the class {thing.__qualname__}" if isinstance(thing, type) else repr(thing)
        raise ConfigError(f"reward is {what}: expected a reward, or an object or function that grades completions")
    kind = type(thing)
    if kind.__name__ == "NaiveRewardManager" and kind.__module__.startswith("ratchet."):
        # Its tokenizer is the run's, and the config has a key for the rest.
        if thing.compute_score is None:
            return GSM8KReward(num_examine=thing.num_examine) if thing.num_examine else GSM8KReward()
        return CustomReward.of(thing.compute_score, thing.num_examine)
    return CustomReward.of(thing)


def _note(refusal: str | None) -> dict[str, str]:
    """Return what stands for a live object's file, so that whoever reads the run sees why there is none."""
    source = "".join(f"# {line}\n" for line in f"A live object: {refusal}".splitlines())
    return {"path": _LIVE, "sha256": sha256(source.encode()).hexdigest(), "source": source}


def reward_from_config(config: Any, stated: frozenset[str] = frozenset()) -> Part:
    """Return the reward that a config declares."""
    section = config.reward_model
    kind = WeightedReward if section.weights else _KINDS[section.type]
    return kind.from_config(config, stated)
