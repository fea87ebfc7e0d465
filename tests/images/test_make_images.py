"""`make images` and `make images-lock`, with engines that only take notes: no registry is asked."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("base", "rollout", "segment", "train")
TAGS = {"docker.io/library/python:3.11.14-slim-bookworm", "docker.io/library/python:3.12.12-slim-bookworm"}
ONLY_HERE, IN_THE_REGISTRY = (f"sha256:{digit * 64}" for digit in "0a")

# Pulls what is not named by the first digest; answers as the engine that it is named after.
FAKE = f"""#!/bin/sh
echo "$0 $*" >> "$NOTES"
case "$*" in
  pull*{ONLY_HERE}) echo "manifest unknown" >&2; exit 125 ;;
  pull*) echo pulled ;;
  "image inspect"*) echo '["localhost/python@{ONLY_HERE}", "NAME@{ONLY_HERE}", "NAME@{IN_THE_REGISTRY}"]' ;;
  "inspect --type image"*) echo {IN_THE_REGISTRY} ;;
  *) exit 2 ;;
esac
"""

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def make(folder: Path, *arguments: str, **variables: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name not in ("BASE_IMAGE", "BUILD_FLAGS", "MAKEFLAGS")}
    finished = subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=folder,
        env={**kept, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.replace("\\\n", " ")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that the verbs read, for tests that write the lock."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copytree(ROOT / "images", tmp_path / "images")
    return tmp_path


@pytest.fixture
def engine(tmp_path: Path) -> Callable[[str], Path]:
    def written(name: str) -> Path:
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(FAKE.replace("NAME", "python" if name == "docker" else "docker.io/library/python"))
        path.chmod(0o755)
        return path

    return written


@pytest.mark.parametrize("engine", ["podman", "docker", "buildah"])
def test_images_is_one_build_for_each_definition_with_flags_that_every_engine_has(engine: str) -> None:
    printed = make(ROOT, "-n", "images", f"ENGINE={engine}", "REGISTRY=example.com/team", "TAG=0.1.0")
    lines = [" ".join(line.split()) for line in printed.splitlines() if line.startswith(engine)]
    for name, line in zip(NAMES, sorted(lines), strict=True):
        build = f"build --file images/{name}/Containerfile --tag example.com/team/ratchet-{name}:0.1.0 --build-arg "
        assert line.startswith(f"{engine} {build}")
        assert re.search(r" --build-arg RATCHET_REVISION=([0-9a-f]{40}(-dirty)?|unknown) \.$", line), line


def test_a_base_image_and_flags_may_be_given() -> None:
    printed = make(
        ROOT, "-n", "image-base", "BASE_IMAGE=localhost/python:3.11", "BUILD_FLAGS=--secret id=pip.conf,src=x"
    )
    assert " --build-arg BASE_IMAGE=localhost/python:3.11 " in " ".join(printed.split())
    assert printed.rstrip().endswith("--secret id=pip.conf,src=x .")


@pytest.mark.parametrize("name", ["podman", "docker", "buildah"])
def test_images_lock_writes_digests_that_the_registry_has_and_images_builds_from_them(
    name: str, checkout: Path, engine: Callable[[str], Path]
) -> None:
    notes = checkout / "notes"
    program = engine(name)
    make(checkout, "images-lock", f"ENGINE={program}", NOTES=str(notes))
    lock = (checkout / "images" / "base-images.lock").read_text()
    locked = [line for line in lock.splitlines() if not line.startswith("#")]
    assert locked == [f"{tag}@{IN_THE_REGISTRY}" for tag in sorted(TAGS)]
    assert f"{program} pull --quiet --platform linux/amd64 {min(TAGS)}\n" in notes.read_text()

    printed = " ".join(make(checkout, "-n", "image-base", "image-train", "ENGINE=podman").split())
    used = re.findall(r"--file images/(\w+)/\S+ .*?--build-arg BASE_IMAGE=(\S+)", printed)
    assert used == [("base", locked[0]), ("train", locked[1])]


def test_a_tag_that_is_not_locked_is_built_from_as_it_is(checkout: Path) -> None:
    (checkout / "images" / "base-images.lock").write_text(f"docker.io/library/python:3.10@{IN_THE_REGISTRY}\n")
    assert "BASE_IMAGE" not in make(checkout, "-n", "images")


def test_an_engine_that_knows_no_digest_of_the_registry_stops_the_lock(
    checkout: Path, engine: Callable[[str], Path]
) -> None:
    before = (checkout / "images" / "base-images.lock").read_text()
    program = engine("podman")
    program.write_text(program.read_text().replace(IN_THE_REGISTRY, ONLY_HERE))
    with pytest.raises(AssertionError, match="knows no digest that the registry has"):
        make(checkout, "images-lock", f"ENGINE={program}", NOTES=str(checkout / "notes"))
    assert (checkout / "images" / "base-images.lock").read_text() == before


def test_the_lock_in_the_repository_names_tags_that_are_built_from() -> None:
    lock = (ROOT / "images" / "base-images.lock").read_text()
    for line in lock.splitlines():
        if not line.startswith("#"):
            tag, _, digest = line.partition("@")
            assert tag in TAGS
            assert re.fullmatch(r"sha256:[0-9a-f]{64}", digest)
