"""What TRL's own loss methods say of the offline cases, with padded batches; not a test itself.

`PYTHONPATH=<folder with trl 1.16.0> python -m tests.ratchet.engines.trl_offline` writes trl_offline.json beside it:
for each case the loss, TRL's metrics, and the gradient of every weight as one number (`projections`). TRL's trainers
are not built: their methods run on a plain namespace, and its fused output layer is replaced by log-softmax of logits.
"""

import json
import tempfile
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from ratchet.engines.offline_rows import PairRow
from tests.ratchet.engines.offline_cases import causal_folder, classifier_folder, pair_rows, projections

FILE = Path(__file__).with_suffix(".json")
CASES: dict[str, dict[str, Any]] = {
    "sft": {},
    "dpo_sigmoid": {"loss_type": "sigmoid", "beta": 0.1},
    "dpo_sigmoid_steep": {"loss_type": "sigmoid", "beta": 0.7},
    "dpo_hinge": {"loss_type": "hinge", "beta": 0.2},
    "dpo_ipo": {"loss_type": "ipo", "beta": 0.3},
    "dpo_sigmoid_norm": {"loss_type": "sigmoid_norm", "beta": 1.5},
    "reward": {},
}


def trl_numbers(name: str, folder: Path) -> dict[str, Any]:
    """Loss, metrics and gradient projections of one case; `folder` is scratch."""
    if name == "reward":
        model: Any = AutoModelForSequenceClassification.from_pretrained(classifier_folder(folder), dtype=torch.float32)
        loss, metrics = _reward(model)
    else:
        model = AutoModelForCausalLM.from_pretrained(causal_folder(folder), dtype=torch.float32)
        loss, metrics = _sft(model) if name == "sft" else _dpo(model, **CASES[name])
    model.zero_grad()
    torch.autograd.backward(loss)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"loss": loss.item(), "metrics": metrics, "gradients": projections(gradients)}


def _padded(columns: list[list[int]], padding: int) -> Tensor:
    width = max(len(column) for column in columns)
    return torch.tensor([[*column, *[padding] * (width - len(column))] for column in columns])


def _batch(sides: list[Any]) -> dict[str, Tensor]:
    """Right-padded rows with attention masks, and the completion masks shifted nowhere."""
    rows = [[*side.prompt_token_ids, *side.completion_token_ids] for side in sides]
    masks = [[0] * len(side.prompt_token_ids) + [int(one) for one in side.loss_mask] for side in sides]
    return {
        "input_ids": _padded(rows, 3),
        "attention_mask": _padded([[1] * len(row) for row in rows], 0),
        "completion_mask": _padded(masks, 0),
    }


def _fused(model: Any) -> Any:
    """A call as TRL's patched models answer it: log-probs of the labels, 0 where there is none."""

    def call(*, labels: Tensor, fused_lm_head: bool, **inputs: Any) -> SimpleNamespace:
        log_p = torch.log_softmax(model(**inputs).logits[:, :-1], -1)
        targets, is_label = labels[:, 1:].clamp(min=0), labels[:, 1:] != -100
        of_labels = log_p.gather(-1, targets[..., None])[..., 0] * is_label
        nothing = torch.zeros_like(of_labels)
        return SimpleNamespace(
            log_probs=of_labels,
            label_mask=is_label,
            entropy=nothing,
            mean_logits=nothing,
            is_top1=is_label,
        )

    return call


def _namespace(model: Any, **own: Any) -> SimpleNamespace:
    def same(value: Tensor) -> Tensor:
        return value

    accelerator = SimpleNamespace(
        device="cpu", gather=same, gather_for_metrics=same, num_processes=1, parallelism_config=None
    )
    metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    shared = {"model": model, "accelerator": accelerator, "_metrics": metrics, "aux_loss_enabled": False}
    return SimpleNamespace(**shared, _total_train_tokens=0, _tp_size=1, **own)


def _metrics(trainer: SimpleNamespace) -> dict[str, float]:
    of_mode = trainer._metrics["eval"]
    return {name: float(values[0]) for name, values in of_mode.items() if name.startswith(("rewards/", "logps/"))}


def _sft(model: Any) -> tuple[Tensor, dict[str, float]]:
    from trl.trainer.sft_trainer import SFTTrainer

    batch = _batch([row.sides()[0] for row in pair_rows()])
    labels = batch["input_ids"].masked_fill(batch.pop("completion_mask") == 0, -100)
    args = SimpleNamespace(loss_type="nll", average_tokens_across_devices=False)
    trainer = _namespace(model, args=args, compute_loss_func=None, label_smoother=None)
    loss: Tensor = SFTTrainer.compute_loss(trainer, _fused(model), {**batch, "labels": labels})
    return loss, {}


def _dpo(model: Any, *, loss_type: str, beta: float) -> tuple[Tensor, dict[str, float]]:
    from trl.trainer.dpo_trainer import DPOTrainer

    rows = pair_rows()
    sides = [row.sides() for row in rows]
    batch = _batch([one[0] for one in sides] + [one[1] for one in sides])
    references = [_reference(rows, side) for side in (0, 1)]
    own = {"ld_alpha": None, "precompute_ref_logps": True, "f_divergence_type": "reverse_kl", "use_weighting": False}
    trainer = _namespace(
        model, loss_types=[loss_type], loss_weights=[1.0], beta=beta, label_smoothing=0.0, args=None, **own
    )
    inputs = {**batch, "ref_chosen_logps": references[0], "ref_rejected_logps": references[1]}
    loss: Tensor = DPOTrainer._compute_loss(trainer, _fused(model), inputs, False)
    return loss, _metrics(trainer)


def _reference(rows: list[PairRow], side: int) -> Tensor:
    """Sums [P] of one side's reference log-probs inside its mask."""
    masks = [torch.tensor(row.sides()[side].loss_mask) for row in rows]
    return torch.stack(
        [torch.tensor(row.references()[side])[mask].sum() for row, mask in zip(rows, masks, strict=True)]
    )


def _reward(model: Any) -> tuple[Tensor, dict[str, float]]:
    from trl.trainer.reward_trainer import RewardTrainer

    sides = [row.sides() for row in pair_rows()]
    batch = _batch([one[0] for one in sides] + [one[1] for one in sides])
    del batch["completion_mask"]
    trainer = _namespace(model, args=SimpleNamespace(center_rewards_coefficient=None))
    loss: Tensor = RewardTrainer.compute_loss(trainer, model, batch)
    found = trainer._metrics["eval"]
    names = {"accuracy": "rewards/accuracies", "margin": "rewards/margins"}
    return loss, {ours: float(found[theirs][0]) for theirs, ours in names.items()}


def main() -> None:
    numbers = {}
    for name in CASES:
        with tempfile.TemporaryDirectory() as folder:
            numbers[name] = trl_numbers(name, Path(folder))
    FILE.write_text(json.dumps({"trl": "1.16.0", "cases": numbers}, indent=1) + "\n")


if __name__ == "__main__":
    main()
