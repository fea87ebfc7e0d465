"""Learning rates against numbers worked by hand and transformers' schedules."""

from functools import partial
from typing import Any

import pytest
import torch
from transformers import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup
from transformers import get_linear_schedule_with_warmup as linear_with_warmup

from ratchet.engines.optimizer import LRScheduler, learning_rate, make_adamw


def rates(scheduler: LRScheduler, *, steps: int, warmup: int, total: int | None, ratio: float = 0.0) -> list[float]:
    return [
        learning_rate(2.0, step, scheduler=scheduler, warmup_steps=warmup, total_steps=total, min_lr_ratio=ratio)
        for step in range(1, steps + 1)
    ]


def test_each_schedule_gives_the_rates_worked_by_hand() -> None:
    assert rates("constant", steps=4, warmup=2, total=None) == [0.0, 1.0, 2.0, 2.0]
    assert rates("linear", steps=6, warmup=0, total=4) == [2.0, 1.5, 1.0, 0.5, 0.0, 0.0]
    assert rates("linear", steps=5, warmup=0, total=4, ratio=0.5) == [2.0, 1.75, 1.5, 1.25, 1.0]
    assert rates("cosine", steps=5, warmup=0, total=4, ratio=0.5) == pytest.approx(
        [2.0, 1.5 + 0.5**1.5, 1.5, 1.5 - 0.5**1.5, 1.0]
    )


def test_the_schedules_are_those_of_transformers() -> None:
    makers: dict[LRScheduler, Any] = {
        "constant": partial(get_constant_schedule_with_warmup, num_warmup_steps=3),
        "linear": partial(linear_with_warmup, num_warmup_steps=3, num_training_steps=11),
        "cosine": partial(get_cosine_schedule_with_warmup, num_warmup_steps=3, num_training_steps=11),
    }
    for scheduler, maker in makers.items():
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
        schedule = maker(optimizer)
        theirs = []
        for _ in range(12):
            theirs.append(schedule.get_last_lr()[0])
            optimizer.step()
            schedule.step()
        assert rates(scheduler, steps=12, warmup=3, total=11) == pytest.approx(theirs, abs=1e-12)


def test_a_step_or_schedule_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="got 0"):
        learning_rate(1.0, 0, scheduler="constant", warmup_steps=0, total_steps=None, min_lr_ratio=0.0)
    with pytest.raises(ValueError, match="total_steps"):
        learning_rate(1.0, 1, scheduler="cosine", warmup_steps=0, total_steps=None, min_lr_ratio=0.0)


def test_a_state_allocated_at_once_steps_as_a_lazy_one_does() -> None:
    ours, theirs = (torch.nn.Parameter(torch.tensor([1.0, -2.0])) for _ in range(2))
    optimizer = make_adamw([("weight", ours)], betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    lazy = torch.optim.AdamW([theirs], lr=0.5, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    optimizer.param_groups[0]["lr"] = 0.5
    for _ in range(3):
        for parameter, one in ((ours, optimizer), (theirs, lazy)):
            parameter.grad = torch.tensor([0.3, -0.1])
            one.step()
    torch.testing.assert_close(ours, theirs)
