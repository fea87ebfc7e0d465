"""Every component's folder, discovered on disk."""

import importlib
import inspect
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = sorted(path.parent for path in (ROOT / "components").glob("*/component.py"))
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(params=FOLDERS, ids=lambda folder: folder.name)
def folder(request: pytest.FixtureRequest) -> Path:
    return request.param


def component_of(folder: Path):  # type: ignore[no-untyped-def]
    return getattr(importlib.import_module(f"components.{folder.name}"), folder.name)


def test_there_are_components() -> None:
    assert {"preflight", "preprocess", "plan", "rollout", "policy_update", "segment"} <= {f.name for f in FOLDERS}


def test_the_folder_is_complete(folder: Path) -> None:
    assert {"__init__.py", "component.py", "metadata.yaml", "README.md"} <= {path.name for path in folder.iterdir()}
    metadata = yaml.safe_load((folder / "metadata.yaml").read_text())
    assert metadata["name"] == folder.name
    assert metadata["stability"] in {"experimental", "alpha", "beta", "stable"}


def test_every_parameter_is_typed_documented_and_in_the_readme(folder: Path) -> None:
    function = component_of(folder).python_func
    documented = re.findall(r"^\s{4,8}(\w+): ", inspect.getdoc(function) or "", re.MULTILINE)
    readme = re.findall(r"^\| `(\w+)` \|", (folder / "README.md").read_text(), re.MULTILINE)
    names = list(inspect.signature(function).parameters)
    assert documented == names
    assert readme == names
    assert set(function.__annotations__) == {*names, "return"}


def test_the_body_passes_every_parameter_on_to_the_library(folder: Path) -> None:
    function = component_of(folder).python_func
    source = inspect.getsource(function).rpartition('"""')[2]
    assert "from ratchet.grains import entry" in source
    for name in inspect.signature(function).parameters:
        assert re.search(rf"\b{name}\b", source), name


def test_the_image_is_one_of_ours(folder: Path) -> None:
    text = (folder / "component.py").read_text()
    (name,) = re.findall(r'image\("(\w+)"\)', text)
    assert (ROOT / "images" / name / "Containerfile").is_file()
    assert "install_kfp_package=False" in text


def test_images_carry_the_library_version() -> None:
    from components.images import VERSION
    from ratchet import __version__

    assert __version__ == VERSION
