"""`python -m benchmarks.advantages`: seconds of every advantage estimator on 65,536 rollouts of up to 1,024 tokens.

Prints the median of five runs after one that is not counted, their spread, and the process's peak memory. `--holes`
cuts a stretch of tool tokens out of every completion; `--compat verl` measures the arithmetic that repeats verl's.
"""

import argparse
import resource
import statistics
import sys
import time

import torch

from ratchet.algorithms.batch import AdvantageBatch, AdvantageOptions
from ratchet.algorithms.catalog import ADVANTAGES

REPEATS = 5
TARGET = 1.0


def make_batch(num_rows: int, num_tokens: int, group_size: int, *, with_holes: bool) -> AdvantageBatch:
    """Random rollouts of random length, each prompt's next to one another, with 0 or 1 as reward on the last token."""
    torch.manual_seed(0)
    length = torch.randint(num_tokens // 4, num_tokens + 1, (num_rows, 1))
    mask = torch.arange(num_tokens) < length
    if with_holes:
        start = length // 3
        mask &= (torch.arange(num_tokens) < start) | (torch.arange(num_tokens) >= start + num_tokens // 16)
    rewards = torch.randint(0, 2, (num_rows,)).double()
    token_rewards = torch.zeros(num_rows, num_tokens)
    token_rewards.scatter_(1, length - 1, rewards.float()[:, None])
    return AdvantageBatch(
        token_rewards=token_rewards,
        mask=mask,
        group_index=torch.arange(num_rows) // group_size,
        rewards=rewards,
        values=torch.rand(num_rows, num_tokens),
        greedy_rewards=torch.rand(num_rows),
        log_probs=torch.rand(num_rows, num_tokens).neg_(),
        sum_pi_squared=torch.rand(num_rows, num_tokens),
        reward_parts={"correct": rewards, "format": torch.rand(num_rows, dtype=torch.float64)},
    )


def main() -> None:
    """Measure and print medians with their spread."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=65_536)
    parser.add_argument("--tokens", type=int, default=1_024)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--holes", action="store_true")
    parser.add_argument("--compat", choices=["ratchet", "verl"], default="ratchet")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    batch = make_batch(arguments.rows, arguments.tokens, arguments.group_size, with_holes=arguments.holes)
    options = AdvantageOptions(gamma=0.99, lam=0.95, compat=arguments.compat)
    sys.stdout.write(f"{arguments.rows} rollouts of up to {arguments.tokens} tokens (target {TARGET} s)\n")
    for name in ADVANTAGES.names():
        function = ADVANTAGES.get(name).function()
        seconds = []
        for _ in range(REPEATS + 1):
            started = time.perf_counter()
            function(batch, options)
            seconds.append(time.perf_counter() - started)
        seconds = seconds[1:]
        spread = f"{min(seconds):.3f} to {max(seconds):.3f}"
        sys.stdout.write(f"{name:29} median {statistics.median(seconds):.3f} s ({spread}, {REPEATS} runs)\n")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    sys.stdout.write(f"peak memory of the process {peak:.1f} GiB, inputs included\n")


if __name__ == "__main__":
    main()
