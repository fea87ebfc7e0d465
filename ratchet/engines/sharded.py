"""A trainer of any packed model, in one process or over many, one step at a time over rows that all ranks are given.

Trap: every rank takes its share of each mini-batch, and all ranks run the same number of micro-batches, since each
forward and backward is a collective. The number of ranks and of micro-batches changes the loss by rounding only.
"""

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Generic, Self, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ratchet.algorithms.aggregation import LossTotals
from ratchet.data.packing import MicroBatch, pack_by_count, pack_by_tokens, split_over_ranks
from ratchet.engines.model import torch_dtype
from ratchet.engines.optimizer import apply_gradients, global_norm, learning_rate, make_adamw
from ratchet.engines.packed import PackedModel, PackedTokens, pack
from ratchet.engines.placement import place_model
from ratchet.engines.process_group import join_group, leave_group, local_device
from ratchet.engines.sharding import check_mesh, gather, names_not_finite
from ratchet.engines.trainer_state import StagedState, StateStaging, load_trainer_state, save_trainer_state
from ratchet.engines.training import AnyRow, LossTokens, MiniBatch, Row, Share, TrainingSettings, merge
from ratchet.errors import EngineError, NumericsError

AnySettings = TypeVar("AnySettings", bound=TrainingSettings)
AnyModel = TypeVar("AnyModel", bound=PackedModel)


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
        self._placement = place_model(module, mesh, settings)
        self._parameters = self._placement.trained
        self._optimizer = make_adamw(
            self._parameters, betas=settings.betas, eps=settings.adam_eps, weight_decay=settings.weight_decay
        )
        self._staging = StateStaging(device)

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
                counts = self._loss_tokens(batch)
                used = [row for row, count in zip(batch, counts, strict=True) if count]
                # Without tokens in the loss there is no gradient, but AdamW would still decay and drift.
                if used:
                    totals = LossTotals.of(counts)
                    done.append(self._train(MiniBatch(used, totals, step, epoch, number), rate))
        bad = names_not_finite(self._parameters, self._mesh)
        if bad:
            raise NumericsError(f"expected finite weights after step {step}, got others in {', '.join(bad[:5])}")
        self.policy_version = step
        skipped = float(num_mini_batches - len(done))
        return self._summary(rows, done) | {f"{self.role}/lr": rate, f"{self.role}/skipped_mini_batches": skipped}

    def skip(self, step: int) -> None:
        """Count step `step` without training in it: the policy's while the critic warms up. Raises EngineError."""
        self._check_step(step)
        self.policy_version = step

    def export_weights(self, dtype: str, *, device: str = "cpu") -> dict[str, Tensor]:
        """Full tensors in `dtype` under Hugging Face names, without a tied output layer; rank 0 only.

        They are copies on the CPU, or on the trainer's own device with "own". What computes in float32 stays in it;
        adapters are added to their weights. Other ranks take part and get an empty dict.
        """
        return self._placement.export(torch_dtype(dtype), self._device if device == "own" else torch.device(device))

    def save_state(self, folder: Path) -> None:
        """Write what `load_state` needs to `folder`: master weights, optimizer and version, by all ranks."""
        save_trainer_state(folder, self._parameters, self._optimizer, self.policy_version)

    def stage_state(self) -> StagedState:
        """Copy what `save_state` writes to host memory; from a GPU this only begins it. EngineError for many ranks."""
        if self._mesh.size() > 1:
            raise EngineError(f"expected one process to stage a trainer's state in, got {self._mesh.size()}")
        return self._staging.stage(self._parameters, self._optimizer, self.policy_version)

    def load_state(self, folder: Path) -> None:
        """Become the trainer that wrote `folder`, whatever the number of ranks it had.

        Later updates are equal to those of a trainer that never stopped, bit for bit on a CPU with as many ranks and
        threads. No random state is kept because none is used: the order of rows and what a loss draws are functions of
        the seed and the place in the run, the learning rate one of the step.
        """
        self._staging.settle()
        # An update that failed may have left gradients.
        self._module.zero_grad()
        self._optimizer.zero_grad()
        self.policy_version = load_trainer_state(folder, self._parameters, self._optimizer)
        self._placement.refresh()

    def close(self) -> None:
        """Give the memory back and leave the process group; the trainer is not usable afterwards."""
        if self._is_closed:
            return
        self._is_closed = True
        self._staging.settle()
        del self._module, self._optimizer, self._parameters, self._placement
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
        self, sums: Mapping[str, float], largest: Mapping[str, float], batch: MiniBatch[AnyRow]
    ) -> dict[str, float]:
        """Metrics of a mini-batch, from what the shares of all ranks come to."""

    def _sequences(self, row: AnyRow) -> Sequence[Row]:
        """What of a row is packed, one after another: the row itself unless it is of several completions."""
        return (cast(Row, row),)

    def _select(self, batch: MiniBatch[AnyRow]) -> Tensor | None:
        """Tokens of a mini-batch to treat differently, bool [N], settled before any of it is trained on."""
        return None

    def _summary(self, rows: Sequence[AnyRow], done: Sequence[dict[str, float]]) -> dict[str, float]:
        """Metrics of a step: means over those of its mini-batches that have them."""
        return merge(done, _mean)

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

    def _loss_tokens(self, rows: Sequence[AnyRow]) -> list[int]:
        """How many tokens of each row are in the loss."""
        parts = [self._sequences(row) for row in rows]
        counts = iter(LossTokens.of([sequence for part in parts for sequence in part]).counts.tolist())
        return [sum(islice(counts, len(part))) for part in parts]

    def _micro_batches(self, rows: Sequence[AnyRow]) -> Iterator[tuple[MicroBatch, PackedTokens]]:
        """This rank's micro-batches of a mini-batch; those of all ranks are equal in number."""
        world_size = self._mesh.size()
        parts = [self._sequences(row) for row in rows]
        lengths = [sum(len(one.prompt_token_ids) + len(one.completion_token_ids) for one in part) for part in parts]
        if self.settings.micro_batch_size is not None:
            batches = pack_by_count(len(rows), self.settings.micro_batch_size)
        else:
            batches = pack_by_tokens(lengths, self.settings.max_tokens_per_micro_batch, multiple_of=world_size)
        for places in split_over_ranks(batches, lengths, world_size)[self._mesh.get_rank()]:
            sequences = [sequence for place in places for sequence in parts[place]]
            prompts = [sequence.prompt_token_ids for sequence in sequences]
            completions = [sequence.completion_token_ids for sequence in sequences]
            yield places, pack(prompts, completions, [sequence.loss_mask for sequence in sequences], self._device)

    def _train(self, batch: MiniBatch[AnyRow], rate: float) -> dict[str, float]:
        selection = self._select(batch)
        sums: dict[str, Tensor] = {}
        largest: dict[str, Tensor] = {}
        for places, packed in self._micro_batches(batch.rows):
            share = self._share(packed, places, batch, selection)
            # FSDP averages gradients over the ranks; the loss is already divided by the totals of all of them.
            torch.autograd.backward(share.loss * self._mesh.size())
            self._placement.collect_gradients()
            sums |= {name: sums[name] + value if name in sums else value for name, value in share.sums.items()}
            for name, value in share.largest.items():
                largest[name] = torch.maximum(largest.get(name, value), value)
        norm = global_norm(parameter.grad for _, parameter in self._parameters if parameter.grad is not None)
        total, most, norm_value = gather(sums, largest, norm, self._mesh)
        # What is only measured may be anything: it is told where it is shown (`finite_metrics`).
        if not (math.isfinite(norm_value) and math.isfinite(total["loss"])):
            self._optimizer.zero_grad()
            got = f"loss {total['loss']} and gradient norm {norm_value}"
            place = f"step {batch.step}, epoch {batch.epoch}"
            raise NumericsError(f"expected a finite loss and gradient in {place}, got {got}")
        self._staging.settle()
        apply_gradients(self._optimizer, norm, lr=rate, grad_clip=self.settings.grad_clip)
        self._placement.refresh()
        return self._batch_metrics(total, most, batch) | {f"{self.role}/grad_norm": norm_value}


def _mean(values: Iterable[float]) -> float:
    given = list(values)
    return sum(given) / len(given)
