"""One rank of the training runs that test_trainer_ranks.py launches with torchrun; not a test itself.

Usage: trainer_worker.py JOBS_JSON OUTPUT_FOLDER WORLD_SIZE
"""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from ratchet.algorithms.batch import LossOptions
from ratchet.engines.critic import CriticSettings, CriticTrainer, ValueRow
from ratchet.engines.trainer import Trainer, TrainerSettings, TrainRow


@dataclass(frozen=True)
class Job:
    """A trainer, and the rows that it is given in every step."""

    name: str
    folder: str
    settings: TrainerSettings | CriticSettings
    rows: list[Any]
    num_steps: int = 1

    def as_json(self) -> dict[str, Any]:
        return {"is_critic": isinstance(self.settings, CriticSettings), **asdict(self)}

    @classmethod
    def of_json(cls, content: dict[str, Any]) -> "Job":
        settings, rows = content["settings"], content["rows"]
        if content.pop("is_critic"):
            own: Any = CriticSettings(**settings)
            return cls(**{**content, "settings": own, "rows": [ValueRow(**row) for row in rows]})
        own = TrainerSettings(**{**settings, "loss_options": LossOptions(**settings["loss_options"])})
        return cls(**{**content, "settings": own, "rows": [TrainRow(**row) for row in rows]})

    def open(self, world_size: int = 1) -> Any:
        trainer = CriticTrainer if isinstance(self.settings, CriticSettings) else Trainer
        return trainer.from_folder(Path(self.folder), self.settings, world_size=world_size, device="cpu")

    def scores(self, trainer: Any) -> list[list[float]]:
        """Log-probs or values of the rows."""
        score = trainer.values if isinstance(trainer, CriticTrainer) else trainer.log_probs
        scored: list[list[float]] = score(
            [row.prompt_token_ids for row in self.rows], [row.completion_token_ids for row in self.rows]
        )
        return scored

    def train(self, trainer: Any) -> list[dict[str, float]]:
        return [trainer.update(self.rows, step=trainer.policy_version + 1) for _ in range(self.num_steps)]


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
