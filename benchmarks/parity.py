"""`python -m benchmarks.parity --model FOLDER`: TRL's loss and this one on the same batch, with every gradient.

One batch is sampled and recorded (batch.json in --out). Then TRL's own forward and loss, and packed rows through
Ratchet's, compute loss and gradients in float32: on-policy, and against a behaviour policy that is off enough to clip.
Trap: dual clipping is not in TRL's loss, so ratios must stay below its bound, 3.
"""

import argparse
import json
import random
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ratchet.algorithms.aggregation import LossTotals
from ratchet.data.packing import pack_by_tokens
from ratchet.data.prompt_rows import INSTRUCTION
from ratchet.data.word_problems import generate
from ratchet.engines.log_probs import PackedLogProbs
from ratchet.engines.model import load_causal_lm, load_tokenizer
from ratchet.engines.objective import TrainerSettings, TrainRow, micro_batch_loss
from ratchet.engines.open_sampler import open_sampler
from ratchet.engines.packed import pack
from ratchet.engines.sampler import SampleRequest, SamplingParams

LIMIT = 1e-3
SHIFT = 0.25
"""Standard deviation, in nats, of what behaviour log-probs are off by: about a fifth of the tokens is then clipped."""
MAX_SHIFT = 1.0
"""Nats; e is below 3."""
MICRO_BATCH_TOKENS = 2048

Batch = dict[str, Any]


def main() -> None:
    """Record a batch, compute both, print the differences; exit code 1 where one is too large."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--model", required=True, type=Path, help="Hugging Face folder")
    parser.add_argument("--out", type=Path, help="folder for the recorded batch and the result")
    parser.add_argument("--shape", type=int, nargs=3, default=[4, 4, 48], metavar=("P", "G", "T"))
    arguments = parser.parse_args()
    out = arguments.out or Path(tempfile.mkdtemp(prefix="ratchet-parity-"))
    out.mkdir(parents=True, exist_ok=True)
    batch = record(arguments.model, *arguments.shape)
    (out / "batch.json").write_text(json.dumps(batch) + "\n", encoding="utf-8")
    results = {
        name: compare(arguments.model, batch, shift) for name, shift in {"on-policy": 0.0, "off-policy": SHIFT}.items()
    }
    result = {"model": arguments.model.resolve().name, "shape": arguments.shape, "limit": LIMIT, **results}
    (out / "parity.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps(result, indent=1) + "\n")
    if any(found[name] > LIMIT for found in results.values() for name in ("loss", "gradient", "worst_gradient")):
        raise SystemExit(f"expected relative differences of at most {LIMIT}")


def record(model: Path, num_prompts: int, group_size: int, num_tokens: int) -> Batch:
    """Sample a batch of completions of natural lengths, with advantages normalised in each group."""
    tokenizer = load_tokenizer(model)
    sampler = open_sampler("hf", model, dtype="float32", device="cpu", max_num_seqs=64)
    rows = generate(level=2, size=num_prompts, seed=0, split="train")
    prompts = [_prompt_ids(tokenizer, f"{row['question']} {INSTRUCTION}") for row in rows for _ in range(group_size)]
    requests = [SampleRequest(prompt, seed) for seed, prompt in enumerate(prompts)]
    completions = sampler.sample(requests, SamplingParams(temperature=1.0, max_tokens=num_tokens))
    sampler.close()
    rewards = torch.tensor([float(zlib.crc32(one.text.encode()) % 5) for one in completions]).view(-1, group_size)
    spread = rewards.std(dim=1, keepdim=True) + 1e-4
    advantages = ((rewards - rewards.mean(dim=1, keepdim=True)) / spread).flatten().tolist()
    return {"prompts": prompts, "completions": [one.token_ids for one in completions], "advantages": advantages}


def _prompt_ids(tokenizer: Any, text: str) -> list[int]:
    messages = [{"role": "user", "content": text}]
    ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return ids


def compare(model: Path, batch: Batch, shift: float) -> dict[str, float]:
    """Relative differences of loss and gradients; the ratio's denominator is off by `shift` nats, or it is 1."""
    policy = PackedLogProbs(load_causal_lm(model, torch.float32, device="cpu"), temperature=1.0)
    own_log_probs = [_log_probs(policy, [row])[0] for row in _rows(batch, None)]
    noise = random.Random(0)
    behaviour = [
        [value + max(-MAX_SHIFT, min(MAX_SHIFT, noise.gauss(0.0, shift))) for value in row] for row in own_log_probs
    ]
    own_loss, own = ratchet_gradients(policy, _rows(batch, behaviour))
    peer_loss, peer = trl_gradients(model, batch, behaviour if shift else None)
    if own.keys() != peer.keys():
        raise SystemExit(f"expected gradients of the same weights, got these once: {sorted(own.keys() ^ peer.keys())}")
    squared = {name: ((own[name] - peer[name]).square().sum(), peer[name].square().sum()) for name in own}
    difference, size = (sum(pair[place] for pair in squared.values()) for place in (0, 1))
    relative = {name: float((one / max(other, size * 1e-12)).sqrt()) for name, (one, other) in squared.items()}
    ratios = [
        a - b for row, other in zip(own_log_probs, behaviour, strict=True) for a, b in zip(row, other, strict=True)
    ]
    return {
        # On-policy the loss is about 0, for advantages are: it is measured by their size.
        "loss": abs(own_loss - peer_loss) / (sum(map(abs, batch["advantages"])) / len(batch["advantages"])),
        "gradient": float((difference / size) ** 0.5),
        "worst_gradient": max(relative.values()),
        "weights": len(own),
        "tokens": sum(map(len, batch["completions"])),
        "largest_log_ratio": max(map(abs, ratios)),
    }


