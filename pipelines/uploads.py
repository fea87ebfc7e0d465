"""Pipelines and their versions on an endpoint, under names that say what is in them.

Trap: the server's own upload makes a pipeline with a first version of the pipeline's name; here a version is named by
its content, so that the same YAML is never uploaded twice.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from kfp.pipeline_spec import pipeline_spec_pb2

from pipelines.api import Api, ConflictError
from pipelines.packages import Package
from pipelines.runs import matching
from ratchet.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Upload:
    """A version of a pipeline on the endpoint."""

    pipeline: str
    pipeline_id: str
    version: str
    version_id: str
    is_new: bool
    """Whether it was not there before."""
    url: str


def upload(api: Api, package: Package, *, version: str | None = None) -> Upload:
    """Make the pipeline, or a version of it, unless the endpoint has it already.

    `version` names it; without it the release and the content's digest do. A version of that name with other content
    is a ConfigError: versions do not change.
    """
    named = version or package.version
    pipeline_id = _find_pipeline(api, package)
    found = None
    if pipeline_id is None:
        pipeline_id = _make_pipeline(api, package)
    else:
        found = _find_version(api, package, pipeline_id, named)
    is_new = found is None
    if found is None:
        found = _make_version(api, package, pipeline_id, named)
    elif version is not None and not _is_same(found.get("pipeline_spec"), package):
        raise ConfigError(
            f"the pipeline {package.name} has a version {version} with other content, and versions do not change: take "
            "another name"
        )
    version_id = str(found["pipeline_version_id"])
    return Upload(
        pipeline=package.name,
        pipeline_id=pipeline_id,
        version=named,
        version_id=version_id,
        is_new=is_new,
        url=api.page(f"pipelines/details/{pipeline_id}/version/{version_id}"),
    )


def _find_pipeline(api: Api, package: Package) -> str | None:
    name = package.name
    query = {"filter": matching("display_name", "EQUALS", name), "namespace": api.namespace}
    found = api.pages(f"find the pipeline {name}", "/pipelines", "pipelines", query)
    return next((str(one["pipeline_id"]) for one in found if one.get("display_name") == name), None)


def _make_pipeline(api: Api, package: Package) -> str:
    body = {"display_name": package.name, "description": package.description}
    if api.namespace:
        body["namespace"] = api.namespace
    try:
        made = api.ask(f"make the pipeline {package.name}", "POST", "/pipelines", body=body)
        return str(made["pipeline_id"])
    except ConflictError:
        # Somebody else made it in between.
        found = _find_pipeline(api, package)
        if found is None:
            raise
        return found


def _find_version(api: Api, package: Package, pipeline_id: str, name: str) -> dict[str, Any] | None:
    query = {"filter": matching("display_name", "EQUALS", name)}
    what = f"find the version {name} of the pipeline {package.name}"
    found = api.pages(what, f"/pipelines/{pipeline_id}/versions", "pipeline_versions", query)
    return next((one for one in found if one.get("display_name") == name), None)


def _make_version(api: Api, package: Package, pipeline_id: str, name: str) -> dict[str, Any]:
    what = f"upload the version {name} of the pipeline {package.name}"
    query = {"name": name, "pipelineid": pipeline_id, "description": f"sha256 {package.digest}"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pipeline.yaml"
        path.write_text(package.text, encoding="utf-8")
        try:
            return api.ask(what, "POST", "/pipelines/upload_version", query=query, file=path)
        except ConflictError:
            found = _find_version(api, package, pipeline_id, name)
            if found is None:
                raise
            return found


def _is_same(told: Mapping[str, Any] | None, package: Package) -> bool:
    """Whether a server's account of a version, which writes defaults and numbers its own way, is this content."""
    if not told:
        return False
    spec, platform = (told["pipeline_spec"], told.get("platform_spec")) if "pipeline_spec" in told else (told, None)
    pairs = [(spec, package.spec, pipeline_spec_pb2.PipelineSpec)]
    pairs.append((platform or {}, package.platform, pipeline_spec_pb2.PlatformSpec))
    return all(json_format.ParseDict(one, kind()) == json_format.ParseDict(other, kind()) for one, other, kind in pairs)
