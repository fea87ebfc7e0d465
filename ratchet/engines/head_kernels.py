"""What the output layer does with a block of logits on a GPU: one read forward, one read and one write backward.

Trap: the gradient takes the place of the logits it was computed from. Triton is imported here and nowhere else, since
hosts without a GPU have none; it compiles for how arguments are aligned, which for what a row reads once gains nothing.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of logits; all is computed in float32."""
_MAX_TILE = 4096


def read_block(
    logits: Tensor,
    targets: Tensor,
    start: int,
    factor: float,
    sums: tuple[Tensor, Tensor, Tensor, Tensor],
    chosen: Tensor,
) -> None:
    """Fill `sums`, four of float32 [N], and those of `chosen` [N] whose target is in the block.

    With z = factor * logits [N, v] the sums are the largest z and, relative to it, those of e^z, e^z z and e^2z. The
    block's first column is `start` of the vocabulary.
    """
    rows, width = logits.shape
    tile = _tile(width)
    _read_kernel[(rows,)](logits, targets, *sums, chosen, start, width, factor, TILE=tile, num_warps=_num_warps(tile))


def write_gradient(
    logits: Tensor,
    targets: Tensor,
    start: int,
    factor: float,
    normaliser: Tensor,
    entropy: Tensor,
    by_log_prob: Tensor,
    by_entropy: Tensor | None,
) -> None:
    """Put the loss's gradient by the plain products in the place of these, `logits` [N, v]; the others are [N].

    `normaliser` is the log-sum-exp over the vocabulary; `by_log_prob` and `by_entropy` are the gradients of log-probs
    and entropies.
    """
    rows, width = logits.shape
    tile = _tile(width)
    _gradient_kernel[(rows, triton.cdiv(width, tile))](
        logits,
        targets,
        normaliser,
        entropy,
        by_log_prob.contiguous(),
        by_log_prob if by_entropy is None else by_entropy.contiguous(),
        start,
        width,
        factor,
        HAS_ENTROPY=by_entropy is not None,
        TILE=tile,
        num_warps=_num_warps(tile),
    )


def _tile(width: int) -> int:
    tile: int = min(triton.next_power_of_2(width), _MAX_TILE)
    return tile


def _num_warps(tile: int) -> int:
    return 4 if tile <= 2048 else 8


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["start"],
    do_not_specialize_on_alignment=["targets", "largest", "total", "dot", "square", "chosen"],
)
def _read_kernel(  # type: ignore[no-untyped-def]
    logits,
    targets,
    largest,
    total,
    dot,
    square,
    chosen,
    start,
    width,
    factor,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    # A finite start: infinities would meet a 0 below.
    most = -1e38
    sum_1 = 0.0
    sum_z = 0.0
    sum_2 = 0.0
    for first in range(0, width, TILE):
        columns = first + tl.arange(0, TILE)
        is_inside = columns < width
        z = tl.load(logits + columns, mask=is_inside, other=0.0).to(tl.float32) * factor
        new = tl.maximum(most, tl.max(tl.where(is_inside, z, -1e38), 0))
        shift = most - new
        scale = tl.exp(shift)
        z = z - new
        power = tl.where(is_inside, tl.exp(z), 0.0)
        sum_z = scale * (sum_z + shift * sum_1) + tl.sum(power * z, 0)
        sum_1 = scale * sum_1 + tl.sum(power, 0)
        sum_2 = scale * scale * sum_2 + tl.sum(power * power, 0)
        most = new
    tl.store(largest + row, most)
    tl.store(total + row, sum_1)
    tl.store(dot + row, sum_z)
    tl.store(square + row, sum_2)
    place = tl.load(targets + row) - start
    is_here = (place >= 0) & (place < width)
    value = tl.load(logits + place, mask=is_here, other=0.0).to(tl.float32) * factor
    tl.store(chosen + row, value, mask=is_here)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["start"],
    do_not_specialize_on_alignment=["targets", "normaliser", "entropy", "by_log_prob", "by_entropy"],
)
def _gradient_kernel(  # type: ignore[no-untyped-def]
    logits,
    targets,
    normaliser,
    entropy,
    by_log_prob,
    by_entropy,
    start,
    width,
    factor,
    HAS_ENTROPY: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_inside = columns < width
    logits += row * width + columns
    log_p = tl.load(logits, mask=is_inside, other=0.0).to(tl.float32) * factor - tl.load(normaliser + row)
    p = tl.exp(log_p)
    slope = tl.load(by_log_prob + row)
    gradient = -slope * p
    if HAS_ENTROPY:
        gradient -= tl.load(by_entropy + row) * p * (log_p + tl.load(entropy + row))
    place = tl.load(targets + row) - start
    gradient += tl.where(columns == place, slope, 0.0)
    tl.store(logits, gradient * factor, mask=is_inside)
