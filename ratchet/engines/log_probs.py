"""Log-probs and entropies of sampled tokens from a causal language model, over packed sequences.

Trap: the logits of all tokens, [T, V], never exist at once, in neither direction: they are computed one block of the
vocabulary after another, and again in the backward pass. A block of the output layer's gradient is then one product
over all tokens, so that nothing of the layer's size is ever summed up. On a GPU a block is read once in each direction
(head_kernels), elsewhere a dozen operations of torch pass over it.
"""

from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from ratchet.engines.packed import PackedModel, PackedTokens
from ratchet.errors import EngineError

NUM_BLOCKS = 64
"""Blocks of the vocabulary: the five that are needed at once are 8% of all logits.

Blocks are part of the arithmetic: they must not depend on the machine.
"""
LARGE_ELEMENTS = 2**28
NUM_LARGE_BLOCKS = 32
"""Blocks where all logits would be 1 GiB or more: narrow products leave a GPU idle, and three are needed at once."""
MIN_BLOCK_ELEMENTS = 2**20
"""Smaller blocks than 4 MiB in float32 save nothing and cost calls."""
CHUNK_ELEMENTS = 2**25
"""Most logits of a block, 128 MiB in float32."""
KERNEL_ELEMENTS = 2**27
"""Logits of a block that the kernels read: 256 MiB in bfloat16, beside which there is no other of the size."""


_Options = tuple[float, float | None, float]
"""What makes logits of the output layer's products: factor, soft cap, temperature."""


class TokenScores(NamedTuple):
    """What a forward says of N scored tokens, each float32 [N]; None where it was not asked."""

    log_probs: Tensor
    """Nats, at the temperature."""
    entropy: Tensor | None
    """Of the distribution before each token, nats."""
    sum_pi_squared: Tensor | None
    """Sum over the vocabulary of the squared probabilities before each token; without gradient."""


class PackedLogProbs(PackedModel):
    """A causal language model that answers with log-probs instead of logits."""

    def __init__(self, model: PreTrainedModel, *, temperature: float) -> None:
        super().__init__(model)
        _check_temperature(temperature)
        head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        if not isinstance(head, nn.Linear) or getattr(head, "bias", None) is not None:
            raise EngineError(f"expected an output layer without bias, got {head} in {type(model).__name__}")
        self.temperature = temperature
        self.scale, self.softcap = _logit_options(model.config)

    def forward(
        self,
        packed: PackedTokens,
        *,
        with_entropy: bool = False,
        entropy_needs_grad: bool = False,
        with_sum_pi_squared: bool = False,
        temperature: float | None = None,
    ) -> TokenScores:
        """Log-probs [N] of the scored tokens, at the model's temperature or another, and what else is asked for."""
        if temperature is None:
            temperature = self.temperature
        _check_temperature(temperature)
        hidden = self.hidden(packed)
        weight = self.model.get_output_embeddings().weight
        log_probs, entropy, squares = _chunked_log_probs(
            hidden,
            weight,
            packed.targets,
            (self.scale, self.softcap, temperature),
            with_entropy,
            with_sum_pi_squared,
        )
        if not entropy_needs_grad:
            entropy = entropy.detach()
        return TokenScores(log_probs, entropy if with_entropy else None, squares if with_sum_pi_squared else None)


