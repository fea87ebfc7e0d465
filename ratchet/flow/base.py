"""What every flow can do with its parts: make a config, be written down, compared, shown, compiled and submitted.

A flow is data. It names the same config keys as a YAML file, so that a run can be declared either way, and a flow can
be written down as a config and rebuilt from it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from ratchet.errors import ConfigError
from ratchet.flow import tree as trees
from ratchet.flow.part import Part
from ratchet.flow.policy_update import PolicyUpdate
from ratchet.flow.runners import find_runner

if TYPE_CHECKING:
    from ratchet.config import RunConfig

Extra: TypeAlias = "Mapping[str, Any] | str | Path | RunConfig | None"
"""The keys that no part sets: nested mappings, a YAML file, or a RunConfig, of which what was given counts."""


class DataFlow:
    """The parts of a run, whatever its objective."""

    policy_update: PolicyUpdate
    live_reward: Any = None
    """The user's own reward object, where one was passed."""
    _objective: str
    """What algorithm.objective must say."""
    _parts: Mapping[str, Part | None]
    """Role -> part, or None where the flow has none."""

    def _hold(self, objective: str, parts: Mapping[str, Part | None], code: Sequence[Any]) -> None:
        """Keep the parts, and the Python files that they and `code` name."""
        self._objective, self._parts = objective, parts
        self._code = trees.embedded([*code, *(entry for part in self.parts for entry in part.code())])

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts, as what sets config keys."""
        return tuple(part for part in self._parts.values() if part is not None)

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
        if parsed.algorithm.objective != self._objective:
            raise ConfigError(
                f"algorithm.objective is {parsed.algorithm.objective!r} in the config, and {type(self).__name__} with "
                f"{type(self.policy_update).__name__} is {self._objective!r}: leave the key out, or declare the parts "
                "of that objective (docs/flow.md)"
            )
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
        return cls._declared(parsed, trees.stated(parsed))

    @classmethod
    def from_dict(cls, config: "Mapping[str, Any] | RunConfig") -> Self:
        """Return the flow that was written down with `to_dict`, as `from_config` does."""
        return cls.from_config(config)

    @classmethod
    def _declared(cls, config: Any, stated: frozenset[str]) -> Self:
        raise NotImplementedError

    def check_travels(self, what: str, *, roles: Sequence[str] | None = None) -> None:
        """Raise ConfigError, which `what` begins, if a part (of these roles) lives in this process only."""
        for role, part in self._parts.items():
            reason = part.stays_here() if part is not None else None
            if reason is not None and (roles is None or role in roles):
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
        if not isinstance(other, DataFlow):
            return NotImplemented
        if self._objective != other._objective:
            return False
        if dict(self._parts) == dict(other._parts) and self._digests() == other._digests():
            return True
        # One may say what follows from the other's arguments anyway.
        try:
            return bool(self.config() == other.config())
        except ConfigError:
            return False

    def __hash__(self) -> int:
        # Of what equal flows have in common: parts may differ where they make the same config.
        return hash((self._objective, self._model()))

    def _model(self) -> Any:
        found = (part.keys().get("actor_rollout_ref.model.path") for part in self.parts)
        return next(filter(None, found), "")

    def _digests(self) -> set[str]:
        return {entry["sha256"] for entry in self._code}

    def __repr__(self) -> str:
        shown = ", ".join(f"{role}={part!r}" for role, part in self._parts.items())
        return f"{type(self).__name__}({shown})"

    def __str__(self) -> str:
        lines = [type(self).__name__, *(f"  {role:14} {part!r}" for role, part in self._parts.items())]
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
