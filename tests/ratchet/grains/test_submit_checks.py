"""What is checked once before a run takes its id: by preflight for a pipeline, by `submit` for a process."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from ratchet.config import RunConfig
from ratchet.errors import ConfigError, DataError, EngineError
from ratchet.grains import entry
from ratchet.grains.session import Session, submit
from ratchet.grains.tasks import PreflightTask
from ratchet.rewards.graders import Grader
from ratchet.stages.preprocess import Preprocess
from ratchet.stages.reward import Reward, _reward_model_digest
from ratchet.store.objects import open_store
from ratchet.store.run import Run
from tests.runs import tiny_config, write_problems
from tests.tiny_models import tiny_tokenizer


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("KUBECONFIG", "/nonexistent")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    _reward_model_digest.cache_clear()
    yield
    _reward_model_digest.cache_clear()


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    return write_problems(tmp_path / "problems.jsonl")


def preflight(root: str, config: RunConfig) -> None:
    text = json.dumps(config.model_dump(mode="json"), indent=1)
    task = PreflightTask(root=root, run_id="run", submission_id="job", config=text, grain="segment")
    assert entry.preflight(task)[0] == entry.TRAIN


def test_preflight_prepares_the_prompts_and_opens_each_grader_once(
    tmp_path: Path, tiny_model: Path, problems: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    usable = Preprocess.usable

    def counted(stage: Preprocess, *arguments: Any, **more: Any) -> Any:
        read.append(stage.split)
        return usable(stage, *arguments, **more)

    monkeypatch.setattr(Preprocess, "usable", counted)
    preflight(str(tmp_path / "runs"), tiny_config(tiny_model, problems, **{"data.val_files": str(problems)}))
    assert read == ["train", "val"]


def test_what_a_process_submits_is_checked_by_itself_and_its_grader_closed(
    tmp_path: Path, tiny_model: Path, problems: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Grader] = []
    close = Grader.close
    monkeypatch.setattr(Grader, "close", lambda grader: (closed.append(grader), close(grader))[1])
    submit(str(tmp_path), "run", tiny_config(tiny_model, problems))
    assert len(closed) == 1
    # The error is that of the check, whichever it is.
    with pytest.raises(EngineError, match="does not exist"):
        submit(str(tmp_path), "second", tiny_config(tmp_path / "absent", problems))
    with pytest.raises(DataError, match="no such file"):
        submit(str(tmp_path), "second", tiny_config(tiny_model, tmp_path / "absent.jsonl"))
    with pytest.raises(ConfigError, match=r"train_batch_size is 9"):
        submit(str(tmp_path), "second", tiny_config(tiny_model, problems, **{"data.train_batch_size": 9}))
    assert not (tmp_path / "second").exists()
    submit(str(tmp_path), "second", tiny_config(tmp_path / "absent", problems), is_checked=True)


def judge(folder: Path) -> Path:
    tokenizer = tiny_tokenizer()
    shape = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
        num_labels=1, pad_token_id=3,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        LlamaForSequenceClassification(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_preflight_does_not_fetch_a_reward_model_and_a_process_does(
    tmp_path: Path, tiny_model: Path, problems: Path, s3_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(f"{s3_root}/judge")
    for path in judge(tmp_path / "judge").iterdir():
        store.upload_file(path, path.name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("RATCHET_CACHE", str(tmp_path / "cache"))
    fetched: list[str] = []
    from ratchet.engines import model_source

    def noted(path: str, **more: Any) -> Path:
        if "judge" in str(path):
            fetched.append(path)
        return resolve(path, **more)

    resolve = model_source.resolve_model_folder
    monkeypatch.setattr(model_source, "resolve_model_folder", noted)
    monkeypatch.setattr("ratchet.engines.model.resolve_model_folder", noted)
    values = {"reward_model.type": "model", "reward_model.path": f"{s3_root}/judge"}
    config = tiny_config(tiny_model, problems, **values)
    preflight(str(tmp_path / "runs"), config)
    assert fetched == []
    submit(str(tmp_path / "runs"), "second", config)
    assert fetched == [f"{s3_root}/judge"]


def test_another_reward_model_than_that_of_step_1_is_noticed_where_it_is_loaded(
    tmp_path: Path, tiny_model: Path, problems: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = judge(tmp_path / "judge")
    values = {"reward_model.type": "model", "reward_model.path": str(path)}
    config = tiny_config(tiny_model, problems, **values)
    run = submit(str(tmp_path / "runs"), "run", config)

    graded = SimpleNamespace(content=SimpleNamespace(inputs={"reward_model": "0" * 64}))
    monkeypatch.setattr(Run, "manifest", lambda run, stage, step: graded if (stage, step) == ("reward", 1) else None)
    with pytest.raises(ConfigError, match="whose files are not those of the reward model"):
        Session(run, config, None, SimpleNamespace(proven_states=set())).run(Reward(), 2)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="whose files are not those of the reward model"):
        submit(str(tmp_path / "runs"), "run", config, is_checked=True)
