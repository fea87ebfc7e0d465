"""The critic: its values against Hugging Face's hidden states, its update against a float64 padded model."""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, distributed
from transformers import AutoModelForSequenceClassification

from ratchet.engines.critic import CriticTrainer, ValueScorer, explained_variance
from ratchet.engines.model import load_causal_lm
from ratchet.errors import ConfigError, DataError, EngineError, NumericsError
from tests.ratchet.engines.trainer_cases import CRITIC, make_tiny_classifier, value_rows
from tests.tiny_models import make_tiny_model

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12], list(range(20, 60))]
COMPLETIONS = [[30, 31, 2], [40, 41, 42, 43, 44], [], [50, 51, 52, 0]]
ROWS = value_rows()
MakeTrainer = Callable[..., CriticTrainer]


@pytest.fixture
def make_trainer(tmp_path: Path) -> Iterator[MakeTrainer]:
    """A factory of critics of one tiny classifier, by settings that differ from CRITIC."""
    folder = make_tiny_classifier(tmp_path / "model")
    trainers: list[CriticTrainer] = []

    def make(**changed: Any) -> CriticTrainer:
        trainers.append(CriticTrainer.from_folder(folder, replace(CRITIC, **changed), device="cpu"))
        return trainers[-1]

    yield make
    for trainer in trainers:
        trainer.close()
    assert not distributed.is_initialized()


def scorer_of(folder: Path, dtype: str = "float32") -> ValueScorer:
    return ValueScorer.from_folder(folder, compute_dtype=dtype, max_tokens_per_micro_batch=50, device="cpu")


def with_head(folder: Path, head: dict[str, Tensor], target: Path) -> Path:
    """A copy of a model folder whose weights hold `head` besides."""
    shutil.copytree(folder, target)
    path = target / "model.safetensors"
    save_file({**load_file(path), **head}, path, metadata={"format": "pt"})
    return target


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], atol=tolerance, rtol=0, msg=name)


@pytest.mark.parametrize("tied", [True, False])
def test_a_policy_becomes_a_critic_that_expects_nothing(tied: bool, tmp_path: Path) -> None:
    scorer = scorer_of(make_tiny_model(tmp_path, tied=tied))
    assert scorer.values(PROMPTS, COMPLETIONS) == [[0.0] * len(completion) for completion in COMPLETIONS]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3_text"])
