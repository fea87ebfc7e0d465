"""Finds who runs a flow: `local` here, `kubeflow` on a cluster, by entry point, so that declaring one imports neither.

An entry point of the group `ratchet.runners` names an object with the methods of `Runner`, or some of them.
"""

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Protocol

from ratchet.errors import ConfigError

GROUP = "ratchet.runners"

_OWN = {"local": "ratchet.grains.runner:LocalRunner", "kubeflow": "pipelines.runner:KubeflowRunner"}
"""Ratchet's own, for a checkout on the import path that was never installed and so has no entry points."""


class Runner(Protocol):
    """What a flow asks of the one who runs it. `flow` is a DataFlow, `config` what its user added."""

    def fit(self, flow: Any, config: Any, **options: Any) -> Any:
        """Train in this process and return the result."""

    def graph(self, config: Any) -> list[tuple[str, tuple[str, ...]]]:
        """Return the stages of one step of a RunConfig in order, each with those it needs."""

    def compile(self, flow: Any, path: str | Path, config: Any, **options: Any) -> Path:
        """Write what a cluster runs and return where it is."""

    def submit(self, flow: Any, config: Any, **options: Any) -> Any:
        """Start the flow on a cluster."""


def find_runner(name: str) -> Runner:
    """Return the runner of that name; ConfigError says what is missing where it cannot be imported."""
    found = {point.name: point for point in entry_points(group=GROUP)}
    point = found.get(name) or (EntryPoint(name, _OWN[name], GROUP) if name in _OWN else None)
    if point is None:
        raise ConfigError(f"no runner {name!r}; known are {', '.join(sorted({*found, *_OWN}))}")
    module, _, attribute = point.value.partition(":")
    try:
        runner: Any = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        raise ConfigError(
            f"the runner {name!r} is {point.value}, and there is no module {error.name}: components/ and pipelines/ "
            "are no part of the installed package; start where the repository's root is importable (PYTHONPATH=ROOT, "
            "or pip install -e ROOT)"
        ) from error
    for one in filter(None, attribute.split(".")):
        runner = getattr(runner, one)
    made: Runner = runner() if isinstance(runner, type) else runner
    return made