def _rows(batch: Batch, behaviour: list[list[float]] | None) -> list[TrainRow]:
    rows = zip(batch["prompts"], batch["completions"], batch["advantages"], strict=True)
    return [
        TrainRow(
            prompt_token_ids=prompt,
            completion_token_ids=completion,
            advantages=[advantage] * len(completion),
            behaviour_log_probs=[0.0] * len(completion) if behaviour is None else behaviour[place],
            loss_mask=[True] * len(completion),
        )
        for place, (prompt, completion, advantage) in enumerate(rows)
    ]


def _scores(policy: PackedLogProbs, rows: list[TrainRow]) -> Any:
    packed = pack(
        [row.prompt_token_ids for row in rows],
        [row.completion_token_ids for row in rows],
        [row.loss_mask for row in rows],
        torch.device("cpu"),
    )
    return policy(packed, with_entropy=True)


@torch.no_grad()
def _log_probs(policy: PackedLogProbs, rows: list[TrainRow]) -> list[list[float]]:
    counts = [len(row.completion_token_ids) for row in rows]
    return [part.tolist() for part in _scores(policy, rows).log_probs.split(counts)]


def ratchet_gradients(policy: PackedLogProbs, rows: list[TrainRow]) -> tuple[float, dict[str, Tensor]]:
    """Loss, and the gradient of each weight under its Hugging Face name, as the trainer accumulates them."""
    settings = TrainerSettings(lr=0.0, mini_batch_size=len(rows), loss_agg_mode="token-mean", compute_dtype="float32")
    totals = LossTotals.of(len(row.completion_token_ids) for row in rows)
    lengths = [len(row.prompt_token_ids) + len(row.completion_token_ids) for row in rows]
    loss = 0.0
    for places in pack_by_tokens(lengths, MICRO_BATCH_TOKENS):
        part = [rows[place] for place in places]
        scores = _scores(policy, part)
        share = micro_batch_loss(scores.log_probs, scores.entropy, part, totals, settings)
        torch.autograd.backward(share.loss)
        loss += share.loss.item()
    return loss, _gradients(policy.named_weights())


def trl_gradients(model: Path, batch: Batch, behaviour: list[list[float]] | None) -> tuple[float, dict[str, Tensor]]:
    """The same of GRPOTrainer, which pads prompts on the left and completions on the right."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    group_size, num_tokens = 2, max(map(len, batch["completions"]))
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=len(batch["prompts"]),
            num_generations=group_size,
            max_completion_length=num_tokens,
            beta=0.0,
            loss_type="dapo",
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to="none",
            model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
        )
        trainer = GRPOTrainer(
            model=str(model),
            args=settings,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            train_dataset=Dataset.from_list([{"prompt": "unused"}]),
        )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    prompt_ids, prompt_mask = _padded(batch["prompts"], is_left=True)
    completion_ids, completion_mask = _padded(batch["completions"], is_left=False)
    inputs = {
        "prompt_ids": prompt_ids.long(),
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids.long(),
        "completion_mask": completion_mask,
        "advantages": torch.tensor(batch["advantages"]),
        "num_items_in_batch": completion_mask.sum(),
    }
    if behaviour is not None:
        inputs["old_per_token_logps"], _ = _padded(behaviour, is_left=False)
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.item(), _gradients(trainer.model.named_parameters())


def _padded(rows: list[list[Any]], *, is_left: bool) -> tuple[Tensor, Tensor]:
    """Rows [B, longest] with zeros beside them, and their mask."""
    longest = max(map(len, rows))
    values, mask = (
        torch.zeros(len(rows), longest, dtype=torch.float32),
        torch.zeros(len(rows), longest, dtype=torch.long),
    )
    for index, row in enumerate(rows):
        place = slice(longest - len(row), longest) if is_left else slice(0, len(row))
        values[index, place], mask[index, place] = torch.tensor(row, dtype=torch.float32), 1
    return values, mask


def _gradients(weights: Any) -> dict[str, Tensor]:
    return {name: weight.grad.double() for name, weight in weights if weight.grad is not None}


if __name__ == "__main__":
    main()
