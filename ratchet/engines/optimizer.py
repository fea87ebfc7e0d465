"""The optimizer and the learning rate of each step.

Trap: the learning rate is a function of the step number and of nothing else, so that a resumed run cannot be off by
one; as in transformers and verl, a warmup starts at 0 and step 1 of a run with warmup moves nothing.
"""

import math
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

LRScheduler = Literal["constant", "linear", "cosine"]


def learning_rate(
    base: float,
    step: int,
    *,
    scheduler: LRScheduler,
    warmup_steps: int,
    total_steps: int | None,
    min_lr_ratio: float,
) -> float:
    """Learning rate of step `step` (from 1), the same for all mini-batches of the step.

    It rises linearly from 0 over `warmup_steps`, then stays ("constant"), or falls to `base * min_lr_ratio` at
    `total_steps` along a line or a half cosine, and stays there. Raises ValueError for a step below 1, or without
    `total_steps` where the schedule needs them.
    """
    if step < 1:
        raise ValueError(f"expected a step of at least 1, got {step}")
    done = step - 1
    if done < warmup_steps:
        return base * done / warmup_steps
    if scheduler == "constant":
        return base
    if total_steps is None:
        raise ValueError(f"expected total_steps for a {scheduler} learning rate, got None")
    progress = min((done - warmup_steps) / max(1, total_steps - warmup_steps), 1.0)
    falling = 1.0 - progress if scheduler == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return base * (min_lr_ratio + (1.0 - min_lr_ratio) * falling)


def make_adamw(
    parameters: Iterable[tuple[str, torch.nn.Parameter]], *, betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.AdamW:
    """AdamW over all parameters, its state allocated at once: a state that is loaded needs places to load into.

    The learning rate is 0 until it is set; weight decay applies to every parameter, as in verl.
    """
    optimizer = torch.optim.AdamW(
        [parameter for _, parameter in parameters], lr=0.0, betas=betas, eps=eps, weight_decay=weight_decay, fused=True
    )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=local.device),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }
    return optimizer


def global_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Euclidean norm over all shards of all gradients, the same scalar on every rank."""
    norm = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def apply_gradients(optimizer: torch.optim.Optimizer, norm: Tensor, *, lr: float, grad_clip: float | None) -> None:
    """Step with the gradients, whose norm is given and cut to `grad_clip` where there is one; then drop them."""
    for group in optimizer.param_groups:
        group["lr"] = lr
        if grad_clip is not None:
            torch.nn.utils.clip_grads_with_norm_(group["params"], grad_clip, norm)
    optimizer.step()
    optimizer.zero_grad()