def test_a_value_is_the_head_on_the_hidden_state_that_predicts_the_token(architecture: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", architecture=architecture)
    weight = torch.linspace(-1.0, 1.0, 64)[None]
    critic = with_head(folder, {"v_head.summary.weight": weight, "v_head.summary.bias": torch.ones(1)}, tmp_path / "c")
    values = scorer_of(critic).values(PROMPTS, COMPLETIONS)
    model = load_causal_lm(folder, "float32")
    for prompt, completion, found in zip(PROMPTS, COMPLETIONS, values, strict=True):
        with torch.no_grad():
            outputs = model(input_ids=torch.tensor([prompt + completion]), output_hidden_states=True, use_cache=False)
        hidden = outputs.hidden_states[-1][0, len(prompt) - 1 : len(prompt) - 1 + len(completion)]
        assert found == pytest.approx((hidden @ weight[0] + 1.0).tolist(), abs=1e-4)


@pytest.mark.parametrize("name", ["score", "classifier", "v_head.summary", "value_head"])
def test_a_head_is_found_by_its_name(name: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    head = torch.linspace(-1.0, 1.0, 64)[None]
    found, same = (
        scorer_of(with_head(folder, {f"{of}.weight": head}, tmp_path / f"as-{of}")).values([[5]], [[6, 7]])
        for of in (name, "score" if name != "score" else "classifier")
    )
    assert found == same
    assert found[0][0] != 0.0


def test_heads_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"one label.*\(2, 64\)"):
        scorer_of(make_tiny_classifier(tmp_path / "two", num_labels=2))
    heads = {"score.weight": torch.zeros(1, 64), "value_head.weight": torch.zeros(1, 64)}
    with pytest.raises(EngineError, match="several heads: score, value_head"):
        scorer_of(with_head(make_tiny_model(tmp_path / "model"), heads, tmp_path / "both"))


def test_a_backbone_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EngineError, match=r"lacks weights.*norm\.weight"):
        scorer_of(folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_are_bit_for_bit_those_of_the_trainer(dtype: str, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer(compute_dtype=dtype, max_tokens_per_micro_batch=50)
    values = scorer_of(tmp_path / "model", dtype).values(PROMPTS, COMPLETIONS)
    assert values == trainer.values(PROMPTS, COMPLETIONS)
    assert [len(row) for row in values] == [3, 5, 0, 4]


def padded_update(folder: Path) -> tuple[dict[str, Tensor], float]:
    """Gradients in float64 of the token mean of the clipped loss, from padded rows, and the loss."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64)
    width = max(len(row.completion_token_ids) for row in ROWS)
    losses = []
    for row in ROWS:
        length = len(row.completion_token_ids)
        ids = torch.tensor([[*row.prompt_token_ids, *row.completion_token_ids, *[3] * (width - length)]])
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[0]
        values = model.score(hidden)[len(row.prompt_token_ids) - 1 :, 0]
        for place in range(length):
            if row.loss_mask[place]:
                clipped = values[place].clamp(row.values[place] - 0.5, row.values[place] + 0.5)
                errors = (values[place] - row.returns[place]) ** 2, (clipped - row.returns[place]) ** 2
                losses.append(0.5 * torch.maximum(*errors))
    loss = torch.stack(losses).mean()
    torch.autograd.backward(loss)
    return {name: parameter.grad for name, parameter in model.named_parameters()}, loss.item()


def test_an_update_follows_the_gradient_of_a_padded_float64_model(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    # AdamW's first step is lr * g / (|g| + eps): with a huge epsilon, and a rate as large, it is the gradient.
    trainer = make_trainer(lr=1e4, adam_eps=1e4, weight_decay=0.0, grad_clip=None, max_tokens_per_micro_batch=20)
    before = trainer.export_weights("float32")
    gradients, loss = padded_update(tmp_path / "model")
    metrics = trainer.update(ROWS, step=1)
    norm = math.sqrt(sum(gradient.square().sum().item() for gradient in gradients.values()))
    assert metrics["critic/vf_loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["critic/grad_norm"] == pytest.approx(norm, rel=1e-4)
    after = trainer.export_weights("float32")
    assert after.keys() == gradients.keys()
    for name, gradient in gradients.items():
        moved = before[name].double() - after[name].double()
        torch.testing.assert_close(moved, gradient, atol=1e-4 * norm, rtol=2e-3, msg=name)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_micro_batches_and_the_order_of_rows_change_rounding_only(mode: str, make_trainer: MakeTrainer) -> None:
    whole = make_trainer(loss_agg_mode=mode, max_tokens_per_micro_batch=4000)
    metrics, weights = whole.update(ROWS, step=1), whole.export_weights("float32")
    shuffled = [ROWS[place] for place in (4, 8, 2, 0, 7, 6, 1, 3, 5)]
    for rows, split in (
        (ROWS, {"max_tokens_per_micro_batch": 40}),
        (ROWS, {"micro_batch_size": 1}),
        (shuffled, {"max_tokens_per_micro_batch": 4000}),
    ):
        other = make_trainer(loss_agg_mode=mode, **split)
        assert other.update(rows, step=1) == pytest.approx(metrics, abs=1e-5, rel=1e-4)
        assert_close(other.export_weights("float32"), weights, 2e-5)


def test_metrics_have_verls_names_and_are_those_of_the_rows(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer()
    found = trainer.values([row.prompt_token_ids for row in ROWS], [row.completion_token_ids for row in ROWS])
    triples = [
        triple
        for row, values in zip(ROWS, found, strict=True)
        for *triple, is_used in zip(values, row.values, row.returns, row.loss_mask, strict=True)
        if is_used
    ]
    metrics = trainer.update(ROWS, step=1)
    names = "vf_loss vf_clipfrac vpred_mean grad_norm lr vf_explained_var skipped_mini_batches"
    assert metrics.keys() == {f"critic/{name}" for name in names.split()}
    values, old, returns = torch.tensor(triples, dtype=torch.float64).T
    assert metrics["critic/vpred_mean"] == pytest.approx(values.mean().item(), abs=1e-5)
    held = torch.minimum(torch.maximum(values, old - 0.5), old + 0.5)
    is_clipped = (held - returns).square() > (values - returns).square()
    assert metrics["critic/vf_clipfrac"] == pytest.approx(is_clipped.double().mean().item(), abs=1e-6)
    assert metrics["critic/vf_explained_var"] == pytest.approx(explained_variance(old, returns), abs=1e-5)


def test_explained_variance_by_hand() -> None:
    returns = torch.tensor([0.0, 2.0, 4.0], dtype=torch.float64)  # variance 4
    assert explained_variance(returns, returns) == pytest.approx(1.0)
    assert explained_variance(torch.ones(3), returns) == pytest.approx(0.0, abs=1e-5)
    # Errors 0, 1, 2 have variance 1: three quarters are explained.
    assert explained_variance(returns - torch.tensor([0.0, 1.0, 2.0]), returns) == pytest.approx(0.75, abs=1e-5)
    assert explained_variance(torch.zeros(2), torch.ones(2)) == 1.0


def test_a_critic_learns_its_returns(tmp_path: Path) -> None:
    trainer = CriticTrainer.from_folder(
        make_tiny_model(tmp_path), replace(CRITIC, lr=1e-2, ppo_epochs=2, mini_batch_size=5), device="cpu"
    )
    losses = []
    for step in range(1, 13):
        prompts, completions = (
            [getattr(row, f"{part}_token_ids") for row in ROWS] for part in ("prompt", "completion")
        )
        rows = [
            replace(row, values=values) for row, values in zip(ROWS, trainer.values(prompts, completions), strict=True)
        ]
        losses.append(trainer.update(rows, step=step)["critic/vf_loss"])
    assert trainer.policy_version == 12
    assert losses[-1] < 0.2 * losses[0]
    trainer.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_critic_is_equal_bit_for_bit_to_one_that_never_stopped(
    dtype: str, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    changed = {"compute_dtype": dtype, "mini_batch_size": 4, "shuffle": True, "ppo_epochs": 2, "warmup_steps": 3}
    through = make_trainer(**changed)
    for step in (1, 2):
        through.update(ROWS, step=step)
    through.save_state(tmp_path / "state")
    expected = [through.update(ROWS, step=step) for step in (3, 4)]
    resumed = make_trainer(**changed)
    resumed.load_state(tmp_path / "state")
    assert resumed.policy_version == 2
    assert [resumed.update(ROWS, step=step) for step in (3, 4)] == expected
    weights = through.export_weights("float32")
    assert all(torch.equal(tensor, weights[name]) for name, tensor in resumed.export_weights("float32").items())


@pytest.mark.parametrize(
    ("architecture", "tied"), [("llama", True), ("llama", False), ("qwen3", True), ("phi3", False), ("gemma2", True)]
)
def test_an_exported_critic_is_read_back_beside_the_files_of_its_base(
    architecture: str, tied: bool, tmp_path: Path
) -> None:
    base = make_tiny_model(tmp_path / "base", architecture=architecture, tied=tied)
    trainer = CriticTrainer.from_folder(base, CRITIC, device="cpu")
    trainer.update(ROWS, step=1)
    exported = tmp_path / "critic"
    shutil.copytree(base, exported, ignore=shutil.ignore_patterns("*.safetensors"))
    weights = trainer.export_weights("float32")
    assert "score.weight" in weights
    assert not any(name.startswith("lm_head") for name in weights)
    save_file(weights, exported / "model.safetensors", metadata={"format": "pt"})
    values = scorer_of(exported).values(PROMPTS, COMPLETIONS)
    assert any(value != 0.0 for row in values for value in row)
    again = CriticTrainer.from_folder(exported, CRITIC, device="cpu")
    assert all(torch.equal(tensor, weights[name]) for name, tensor in again.export_weights("float32").items())
    scorer = scorer_of(base)
    scorer.load_weights(weights)
    assert scorer.values(PROMPTS, COMPLETIONS) == values
    # It is a classifier for transformers, too, once its configuration says how many labels there are.
    config = json.loads((exported / "config.json").read_text())
    (exported / "config.json").write_text(json.dumps({**config, "num_labels": 1, "id2label": {"0": "value"}}))
    classifier = AutoModelForSequenceClassification.from_pretrained(exported)
    assert torch.equal(classifier.score.weight, weights["score.weight"])
    trainer.close()
    again.close()


def test_gradient_checkpointing_changes_nothing(make_trainer: MakeTrainer) -> None:
    plain, checkpointed = (make_trainer(gradient_checkpointing=is_on) for is_on in (False, True))
    assert plain.update(ROWS, step=1) == checkpointed.update(ROWS, step=1)


def test_rows_that_do_not_fit_are_refused_and_move_nothing(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    with pytest.raises(DataError, match="row 1 has 2 returns for 1"):
        trainer.update([ROWS[0], replace(ROWS[1], returns=[1.0, 2.0])], step=1)
    with pytest.raises(NumericsError, match="row 0 has values"):
        trainer.update([replace(ROWS[0], values=[float("nan"), 0.0, 0.0])], step=1)
    with pytest.raises(EngineError, match="expected step 1"):
        trainer.update(ROWS, step=2)
    masked = [replace(row, loss_mask=[False] * len(row.loss_mask)) for row in ROWS]
    assert trainer.update(masked, step=1) == {"critic/lr": 1e-3, "critic/skipped_mini_batches": 1.0}
    with pytest.raises(ConfigError, match="cliprange_value"):
        replace(CRITIC, cliprange_value=0.0)
