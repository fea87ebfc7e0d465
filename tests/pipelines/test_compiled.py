"""The compiled pipelines, read as a server reads them."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.protobuf import json_format
from kfp.pipeline_spec import pipeline_spec_pb2

from pipelines import compile as compiling

GOLDEN = sorted(compiling.GOLDEN, key=str)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def specification(path: Path) -> dict[str, Any]:
    """Return the pipeline's IR; a golden file may hold a second document with platform settings."""
    return next(iter(yaml.safe_load_all(path.read_text())))


def all_tasks(ir: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return every task of every DAG under its place."""
    dags = {"root": ir["root"]["dag"]} | {
        name: component["dag"] for name, component in ir["components"].items() if "dag" in component
    }
    return {f"{dag}/{name}": task for dag, body in dags.items() for name, task in body["tasks"].items()}


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_the_golden_file_is_what_the_pipeline_compiles_to(path: Path) -> None:
    assert path.read_text() == compiling.compiled(compiling.GOLDEN[path])


def test_every_golden_file_on_disk_belongs_to_a_pipeline() -> None:
    assert sorted(compiling.FOLDER.rglob("*.yaml"), key=str) == GOLDEN


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_a_strict_parse_accepts_every_field(path: Path) -> None:
    spec = json_format.ParseDict(specification(path), pipeline_spec_pb2.PipelineSpec())
    assert spec.schema_version


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_caching_is_off_on_every_task(path: Path) -> None:
    tasks = all_tasks(specification(path))
    cached = [place for place, task in tasks.items() if task.get("cachingOptions", {}).get("enableCache")]
    # A loop's own node has no caching options; every task that runs something states them.
    unstated = [place for place, task in tasks.items() if "cachingOptions" not in task and "iterator" not in place]
    loops = [place for place in unstated if "parameterIterator" in tasks[place]]
    assert cached == []
    assert unstated == loops


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_every_task_is_given_every_argument(path: Path) -> None:
    ir = specification(path)
    for place, task in all_tasks(ir).items():
        declared = ir["components"][task["componentRef"]["name"]].get("inputDefinitions", {}).get("parameters", {})
        given = task.get("inputs", {}).get("parameters", {})
        items = {task["parameterIterator"]["itemInput"]} if "parameterIterator" in task else set()
        assert set(declared) - items == set(given) - items, place


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_every_reference_resolves(path: Path) -> None:
    ir = specification(path)
    executors = ir["deploymentSpec"]["executors"]
    for component in ir["components"].values():
        assert component.get("executorLabel") in executors or "dag" in component
    for dag in [ir["root"]["dag"], *(c["dag"] for c in ir["components"].values() if "dag" in c)]:
        for task in dag["tasks"].values():
            assert task["componentRef"]["name"] in ir["components"]
            assert set(task.get("dependentTasks", [])) <= set(dag["tasks"])


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_loops_are_sequential(path: Path) -> None:
    loops = [task for task in all_tasks(specification(path)).values() if "parameterIterator" in task]
    assert len(loops) == 1
    assert loops[0]["iteratorPolicy"]["parallelismLimit"] == 1


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_no_outer_task_output_but_the_list_of_items_enters_a_loop(path: Path) -> None:
    """kfp.local would replace it by the loop's item."""
    for task in all_tasks(specification(path)).values():
        if "parameterIterator" in task:
            items = task["parameterIterator"]["items"]["inputParameter"]
            given = task["inputs"]["parameters"]
            outputs = [name for name, value in given.items() if "taskOutputParameter" in value]
            assert outputs == [items]


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_the_root_component_fits_one_argument_of_the_driver(path: Path) -> None:
    assert len(json.dumps(specification(path)["root"])) < 128 * 1024


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_parameters_are_described_for_the_form(path: Path) -> None:
    ir = specification(path)
    parameters = ir["root"]["inputDefinitions"]["parameters"]
    assert len(parameters) <= 12
    assert all(parameter.get("description") for parameter in parameters.values())


def test_pipelines_hold_no_logic_that_runs_later() -> None:
    """What a pod runs is in the library; a component's body is an import and one call."""
    from components.segment.component import segment

    lines = [line for line in inspect.getsource(segment.python_func).splitlines() if line.startswith("    ")]
    code = [line for line in lines if line.strip() and '"""' not in line]
    assert code[-1].strip().startswith("return entry.segment(")
