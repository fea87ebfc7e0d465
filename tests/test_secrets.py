"""Secrets that a run is given, and one that somebody types where it does not belong, are in nothing that it leaves.

One real run with everything planted, on a real S3 server and a real MLflow server, and failures of several kinds; then
every byte that they wrote is searched.
"""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from demo.servers import mlflow_server
from ratchet.config import load_config, parse_config, parse_text
from ratchet.config.keys import known_keys
from ratchet.config.reading import Reading
from ratchet.config.secrets import shown
from ratchet.errors import ConfigError, EngineError, RatchetError
from ratchet.grains import program
from ratchet.grains.tasks import StageTask
from ratchet.redaction import HidingFormatter, hidden
from ratchet.store.objects import open_store
from tests.conftest import ADMIN_KEYS
from tests.runs import CONFIGS, write_problems

PLANTED = {
    "AWS_SESSION_TOKEN": "planted-session-token-000",
    "MLFLOW_TRACKING_PASSWORD": "planted-mlflow-password-001",
    "MLFLOW_TRACKING_TOKEN": "planted-mlflow-token-002",
    "HF_TOKEN": "hf_plantedHuggingFaceToken003",
    "RATCHET_REWARD_TOKEN": "Bearer planted-reward-token-004",
    "KF_PIPELINES_TOKEN": "planted-kfp-token-005",
    "KF_PIPELINES_COOKIES": "authservice_session=planted-kfp-cookie-006",
    "KUBE_TOKEN": "planted-kubeconfig-token-007",
}
PROXY, TRACKING, SIGNED = "planted-proxy-password-008", "planted-uri-password-009", "planted-signature-010"
WORDS = [
    ADMIN_KEYS["secretKey"],
    *(value.rpartition(" ")[2].rpartition("=")[2] for value in PLANTED.values()),
    PROXY,
    TRACKING,
    SIGNED,
]
CALLS = """
import json, logging, os, sys
from ratchet.environment import start_log
start_log(logging.DEBUG)
import ratchet.cli.cluster, ratchet.cli.local
from ratchet.cli.app import main
for arguments, environment in json.loads(sys.argv[1]):
    os.environ.update(environment)
    sys.argv[1:] = arguments
    try:
        main()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    print("ended with", code)
"""


def _found(text: str) -> list[str]:
    return [word for word in WORDS if word in text]


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", ADMIN_KEYS["secretKey"])


@pytest.fixture
def everywhere(planted: None, s3_root: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The folder of an MLflow server whose address holds a password; all other secrets are in the environment."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, f"http://someone:{PROXY}@127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)  # the server knows no sessions
    with mlflow_server(tmp_path / "mlflow") as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri.replace("://", f"://someone:{TRACKING}@"))
        monkeypatch.delenv("MLFLOW_TRACKING_TOKEN")  # one way to log in is enough, and the address is one
        yield tmp_path / "mlflow"


