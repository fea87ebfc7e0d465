"""A trainer of any packed model: sharded with FSDP2, one step at a time over rows that all ranks are given.

Trap: every rank takes its share of each mini-batch, and all ranks run the same number of micro-batches, since each
forward and backward is a collective. The number of ranks and of micro-batches changes the loss by rounding only.
"""

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Self, TypeVar

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ratchet.algorithms.aggregation import LossTotals
from ratchet.data.packing import MicroBatch, pack_by_count, pack_by_tokens, split_over_ranks
from ratchet.engines.model import torch_dtype
from ratchet.engines.optimizer import global_norm, learning_rate, make_adamw
from ratchet.engines.packed import PackedModel, PackedTokens, pack
from ratchet.engines.process_group import join_group, leave_group, local_device
from ratchet.engines.sharding import check_mesh, local_shard, shard
from ratchet.engines.trainer_state import load_trainer_state, save_trainer_state
from ratchet.engines.training import Row, Share, TrainingSettings, merge, to_numbers
from ratchet.errors import EngineError, NumericsError

AnyRow = TypeVar("AnyRow", bound=Row)
AnySettings = TypeVar("AnySettings", bound=TrainingSettings)
AnyModel = TypeVar("AnyModel", bound=PackedModel)


@dataclass(frozen=True, slots=True)
class MiniBatch(Generic[AnyRow]):
    """The rows of one optimizer step that have a token in the loss, in order."""

    rows: list[AnyRow]
    totals: LossTotals
    step: int
    epoch: int
    number: int
    """From 0 in each epoch, over all mini-batches."""


