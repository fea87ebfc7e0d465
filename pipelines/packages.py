"""Compiled pipelines as what is sent to an endpoint: by name or from a file, with their parameters checked.

Trap: a server refuses fields that it does not know, takes a number for an integer, and says nothing of a parameter that
is spelled wrongly until its own form is filled in; all of that is found here.
"""

import copy
import difflib
import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import yaml
from google.protobuf import json_format
from kfp import dsl
from kfp.pipeline_spec import pipeline_spec_pb2

from ratchet import __version__
from ratchet.config.text import read_value
from ratchet.errors import ConfigError

Pipeline: TypeAlias = dsl.base_component.BaseComponent

_TYPES: dict[str, tuple[str, tuple[type, ...]]] = {
    "STRING": ("text", (str,)),
    "NUMBER_INTEGER": ("a whole number", (int,)),
    "NUMBER_DOUBLE": ("a number", (int, float)),
    "BOOLEAN": ("true or false", (bool,)),
    "LIST": ("a list", (list, tuple)),
    "STRUCT": ("a mapping", (dict,)),
}
"""Type of a parameter -> what messages call it, and the Python types that it takes."""
_PREFIX = "ratchet-"
# libyaml's, where Python has it, is ten times as fast.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


@dataclass(frozen=True)
class Package:
    """One compiled pipeline."""

    text: str = field(repr=False)
    """Its YAML."""
    spec: Mapping[str, Any] = field(repr=False)
    """The pipeline's specification."""
    platform: Mapping[str, Any] = field(repr=False)
    """What it asks of Kubernetes; empty where it asks for nothing."""

    @property
    def name(self) -> str:
        """What endpoints call it."""
        return str(self.spec["pipelineInfo"]["name"])

    @property
    def description(self) -> str:
        """What its form says."""
        return str(self.spec["pipelineInfo"].get("description", ""))

    @property
    def body(self) -> Mapping[str, Any]:
        """What a run or a recurring run holds of it."""
        return {"pipeline_spec": self.spec, "platform_spec": self.platform} if self.platform else self.spec

    @cached_property
    def digest(self) -> str:
        """sha256 of the YAML."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def version(self) -> str:
        """Name of this very content as a version: the same YAML has the same one, in letters that Kubernetes takes."""
        release = re.sub("[^a-z0-9.]", "-", __version__.lower())
        return f"{release}-{self.digest[:12]}"

    @property
    def parameters(self) -> Mapping[str, Mapping[str, Any]]:
        """Name -> declaration of each parameter, in order."""
        declared: Mapping[str, Mapping[str, Any]] = self.spec["root"].get("inputDefinitions", {}).get("parameters", {})
        return declared

    def read(self, pairs: Iterable[str]) -> dict[str, Any]:
        """Return `name=value` texts as values of the parameters' types: text as it is, anything else as YAML."""
        found: dict[str, Any] = {}
        for pair in pairs:
            name, separator, text = pair.partition("=")
            if not separator:
                raise ConfigError(f"{pair!r}: expected PARAMETER=VALUE")
            self._declaration(name)
            is_text = self.parameters[name]["parameterType"] == "STRING"
            found[name] = text if is_text else read_value(text, f"parameter {name}: the value")
        return found

    def check(self, values: Mapping[str, Any]) -> None:
        """Raise ConfigError where a value is of no parameter or of another type, or a parameter has none; say all."""
        faults = []
        for name, value in values.items():
            try:
                faults += _faults(name, value, self._declaration(name))
            except ConfigError as error:
                faults.append(str(error))
        for name, declared in self.parameters.items():
            if name not in values and "defaultValue" not in declared and not declared.get("isOptional"):
                faults.append(f"parameter {name} is missing: {declared.get('description', 'it has no default')}")
        if faults:
            listed = "\n".join(f"  {fault}" for fault in faults)
            raise ConfigError(f"pipeline {self.name} cannot be given these parameters:\n{listed}")

    def with_defaults(self, values: Mapping[str, Any]) -> "Package":
        """Return the pipeline whose defaults these are; they are checked first."""
        self.check(values)
        spec = copy.deepcopy(dict(self.spec))
        for name, value in values.items():
            spec["root"]["inputDefinitions"]["parameters"][name]["defaultValue"] = value
        documents = [spec, *([dict(self.platform)] if self.platform else [])]
        return parse_package(yaml.dump_all(documents, Dumper=_Dumper, sort_keys=True), self.name)

    def value(self, name: str, given: Mapping[str, Any]) -> Any:
        """Return what a parameter will be: given, or its default; None where it has neither."""
        if name in given:
            return given[name]
        return self.parameters.get(name, {}).get("defaultValue")

    def _declaration(self, name: str) -> Mapping[str, Any]:
        if name in self.parameters:
            return self.parameters[name]
        near = difflib.get_close_matches(name, self.parameters, n=1)
        known = f"did you mean {near[0]}?" if near else f"it has {', '.join(self.parameters) or 'none'}"
        raise ConfigError(f"pipeline {self.name} has no parameter {name!r}: {known}")


