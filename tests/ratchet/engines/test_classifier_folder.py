"""Reward models from a causal language model to a folder that others load, and that judges as it was trained to."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ratchet.engines.classifier_folder import make_classifier_folder
from ratchet.engines.export import prove_classifier_export, write_export
from ratchet.engines.model import chat_prompt_ids, is_classifier, load_config
from ratchet.engines.offline_rows import PairRow
from ratchet.engines.reward_model import RewardModel, conversations_of_a_prompt
from ratchet.engines.reward_trainer import RewardModelTrainer
from ratchet.errors import DataError, EngineError
from tests.ratchet.engines.offline_cases import REWARD
from tests.tiny_models import make_tiny_model, tiny_tokenizer

PROMPT = [{"role": "user", "content": "How much is 12 + 30?"}]
CHOSEN = [{"role": "assistant", "content": "The answer is 42."}]
REJECTED = [{"role": "assistant", "content": "The answer is 17."}]


def pair() -> PairRow:
    prompt, (chosen, rejected) = conversations_of_a_prompt(tiny_tokenizer(), PROMPT, [CHOSEN, REJECTED])
    return PairRow(prompt, chosen, rejected, [True] * len(chosen), [True] * len(rejected))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral", "phi3", "gemma2", "gemma3_text"])
def test_a_classifier_is_the_backbone_with_a_head(architecture: str, tmp_path: Path) -> None:
    causal = make_tiny_model(tmp_path / "causal", architecture=architecture, dtype=torch.bfloat16)
    make_classifier_folder(causal, tmp_path / "classifier", seed=1)
    assert is_classifier(load_config(tmp_path / "classifier"))
    assert not is_classifier(load_config(causal))
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("causal", "classifier"))
    head = after.pop("score.weight")
    before.pop("lm_head.weight", None)
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())
    assert head.shape == (1, 64)
    assert head.dtype == torch.bfloat16
    model, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "classifier", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"))
    assert model.num_labels == 1
    assert AutoTokenizer.from_pretrained(tmp_path / "classifier").chat_template == tiny_tokenizer().chat_template
    RewardModelTrainer.from_folder(tmp_path / "classifier", REWARD, device="cpu").close()


def test_the_head_is_a_draw_of_the_seed(tmp_path: Path) -> None:
    causal = make_tiny_model(tmp_path / "causal")
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        make_classifier_folder(causal, tmp_path / name, seed=seed)
    assert torch.equal(torch.random.get_rng_state(), state)
    one, same, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "same", "other"))
    assert one == same != other
    head = load_file(tmp_path / "one" / "model.safetensors")["score.weight"]
    # 64 draws of variance 1 / 65: their mean square is within four standard errors of it.
    assert float(head.square().mean()) == pytest.approx(1 / 65, rel=4 * (2 / 64) ** 0.5)


def test_a_folder_that_has_a_head_is_refused(tmp_path: Path) -> None:
    causal = make_tiny_model(tmp_path / "causal")
    make_classifier_folder(causal, tmp_path / "classifier", seed=0)
    with pytest.raises(EngineError, match="got a model that has a head"):
        make_classifier_folder(tmp_path / "classifier", tmp_path / "again", seed=0)
    weights = load_file(causal / "model.safetensors")
    save_file({**weights, "v_head.summary.weight": torch.zeros(1, 64)}, causal / "model.safetensors")
    with pytest.raises(EngineError, match="got a model that has a head"):
        make_classifier_folder(causal, tmp_path / "again", seed=0)


def test_without_a_padding_token_the_end_of_text_stands_in(tmp_path: Path) -> None:
    causal = make_tiny_model(tmp_path / "causal")
    for name in ("config.json", "tokenizer_config.json"):
        content = json.loads((causal / name).read_text())
        (causal / name).write_text(json.dumps({key: value for key, value in content.items() if "pad_token" not in key}))
    make_classifier_folder(causal, tmp_path / "classifier", seed=0)
    assert json.loads((tmp_path / "classifier" / "config.json").read_text())["pad_token_id"] == 2
    # A completion that ends with it is judged one token earlier, in training as in judging.
    trainer = RewardModelTrainer.from_folder(tmp_path / "classifier", REWARD, device="cpu")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "classifier")
    row = PairRow([5, 6], [30, 31, 2], [40, 2, 2], [True] * 3, [True] * 3)
    with torch.no_grad():
        chosen, rejected = (float(model(torch.tensor([ids])).logits) for ids in ([5, 6, 30, 31, 2], [5, 6, 40, 2, 2]))
    assert trainer.evaluate([row])[0]["margin"] == pytest.approx(chosen - rejected, abs=1e-5)
    assert trainer.update([row], step=1)["rewards/chosen"] == pytest.approx(chosen, abs=1e-5)
    trainer.close()


def test_what_was_trained_judges_the_same_as_a_reward_model_and_in_transformers(tmp_path: Path) -> None:
    make_classifier_folder(make_tiny_model(tmp_path / "causal"), tmp_path / "base", seed=0)
    trainer = RewardModelTrainer.from_folder(tmp_path / "base", REWARD, device="cpu")
    first = trainer.evaluate([pair()])[0]
    for step in range(1, 9):
        trainer.update([pair()], step=step)
    last = trainer.evaluate([pair()])[0]
    assert last["margin"] > max(first["margin"], 0.5)
    weights = trainer.export_weights("float32")
    trainer.close()
    save_file(weights, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    write_export(tmp_path / "base", tmp_path / "export", dtype="float32")
    judge = RewardModel.from_folder(
        tmp_path / "export", compute_dtype="float32", max_tokens_per_micro_batch=64, device="cpu"
    )
    scores = judge.chat_scores([[*PROMPT, *CHOSEN], [*PROMPT, *REJECTED]])
    assert scores[0] - scores[1] == pytest.approx(last["margin"], abs=1e-5)
    row = pair()
    texts = [[*row.prompt_token_ids, *ids] for ids in (row.chosen_token_ids, row.rejected_token_ids)]
    assert prove_classifier_export(tmp_path / "export", texts, scores, tolerance=1e-4) < 1e-4
    with pytest.raises(EngineError, match="gives other scores: they differ by"):
        prove_classifier_export(tmp_path / "export", texts, [scores[0] + 1.0, scores[1]], tolerance=1e-4)


def test_conversations_of_a_prompt_end_as_reward_models_read_them() -> None:
    tokenizer = tiny_tokenizer()
    prompt, rests = conversations_of_a_prompt(tokenizer, PROMPT, [CHOSEN, REJECTED])
    assert prompt == chat_prompt_ids(tokenizer, PROMPT)
    assert [tokenizer.decode(rest) for rest in rests] == [
        "The answer is 42.<|im_end|>\n",
        "The answer is 17.<|im_end|>\n",
    ]
    with pytest.raises(DataError, match="go on, got"):
        conversations_of_a_prompt(tokenizer, PROMPT, [[], CHOSEN])
