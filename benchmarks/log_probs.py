"""Log-probs and entropies from hidden states, forward and backward: in blocks, beside all logits at once.

    python -m benchmarks.log_probs --rounds 5
    python -m benchmarks.log_probs --device cuda --tokens 16384

The target is a peak below a tenth of the naive way's, in at most 1.3 times its time. Trap: memory is the high-water
mark of a process, so each way is measured in one of its own; and since both must return the gradients of hidden states
and output layer, these are shown apart. Times take turns within one process, and are compared within a round.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from ratchet.engines.log_probs import _chunked_log_probs

MEGABYTE = 1024 * 1024
Way = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def naive(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies by way of all logits [N, V]."""
    log_p = torch.log_softmax(functional.linear(hidden, weight).float(), -1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The same as the engines do it."""
    log_probs, entropy, _ = _chunked_log_probs(hidden, weight, targets, (1.0, None, 1.0), True, False)
    return log_probs, entropy


WAYS: dict[str, Way] = {"naive": naive, "chunked": chunked}


def inputs(arguments: argparse.Namespace, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random hidden states, output layer and targets."""
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, arguments.dtype)

    def place(tensor: Tensor) -> Tensor:
        return tensor.to(arguments.device, dtype).requires_grad_()

    hidden = place(torch.randn(num_tokens, arguments.hidden, generator=generator))
    weight = place(torch.randn(arguments.vocabulary, arguments.hidden, generator=generator) * 0.05)
    return hidden, weight, torch.randint(arguments.vocabulary, (num_tokens,), generator=generator).to(arguments.device)


def run(way: Way, hidden: Tensor, weight: Tensor, targets: Tensor) -> float:
    """Return the seconds of forward and backward; the gradients stay in `hidden` and `weight`."""
    hidden.grad = weight.grad = None
    _synchronize(hidden)
    started = time.perf_counter()
    log_probs, entropy = way(hidden, weight, targets)
    torch.autograd.backward(log_probs.mean() - 0.01 * entropy.mean())
    _synchronize(hidden)
    return time.perf_counter() - started


def peak(arguments: argparse.Namespace) -> dict[str, float]:
    """Bytes that one way adds to what is there before, at its peak, and those of the gradients among them."""
    way = WAYS[arguments.peak_of]
    run(way, *inputs(arguments, 8))  # libraries load themselves and their workspaces on first use
    tensors = inputs(arguments, arguments.tokens)
    if arguments.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(way, *tensors)
        used = torch.cuda.max_memory_allocated() - before
    else:
        Path("/proc/self/clear_refs").write_text("5")  # forget the high-water mark of the warm-up
        before = _status("VmRSS")
        run(way, *tensors)
        used = _status("VmHWM") - before
    gradients = sum(tensor.numel() * tensor.element_size() for tensor in tensors[:2])
    return {"used": used, "gradients": gradients}


def measured_apart(name: str) -> dict[str, float]:
    """`peak` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.log_probs", *sys.argv[1:], "--peak-of", name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="log-probs in blocks beside all logits at once", allow_abbrev=False)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--peak-of", choices=list(WAYS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak_of:
        sys.stdout.write(json.dumps(peak(arguments)))
        return
    peaks = {name: measured_apart(name) for name in WAYS}
    tensors = inputs(arguments, arguments.tokens)
    for way in WAYS.values():
        run(way, *tensors)
    rounds = [{name: run(way, *tensors) for name, way in WAYS.items()} for _ in range(arguments.rounds)]
    for name, found in peaks.items():
        seconds = statistics.median(times[name] for times in rounds)
        extra = (found["used"] - found["gradients"]) / MEGABYTE
        total, gradients = found["used"] / MEGABYTE, found["gradients"] / MEGABYTE
        _say(f"{name:8} {seconds:8.4f} s, peak {total:7.1f} MiB, of it gradients {gradients:.1f}, the rest {extra:.1f}")
    rest = {name: found["used"] - found["gradients"] for name, found in peaks.items()}
    logits = arguments.tokens * arguments.vocabulary * 4
    slower = statistics.median(times["chunked"] / times["naive"] for times in rounds)
    _say(
        f"memory {rest['chunked'] / rest['naive']:.1%} of the naive way's, {rest['chunked'] / logits:.1%} of all logits"
    )
    _say(f"time {slower:.2f} of the naive way's")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {name} in /proc/self/status")


def _synchronize(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    main()
