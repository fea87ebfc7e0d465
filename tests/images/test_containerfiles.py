"""The image definitions, read as text: no engine is needed, and none of this replaces a build."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

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


@each_image
def test_every_base_is_an_argument_whose_default_is_pinned(path):
    defaults = {}
    for instruction in instructions(path):
        if instruction.word == "ARG":
            name, _, value = instruction.arguments.partition("=")
            defaults.setdefault(name, value)
        if instruction.word == "FROM":
            reference = instruction.arguments.split()[0]
            argument = re.fullmatch(r"\$\{(\w+)\}", reference)
            assert argument, f"{path}: FROM {reference} cannot be replaced by a build argument"
            assert re.fullmatch(r"[\w./-]+(:[\w.-]*\d[\w.-]*(@sha256:[0-9a-f]{64})?)", defaults[argument[1]])
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
    assert installs
    for arguments in installs:
        assert "--require-hashes" in arguments or arguments.endswith("torch.txt")
    words = [f"{one.word} {one.arguments}" for one in instructions(path)]
    source = next(index for index, text in enumerate(words) if text.startswith("COPY ratchet"))
    assert all("pip install" not in text and "apt-get" not in text for text in words[source:])


@each_image
def test_it_runs_as_a_numeric_user_of_group_zero(path):
    users = [instruction.arguments for instruction in final_stage(path) if instruction.word == "USER"]
    assert users == ["1000:0"]
    assert final_stage(path)[-1].word == "USER"
    assert not re.search(r"\b(sudo|openssh|vim|curl)\b", path.read_text())


@each_image
def test_it_writes_to_nothing_but_tmp_and_needs_no_entry_in_the_password_file(path):
    environment = dict(
        pair.split("=", 1) for one in final_stage(path) if one.word == "ENV" for pair in one.arguments.split()
    )
    assert environment["HOME"] == "/tmp"
    assert environment["USER"]
    caches = {name: value for name, value in environment.items() if re.search(r"CACHE|_HOME|CONFIGDIR|WORKSPACE", name)}
    assert {"XDG_CACHE_HOME", "HF_HOME"} <= set(caches)
    assert all(value.startswith("/tmp/") for value in caches.values()), caches


@each_image
def test_the_revision_is_an_argument_a_label_and_a_variable(path):
    text = {(one.word, one.arguments) for one in final_stage(path)}
    assert ("ARG", "RATCHET_REVISION=unknown") in text
    assert ("ENV", "RATCHET_REVISION=${RATCHET_REVISION}") in text
    labels = next(arguments for word, arguments in text if word == "LABEL")
    for name in ("title", "description", "licenses", "revision"):
        assert f"org.opencontainers.image.{name}=" in labels
    assert f'title="ratchet-{path.parent.name}"' in labels


def test_every_image_that_components_pipelines_and_manifests_name_is_defined_here():
    used = {path: re.compile(r"\bratchet-([a-z]+)[:@]") for path in (ROOT / "components").rglob("*.*")}
    used |= {path: re.compile(r"\bratchet-([a-z]+)[:@]") for path in (ROOT / "pipelines").rglob("*.*")}
    used |= {path: re.compile(r"\bimage: (?:\S+/)?ratchet-([a-z]+)") for path in (ROOT / "manifests").rglob("*.yaml")}
    texts = {path: path.read_text() for path in used if path.suffix in (".py", ".yaml", ".md")}
    found = {(name, path) for path, text in texts.items() for name in used[path].findall(text)}
    assert ("base", ROOT / "manifests" / "third-party" / "mlflow" / "deployment.yaml") in found
    assert not [f"{path}: ratchet-{name}" for name, path in found if name not in NAMES]
