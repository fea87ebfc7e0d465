"""Pipelines by name, their parameters, and a config on its way into one."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipelines import configs, packages
from pipelines.compile import GOLDEN, compiled
from pipelines.configs import parameter_text, read_config
from pipelines.packages import Package, find_package, parse_package
from ratchet.config import parse_text
from ratchet.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

PARAMETERS: dict[str, Any] = {
    "root": {"parameterType": "STRING", "description": "Where runs lie."},
    "steps": {"parameterType": "NUMBER_INTEGER", "defaultValue": 3.0},
    "rate": {"parameterType": "NUMBER_DOUBLE", "isOptional": True},
    "fast": {"parameterType": "BOOLEAN", "defaultValue": False},
    "names": {"parameterType": "LIST", "defaultValue": []},
    "device_map": {"parameterType": "STRUCT", "defaultValue": {}},
    "size": {"parameterType": "STRING", "literals": ["small", "large"], "defaultValue": "small"},
}


@pytest.fixture(scope="module")
def package() -> Package:
    """A pipeline with a parameter of every type."""
    ir = next(iter(yaml.safe_load_all(compiled(GOLDEN[packages.catalogue()["grpo"][0]]))))
    ir["root"]["inputDefinitions"]["parameters"] = PARAMETERS
    return parse_package(yaml.safe_dump(ir), "the test")


def test_the_catalogue_is_what_is_compiled() -> None:
    assert {name: path for name, (path, _) in packages.catalogue().items()} == {
        path.parent.name + path.stem.removeprefix("pipeline"): path for path in GOLDEN
    }


def test_a_pipeline_is_found_by_either_of_its_names_or_by_its_file(tmp_path: Path) -> None:
    by_name = find_package("grpo_stages")
    assert by_name.name == "ratchet-grpo-stages"
    assert find_package("ratchet-grpo-stages") == by_name
    (tmp_path / "mine.yaml").write_text(by_name.text)
    assert find_package(str(tmp_path / "mine.yaml")).version == by_name.version
    with pytest.raises(ConfigError, match="no pipeline 'grpo_stage': did you mean grpo_stages"):
        find_package("grpo_stage")
    with pytest.raises(ConfigError, match=r"cannot read the pipeline gone\.yaml: No such file"):
        find_package("gone.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"cannot read the pipeline .*bytes\.yaml: it is not UTF-8"):
        find_package(str(tmp_path / "bytes.yaml"))


def test_a_version_is_named_by_release_and_content(package: Package) -> None:
    other = parse_package(package.text + "# more\n", "the test")
    assert package.version != other.version
    assert package.version == f"0.1.0-{package.digest[:12]}"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: 1", "has no pipelineInfo"),
        ("[", "while parsing"),
        ("pipelineInfo: {name: x}\nrut: {}", 'no field named "rut"'),
        ("pipelineInfo: {name: x}", "has no name or no root"),
        ("pipelineInfo: {}\nroot: {}", "has no name or no root"),
    ],
)
def test_what_a_server_would_refuse_is_refused_here(text: str, why: str) -> None:
    with pytest.raises(
        ConfigError, match=f"mine is no compiled pipeline: .*{why}|mine is no compiled pipeline: it {why}"
    ):
        parse_package(text, "mine")


def test_values_are_read_as_their_parameters_types(package: Package) -> None:
    pairs = [
        "root=s3://b/r",
        "size=1e3",
        "steps=20",
        "rate=1e-6",
        "fast=true",
        "names=[a, 1]",
        'device_map={"a": {"b": 1}}',
    ]
    assert package.read(pairs) == {
        "root": "s3://b/r",
        "size": "1e3",
        "steps": 20,
        "rate": 1e-6,
        "fast": True,
        "names": ["a", 1],
        "device_map": {"a": {"b": 1}},
    }
    with pytest.raises(ConfigError, match="'steps': expected PARAMETER=VALUE"):
        package.read(["steps"])
    with pytest.raises(ConfigError, match="has no parameter 'step': did you mean steps"):
        package.read(["step=1"])


def test_every_fault_of_the_parameters_is_said_at_once(package: Package) -> None:
    package.check({"root": "r", "rate": 1})
    given = {"steps": 2.5, "rate": "x", "fast": 1, "names": {}, "device_map": [], "size": "huge", "rott": "s3://b"}
    with pytest.raises(ConfigError) as refused:
        package.check(given)
    assert [line.strip() for line in str(refused.value).splitlines()] == [
        "pipeline ratchet-grpo cannot be given these parameters:",
        "parameter steps: expected a whole number, but it is 2.5",
        "parameter rate: expected a number, but it is 'x'",
        "parameter fast: expected true or false, but it is 1",
        "parameter names: expected a list, but it is {}",
        "parameter device_map: expected a mapping, but it is []",
        "parameter size: expected one of ['small', 'large'], but it is 'huge'",
        "pipeline ratchet-grpo has no parameter 'rott': did you mean root?",
        "parameter root is missing: Where runs lie.",
    ]


def test_true_is_no_number(package: Package) -> None:
    with pytest.raises(ConfigError, match="steps: expected a whole number, but it is True"):
        package.check({"root": "r", "steps": True})


# -- configs ---------------------------------------------------------------------------------------------------------

CONFIG = """
data: {train_files: s3://data/train.parquet}
actor_rollout_ref: {model: {path: s3://models/qwen}, rollout: {n: 4}}
trainer: {total_training_steps: 7}
"""


def test_a_config_file_becomes_one_line_that_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    text, parsed = read_config(str(path), ["trainer.seed=5"])
    assert "\n" not in text
    assert parse_text(text) == parsed
    assert parsed is not None
    assert (parsed.trainer.seed, parsed.actor_rollout_ref.rollout.n) == (5, 4)
    assert read_config(CONFIG, ["trainer.seed=5"])[0] == text
    # A parameter's value has no space after a colon where somebody wrote JSON.
    compact = json.dumps(yaml.safe_load(CONFIG), separators=(",", ":"))
    assert read_config(compact, ["trainer.seed=5"])[0] == text


def test_a_mistake_in_a_config_is_found_before_anything_is_sent(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG.replace("total_training_steps", "total_training_stepps"))
    with pytest.raises(
        ConfigError, match=r"run\.yaml does not make a run:\n  trainer\.total_training_stepps: no such key"
    ):
        read_config(str(path))
    with pytest.raises(ConfigError, match=r"cannot read the config file gone\.yaml"):
        read_config("gone.yaml")


def test_code_travels_within_a_config_and_argo_fills_in_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = 'TEMPLATE = "{{ messages }}{{{workflow.uid}}}"\n\n\ndef score(data):\n    return []\n'
    Path("mine.py").write_text(source)
    reward = "custom_reward_function: {path: mine.py, name: score}\n"
    text, parsed = read_config(f"{CONFIG}{reward}")
    assert "{{" not in text
    assert parse_text(text) == parsed
    assert parse_text(text).code[0].source == source


def test_a_config_that_no_process_could_be_given_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"has \d+ bytes, and a pipeline's parameter holds 98304"):
        parameter_text({"a": "x" * configs.MAX_CONFIG_BYTES})


def test_a_place_is_sent_as_it_is_where_it_cannot_be_read_from_here(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_MAX_ATTEMPTS": "1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    with caplog.at_level(logging.WARNING):
        assert read_config("s3://bucket/run.yaml") == ("s3://bucket/run.yaml", None)
    assert "s3://bucket/run.yaml cannot be read from here, so that the pods are the first to check it" in caplog.text
    with pytest.raises(ConfigError, match=r"config s3://bucket/run\.yaml is read by the pods, and cannot be changed"):
        read_config("s3://bucket/run.yaml", ["trainer.seed=5"])


def test_a_place_that_can_be_read_is_checked(s3_root: str) -> None:
    from ratchet.store.objects import open_store

    store = open_store(s3_root)
    store.put("good.yaml", CONFIG.encode())
    store.put("bad.yaml", b"trainer: {seeed: 1}")
    text, parsed = read_config(f"{s3_root}/good.yaml")
    assert (text, parsed and parsed.trainer.total_training_steps) == (f"{s3_root}/good.yaml", 7)
    with pytest.raises(ConfigError, match=r"bad\.yaml does not make a run:\n  trainer\.seeed: no such key"):
        read_config(f"{s3_root}/bad.yaml")
    with pytest.raises(ConfigError, match=r"there is no config at s3://.*/gone\.yaml"):
        read_config(f"{s3_root}/gone.yaml")