def _faults(name: str, value: Any, declared: Mapping[str, Any]) -> list[str]:
    label, kinds = _TYPES[declared["parameterType"]]
    # A bool is an int in Python, and 3.0 is a whole number to a server.
    is_right = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
    if not is_right:
        return [f"parameter {name}: expected {label}, but it is {value!r}"]
    literals = declared.get("literals")
    return (
        [f"parameter {name}: expected one of {literals}, but it is {value!r}"]
        if literals and value not in literals
        else []
    )


def catalogue() -> dict[str, tuple[Path, Pipeline]]:
    """Return every pipeline of this checkout: short name -> its golden file and the pipeline."""
    from pipelines.compile import GOLDEN

    return {one.name.removeprefix(_PREFIX).replace("-", "_"): (path, one) for path, one in GOLDEN.items()}


def find_package(name: str) -> Package:
    """Return the pipeline of that name, compiled for this installation, or that of a YAML file.

    What compiling reads from the environment (docs/operations.md: image, claims, queue) holds for what is returned.
    """
    if name.endswith((".yaml", ".yml")):
        try:
            return parse_package(Path(name).read_text(encoding="utf-8"), name)
        except OSError as error:
            raise ConfigError(f"cannot read the pipeline {name}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"cannot read the pipeline {name}: it is not UTF-8 ({error})") from error
    known = catalogue()
    found = known.get(name.removeprefix(_PREFIX).replace("-", "_"))
    if found is None:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"no pipeline {name!r}: {hint}there are {', '.join(known)}, or give a compiled file (*.yaml)")
    from pipelines.compile import compiled

    return parse_package(compiled(found[1]), name)


def parse_package(text: str, source: str) -> Package:
    """Read a compiled pipeline as a server does, which refuses what it does not know."""
    try:
        documents = [one for one in yaml.load_all(text, Loader=_Loader) if one]
        spec = next((one for one in documents if isinstance(one, dict) and "pipelineInfo" in one), None)
        if spec is None:
            raise ConfigError(f"{source} is no compiled pipeline: it has no pipelineInfo")
        platform = next((one for one in documents if isinstance(one, dict) and "platforms" in one), {})
        parsed = json_format.ParseDict(spec, pipeline_spec_pb2.PipelineSpec())
        if not parsed.pipeline_info.name or not parsed.HasField("root"):
            raise ConfigError(f"{source} is no compiled pipeline: it has no name or no root")
        json_format.ParseDict(platform, pipeline_spec_pb2.PlatformSpec())
    except (yaml.YAMLError, json_format.ParseError) as error:
        raise ConfigError(f"{source} is no compiled pipeline: {error}") from error
    return Package(text, spec, platform)
