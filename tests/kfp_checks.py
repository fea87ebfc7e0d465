"""What a Kubeflow Pipelines server refuses: fields that it does not know, broken pipelines, wrong parameters, filters.

The fields are those of the generated client's models, the pipelines are parsed as protobuf, without leniency.
"""

import json
from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote_plus

import kfp_server_api
import yaml
from google.protobuf import json_format
from kfp.pipeline_spec import pipeline_spec_pb2

FILTERED = {
    "/experiments": {"experiment_id", "display_name", "created_at", "description", "namespace", "storage_state"},
    "/pipelines": {"pipeline_id", "display_name", "name", "created_at", "description", "namespace"},
    "/versions": {"pipeline_version_id", "display_name", "name", "created_at", "description"},
    "/runs": {
        "run_id",
        "display_name",
        "created_at",
        "finished_at",
        "description",
        "scheduled_at",
        "storage_state",
        "namespace",
        "experiment_id",
        "state",
        "recurring_run_id",
    },
    "/recurringruns": {"recurring_run_id", "display_name", "created_at", "updated_at", "description"},
}
"""Fields that a listing may be filtered by."""

_VALUES = {
    "STRING": lambda value: isinstance(value, str),
    "NUMBER_INTEGER": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    "NUMBER_DOUBLE": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    "BOOLEAN": lambda value: isinstance(value, bool),
    "LIST": lambda value: isinstance(value, list),
    "STRUCT": lambda value: isinstance(value, dict),
}


class Refused(Exception):
    """A request that the server refuses."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def check_body(body: Any, model: str) -> None:
    """Refuse what is no message of the API's: another field, another type, another name of an enumeration."""
    kind = getattr(kfp_server_api, model)
    if hasattr(kind, "allowable_values"):
        if body not in kind.allowable_values:
            raise Refused(400, f"proto: invalid value for enum field: {body!r}")
        return
    if not isinstance(body, dict):
        raise Refused(400, f"proto: unexpected token {body!r}")
    known = {name: kind.openapi_types[attribute] for attribute, name in kind.attribute_map.items()}
    for name, value in body.items():
        if name not in known:
            raise Refused(400, f'proto: (line 1:2): unknown field "{name}"')
        _check_value(name, value, known[name])


def _check_value(name: str, value: Any, kind: str) -> None:
    if kind.startswith("V2beta1") or kind == "RecurringRunMode":
        check_body(value, kind)
        return
    if name in ("max_concurrency", "interval_second"):
        # Whole numbers of 64 bits are text in JSON, or numbers.
        value = str(value)
    expected = {"str": str, "datetime": str, "bool": bool}.get(
        kind, dict if kind.startswith(("object", "dict")) else object
    )
    if not isinstance(value, expected):
        raise Refused(400, f"proto: invalid value for field {name}: {value!r}")


def parse_pipeline(documents: Iterable[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return specification and platform of a pipeline."""
    spec: dict[str, Any] = {}
    platform: dict[str, Any] = {}
    try:
        for one in documents:
            if "pipelineInfo" in one:
                parsed = json_format.ParseDict(one, pipeline_spec_pb2.PipelineSpec())
                if parsed.schema_version != "2.1.0" or not parsed.pipeline_info.name or not parsed.HasField("root"):
                    raise Refused(400, "invalid v2 pipeline spec")
                spec = json_format.MessageToDict(parsed)
            elif "platforms" in one:
                platform = json_format.MessageToDict(json_format.ParseDict(one, pipeline_spec_pb2.PlatformSpec()))
            else:
                raise Refused(400, f"unknown template format: {sorted(one)}")
    except json_format.ParseError as error:
        raise Refused(400, f"invalid v2 pipeline spec: {error}") from error
    if not spec:
        raise Refused(400, "no pipeline spec is provided")
    return spec, platform


def parse_yaml(text: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return specification and platform of an uploaded pipeline."""
    return parse_pipeline(one for one in yaml.load_all(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)) if one)


def spec_in(told: dict[str, Any]) -> dict[str, Any]:
    """Return the specification in a run's or a version's field pipeline_spec, which must be a pipeline's."""
    documents = [told] if "pipelineInfo" in told else list(told.values())
    return parse_pipeline(documents)[0]


def check_parameters(spec: dict[str, Any], given: dict[str, Any]) -> None:
    """Refuse parameters that are missing, of another type, or the pipeline's not at all."""
    declared = spec["root"].get("inputDefinitions", {}).get("parameters", {})
    for name, one in declared.items():
        if name not in given:
            if "defaultValue" not in one and not one.get("isOptional"):
                raise Refused(
                    400, f"parameter {name} is not optional, yet has neither default value nor user provided value"
                )
        elif not _VALUES[one["parameterType"]](given[name]):
            raise Refused(400, f"input parameter {name} requires type {one['parameterType']}")
    extra = sorted(set(given) - set(declared))
    if extra:
        raise Refused(400, f"parameter(s) provided are not required by pipeline: {', '.join(extra)}")


def keep(items: list[dict[str, Any]], text: str, fields: set[str]) -> list[dict[str, Any]]:
    """Return those that a listing's filter lets through; the server decodes it once more than HTTP does."""
    if not text:
        return items
    try:
        predicates = json.loads(unquote_plus(text))["predicates"]
    except ValueError as error:
        raise Refused(400, f"failed to parse valid filter from {text!r}") from error
    for one in predicates:
        key, operation = one["key"], {1: "EQUALS", 8: "IN"}.get(one["operation"], one["operation"])
        if key not in fields:
            raise Refused(400, f'no support for filtering on unrecognized field "{key}"')
        if operation == "EQUALS":
            items = [item for item in items if item.get(key) == _given(one, "string_value", "stringValue")]
        elif operation == "IN":
            items = [item for item in items if item.get(key) in _given(one, "string_values", "stringValues")["values"]]
        else:
            raise Refused(400, f"invalid value for enum field operation: {operation!r}")
    return items


def _given(predicate: dict[str, Any], *names: str) -> Any:
    """Return the value of a predicate; both spellings of its name are protobuf's."""
    return next(predicate[name] for name in names if name in predicate)
