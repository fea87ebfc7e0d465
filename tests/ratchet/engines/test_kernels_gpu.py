"""Fused kernels on a GPU: the output layer's, Liger's, and compiled layers, each beside torch's own operations."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from ratchet.engines import liger
from ratchet.engines import log_probs as log_probs_module
from ratchet.engines.critic import CriticTrainer
from ratchet.engines.log_probs import PackedLogProbs
from ratchet.engines.model import load_causal_lm
from ratchet.engines.packed import pack
from ratchet.engines.trainer import Trainer, TrainerSettings, TrainRow
from tests.ratchet.engines.trainer_cases import CRITIC, make_tiny_classifier, value_rows
from tests.tiny_models import make_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

Dtype = Literal["float32", "bfloat16"]
TOLERANCES = [("float32", 1e-5), ("bfloat16", 2e-2)]
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12], list(range(20, 90))]
COMPLETIONS = [[30, 31, 2], [40, 41, 42, 43, 44], [50], [50, 51, 52, 0]]
ROWS = [
    TrainRow(
        prompt_token_ids=np.array(prompt),
        completion_token_ids=np.array(completion),
        advantages=np.full(len(completion), 1.0 - row),
        behaviour_log_probs=None,
        loss_mask=np.ones(len(completion), np.bool_),
        sampler_log_probs=np.full(len(completion), -6.0) if row == 1 else None,
    )
    for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True))
]
SETTINGS = TrainerSettings(lr=1e-3, adam_eps=1e-3, mini_batch_size=4, use_liger=False)


def assert_near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """The norm of the difference is at most `tolerance` of the expected one's."""
    assert (found.double() - expected.double()).norm() <= tolerance * expected.double().norm()


def head(dtype: str, options: tuple[float, None, float], *, needs_entropy: bool) -> list[Tensor]:
    """Log-probs, entropies, sums of squares, and the gradients of hidden states and output layer."""
    generator = torch.Generator().manual_seed(0)
    own = getattr(torch, dtype)
    hidden, weight = (
        torch.randn(*shape, generator=generator).to("cuda", own).requires_grad_() for shape in ((37, 32), (5003, 32))
    )
    targets = torch.randint(5003, (37,), generator=generator).cuda()
    log_probs, entropy, squares = log_probs_module._chunked_log_probs(hidden, weight, targets, options, True, True)
    loss = (log_probs * torch.linspace(-1.0, 2.0, 37, device="cuda")).sum()
    if needs_entropy:
        loss = loss + 0.3 * entropy.sum()
    torch.autograd.backward(loss)
    assert hidden.grad is not None
    assert weight.grad is not None
    return [log_probs.detach(), entropy.detach(), squares, hidden.grad, weight.grad]


@pytest.mark.parametrize("num_elements", [37 * 64, 37 * 1000, 2**27])
@pytest.mark.parametrize("options", [(1.0, None, 1.0), (0.5, None, 0.7)])
@pytest.mark.parametrize("needs_entropy", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_the_kernels_of_the_output_layer_do_what_torch_does(
    dtype: str,
    tolerance: float,
    needs_entropy: bool,
    options: tuple[float, None, float],
    num_elements: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    assert log_probs_module._head_kernels() is not None
    monkeypatch.setattr(log_probs_module, "KERNEL_ELEMENTS", num_elements)
    found = head(dtype, options, needs_entropy=needs_entropy)
    monkeypatch.setattr(log_probs_module, "_head_kernels", lambda: None)
    for ours, theirs in zip(found, head(dtype, options, needs_entropy=needs_entropy), strict=True):
        assert_near(ours, theirs, tolerance)


def scores_and_gradients(folder: Path, dtype: str, *, use_liger: bool) -> list[Tensor]:
    model = load_causal_lm(folder, getattr(torch, dtype), device="cuda")
    if use_liger:
        liger.use_liger(model)
        assert any("forward" in vars(module) for module in model.modules())
    module: Any = PackedLogProbs(model, temperature=1.0)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    module.train()
    log_probs, entropy, _ = module(
        pack(PROMPTS, COMPLETIONS, None, torch.device("cuda")), with_entropy=True, entropy_needs_grad=True
    )
    torch.autograd.backward(log_probs.mean() + entropy.mean())
    return [log_probs.detach(), torch.cat([parameter.grad.flatten() for parameter in module.parameters()])]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.15)])
def test_ligers_layers_do_what_torch_does(architecture: str, dtype: str, tolerance: float, tmp_path: Path) -> None:
    pytest.importorskip("liger_kernel")
    folder = make_tiny_model(tmp_path, architecture=architecture)
    expected = scores_and_gradients(folder, dtype, use_liger=False)
    for ours, theirs in zip(scores_and_gradients(folder, dtype, use_liger=True), expected, strict=True):
        assert_near(ours, theirs, tolerance)


@pytest.mark.filterwarnings("ignore::UserWarning")  # the compiler's
# torch's compiler imports a module of torch that is deprecated.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    "changed",
    [
        {"use_liger": True},
        {"use_liger": True, "gradient_checkpointing": True, "micro_batch_size": 1},
        {"use_liger": True, "lora_rank": 4},
        {"use_torch_compile": True},
    ],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.1)])
def test_an_update_is_the_same_by_any_kernel(
    dtype: Dtype, tolerance: float, changed: dict[str, Any], tmp_path: Path
) -> None:
    if "use_liger" in changed:
        pytest.importorskip("liger_kernel")
    if "lora_rank" in changed:
        pytest.importorskip("peft")
    folder = make_tiny_model(tmp_path / "model")
    plain = replace(SETTINGS, compute_dtype=dtype, lora_rank=changed.get("lora_rank", 0))
    metrics, weights = [], []
    for settings in (replace(plain, **changed), plain):
        trainer = Trainer.from_folder(folder, settings, device="cuda")
        metrics.append(trainer.update(ROWS, step=1))
        weights.append(trainer.export_weights("float32"))
        trainer.close()
    assert "training/rollout_probs_diff_mean" in metrics[0]
    assert metrics[0] == pytest.approx(metrics[1], rel=tolerance, abs=tolerance)
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], atol=tolerance * 1e-2, rtol=0, msg=name)


def test_a_critic_by_ligers_layers_is_the_critic(tmp_path: Path) -> None:
    pytest.importorskip("liger_kernel")
    folder = make_tiny_classifier(tmp_path / "model")
    metrics = []
    for use_liger in (True, False):
        trainer = CriticTrainer.from_folder(folder, replace(CRITIC, use_liger=use_liger), device="cuda")
        metrics.append(trainer.update(value_rows(), step=1))
        trainer.close()
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-3, abs=1e-3)
