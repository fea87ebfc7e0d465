"""Policy updates: a model sharded with FSDP2, trained on committed trajectories one step at a time.

Trap: every rank is given all the rows and takes its share of each mini-batch, and all ranks run the same number of
micro-batches, since each forward and backward is a collective. The number of ranks and of micro-batches changes the
loss by rounding only.
"""

import logging
import random
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ratchet.algorithms.aggregation import LossTotals
from ratchet.data.packing import MicroBatch, pack_by_count, pack_by_tokens, split_over_ranks
from ratchet.engines.log_probs import PackedLogProbs, PackedTokens, pack, score
from ratchet.engines.model import load_causal_lm, torch_dtype
from ratchet.engines.objective import SUMMED, TrainerSettings, TrainRow, check_rows, micro_batch_loss
from ratchet.engines.optimizer import global_norm, learning_rate, make_adamw
from ratchet.engines.process_group import join_group, leave_group, local_device
from ratchet.engines.trainer_state import load_trainer_state, save_trainer_state
from ratchet.errors import EngineError, NumericsError

__all__ = ["TrainRow", "Trainer", "TrainerSettings"]

logger = logging.getLogger(__name__)


class Trainer:
    """A policy with its optimizer. All ranks call every method together, with the same arguments.

    After an error in `update` the weights may be those of a half-done step: load a state or make a new trainer.
    """

    policy_version: int
    """Steps done: version k is what step k published, 0 the base. Set it where a folder is not the base."""

    def __init__(
        self, module: PackedLogProbs, settings: TrainerSettings, mesh: DeviceMesh, device: torch.device
    ) -> None:
        """Use `from_folder`; `module` is a full model in float32, the same on every rank."""
        self.settings = settings
        self.policy_version = 0
        self._module = module
        self._mesh = mesh
        self._device = device
        self._is_closed = False
        _shard(module, mesh, settings)
        # Shared parameters come once, under the name of their first module: a tied output layer is left out.
        self._parameters = list(module.model.named_parameters())
        self._optimizer = make_adamw(
            self._parameters, betas=settings.betas, eps=settings.adam_eps, weight_decay=settings.weight_decay
        )

    @classmethod
    def from_folder(
        cls, model_folder: Path, settings: TrainerSettings, *, world_size: int = 1, device: str = "auto"
    ) -> Self:
        """Load a Hugging Face folder and shard it over `world_size` processes (torchrun's, or this one alone).

        Raises ConfigError where another number of processes runs, EngineError where the model cannot be loaded.
        """
        place = local_device(device)
        with ExitStack() as on_failure:
            mesh = join_group(world_size, place)
            on_failure.callback(leave_group)
            model = load_causal_lm(model_folder, torch.float32, device=place)
            trainer = cls(PackedLogProbs(model, temperature=settings.temperature), settings, mesh, place)
            on_failure.pop_all()
        return trainer

    def update(self, rows: Sequence[TrainRow], *, step: int) -> dict[str, float]:
        """Run step `step` (from 1): all epochs and mini-batches over `rows`. Returns metrics by verl's names.

        Tokens outside the loss mask and empty completions train nothing. A mini-batch without a token in the loss
        leaves weights and optimizer as they are ("actor/skipped_mini_batches" counts them). Raises NumericsError before
        the optimizer moves where a loss or gradient is not finite, and at the end where a weight is not; DataError for
        rows that do not fit; EngineError where `step` does not follow `policy_version`.
        """
        if step != self.policy_version + 1:
            raise EngineError(f"expected step {self.policy_version + 1} after {self.policy_version}, got {step}")
        check_rows(rows, self.settings)
        rate = self._learning_rate(step)
        done: list[dict[str, float]] = []
        num_mini_batches = 0
        for epoch in range(self.settings.ppo_epochs):
            for mini_batch in self._mini_batches(rows, step, epoch):
                num_mini_batches += 1
                # Without tokens in the loss there is no gradient, but AdamW would still decay and drift.
                if any(any(row.loss_mask) for row in mini_batch):
                    done.append(self._train_mini_batch(mini_batch, rate, place=f"step {step}, epoch {epoch}"))
        self._check_weights(step)
        self.policy_version = step
        metrics = {name: sum(metrics[name] for metrics in done) / len(done) for name in (done[0] if done else ())}
        # Only before the first optimizer step is the policy the one that is compared with the sampler's.
        metrics |= {name: value for name, value in (done[0] if done else {}).items() if name.startswith("training/")}
        if self.settings.kl_loss_coef:
            metrics["actor/kl_coef"] = self.settings.kl_loss_coef
        return metrics | {
            "actor/lr": rate,
            "actor/skipped_mini_batches": float(num_mini_batches - len(done)),
            "perf/total_num_tokens": float(
                sum(len(row.prompt_token_ids) + len(row.completion_token_ids) for row in rows)
            ),
        }

    def log_probs(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs of every completion token under the current policy, as `Scorer.log_probs` computes them."""
        return score(
            self._score, prompts, completions, max_tokens=self.settings.max_tokens_per_micro_batch, device=self._device
        )

    def export_weights(self, dtype: str) -> dict[str, Tensor]:
        """Full tensors on the CPU in `dtype` under Hugging Face names, without a tied output layer; rank 0 only.

        Other ranks take part and get an empty dict.
        """
        cast = torch_dtype(dtype)
        exported: dict[str, Tensor] = {}
        for name, parameter in self._parameters:
            full = parameter.detach()
            full = full.full_tensor() if isinstance(full, DTensor) else full
            if self._mesh.get_rank() == 0:
                # A copy even where nothing changes: at world size 1 the full tensor is the master itself.
                exported[name] = full.to("cpu", cast, copy=True)
        return exported

    def save_state(self, folder: Path) -> None:
        """Write what `load_state` needs to `folder`: master weights, optimizer and version, by all ranks."""
        save_trainer_state(folder, self._parameters, self._optimizer, self.policy_version)

    def load_state(self, folder: Path) -> None:
        """Become the trainer that wrote `folder`, whatever the number of ranks it had.

        Later updates are equal to those of a trainer that never stopped, bit for bit on a CPU with as many ranks and
        threads. No random state is kept because none is used: the order of rows is a function of (seed, step, epoch),
        the learning rate one of the step.
        """
        self.policy_version = load_trainer_state(folder, self._parameters, self._optimizer)

    def close(self) -> None:
        """Give the memory back and leave the process group; the trainer is not usable afterwards."""
        if self._is_closed:
            return
        self._is_closed = True
        del self._module, self._optimizer, self._parameters
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        leave_group()

    def _learning_rate(self, step: int) -> float:
        settings = self.settings
        return learning_rate(
            settings.lr,
            step,
            scheduler=settings.lr_scheduler,
            warmup_steps=settings.warmup_steps,
            total_steps=settings.total_steps,
            min_lr_ratio=settings.min_lr_ratio,
        )

    def _mini_batches(self, rows: Sequence[TrainRow], step: int, epoch: int) -> list[list[TrainRow]]:
        order = list(range(len(rows)))
        if self.settings.shuffle:
            random.Random(f"{self.settings.seed}/{step}/{epoch}").shuffle(order)
        batches = pack_by_count(len(rows), self.settings.mini_batch_size)
        return [[rows[order[place]] for place in batch] for batch in batches]

    def _plan(self, rows: Sequence[TrainRow]) -> list[MicroBatch]:
        """This rank's micro-batches of a mini-batch; those of all ranks are equal in number."""
        world_size = self._mesh.size()
        lengths = [len(row.prompt_token_ids) + len(row.completion_token_ids) for row in rows]
        if self.settings.micro_batch_size is not None:
            batches = pack_by_count(len(rows), self.settings.micro_batch_size)
        else:
            batches = pack_by_tokens(lengths, self.settings.max_tokens_per_micro_batch, multiple_of=world_size)
        return split_over_ranks(batches, lengths, world_size)[self._mesh.get_rank()]

    def _train_mini_batch(self, mini_batch: Sequence[TrainRow], rate: float, *, place: str) -> dict[str, float]:
        rows = [row for row in mini_batch if any(row.loss_mask)]
        totals = LossTotals.of(sum(row.loss_mask) for row in rows)
        sums = torch.zeros(len(SUMMED), dtype=torch.float64, device=self._device)
        largest = torch.zeros((), dtype=torch.float64, device=self._device)
        for places in self._plan(rows):
            part = [rows[index] for index in places]
            packed = pack(
                [row.prompt_token_ids for row in part],
                [row.completion_token_ids for row in part],
                [row.loss_mask for row in part],
                self._device,
            )
            log_probs, entropy = self._module(
                packed, with_entropy=True, entropy_needs_grad=self.settings.entropy_coeff != 0
            )
            loss, part_sums, part_largest = micro_batch_loss(log_probs, entropy, part, totals, self.settings)
            # FSDP averages gradients over the ranks; the loss is already divided by the totals of all of them.
            torch.autograd.backward(loss * self._mesh.size())
            sums += part_sums
            largest = torch.maximum(largest, part_largest)
        return self._step(sums, largest, totals, rate, place)

    def _step(self, sums: Tensor, largest: Tensor, totals: LossTotals, rate: float, place: str) -> dict[str, float]:
        """Check, clip and apply the gradients of a mini-batch; its metrics, reduced over the ranks."""
        if self._mesh.size() > 1:
            distributed.all_reduce(sums)
            distributed.all_reduce(largest, op=distributed.ReduceOp.MAX)
        parameters = [parameter for _, parameter in self._parameters]
        norm = global_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        values = dict(zip(SUMMED, sums.tolist(), strict=True))
        is_finite = bool(torch.isfinite(sums).all()) and bool(torch.isfinite(norm))
        if not is_finite:
            self._optimizer.zero_grad()
            got = f"loss {values['loss']} and gradient norm {norm.item()}"
            raise NumericsError(f"expected a finite loss and gradient in {place}, got {got}")
        if self.settings.grad_clip is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.settings.grad_clip, norm)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        count = totals.num_tokens
        mean = values["diff"] / count
        variance = max(values["diff_squared"] - count * mean**2, 0.0) / max(count - 1, 1)
        metrics = {f"actor/{name}": values[name] / count for name in ("pg_clipfrac", "pg_clipfrac_lower", "ppo_kl")}
        metrics |= {"actor/pg_loss": values["pg_loss"], "actor/entropy": values["entropy"]}
        if self.settings.kl_loss_coef:
            metrics["actor/kl_loss"] = values["kl_loss"]
        return metrics | {
            "actor/grad_norm": norm.item(),
            "training/rollout_probs_diff_mean": mean,
            "training/rollout_probs_diff_max": largest.item(),
            "training/rollout_probs_diff_std": variance**0.5,
        }

    def _check_weights(self, step: int) -> None:
        local = [_local(parameter) for _, parameter in self._parameters]
        bad = torch.stack([(~torch.isfinite(shard)).any() for shard in local]).to(torch.int32)
        if self._mesh.size() > 1:
            distributed.all_reduce(bad, op=distributed.ReduceOp.MAX)
        names = [name for (name, _), is_bad in zip(self._parameters, bad.tolist(), strict=True) if is_bad]
        if names:
            raise NumericsError(f"expected finite weights after step {step}, got others in {', '.join(names[:5])}")

    @torch.no_grad()
    def _score(self, packed: PackedTokens) -> Tensor:
        log_probs, _ = self._module(packed)
        assert isinstance(log_probs, Tensor)
        return log_probs


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local().detach() if isinstance(parameter, DTensor) else parameter.detach()


def _shard(module: PackedLogProbs, mesh: DeviceMesh, settings: TrainerSettings) -> None:
    model = module.model
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # Checkpointing works in training mode only; there is no dropout left for the mode to switch on.
    module.train(settings.gradient_checkpointing)
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise EngineError(f"expected decoder layers in {type(model).__name__}.layers, got {type(layers).__name__}")
    policy = MixedPrecisionPolicy()
    if settings.compute_dtype == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
