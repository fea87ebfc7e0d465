"""One completion as text for people: what was asked and answered, what it earned, and its tokens in a table.

Trap: prompts and completions come from data and models; what a terminal would take for a command is left out.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from ratchet.grains.audit.sample import Sample
from ratchet.grains.status.screen import one_line

_SHORT = 12
_UPDATE = ("actor/pg_loss", "actor/grad_norm", "actor/lr", "actor/pg_clipfrac", "actor/ppo_kl", "actor/entropy")
"""Of the update's metrics, those that a line says; --json has all."""
_HEADS = {
    "token_ids": "token",
    "texts": "text",
    "sampler_log_probs": "sampler",
    "behaviour_log_probs": "behaviour",
    "policy_log_probs": "policy",
    "reference_log_probs": "reference",
    "advantages": "advantage",
    "returns": "return",
    "token_rewards": "reward",
    "values": "value",
    "importance_weights": "weight",
    "loss_mask": "in loss",
}
"""Column -> its head, in the order in which they stand."""


def sample_lines(sample: Sample) -> Iterator[str]:
    """Yield the lines of one completion."""
    found = sample
    yield f"{found.group_id} sample {found.sample_index} of {len(found.group_rewards)}, in {found.run}"
    source = one_line(f"{found.prompt['data_source']} {found.prompt['extra_info']}")
    yield f"prompt {found.prompt_id} ({len(found.prompt_token_ids)} tokens), from {source}"
    for message in found.prompt["prompt"]:
        yield from _block(f"  {message['role']}: ", message["content"])
    yield (
        f"completion ({len(found.tokens['token_ids'])} tokens, ended by {found.finish_reason}), "
        f"sampled by policy version {found.policy_version} with seed {found.seed}"
    )
    yield from _block("  ", found.completion)
    yield from _earned(found)
    yield from _table(found)
    yield from _fed(found)
    for one in found.stages:
        outputs = ", ".join(f"{role} {output.digest[:_SHORT]}" for role, output in one.outputs.items())
        yield f"{one.place}: manifest {one.manifest_sha256[:_SHORT]}, {outputs}"
    yield from (f"fault: {one_line(str(fault))}" for fault in found.faults)


def _block(first: str, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines() or [""]):
        yield (first if number == 0 else " " * len(first)) + one_line(line)


def _earned(sample: Sample) -> Iterator[str]:
    if sample.reward is None:
        yield "not graded yet"
        return
    said = sample.reward
    parts = ", ".join(f"{name} {_number(value)}" for name, value in said["reward_breakdown"].items())
    reward = _number(said["reward"]) + (f" ({parts})" if parts else "")
    truth = (sample.prompt["reward_model"] or {}).get("ground_truth")
    answer = "no answer was read" if said["extracted"] is None else f"answer {said['extracted']!r}"
    yield one_line(f"reward {reward}: {answer}, ground truth {truth!r}")
    if said["error"]:
        yield one_line(f"  error: {said['error']}")
    rewards = ", ".join(map(_number, sample.group_rewards))
    group = sample.group
    if group and group["group_size"] is None:
        yield f"left out of its group, whose rewards are {rewards}"
    elif group:
        spread = f"mean {group['group_reward_mean']:g}, standard deviation {group['group_reward_std']:g}"
        source = f"behaviour log-probs are the {group['behaviour_source']}'s"
        yield f"group of {group['group_size']}: rewards {rewards}; {spread}; {source}"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"


def _table(sample: Sample) -> Iterator[str]:
    columns = [name for name in _HEADS if name in sample.tokens]
    cells = [[_HEADS[name], *(_cell(name, value) for value in sample.tokens[name])] for name in columns]
    widths = [max(map(len, column)) for column in cells]
    for row in zip(*cells, strict=True):
        yield "  " + _row(columns, row, widths)


def _row(columns: Sequence[str], row: Sequence[str], widths: Sequence[int]) -> str:
    fields = zip(columns, row, widths, strict=True)
    return "  ".join(
        cell.ljust(width) if name == "texts" else cell.rjust(width) for name, cell, width in fields
    ).rstrip()


def _cell(name: str, value: Any) -> str:
    if name == "texts":
        # As JSON has it: spaces and line breaks are seen.
        return one_line(json.dumps(value, ensure_ascii=False))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value) if isinstance(value, int) else f"{value:.4f}"


def _fed(sample: Sample) -> Iterator[str]:
    update = sample.update
    if update is None:
        yield f"the update of step {sample.step} is not committed yet"
        return
    numbers = ", ".join(
        f"{name} {sample.update_metrics[name]:.4g}" for name in _UPDATE if name in sample.update_metrics
    )
    policy = update.outputs["policy"].digest[:_SHORT] if "policy" in update.outputs else "nothing"
    yield (
        f"fed the update to policy version {update.policy_version}, {policy} (manifest "
        f"{update.manifest_sha256[:_SHORT]})" + (f": {numbers}" if numbers else "")
    )
