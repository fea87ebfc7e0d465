"""The image definitions, read as text: no engine is needed, and none of this replaces a build (test_builds.py)."""

import importlib.util
import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipelines.installation import COMPILE_CACHE
from ratchet.environment import _COMPILE_CACHES

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "images").glob("*/Containerfile"))
NAMES = {path.parent.name for path in FILES}


@dataclass(frozen=True)
class Instruction:
    word: str
    arguments: str

    def options(self, name: str) -> list[str]:
        return re.findall(rf"--{name}=(\S+)", self.arguments)


def instructions(path: Path) -> list[Instruction]:
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [Instruction(*(line.split(maxsplit=1))) for line in joined.splitlines()]


def final_stage(path: Path) -> list[Instruction]:
    found = instructions(path)
    last = max(index for index, instruction in enumerate(found) if instruction.word == "FROM")
    return found[last:]


each_image = pytest.mark.parametrize("path", FILES, ids=[path.parent.name for path in FILES])


def test_there_is_one_definition_for_each_folder():
    folders = {path.name for path in (ROOT / "images").iterdir() if path.is_dir()}
    assert folders == NAMES == {"base", "rollout", "train", "segment"}


def environment(path: Path) -> dict[str, str]:
    pairs = (pair for one in final_stage(path) if one.word == "ENV" for pair in one.arguments.split())
    return dict(pair.split("=", 1) for pair in pairs)


@each_image
def test_every_base_is_an_argument_whose_default_is_a_pinned_tag_of_a_named_registry(path):
    defaults = {}
    for instruction in instructions(path):
        if instruction.word == "ARG":
            name, _, value = instruction.arguments.partition("=")
            defaults.setdefault(name, value)
        if instruction.word == "FROM":
            reference = instruction.arguments.split()[0]
            argument = re.fullmatch(r"\$\{(\w+)\}", reference)
            assert argument, f"{path}: FROM {reference} cannot be replaced by a build argument"
            # Podman and Buildah look a short name up in the host's settings, or refuse it.
            assert re.fullmatch(r"[\w.-]+\.\w+/[\w./-]+:\d+\.\d+\.\d+[\w.-]*", defaults[argument[1]])
    assert "latest" not in path.read_text()


@each_image
def test_every_copied_or_mounted_path_exists_and_is_in_the_build_context(path):
    context = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for instruction in instructions(path):
        sources = []
        if instruction.word in ("COPY", "ADD") and not instruction.options("from"):
            sources = [part for part in instruction.arguments.split() if not part.startswith("--")][:-1]
        if instruction.word == "RUN":
            sources = re.findall(r"type=bind,source=([^,\s]+)", instruction.arguments)
            for lock in re.findall(r"--requirement /(requirements/\S+)", instruction.arguments):
                assert (ROOT / lock).is_file(), f"{path}: {lock}"
        for source in sources:
            assert (ROOT / source).exists(), f"{path}: {source}"
            assert source.split("/")[0] in context, f"{path}: {source} is left out by .dockerignore"


@each_image
def test_third_parties_come_from_a_lock_with_hashes_before_the_source(path):
    installs = [one.arguments for one in instructions(path) if one.word == "RUN" and "pip install" in one.arguments]
    locked, *rest = installs
    assert locked.count("pip install") == locked.count("--no-deps --require-hashes") == 2
    # torch's build is the host's choice, and flash-attn is named by an address with its hash.
    for arguments in rest:
        assert arguments.endswith(("/requirements/torch.txt", '--no-deps "${FLASH_ATTN}"; fi'))
    words = [f"{one.word} {one.arguments}" for one in instructions(path)]
    source = next(index for index, text in enumerate(words) if text.startswith("COPY ratchet"))
    assert all("pip install" not in text and "apt-get" not in text for text in words[source:])


@each_image
def test_what_has_no_wheel_is_built_by_a_setuptools_that_has_a_hash(path, tmp_path):
    (run,) = (one.arguments for one in instructions(path) if "--no-build-isolation" in one.arguments)
    command = re.search(r"(sed .*?) > /tmp/setuptools.txt", run)
    assert command
    script = command[1].replace("/requirements/", f"{ROOT}/requirements/")
    picked = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    assert re.fullmatch(r"setuptools==[\d.]+ \\", picked[0])
    assert len(picked) > 1
    assert all(line.strip().startswith("--hash=sha256:") for line in picked[1:])
    assert not picked[-1].endswith("\\")


@pytest.mark.parametrize("lock", ["base", "gpu", "gpu-train"])
def test_kfp_and_vllm_share_one_protobuf_in_every_lock(lock):
    pins = dict(re.findall(r"(?m)^([a-z0-9-]+)==([^ ;]+)", (ROOT / "requirements" / f"{lock}.txt").read_text()))
    assert {"kfp", "kfp-kubernetes", "kfp-pipeline-spec"} <= set(pins)
    # kfp-kubernetes 2.17 asks for >=6.33.5,<7; vLLM forbids 6.30 to 6.33.4.
    version = tuple(int(part) for part in pins["protobuf"].split("."))
    assert (6, 33, 5) <= version < (7,)
    assert ("vllm" in pins) == (lock == "gpu")


