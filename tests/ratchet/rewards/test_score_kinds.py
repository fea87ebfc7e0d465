"""`ratchet score` by every kind of reward, from the command line."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from examples.reward_server import RewardHandler, RewardServer
from tests.command_line import Ratchet, in_this_process
from tests.ratchet.rewards.servers import Answer, Server
from tests.tiny_models import make_tiny_classifier

LINES = [
    {"prompt": "6 * 7?", "completion": "It is\n#### 42", "ground_truth": "42"},
    {"prompt": [{"role": "user", "content": "6 * 8?"}], "completion": "#### 47", "ground_truth": 48},
    {"prompt": "6 * 9?", "completion": "I do not know.", "ground_truth": "54"},
]


@pytest.fixture
def ratchet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ratchet:
    """Run the command line in this process, as its entry point does."""
    return in_this_process(monkeypatch, capsys)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Three completions: right, wrong and none."""
    return _written(tmp_path / "completions.jsonl", LINES)


def _written(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def _scored(ratchet: Ratchet, *arguments: object) -> list[dict[str, Any]]:
    finished = ratchet("score", *arguments)
    assert finished.code == 0, finished.err
    return [json.loads(line) for line in finished.lines]


def _verdict(text: str) -> Answer:
    """A chat completion."""
    return 200, {}, json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()


@pytest.fixture
def reward_server() -> Iterator[str]:
    """The server of the examples."""
    with RewardServer(("127.0.0.1", 0), RewardHandler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_by_a_model_alone(ratchet: Ratchet, tmp_path: Path, file: Path) -> None:
    folder = make_tiny_classifier(tmp_path / "classifier")
    scored = _scored(ratchet, file, f"reward_model.path={folder}", "reward_model.dtype=float32", "trainer.device=cpu")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    for line, found in zip(LINES, scored, strict=True):
        prompt: Any = line["prompt"]
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        whole = [*messages, {"role": "assistant", "content": line["completion"]}]
        ids = tokenizer.apply_chat_template(whole, return_tensors="pt", return_dict=True)["input_ids"]
        with torch.no_grad():
            assert found["reward"] == pytest.approx(float(model(ids).logits), abs=1e-4)


def test_by_an_endpoint_and_by_several_with_every_part_kept(
    ratchet: Ratchet, tmp_path: Path, file: Path, reward_server: str
) -> None:
    alone = _scored(ratchet, file, f"reward_model.url={reward_server}")
    assert [line["reward"] for line in alone] == [1.0, 0.0, 0.0]
    code = tmp_path / "mine.py"
    code.write_text("def brevity(data):\n    return [-len(item.completion) / 10 for item in data]\n")
    config = tmp_path / "mix.yaml"
    mix = {
        "reward_model": {"weights": {"rule": 1.0, "api": 0.5, "custom": 2.0}, "url": reward_server},
        "custom_reward_function": {"path": str(code), "name": "brevity"},
    }
    config.write_text(json.dumps(mix))
    scored = _scored(ratchet, file, "--config", config, "reward_model.num_examine=2")
    # "It is\n#### 42" has 13 characters, "#### 47" has 7.
    assert scored[0]["reward_breakdown"] == {"rule": 1.0, "api": 1.0, "custom": -1.3}
    assert [line["reward"] for line in scored[:2]] == pytest.approx([1.0 + 0.5 - 2.6, -1.4])
    assert [line["extracted"] for line in scored] == ["42", "47", None]


def test_by_a_judge_whose_missing_verdicts_are_no_zeros(ratchet: Ratchet, file: Path, server: Server) -> None:
    def answer(body: dict[str, Any]) -> Answer:
        asked = body["messages"][-1]["content"]
        if "I do not know" in asked:
            return _verdict("Who could tell?")
        return _verdict("Score: 10" if "Reference answer:\n42" in asked and "6 * 7?" in asked else "Bad.\nScore: 2.5")

    server.answer = answer
    url = server.url.removesuffix("/score")
    keys = ("reward_model.type=judge", f"reward_model.judge={{url: {url}/v1, model: tiny}}")
    scored = _scored(ratchet, file, *keys, "reward_model.on_failure=exclude")
    assert [line["reward"] for line in scored] == [1.0, 0.25, None]
    assert "Who could tell?" in scored[2]["error"]
    assert scored[2]["is_parseable"] is False
    finished = ratchet("score", file, *keys)
    assert finished.code != 0
    assert "completions.jsonl, line 3" in finished.err
    # Lines are graded in chunks: that a whole one has no verdict says nothing about the next.
    server.answer = lambda body: _verdict("Who could tell?")
    scored = _scored(ratchet, file, *keys, "reward_model.on_failure=exclude")
    assert [line["reward"] for line in scored] == [None, None, None]


def test_by_the_rule_of_mathematics_over_the_lines_data_source(ratchet: Ratchet, tmp_path: Path) -> None:
    lines = [
        {"data_source": "mine", "completion": r"So \boxed{\frac{2}{4}}.", "ground_truth": r"\frac{1}{2}"},
        {"data_source": "mine", "completion": r"So \boxed{\frac{2}{5}}.", "ground_truth": r"\frac{1}{2}"},
    ]
    path = _written(tmp_path / "math.jsonl", lines)
    assert [line["reward"] for line in _scored(ratchet, path, "reward_model.rule=math")] == [1.0, 0.0]
    by_option = _scored(ratchet, path, "--data-source", "HuggingFaceH4/MATH-500")
    assert [line["reward"] for line in by_option] == [1.0, 0.0]
    assert "'mine'" in ratchet("score", path).err


def test_with_form_and_length(ratchet: Ratchet, tmp_path: Path, tiny_model: Path) -> None:
    keys = (
        "reward_model.format={pattern: '^It is', weight: 0.5}",
        "reward_model.length_penalty.weight=1",
        "data.max_response_length=10",
    )
    path = _written(tmp_path / "lines.jsonl", [LINES[0] | {"completion_token_ids": [5, 6, 7, 8]}])
    (line,) = _scored(ratchet, path, *keys)
    assert line["reward_breakdown"] == {"rule": 1.0, "format": 1.0, "length_penalty": -0.4}
    assert line["reward"] == pytest.approx(1.1)
    path = _written(path, LINES[:1])
    finished = ratchet("score", path, *keys)
    assert finished.code == 2
    assert "line 1: the reward has a penalty on length: expected the key completion_token_ids" in finished.err
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_model)
    num_tokens = len(tokenizer(LINES[0]["completion"], add_special_tokens=False)["input_ids"])
    longer = (*keys[:2], "data.max_response_length=100", f"actor_rollout_ref.model.path={tiny_model}")
    (line,) = _scored(ratchet, path, *longer)
    assert line["reward_breakdown"]["length_penalty"] == pytest.approx(-num_tokens / 100)


@pytest.mark.parametrize(
    ("line", "keys", "message"),
    [
        ({"completion": "#### 42"}, (), "expected the keys completion and ground_truth, got completion"),
        ({"completion": "x"}, ("reward_model.type=judge",), "expected the keys completion and prompt"),
        ({"completion": "x", "prompt": []}, ("reward_model.type=judge",), "prompt: expected the prompt to be a text"),
        ({"completion": "x", "ground_truth": "1", "extra_info": 3}, (), "expected extra_info to be an object"),
        (
            {"completion": "x", "ground_truth": "1", "completion_token_ids": "12"},
            (),
            "completion_token_ids to be",
        ),
    ],
)
def test_a_line_without_what_the_reward_reads_is_named(
    ratchet: Ratchet, tmp_path: Path, line: dict[str, Any], keys: tuple[str, ...], message: str
) -> None:
    judge = ("reward_model.judge={url: 'http://127.0.0.1:1/v1', model: tiny}",) if keys else ()
    finished = ratchet("score", _written(tmp_path / "bad.jsonl", [line]), *keys, *judge)
    assert finished.code == 2
    assert "bad.jsonl, line 1" in finished.err
    assert message in finished.err