class _ChunkedLogProbs(torch.autograd.Function):
    """hidden [N, H], weight [V, H], targets [N] to log-probs, entropy, sum of squares, [N] each, float32 or wider.

    The gradient of a log-prob by the logits z is onehot - p, that of the entropy S is -p * (log p + S). Logits are
    recomputed block by block in the backward pass; only their log-sum-exp is kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        options: _Options,
        with_entropy: bool,
        with_squares: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        kernels = _kernels(hidden, options)
        blocks = list(vocabulary_blocks(len(targets), weight.shape[0], has_kernels=kernels is not None))
        # Of each block: the largest logit; relative to it the sums of e^z, e^z z and e^2z; the target's logit.
        largest, total, dot, square = (hidden.new_zeros(len(blocks), len(targets), dtype=dtype) for _ in range(4))
        chosen = hidden.new_zeros(len(targets), dtype=dtype)
        for index, block in enumerate(blocks):
            if kernels is not None:
                products = functional.linear(hidden, weight[block])
                into = (largest[index], total[index], dot[index], square[index])
                kernels.read_block(products, targets, block.start, _factor(options), into, chosen)
                continue
            logits, _ = _logits(hidden, weight[block], *options)
            place, is_inside = _places(targets, block)
            chosen = torch.where(is_inside, logits.gather(1, place)[:, 0], chosen)
            torch.amax(logits, -1, out=largest[index])
            logits.sub_(largest[index, :, None])
            powers = torch.exp(logits)
            torch.sum(powers, -1, out=total[index])
            if with_squares:
                square[index] = torch.linalg.vector_norm(powers, dim=-1).square_()
            if with_entropy:
                torch.sum(powers.mul_(logits), -1, out=dot[index])
        top = largest.amax(0)
        shift = largest - top
        factor = shift.exp()
        sums = (factor * total).sum(0)
        normaliser = top + sums.log()
        entropy, squares = torch.zeros_like(top), torch.zeros_like(top)
        if with_entropy:
            entropy = sums.log() - (factor * (dot + total * shift)).sum(0) / sums
        if with_squares:
            squares = (factor.square() * square).sum(0) / sums.square()
        ctx.save_for_backward(hidden, weight, targets, normaliser, entropy)
        ctx.options = options
        ctx.mark_non_differentiable(squares)
        ctx.set_materialize_grads(False)
        return chosen - normaliser, entropy, squares

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normaliser, entropy = ctx.saved_tensors
        by_log_prob, by_entropy, _ = gradients
        if by_log_prob is None:
            by_log_prob = torch.zeros_like(normaliser)
        # Summed in float32: many small bfloat16 additions would lose the last ones.
        d_hidden = torch.zeros_like(hidden, dtype=torch.promote_types(hidden.dtype, torch.float32))
        # Beside adapters the layer is frozen.
        d_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        kernels = _kernels(hidden, ctx.options)
        for block in vocabulary_blocks(len(targets), weight.shape[0], has_kernels=kernels is not None):
            part = weight[block]
            if kernels is not None:
                d_logits = functional.linear(hidden, part)
                given = (normaliser, entropy, by_log_prob, by_entropy)
                kernels.write_gradient(d_logits, targets, block.start, _factor(ctx.options), *given)
            else:
                d_logits = _block_gradient(
                    hidden, part, targets, block, ctx.options, normaliser, entropy, by_log_prob, by_entropy
                )
            if d_hidden.dtype == d_logits.dtype:
                d_hidden.addmm_(d_logits, part)
            else:
                d_hidden += d_logits @ part
            if d_weight is not None:
                torch.mm(d_logits.T, hidden, out=d_weight[block])
        return d_hidden.to(hidden.dtype), d_weight, None, None, None, None


def _chunked_log_probs(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    log_probs, entropy, squares = _ChunkedLogProbs.apply(*arguments)  # type: ignore[no-untyped-call]
    return log_probs, entropy, squares


def _block_gradient(
    hidden: Tensor,
    part: Tensor,
    targets: Tensor,
    block: slice,
    options: _Options,
    normaliser: Tensor,
    entropy: Tensor,
    by_log_prob: Tensor,
    by_entropy: Tensor | None,
) -> Tensor:
    """The loss's gradient by the plain products of a block, [N, v], in their dtype."""
    logits, slope = _logits(hidden, part, *options)
    log_p = logits.sub_(normaliser[:, None])
    if by_entropy is None:
        d_logits = log_p.exp_().mul_(-by_log_prob[:, None])
    else:
        d_logits = torch.exp(log_p)
        log_p.add_(entropy[:, None]).mul_(-by_entropy[:, None]).sub_(by_log_prob[:, None])
        d_logits.mul_(log_p)
    place, is_inside = _places(targets, block)
    d_logits.scatter_add_(1, place, torch.where(is_inside, by_log_prob, 0.0).to(d_logits.dtype)[:, None])
    if isinstance(slope, Tensor) or slope != 1.0:
        d_logits.mul_(slope)
    return d_logits.to(hidden.dtype)


def _kernels(hidden: Tensor, options: _Options) -> ModuleType | None:
    """The kernels, where they can do it: on a GPU, without a soft cap."""
    kernels = _head_kernels() if hidden.is_cuda and options[1] is None and len(hidden) else None
    return kernels if kernels is not None and hidden.dtype in kernels.DTYPES else None


@cache
def _head_kernels() -> ModuleType | None:
    if find_spec("triton") is None:
        return None
    from ratchet.engines import head_kernels

    return head_kernels


def _factor(options: _Options) -> float:
    """What plain products are multiplied by where nothing bends them."""
    scale, _, temperature = options
    return scale / temperature


def _check_temperature(temperature: float) -> None:
    if temperature <= 0:
        raise EngineError(f"expected a temperature above 0, got {temperature}")


def _logits(
    hidden: Tensor, weight: Tensor, scale: float, softcap: float | None, temperature: float
) -> tuple[Tensor, Tensor | float]:
    """Logits [N, v] in float32 or wider, and their derivative by the output layer's plain products."""
    logits = functional.linear(hidden, weight).to(torch.promote_types(hidden.dtype, torch.float32))
    if scale != 1.0:
        logits.mul_(scale)
    slope: Tensor | float = scale / temperature
    if softcap is not None:
        bent = logits.div_(softcap).tanh_()
        slope = (1.0 - bent.square()) * slope
        logits = bent.mul_(softcap)
    if temperature != 1.0:
        logits.div_(temperature)
    return logits, slope


def vocabulary_blocks(num_rows: int, num_logits: int, *, has_kernels: bool = False) -> Iterator[slice]:
    """Slices of the vocabulary, such that no block holds more than its share of the logits."""
    num_blocks = NUM_BLOCKS if num_rows * num_logits < LARGE_ELEMENTS else NUM_LARGE_BLOCKS
    share = max(-(-num_rows * num_logits // num_blocks), MIN_BLOCK_ELEMENTS)
    size = max(1, (KERNEL_ELEMENTS if has_kernels else min(share, CHUNK_ELEMENTS)) // max(num_rows, 1))
    # Products are faster with sides of a round number.
    size = size // 64 * 64 or size
    return (slice(start, min(start + size, num_logits)) for start in range(0, num_logits, size))


def _places(targets: Tensor, block: slice) -> tuple[Tensor, Tensor]:
    """Column [N, 1] of each target in a block, or any column, and whether it is inside [N]."""
    place = targets - block.start
    width = block.stop - block.start
    return place.clamp(0, width - 1)[:, None], (place >= 0) & (place < width)


def _logit_options(config: Any) -> tuple[float, float | None]:
    """Factor on the logits and their soft cap, as the model families name them."""
    scale = 1.0
    if getattr(config, "logit_scale", None) is not None:  # Cohere
        scale = float(config.logit_scale)
    elif getattr(config, "logits_scaling", None) is not None:  # Granite
        scale = 1.0 / float(config.logits_scaling)
    softcap = getattr(config, "final_logit_softcapping", None)
    return scale, None if softcap is None else float(softcap)