@each_image
def test_an_index_of_ones_own_is_a_secret_of_the_build_and_in_no_layer(path):
    text = path.read_text()
    for run in (one.arguments for one in instructions(path) if "pip install" in one.arguments):
        assert "--mount=type=secret,id=pip.conf,target=/etc/pip.conf" in run
        assert "--mount=type=cache,target=/root/.cache/pip" in run
    assert not re.search(r"https?://(?!\.\.\.)", text)
    words = " ".join(one.arguments for one in instructions(path) if one.word in ("ARG", "ENV", "COPY"))
    assert not re.search(r"(?i)pip\.conf|token|password|secret", words)


@each_image
def test_it_runs_as_a_numeric_user_of_group_zero(path):
    users = [instruction.arguments for instruction in final_stage(path) if instruction.word == "USER"]
    assert users == ["1000:0"]
    assert [one.word for one in final_stage(path)][-2:] == ["USER", "CMD"]
    assert "chmod -R g=u /app" in path.read_text()
    assert not re.search(r"\b(sudo|openssh|vim|curl)\b", path.read_text())


@each_image
def test_its_command_is_a_module_of_what_it_copies_and_tasks_can_replace_it(path):
    words = {one.word: one.arguments for one in final_stage(path)}
    assert "ENTRYPOINT" not in words
    program, dash_m, module, *_ = json.loads(words["CMD"])
    assert (program, dash_m) == ("python", "-m")
    assert importlib.util.find_spec(module) is not None
    copied = [one.arguments for one in final_stage(path) if one.word == "COPY"]
    assert copied == ["--from=dependencies /opt/venv /opt/venv", f"{module.split('.')[0]} /app/{module.split('.')[0]}"]
    assert environment(path)["PYTHONPATH"] == words["WORKDIR"] == "/app"
    assert environment(path)["PATH"].startswith("/opt/venv/bin:")


@each_image
def test_it_writes_to_tmp_and_the_volume_of_compiled_kernels_and_needs_no_entry_in_the_password_file(path):
    found = environment(path)
    assert found["HOME"] == "/tmp"
    assert found["USER"]
    caches = {name: value for name, value in found.items() if re.search(r"CACHE|_HOME|CONFIGDIR|WORKSPACE", name)}
    assert {"XDG_CACHE_HOME", "HF_HOME"} <= set(caches)
    compiled = {name for name, value in caches.items() if value.startswith(COMPILE_CACHE)}
    assert all(value.startswith("/tmp/") for name, value in caches.items() if name not in compiled)
    name = path.parent.name
    engines = {"VLLM_CACHE_ROOT", "FLASHINFER_WORKSPACE_BASE"}
    kernels = {"TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"}
    assert compiled == {"base": set(), "train": kernels}.get(name, engines | kernels)
    # What a program falls back from where no volume is mounted.
    assert compiled <= set(_COMPILE_CACHES)
    folders = [one.arguments for one in final_stage(path) if one.arguments.startswith("install --directory")]
    assert folders == ([f"install --directory --group=0 --mode=775 {COMPILE_CACHE}"] if compiled else [])


@each_image
def test_the_revision_is_an_argument_a_label_and_a_variable(path):
    text = {(one.word, one.arguments) for one in final_stage(path)}
    assert ("ARG", "RATCHET_REVISION=unknown") in text
    assert ("ARG", "BASE_IMAGE") in text
    assert environment(path)["RATCHET_REVISION"] == "${RATCHET_REVISION}"
    labels = next(arguments for word, arguments in text if word == "LABEL")
    for name in ("title", "description", "licenses", "revision", "base.name"):
        assert f"org.opencontainers.image.{name}=" in labels
    assert f'title="ratchet-{path.parent.name}"' in labels
    assert 'base.name="${BASE_IMAGE}"' in labels


@each_image
def test_an_image_says_in_a_variable_which_one_it_is(path):
    assert environment(path)["RATCHET_IMAGE_ROLE"] == path.parent.name


def test_segment_is_rollout_with_the_trainers_choice_of_flash_attn():
    def without_names(name: str) -> list[str]:
        found = instructions(ROOT / "images" / name / "Containerfile")
        kept = [one for one in found if "FLASH_ATTN" not in one.arguments and one.word != "LABEL"]
        return [f"{one.word} {one.arguments}".replace(f"ROLE={name}", "ROLE=") for one in kept]

    assert without_names("segment") == without_names("rollout")


def test_every_image_that_components_pipelines_and_manifests_name_is_defined_here():
    used = {path: re.compile(r"\bratchet-([a-z]+)[:@]") for path in (ROOT / "components").rglob("*.*")}
    used |= {path: re.compile(r"\bratchet-([a-z]+)[:@]") for path in (ROOT / "pipelines").rglob("*.*")}
    used |= {path: re.compile(r"\bimage: (?:\S+/)?ratchet-([a-z]+)") for path in (ROOT / "manifests").rglob("*.yaml")}
    texts = {path: path.read_text() for path in used if path.suffix in (".py", ".yaml", ".md")}
    found = {(name, path) for path, text in texts.items() for name in used[path].findall(text)}
    assert ("base", ROOT / "manifests" / "third-party" / "mlflow" / "deployment.yaml") in found
    assert not [f"{path}: ratchet-{name}" for name, path in found if name not in NAMES]
