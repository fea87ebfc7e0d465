"""A number that says which weights somebody holds, however they are laid out.

Engines fuse, pad and split the same weights in their own ways, so the number is a sum over elements. Trap: places do
not enter, so it tells old weights from new ones, not a permuted set from the right one.
"""

from collections.abc import Iterable

import torch

_WORD = (1 << 63) - 1
# Odd, so that multiplying modulo 2**63 loses nothing: the golden ratio's bits, and SplitMix64's second factor.
_FACTORS = (0x1E3779B97F4A7C15, 0x14D049BB133111EB)
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
# Elements at a time; on CPU the work buffers then stay in a core's cache.
_CHUNK = {"cpu": 1 << 16}
_DEVICE_CHUNK = 1 << 24


@torch.no_grad()
def fingerprint(tensors: Iterable[torch.Tensor]) -> int:
    """The sum over all elements of a hash of their bits, modulo 2**63; the same on every device.

    Order, splitting, fusing and added zeros (of bits, so not -0.0) do not change it; another bit in any one element
    does. Elements of 64 bits count as their two halves.
    """
    totals: dict[torch.device, torch.Tensor] = {}
    for tensor in tensors:
        flat = tensor.detach().contiguous().view(-1)
        bits = flat.view(_BITS[flat.element_size()])
        chunk = _CHUNK.get(flat.device.type, _DEVICE_CHUNK)
        total = totals.setdefault(flat.device, torch.zeros((), dtype=torch.int64, device=flat.device))
        for start in range(0, len(bits), chunk):
            total += _mixed(bits[start : start + chunk]).sum()
    return sum(int(total) for total in totals.values()) & _WORD


def _mixed(bits: torch.Tensor) -> torch.Tensor:
    """A hash of 63 bits for every element, one to one, 0 for 0; multiplying wraps modulo 2**64."""
    words = bits.to(torch.int64)
    for factor in _FACTORS:
        words.mul_(factor).bitwise_and_(_WORD)
        words.bitwise_xor_(words >> 32)
    return words
