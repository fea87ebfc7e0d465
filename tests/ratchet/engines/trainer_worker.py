"""One rank of the training runs that test_trainer_ranks.py launches with torchrun; not a test itself.

Usage: trainer_worker.py JOBS_JSON OUTPUT_FOLDER WORLD_SIZE
"""

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from ratchet.algorithms.batch import LossOptions
from ratchet.engines.critic import CriticSettings, CriticTrainer, ValueRow
from ratchet.engines.dpo_trainer import DPOSettings, DPOTrainer
from ratchet.engines.offline_rows import PairRow, SFTRow
from ratchet.engines.reward_trainer import RewardModelSettings, RewardModelTrainer
from ratchet.engines.sft_trainer import SFTSettings, SFTTrainer
from ratchet.engines.trainer import Trainer, TrainerSettings, TrainRow

KINDS: dict[str, tuple[Any, Any, Any]] = {
    "policy": (Trainer, TrainerSettings, TrainRow),
    "critic": (CriticTrainer, CriticSettings, ValueRow),
    "sft": (SFTTrainer, SFTSettings, SFTRow),
    "dpo": (DPOTrainer, DPOSettings, PairRow),
    "reward": (RewardModelTrainer, RewardModelSettings, PairRow),
}
"""Name -> trainer, its settings and its rows."""


@dataclass(frozen=True)
class Job:
    """A trainer, and the rows that it is given in every step."""

    name: str
    kind: str
    folder: str
    settings: Any
    rows: list[Any]
    sft_rows: list[Any] = field(default_factory=list)
    """What a policy imitates beside its rows."""
    num_steps: int = 1

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, content: dict[str, Any]) -> "Job":
        _, settings, row = KINDS[content["kind"]]
        given = content["settings"]
        if "loss_options" in given:
            given["loss_options"] = LossOptions(**given["loss_options"])
        rows = {"rows": [row(**one) for one in content["rows"]], "sft_rows": [SFTRow(**x) for x in content["sft_rows"]]}
        return cls(**{**content, **rows, "settings": settings(**given)})

    def open(self, world_size: int = 1) -> Any:
        trainer, _, _ = KINDS[self.kind]
        return trainer.from_folder(Path(self.folder), self.settings, world_size=world_size, device="cpu")

    def scores(self, trainer: Any) -> list[list[float]]:
        """Log-probs or values of the rows, or what a trainer of examples says of them."""
        if self.kind not in ("policy", "critic"):
            return [list(found.values()) for found in trainer.evaluate(self.rows)]
        score = trainer.values if self.kind == "critic" else trainer.log_probs
        scored: list[list[float]] = score(
            [row.prompt_token_ids for row in self.rows], [row.completion_token_ids for row in self.rows]
        )
        return scored

    def train(self, trainer: Any) -> list[dict[str, float]]:
        besides = {"sft_rows": self.sft_rows} if self.sft_rows else {}
        return [trainer.update(self.rows, step=trainer.policy_version + 1, **besides) for _ in range(self.num_steps)]


def main(jobs_file: Path, output: Path, world_size: int) -> None:
    for content in json.loads(jobs_file.read_text()):
        job = Job.of_json(content)
        trainer = job.open(world_size)
        found = {"scores": job.scores(trainer), "metrics": job.train(trainer)}
        folder = output / job.name
        trainer.save_state(folder / "state")
        weights = trainer.export_weights("float32")
        if weights:
            save_file(weights, folder / "weights.safetensors")
            (folder / "found.json").write_text(json.dumps(found))
        trainer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
