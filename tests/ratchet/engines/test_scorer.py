"""The scorer: equal to the trainer's own log-probs, and honest about weights that do not fit."""

from pathlib import Path

import pytest
import torch

from ratchet.engines.model import load_causal_lm
from ratchet.engines.scorer import Scorer
from ratchet.engines.trainer import Trainer, TrainerSettings
from ratchet.errors import EngineError
from tests.tiny_models import make_tiny_model

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12], list(range(20, 60))]
COMPLETIONS = [[30, 31, 2], [40, 41, 42, 43, 44], [], [50, 51, 52, 0]]


def scorer_of(folder: Path, dtype: str = "float32", budget: int = 50) -> Scorer:
    return Scorer.from_folder(
        folder, compute_dtype=dtype, temperature=0.8, max_tokens_per_micro_batch=budget, device="cpu"
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_scores_are_bit_for_bit_those_of_the_trainer(dtype: str, architecture: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, architecture=architecture)
    settings = TrainerSettings(
        lr=0.0,
        mini_batch_size=4,
        temperature=0.8,
        max_tokens_per_micro_batch=50,
        compute_dtype=dtype,  # type: ignore[arg-type]
    )
    trainer = Trainer.from_folder(folder, settings, device="cpu")
    scores = scorer_of(folder, dtype).log_probs(PROMPTS, COMPLETIONS)
    assert scores == trainer.log_probs(PROMPTS, COMPLETIONS)
    assert [len(row) for row in scores] == [3, 5, 0, 4]
    trainer.close()


def test_sums_of_squared_probabilities_come_beside_the_same_log_probs(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    scorer = scorer_of(folder)
    log_probs, squares = scorer.scores_with_sum_pi_squared(PROMPTS, COMPLETIONS)
    assert log_probs == scorer.log_probs(PROMPTS, COMPLETIONS)
    model = load_causal_lm(folder, "float32")
    for prompt, completion, found in zip(PROMPTS, COMPLETIONS, squares, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + completion]), use_cache=False).logits[0].double()
        before = torch.softmax(logits[len(prompt) - 1 : len(prompt) - 1 + len(completion)] / 0.8, dim=-1)
        assert found == pytest.approx(before.square().sum(-1).tolist(), abs=1e-5)


def test_loaded_weights_score_as_the_folder_that_they_came_from(tmp_path: Path) -> None:
    first = make_tiny_model(tmp_path / "first", seed=0)
    second = make_tiny_model(tmp_path / "second", seed=1)
    trainer = Trainer.from_folder(second, TrainerSettings(lr=0.0, mini_batch_size=1), device="cpu")
    scorer = scorer_of(first)
    assert scorer.log_probs([[5]], [[6]]) != scorer_of(second).log_probs([[5]], [[6]])
    scorer.load_weights(trainer.export_weights("float32"))
    assert scorer.log_probs([[5]], [[6]]) == scorer_of(second).log_probs([[5]], [[6]])
    trainer.close()


def test_weights_that_do_not_fit_are_refused_and_change_nothing(tmp_path: Path) -> None:
    scorer = scorer_of(make_tiny_model(tmp_path))
    before = scorer.log_probs([[5]], [[6]])
    name = "model.norm.weight"
    for weights in ({name: torch.zeros(3)}, {"other": torch.zeros(64)}, {name: torch.zeros(64)}):
        with pytest.raises(EngineError, match=r"shape|unknown|missing"):
            scorer.load_weights(weights)
    assert scorer.log_probs([[5]], [[6]]) == before


def test_a_closed_scorer_holds_no_model(tmp_path: Path) -> None:
    scorer = scorer_of(make_tiny_model(tmp_path))
    scorer.close()
    with pytest.raises(AttributeError):
        scorer.log_probs([[5]], [[6]])
