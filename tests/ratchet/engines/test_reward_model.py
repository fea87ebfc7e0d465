"""Rewards of whole texts against transformers' own sequence classifiers."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ratchet.engines.critic import ValueScorer
from ratchet.engines.reward_model import RewardModel
from ratchet.errors import DataError, EngineError
from tests.ratchet.engines.trainer_cases import make_tiny_classifier
from tests.tiny_models import make_tiny_model

TEXTS = [
    "A baker sells 12 loaves.",
    "Mia",
    "The answer is 42, since 12 + 30 = 42 and nothing is left of it." * 3,
    # What ends in padding is judged at the token before it.
    "There are 5 boxes<|pad|><|pad|>",
    "<|im_start|>user\nHow many?<|im_end|>\n",
]
CHATS = [
    [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "42"}],
    [{"role": "user", "content": "Is it 7?"}],
]


def reward_model(folder: Path, *, budget: int = 64, dtype: str = "float32") -> RewardModel:
    return RewardModel.from_folder(folder, compute_dtype=dtype, max_tokens_per_micro_batch=budget, device="cpu")


def of_transformers(folder: Path, texts: list[str]) -> list[float]:
    """Logits of the texts as one padded batch."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    batch = tokenizer(texts, add_special_tokens=False, padding=True, padding_side="right", return_tensors="pt")
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return [float(value) for value in logits[:, 0]]


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("budget", [1, 64, 4000])
def test_scores_are_those_of_transformers(architecture: str, budget: int, tmp_path: Path) -> None:
    folder = make_tiny_classifier(tmp_path, architecture=architecture)
    scores = reward_model(folder, budget=budget).scores(TEXTS)
    assert scores == pytest.approx(of_transformers(folder, TEXTS), abs=1e-4)
    assert len(set(scores)) == len(TEXTS)


def test_a_conversation_is_scored_as_the_text_that_its_template_renders(tmp_path: Path) -> None:
    model = reward_model(make_tiny_classifier(tmp_path))
    rendered = [
        "".join(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in chat)
        for chat in CHATS
    ]
    assert model.chat_scores(CHATS) == model.scores(rendered)


def test_a_language_model_with_a_head_is_scored_at_its_last_token(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    with pytest.raises(EngineError, match=r"no value or reward head.*score\.weight"):
        reward_model(folder)
    with_head = tmp_path / "reward"
    shutil.copytree(folder, with_head)
    head = {"v_head.summary.weight": torch.linspace(-1, 1, 64)[None], "v_head.summary.bias": torch.ones(1)}
    path = with_head / "model.safetensors"
    save_file({**load_file(path), **head}, path, metadata={"format": "pt"})
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    critic = ValueScorer.from_folder(with_head, compute_dtype="float32", max_tokens_per_micro_batch=4000, device="cpu")
    # The value before a token that follows the whole text: padding at its end is a token like others here.
    expected = [row[0] for row in critic.values(ids, [[0]] * len(ids))]
    assert reward_model(with_head).scores(TEXTS) == pytest.approx(expected, abs=1e-4)


def test_scores_in_bfloat16_are_near_and_an_empty_text_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_classifier(tmp_path)
    exact, near = (reward_model(folder, dtype=dtype).scores(TEXTS) for dtype in ("float32", "bfloat16"))
    assert near == pytest.approx(exact, abs=0.3)
    model = reward_model(folder)
    assert model.scores([]) == []
    with pytest.raises(DataError, match="text 1"):
        model.scores(["yes", ""])
    model.close()
