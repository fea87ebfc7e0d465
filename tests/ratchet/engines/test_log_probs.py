"""Packed log-probs and entropies against Hugging Face's plain logits."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ratchet.engines import log_probs as log_probs_module
from ratchet.engines.log_probs import PackedLogProbs
from ratchet.engines.model import load_causal_lm
from ratchet.engines.packed import PackedTokens, pack, score
from ratchet.errors import DataError, EngineError
from tests.tiny_models import ARCHITECTURES, make_tiny_model

CPU = torch.device("cpu")
# Lengths on both sides of Gemma's sliding window of 32.
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12], list(range(20, 60))]
COMPLETIONS = [[30, 31, 2], [40, 41, 42, 43, 44], [], [50, 51, 52, 0]]


def module_of(folder: Path, *, temperature: float = 1.0) -> PackedLogProbs:
    return PackedLogProbs(load_causal_lm(folder, torch.float32), temperature=temperature)


def plain_logits(folder: Path, prompt: list[int], completion: list[int]) -> Tensor:
    """Logits [tokens, V] of one sequence alone, by the model itself; eager, which knows soft caps."""
    model = load_causal_lm(folder, torch.float32, attn="eager")
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + completion]), use_cache=False).logits[0]
    assert isinstance(logits, Tensor)
    return logits


def explicit_loop(logits: Tensor, prompt: list[int], completion: list[int], temperature: float) -> list[list[float]]:
    """(log-prob, entropy, sum p^2) of each completion token: the logits before it, one token at a time."""
    found = []
    for place, token in enumerate(completion, start=len(prompt)):
        distribution = torch.softmax(logits[place - 1].double() / temperature, dim=-1)
        entropy = -(distribution * distribution.log()).sum().item()
        found.append([distribution[token].log().item(), entropy, distribution.square().sum().item()])
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_rows_score_as_each_row_alone_does_by_plain_logits(architecture: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, architecture=architecture)
    module = module_of(folder, temperature=0.7)
    with torch.no_grad():
        log_probs, entropy, squares = module(
            pack(PROMPTS, COMPLETIONS, None, CPU), with_entropy=True, with_sum_pi_squared=True
        )
    expected = [
        pair
        for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True)
        for pair in explicit_loop(plain_logits(folder, prompt, completion), prompt, completion, 0.7)
    ]
    torch.testing.assert_close(
        torch.stack([log_probs, entropy, squares], dim=1).double(),
        torch.tensor(expected).double(),
        atol=2e-4,
        rtol=1e-5,
    )


def test_a_neighbour_in_the_pack_changes_nothing(tmp_path: Path) -> None:
    module = module_of(make_tiny_model(tmp_path))
    with torch.no_grad():
        alone, *_ = module(pack([[5, 6, 7]], [[30, 31]], None, CPU))
        for neighbour in ([9] * 20, [400, 3, 77]):
            packed, *_ = module(pack([neighbour, [5, 6, 7], neighbour], [[8], [30, 31], [1]], None, CPU))
            torch.testing.assert_close(packed[1:3], alone, atol=1e-5, rtol=0)


def test_an_untied_output_layer_is_used(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, tied=False)
    with torch.no_grad():
        log_probs, *_ = module_of(folder)(pack([[5]], [[6]], None, CPU))
    expected = explicit_loop(plain_logits(folder, [5], [6]), [5], [6], 1.0)[0][0]
    assert log_probs.item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_chunks_change_neither_values_nor_gradients_beyond_rounding(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = module_of(make_tiny_model(tmp_path, architecture=architecture), temperature=1.3)

    def run() -> tuple[Tensor, Tensor, list[Tensor]]:
        module.zero_grad()
        packed = pack(PROMPTS, COMPLETIONS, None, CPU)
        log_probs, entropy, _ = module(packed, with_entropy=True, entropy_needs_grad=True)
        torch.autograd.backward((log_probs * torch.arange(1.0, 13.0)).sum() + 0.3 * entropy.sum())
        return log_probs.detach(), entropy.detach(), [p.grad.clone() for p in module.parameters() if p.grad is not None]

    whole = run()
    monkeypatch.setattr(log_probs_module, "CHUNK_ELEMENTS", 12 * 100)
    chunked = run()
    torch.testing.assert_close(chunked, whole, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("columns", [2, 7])
def test_the_gradient_is_that_of_finite_differences(
    softcap: float | None, scale: float, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_probs_module, "CHUNK_ELEMENTS", 5 * columns)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 3, 6, 3, 1])

    def both(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        options = (scale, softcap, 0.8)
        log_probs, entropy, _ = log_probs_module._chunked_log_probs(hidden, weight, targets, options, True, False)
        return log_probs, entropy

    assert torch.autograd.gradcheck(both, (hidden, weight))
    log_probs, _ = both(hidden, weight)
    logits = hidden @ weight.T * scale
    logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / 0.8
    expected = torch.log_softmax(logits, -1)[torch.arange(5), targets]
    torch.testing.assert_close(log_probs, expected)


def test_logits_of_all_tokens_never_exist_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_probs_module, "CHUNK_ELEMENTS", 4 * 1000)
    hidden = torch.zeros(64, 8, requires_grad=True)
    weight = torch.zeros(1000, 8, requires_grad=True)
    seen: list[int] = []

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                seen.append(result.numel())
            return result

    with Watch():  # type: ignore[no-untyped-call]
        log_probs, entropy, _ = log_probs_module._chunked_log_probs(
            hidden, weight, torch.zeros(64, dtype=torch.long), (1.0, None, 1.0), True, False
        )
        torch.autograd.backward(log_probs.sum() + entropy.sum())
    assert max(seen) <= 8 * 1000


def test_the_mask_chooses_the_tokens_that_are_scored(tmp_path: Path) -> None:
    module = module_of(make_tiny_model(tmp_path))
    with torch.no_grad():
        everything, *_ = module(pack([[5], [6]], [[7, 8, 9], [3, 4]], None, CPU))
        chosen, *_ = module(pack([[5], [6]], [[7, 8, 9], [3, 4]], [[False, True, True], [True, False]], CPU))
    torch.testing.assert_close(chosen, everything[[1, 2, 3]])


def test_nothing_to_score_still_reaches_every_weight(tmp_path: Path) -> None:
    module = module_of(make_tiny_model(tmp_path))
    log_probs, entropy, _ = module(pack([], [], None, CPU), with_entropy=True)
    assert log_probs.shape == entropy.shape == (0,)
    torch.autograd.backward(log_probs.sum())
    gradients = [parameter.grad for parameter in module.parameters()]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)


def test_scores_come_back_in_the_order_of_the_rows_whatever_the_packing(tmp_path: Path) -> None:
    module = module_of(make_tiny_model(tmp_path))

    @torch.no_grad()
    def forward(packed: PackedTokens) -> list[Tensor]:
        return [module(packed).log_probs]

    together = score(forward, PROMPTS, COMPLETIONS, max_tokens=1000, device=CPU)[0]
    apart = score(forward, PROMPTS, COMPLETIONS, max_tokens=1, device=CPU)[0]
    assert [len(row) for row in together] == [3, 5, 0, 4]
    for one, other in zip(together, apart, strict=True):
        assert one == pytest.approx(other, abs=1e-4)


def test_what_cannot_be_scored_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="row 1"):
        pack([[1], []], [[2], [3]], None, CPU)
    with pytest.raises(EngineError, match="temperature"):
        module_of(make_tiny_model(tmp_path), temperature=0.0)