@pytest.mark.slow
def test_a_run_that_is_given_secrets_leaves_none(
    everywhere: Path, s3_root: str, tiny_model: Path, tmp_path: Path
) -> None:
    problems = write_problems(tmp_path / "problems.jsonl", 2)
    settings = [
        f"actor_rollout_ref.model.path={tiny_model}",
        f"data.train_files={problems}",
        "data.train_batch_size=1",
        "data.max_response_length=4",
        "actor_rollout_ref.rollout.n=2",
        "trainer.total_training_steps=1",
        "trainer.logger=[console,mlflow]",
    ]
    endpoint = ["url=http://127.0.0.1:1/score", "retries=0", "auth_env=RATCHET_REWARD_TOKEN"]
    train = ["train", "--config", str(CONFIGS / "tiny.yaml"), "--root", s3_root, "--run-id"]
    calls = [
        ([*train, "good", *settings], {}),
        (
            [*train, "bad", *settings, *(f"reward_model.{setting}" for setting in endpoint)],
            {"MLFLOW_TRACKING_URI": f"http://someone:{TRACKING}@127.0.0.1:1"},
        ),
        (["compile", "grpo", "--to", str(tmp_path / "grpo.yaml")], {}),
    ]
    done = subprocess.run(
        [sys.executable, "-c", CALLS, json.dumps(calls)],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(CONFIGS.parent),
            "OMP_NUM_THREADS": "1",
            # Nobody listens there, however often it is asked.
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    ends = [line for line in done.stdout.splitlines() if line.startswith("ended with")]
    assert ends == ["ended with 0", "ended with 2", "ended with 0"], done.stderr[-3000:]
    # The log is one of everything, addresses, headers and failures among it.
    assert "http://127.0.0.1:1/score, " in done.stderr
    assert "MLflow at http://127.0.0.1:1 cannot be used" in done.stderr
    assert "DEBUG botocore" in done.stderr
    assert "DEBUG urllib3" in done.stderr
    assert "***" in done.stderr
    assert not _found(done.stdout + done.stderr)
    assert not _found((tmp_path / "grpo.yaml").read_text())
    store = open_store(s3_root)
    objects = [info.key for info in store.list_objects("")]
    assert {"good/run.json", "good/submissions/0001.json", "bad/submissions/0001.json"} <= {*objects}
    for key in objects:
        assert not _found(store.get(key).decode("latin-1")), key
    files = [path for path in everywhere.rglob("*") if path.is_file()]
    assert any(path.name == "config.yaml" for path in files)
    assert any(b"ratchet.root" in path.read_bytes() for path in files)
    for path in files:
        assert not _found(path.read_bytes().decode("latin-1")), path


@pytest.mark.parametrize(
    ("setting", "kind"),
    [
        ("reward_model.url=https://someone:planted-uri-password-009@host/score", "an address with a login"),
        ("reward_model.url=https://host/score?api_key=planted-signature-010", "an address with a key or signature"),
        (
            "data.train_files=https://host/train.parquet?X-Amz-Credential=me&X-Amz-Signature=planted-signature-010",
            "an address with a key or signature",
        ),
        ("trainer.project_name=hf_plantedHuggingFaceToken003", "what looks like a token or a private key"),
        ("custom_reward_function.reward_kwargs={judge: {api_key: planted-signature-010}}", "called like a secret"),
        ("custom_reward_function.reward_kwargs={judges: ['redis://:planted-uri-password-009@host']}", "with a login"),
        ("custom_reward_function.reward_kwargs.password=planted-uri-password-009", "called like a secret"),
    ],
)
def test_a_secret_in_a_config_is_refused_before_anything_is_stored_and_not_repeated(setting: str, kind: str) -> None:
    with pytest.raises(ConfigError, match=kind) as caught:
        load_config(None, [setting])
    assert "which would be stored with the run" in str(caught.value)
    assert setting.partition("=")[0] in str(caught.value)
    assert not _found(str(caught.value))


def test_a_secret_that_stands_in_a_wrong_place_is_not_repeated() -> None:
    text = """
    reward_model:
      timeout: https://someone:planted-uri-password-009@host
      urll: https://host?token=planted-signature-010
      url: ${oc.env:URL,https://someone:planted-uri-password-009@host}
    data: https://someone:planted-uri-password-009@host
    trainer.seed: hf_plantedHuggingFaceToken003
    """
    with pytest.raises(ConfigError) as caught:
        parse_text(text)
    assert all(key in str(caught.value) for key in ("timeout", "urll", "url", "data", "trainer.seed"))
    assert not _found(str(caught.value))
    with pytest.raises(ConfigError, match="is not YAML") as caught:
        parse_text('reward_model: {url: "https://someone:planted-uri-password-009@host')
    assert not _found(str(caught.value))
    with pytest.raises(ConfigError, match="expected key") as caught:
        load_config(None, ["https://someone:planted-uri-password-009@host"])
    assert not _found(str(caught.value))
    assert shown("judge.api_key", "planted") == "'***'"


@pytest.mark.parametrize(
    "value",
    [
        "s3://bucket/prefix/train.parquet",
        "ratchet/word-problems?level=1&size=512&seed=0",
        "http://host:8000/score?model=a&keys=3",
        "me@example.org",
        "gpt-4 sk-learn <|eos_token|>",
        "tokens per second",
    ],
)
def test_what_is_no_secret_may_stand_in_a_config(value: str) -> None:
    assert load_config(None, [f"custom_reward_function.reward_kwargs={json.dumps({'pad_token': value})}"])
    assert hidden(value) == value


def test_a_run_that_has_stored_one_can_still_go_on() -> None:
    tree = {"custom_reward_function": {"reward_kwargs": {"api_key": "none"}}}
    with pytest.raises(ConfigError, match="called like a secret"):
        parse_config(tree)
    assert parse_config(tree, is_stored=True)


def test_no_key_of_the_config_is_called_like_a_secret() -> None:
    reading = Reading()
    reading.values = dict.fromkeys(known_keys(), "x")
    assert reading.all_faults(with_secrets=True) == []


@pytest.mark.parametrize(
    "error",
    [
        EngineError(f"503 from https://someone:{TRACKING}@host/score?sig={SIGNED}: planted-reward-token-004"),
        RuntimeError(f"Authorization: Basic {TRACKING}; planted-kfp-token-005, planted-session-token-000"),
    ],
)
def test_what_ends_a_task_is_told_without_secrets(
    error: Exception, planted: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def work(task: StageTask) -> None:
        program.say(f"asking {error}")
        raise error

    task = StageTask(root=str(tmp_path), run_id="run", submission_id="6f0c", step=3)
    handler = logging.StreamHandler(sys.stderr)
    logging.getLogger().addHandler(handler)
    try:
        with pytest.raises(SystemExit):
            program.run("reward", work, task)
    finally:
        logging.getLogger().removeHandler(handler)
    (status,) = (tmp_path / "run/status").rglob("*.json")
    said = json.loads(status.read_text())
    assert said["error"] == type(error).__name__
    assert "***" in said["message"]
    assert "***" in said["note"]
    printed = capfd.readouterr().err
    assert "***" in printed
    assert ("Traceback" in printed) is not isinstance(error, RatchetError)
    assert not _found(status.read_text() + printed)


def test_a_log_of_everything_shows_no_secret(planted: None) -> None:
    formatter = HidingFormatter(logging.Formatter("%(message)s"))

    def line(message: str, *arguments: Any) -> str:
        return formatter.format(logging.LogRecord("x", logging.DEBUG, "x", 1, message, arguments, None))

    assert line("%s", {"X-Amz-Security-Token": "another-one", "Host": "h"}) == (
        "{'X-Amz-Security-Token': '***', 'Host': 'h'}"
    )
    assert line("GET /a?X-Amz-Signature=%s&x=1", SIGNED) == "GET /a?X-Amz-Signature=***&x=1"
    assert line("header Authorization: Bearer abc") == "header Authorization: ***"
    assert line("planted-reward-token-004 was refused") == "*** was refused"
    assert line("-----BEGIN RSA PRIVATE KEY-----\nMII\n-----END RSA PRIVATE KEY----- is bad") == "*** is bad"
