"""Every component's folder, discovered on disk."""

import ast
import dataclasses
import importlib
import inspect
import itertools
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml
from kfp import dsl

from components import readme
from ratchet.grains import tasks

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = sorted(path.parent for path in (ROOT / "components").glob("*/component.py"))
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(params=FOLDERS, ids=lambda folder: folder.name)
def folder(request: pytest.FixtureRequest) -> Path:
    return request.param


def component_of(folder: Path):  # type: ignore[no-untyped-def]
    return getattr(importlib.import_module(f"components.{folder.name}"), folder.name)


def test_there_are_components() -> None:
    grains = {"segment", "step"}
    stages = {"preflight", "preprocess", "rollout", "reward", "scores", "advantage", "policy_update", "promote"}
    assert grains | stages <= {f.name for f in FOLDERS}


def test_the_folder_is_complete(folder: Path) -> None:
    assert {"__init__.py", "component.py", "metadata.yaml", "README.md"} <= {path.name for path in folder.iterdir()}
    metadata = yaml.safe_load((folder / "metadata.yaml").read_text())
    assert metadata["name"] == folder.name
    assert metadata["stability"] in {"experimental", "alpha", "beta", "stable"}


TASKS = {
    "preflight": tasks.PreflightTask,
    "preprocess": tasks.PreprocessTask,
    "plan": tasks.PlanTask,
    "segment": tasks.SegmentTask,
    "step": tasks.StepTask,
    "evaluate": tasks.EvaluateTask,
    "checkpoint_export": tasks.ExportTask,
    "promote": tasks.PromoteTask,
}
"""Component -> what it is told; the others are stages of a step."""


def told(folder: Path) -> dict[str, tuple[Any, Any, str]]:
    """Return field -> (type, default, description) of a component's record, read from its source."""
    record = TASKS.get(folder.name, tasks.StageTask)
    documented: dict[str, str] = {}
    for kind in reversed(record.__mro__[:-1]):
        (body,) = ast.parse(inspect.getsource(kind)).body
        assert isinstance(body, ast.ClassDef)
        for field, text in itertools.pairwise(body.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                documented[ast.unparse(field.target)] = ast.literal_eval(text.value)
    found = {}
    for field in dataclasses.fields(record):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        found[field.name] = (field.type, default, documented[field.name])
    return found


def test_inputs_are_the_fields_of_the_typed_record(folder: Path) -> None:
    parameters = inspect.signature(component_of(folder).python_func).parameters.values()
    inputs = {one.name: one for one in parameters if not one.name.startswith("output_")}
    expected = told(folder)
    assert list(inputs) == list(expected)
    for name, (kind, default, description) in expected.items():
        given = inputs[name].default
        assert inputs[name].annotation == kind, name
        assert (dataclasses.MISSING if given is inspect.Parameter.empty else given) == default, name
        assert readme.descriptions(folder.name)[name] == description, name


def test_outputs_are_named_by_what_they_are(folder: Path) -> None:
    names = {
        "output_metrics": dsl.Metrics,
        "output_report": dsl.Markdown,
        "output_page": dsl.HTML,
        "output_model": dsl.Model,
    }
    for one in inspect.signature(component_of(folder).python_func).parameters.values():
        if one.name.startswith("output_"):
            assert one.annotation.__args__[0] is names[one.name]
            assert readme.descriptions(folder.name)[one.name]


def test_the_readme_is_what_the_interface_says(folder: Path) -> None:
    assert (folder / "README.md").read_text() == readme.readme(folder.name)


def test_the_body_builds_its_record_and_calls_the_library_once(folder: Path) -> None:
    """No logic: an import, a record of every input, and one call that gets every output."""
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(component_of(folder).python_func))).body
    assert isinstance(function, ast.FunctionDef)
    _, imports, record, call = function.body
    assert ast.unparse(imports) == "from ratchet.grains import entry, program, tasks"
    names = list(told(folder))
    fields = ", ".join(f"{name}={name}" for name in names)
    kind = TASKS.get(folder.name, tasks.StageTask).__name__
    assert ast.unparse(record) == f"task = tasks.{kind}({fields})"
    assert ast.unparse(call).startswith(f"return program.run('{folder.name}', entry.")
    outputs = {
        one.removeprefix("output_"): one
        for one in inspect.signature(component_of(folder).python_func).parameters
        if one.startswith("output_")
    }
    assert isinstance(call, ast.Return)
    assert isinstance(call.value, ast.Call)
    handed = {one.arg: ast.unparse(one.value) for one in call.value.keywords if one.arg != "name"}
    assert handed == outputs


def test_the_image_is_one_of_ours(folder: Path) -> None:
    text = (folder / "component.py").read_text()
    (name,) = re.findall(r'image\("(\w+)"\)', text)
    assert (ROOT / "images" / name / "Containerfile").is_file()
    assert "install_kfp_package=False" in text


def test_images_carry_the_library_version() -> None:
    from components.images import VERSION
    from ratchet import __version__

    assert __version__ == VERSION
    # What `make images` builds is what pipelines and overlays name.
    assert f"\nTAG ?= {VERSION}\n" in (ROOT / "Makefile").read_text()
    for overlay in (ROOT / "manifests" / "overlays").glob("*/kustomization.yaml"):
        for image in yaml.safe_load(overlay.read_text()).get("images", []):
            assert not image["name"].startswith("ratchet-") or image["newTag"] == VERSION, overlay