class ShardedTrainer(ABC, Generic[AnyModel, AnyRow, AnySettings]):
    """A model with its optimizer. All ranks call every method together, with the same arguments.

    After an error in `update` the weights may be those of a half-done step: load a state or make a new trainer.
    """

    role: str
    """What metric names begin with."""
    policy_version: int
    """Steps done: version k is what step k published, 0 the base. Set it where a folder is not the base."""

    def __init__(
        self,
        module: AnyModel,
        settings: AnySettings,
        mesh: DeviceMesh,
        device: torch.device,
        *,
        leaves_group: bool = True,
    ) -> None:
        """Use `from_folder`; `module` is a full model in float32, the same on every rank."""
        self.settings = settings
        self.policy_version = 0
        self._module = module
        self._mesh = mesh
        self._device = device
        self._leaves_group = leaves_group
        self._is_closed = False
        shard(module, mesh, settings)
        # Shared parameters come once, under the name of their first module: a tied output layer is left out.
        self._parameters = list(module.named_weights())
        self._optimizer = make_adamw(
            self._parameters, betas=settings.betas, eps=settings.adam_eps, weight_decay=settings.weight_decay
        )

    @classmethod
    def from_folder(
        cls,
        model_folder: Path,
        settings: AnySettings,
        *,
        world_size: int = 1,
        device: str = "auto",
        mesh: DeviceMesh | None = None,
    ) -> Self:
        """Load a Hugging Face folder and shard it over `world_size` processes (torchrun's, or this one alone).

        A `mesh` that exists is used as it is and outlives the trainer; it has one dimension that holds all processes.
        Raises ConfigError where another number of processes runs or the mesh does not fit, EngineError where the model
        cannot be loaded.
        """
        place = local_device(device)
        with ExitStack() as on_failure:
            is_joining = mesh is None
            if mesh is None:
                mesh = join_group(world_size, place)
                on_failure.callback(leave_group)
            else:
                check_mesh(mesh, world_size, place)
            trainer = cls(cls._load(model_folder, settings, place), settings, mesh, place, leaves_group=is_joining)
            on_failure.pop_all()
        return trainer

    def update(self, rows: Sequence[AnyRow], *, step: int) -> dict[str, float]:
        """Run step `step` (from 1): all epochs and mini-batches over `rows`. Returns metrics by verl's names.

        Tokens outside the loss mask and empty completions train nothing. A mini-batch without a token in the loss
        leaves weights and optimizer as they are ("<role>/skipped_mini_batches" counts them). Raises NumericsError
        before the optimizer moves where a loss or gradient is not finite, and at the end where a weight is not;
        DataError for rows that do not fit; EngineError where `step` does not follow `policy_version`.
        """
        self._check_step(step)
        self._check_rows(rows)
        rate = self._learning_rate(step)
        done: list[dict[str, float]] = []
        num_mini_batches = 0
        for epoch in range(self.settings.ppo_epochs):
            for number, batch in enumerate(self._mini_batches(rows, step, epoch)):
                num_mini_batches += 1
                used = [row for row in batch if any(row.loss_mask)]
                # Without tokens in the loss there is no gradient, but AdamW would still decay and drift.
                if used:
                    totals = LossTotals.of(sum(row.loss_mask) for row in used)
                    done.append(self._train(MiniBatch(used, totals, step, epoch, number), rate))
        self._check_weights(step)
        self.policy_version = step
        skipped = float(num_mini_batches - len(done))
        return self._summary(rows, done) | {f"{self.role}/lr": rate, f"{self.role}/skipped_mini_batches": skipped}

    def skip(self, step: int) -> None:
        """Count step `step` without training in it: the policy's while the critic warms up. Raises EngineError."""
        self._check_step(step)
        self.policy_version = step

    def export_weights(self, dtype: str) -> dict[str, Tensor]:
        """Full tensors on the CPU in `dtype` under Hugging Face names, without a tied output layer; rank 0 only.

        What computes in float32 stays in it. Other ranks take part and get an empty dict.
        """
        wide = {id(one) for module in self._module.float32_modules() for one in module.parameters()}
        exported: dict[str, Tensor] = {}
        for name, parameter in self._parameters:
            full = parameter.detach()
            full = full.full_tensor() if isinstance(full, DTensor) else full
            if self._mesh.get_rank() == 0:
                # A copy even where nothing changes: at world size 1 the full tensor is the master itself.
                exported[name] = full.to(
                    "cpu", torch.float32 if id(parameter) in wide else torch_dtype(dtype), copy=True
                )
        return exported

    def save_state(self, folder: Path) -> None:
        """Write what `load_state` needs to `folder`: master weights, optimizer and version, by all ranks."""
        save_trainer_state(folder, self._parameters, self._optimizer, self.policy_version)

    def load_state(self, folder: Path) -> None:
        """Become the trainer that wrote `folder`, whatever the number of ranks it had.

        Later updates are equal to those of a trainer that never stopped, bit for bit on a CPU with as many ranks and
        threads. No random state is kept because none is used: the order of rows and what a loss draws are functions of
        the seed and the place in the run, the learning rate one of the step.
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
        if self._leaves_group:
            leave_group()

    @classmethod
    @abstractmethod
    def _load(cls, model_folder: Path, settings: AnySettings, device: torch.device) -> AnyModel:
        """The model of a folder, in float32."""

    @abstractmethod
    def _check_rows(self, rows: Sequence[AnyRow]) -> None:
        """Raise DataError or NumericsError for rows that cannot be trained on."""

    @abstractmethod
    def _share(
        self, packed: PackedTokens, places: MicroBatch, batch: MiniBatch[AnyRow], selection: Tensor | None
    ) -> Share:
        """What the rows at `places` contribute; without rows, a loss of 0 that reaches every weight."""

    @abstractmethod
    def _batch_metrics(
        self, sums: Mapping[str, float], largest: Mapping[str, float], totals: LossTotals
    ) -> dict[str, float]:
        """Metrics of a mini-batch, from what the shares of all ranks come to."""

    def _select(self, batch: MiniBatch[AnyRow]) -> Tensor | None:
        """Tokens of a mini-batch to treat differently, bool [N], settled before any of it is trained on."""
        return None

    def _summary(self, rows: Sequence[AnyRow], done: Sequence[dict[str, float]]) -> dict[str, float]:
        """Metrics of a step: means over its mini-batches."""
        return {name: sum(metrics[name] for metrics in done) / len(done) for name in (done[0] if done else ())}

    def _token_means(self, sums: Mapping[str, float], totals: LossTotals) -> dict[str, float]:
        """Metrics of the sums over tokens, whose names begin with "token/"."""
        prefix = "token/"
        return {
            f"{self.role}/{name.removeprefix(prefix)}": value / totals.num_tokens
            for name, value in sums.items()
            if name.startswith(prefix)
        }

    def _check_step(self, step: int) -> None:
        if step != self.policy_version + 1:
            raise EngineError(f"expected step {self.policy_version + 1} after {self.policy_version}, got {step}")

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

    def _mini_batches(self, rows: Sequence[AnyRow], step: int, epoch: int) -> list[list[AnyRow]]:
        order = list(range(len(rows)))
        if self.settings.shuffle:
            random.Random(f"{self.settings.seed}/{step}/{epoch}").shuffle(order)
        batches = pack_by_count(len(rows), self.settings.mini_batch_size)
        return [[rows[order[place]] for place in batch] for batch in batches]

    def _micro_batches(self, rows: Sequence[AnyRow]) -> Iterator[tuple[MicroBatch, PackedTokens]]:
        """This rank's micro-batches of a mini-batch; those of all ranks are equal in number."""
        world_size = self._mesh.size()
        lengths = [len(row.prompt_token_ids) + len(row.completion_token_ids) for row in rows]
        if self.settings.micro_batch_size is not None:
            batches = pack_by_count(len(rows), self.settings.micro_batch_size)
        else:
            batches = pack_by_tokens(lengths, self.settings.max_tokens_per_micro_batch, multiple_of=world_size)
        for places in split_over_ranks(batches, lengths, world_size)[self._mesh.get_rank()]:
            prompts = [rows[place].prompt_token_ids for place in places]
            completions = [rows[place].completion_token_ids for place in places]
            yield places, pack(prompts, completions, [rows[place].loss_mask for place in places], self._device)

    def _train(self, batch: MiniBatch[AnyRow], rate: float) -> dict[str, float]:
        selection = self._select(batch)
        sums: dict[str, Tensor] = {}
        largest: dict[str, Tensor] = {}
        for places, packed in self._micro_batches(batch.rows):
            share = self._share(packed, places, batch, selection)
            # FSDP averages gradients over the ranks; the loss is already divided by the totals of all of them.
            torch.autograd.backward(share.loss * self._mesh.size())
            sums |= {name: sums[name] + value if name in sums else value for name, value in share.sums.items()}
            for name, value in share.largest.items():
                largest[name] = torch.maximum(largest.get(name, value), value)
        ranks = self._gather(to_numbers(sums), to_numbers(largest))
        total = merge([of_sums for of_sums, _ in ranks], sum)
        norm = self._step(total, rate, f"step {batch.step}, epoch {batch.epoch}")
        metrics = self._batch_metrics(total, merge([of_largest for _, of_largest in ranks], max), batch.totals)
        return metrics | {f"{self.role}/grad_norm": norm}

    def _gather(self, *mine: dict[str, float]) -> list[tuple[dict[str, float], ...]]:
        """What each rank has, in their order: by name, since a rank without a token does not know all names."""
        if self._mesh.size() == 1:
            return [mine]
        ranks: list[tuple[dict[str, float], ...]] = [()] * self._mesh.size()
        distributed.all_gather_object(ranks, mine)
        return ranks

    def _step(self, sums: Mapping[str, float], rate: float, place: str) -> float:
        """Check, clip and apply the gradients of a mini-batch; returns their norm before clipping."""
        parameters = [parameter for _, parameter in self._parameters]
        norm = global_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        if not (torch.isfinite(norm) and all(math.isfinite(value) for value in sums.values())):
            self._optimizer.zero_grad()
            got = f"loss {sums['loss']} and gradient norm {norm.item()}"
            raise NumericsError(f"expected a finite loss and gradient in {place}, got {got}")
        if self.settings.grad_clip is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.settings.grad_clip, norm)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        return norm.item()

    def _check_weights(self, step: int) -> None:
        local = [local_shard(parameter) for _, parameter in self._parameters]
        bad = torch.stack([(~torch.isfinite(shard)).any() for shard in local]).to(torch.int32)
        if self._mesh.size() > 1:
            distributed.all_reduce(bad, op=distributed.ReduceOp.MAX)
        names = [name for (name, _), is_bad in zip(self._parameters, bad.tolist(), strict=True) if is_bad]
        if names:
            raise NumericsError(f"expected finite weights after step {step}, got others in {', '.join(names[:5])}")
