"""One rank of a training run that test_trainer_ranks.py launches with torchrun; not a test itself.

Usage: trainer_worker.py MODEL_FOLDER ROWS_JSON OUTPUT_FOLDER WORLD_SIZE
"""

import json
import sys
from pathlib import Path

from safetensors.torch import save_file

from ratchet.engines.trainer import Trainer, TrainerSettings, TrainRow


def main(model_folder: Path, rows_file: Path, output: Path, world_size: int) -> None:
    content = json.loads(rows_file.read_text())
    settings = TrainerSettings(**content["settings"])
    rows = [TrainRow(**row) for row in content["rows"]]
    trainer = Trainer.from_folder(model_folder, settings, world_size=world_size, device="cpu")
    log_probs = trainer.log_probs([row.prompt_token_ids for row in rows], [row.completion_token_ids for row in rows])
    metrics = [trainer.update(rows, step=step) for step in (1, 2)]
    trainer.save_state(output / "state")
    weights = trainer.export_weights("float32")
    if weights:
        save_file(weights, output / "weights.safetensors")
        (output / "metrics.json").write_text(json.dumps({"metrics": metrics, "log_probs": log_probs}))
    trainer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
