"""Writes images/base-images.lock, the digests behind the tags of the base images: `python images/lock.py ENGINE`, run
from the repository root; needs the registry.

The tags themselves are the defaults of BASE_IMAGE in the Containerfiles. Trap: an engine also knows digests that no
registry has (of layers as it stores them), so that a digest counts only once the image was pulled by it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path("images")
LOCK = FOLDER / "base-images.lock"
HEADER = """\
# Made by `make images-lock`: digests of the base images, for x86-64. `make images` builds from these, and from the tag
# alone where a Containerfile's is not here.
"""
# The locks of the GPU images hold for x86-64 only.
PULL = ["pull", "--quiet", "--platform", "linux/amd64"]


def main() -> None:
    (engine,) = sys.argv[1:]
    tags = sorted({tag for path in FOLDER.glob("*/Containerfile") for tag in base_images(path.read_text("utf-8"))})
    lines = [f"{tag}@{digest(engine, tag)}\n" for tag in tags]
    LOCK.write_text(HEADER + "".join(lines), encoding="utf-8")


def base_images(containerfile: str) -> list[str]:
    return re.findall(r"(?m)^ARG BASE_IMAGE=(\S+)", containerfile)


def digest(engine: str, tag: str) -> str:
    subprocess.run([engine, *PULL, tag], check=True)
    repository = tag.rpartition(":")[0]
    for found in known_digests(engine, tag, repository):
        if subprocess.run([engine, *PULL, f"{repository}@{found}"], check=False).returncode == 0:
            return found
    sys.exit(f"{tag}: {engine} pulled it and knows no digest that the registry has")


def known_digests(engine: str, tag: str, repository: str) -> list[str]:
    if Path(engine).name == "buildah":
        return [_output(engine, "inspect", "--type", "image", "--format", "{{.FromImageDigest}}", tag).strip()]
    known = json.loads(_output(engine, "image", "inspect", "--format", "{{json .RepoDigests}}", tag))
    # docker leaves its own registry's name out.
    names = (repository, repository.removeprefix("docker.io/"), repository.removeprefix("docker.io/library/"))
    return [found for name, _, found in (one.partition("@") for one in known) if name in names]


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
