"""Which kernel packed attention takes, what it says about it, and what it hands to flash-attn.

flash-attn itself runs on a GPU only; here a reference with its documented signature stands in for its function.
"""

import logging
import sys
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ratchet.engines import packed_attention
from ratchet.engines.scorer import Scorer
from tests.tiny_models import make_tiny_model

HEADS, KEY_HEADS, WIDTH = 4, 2, 8
LENGTHS = [3, 1, 6]


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """What is said once in a process is said once in a test."""
    installed = sys.modules.pop("flash_attn", None)
    for remembered in (packed_attention._kernel, packed_attention._say):
        remembered.cache_clear()
    yield
    packed_attention._kernel.cache_clear()
    sys.modules.pop("flash_attn", None)
    if installed is not None:
        sys.modules["flash_attn"] = installed


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """flash-attn 2.8's signature: [total, heads, width]; keys from i - left to i + right, up to i where causal."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    borders = cu_seqlens_q.tolist()
    assert max_seqlen_q == max_seqlen_k == max(stop - start for start, stop in pairwise(borders))
    assert dropout_p == 0.0
    pieces = []
    for start, stop in pairwise(borders):
        place = torch.arange(stop - start)
        distance = place[:, None] - place[None, :]
        mask = torch.ones_like(distance, dtype=torch.bool)
        if causal:
            mask &= distance >= 0
        if window_size[0] >= 0:
            mask &= distance <= window_size[0]
        if window_size[1] >= 0:
            mask &= -distance <= window_size[1]
        one, keys, values = (heads[start:stop].transpose(0, 1) for heads in (q, k, v))
        keys, values = (heads.repeat_interleave(q.shape[1] // k.shape[1], dim=0) for heads in (keys, values))
        attended = functional.scaled_dot_product_attention(one, keys, values, attn_mask=mask, scale=softmax_scale)
        pieces.append(attended.transpose(0, 1))
    return torch.cat(pieces)


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("scaling", [None, 0.5])
def test_flash_attn_is_called_so_that_it_computes_what_the_cpu_computes(
    window: int | None, scaling: float | None
) -> None:
    random = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, n, sum(LENGTHS), WIDTH, generator=random) for n in (HEADS, KEY_HEADS, KEY_HEADS)
    )
    arguments = packed_attention.attention_arguments(LENGTHS, torch.device("cpu"))
    expected, _ = packed_attention._packed_attention(
        torch.nn.Module(), query, key, value, None, scaling=scaling, sliding_window=window, **arguments
    )
    kernel = partial(packed_attention._flash_attn, flash_attn_varlen_func)
    flat = (heads[0].transpose(0, 1) for heads in (query, key, value))
    attended = kernel(*flat, arguments["sequences"].borders, max(LENGTHS), scaling, window)
    torch.testing.assert_close(attended, expected[0])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "torch's variable-length kernel instead of flash-attn: it is not installed"),
        ("raise ImportError('undefined symbol')", "it cannot be imported (undefined symbol)"),
        ("def flash_attn_varlen_func(): ...", "attention: flash-attn"),
    ],
)
def test_the_kernel_is_flash_attn_where_it_can_be_imported_and_the_log_says_which_once(
    source: str | None,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if source is not None:
        (tmp_path / "flash_attn.py").write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path))
    elif packed_attention.find_spec("flash_attn") is not None:
        pytest.skip("flash-attn is installed here")
    caplog.set_level(logging.INFO)
    kernels = {packed_attention._kernel() for _ in range(3)}
    assert [message in record.message for record in caplog.records] == [True]
    is_flash = [isinstance(kernel, partial) for kernel in kernels]
    assert is_flash == [source is not None and source.startswith("def")]


def test_scoring_on_a_cpu_says_once_that_attention_runs_without_a_flash_kernel(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    scorer = Scorer.from_folder(
        make_tiny_model(tmp_path), compute_dtype="float32", temperature=1.0, max_tokens_per_micro_batch=8, device="cpu"
    )
    for _ in range(2):
        scorer.log_probs([[5, 6, 7], [8]], [[30, 31, 2], [40, 41]])
    said = [record.message for record in caplog.records if record.message.startswith("attention:")]
    assert said == ["attention: torch's scaled_dot_product_attention, one sequence after another"]
