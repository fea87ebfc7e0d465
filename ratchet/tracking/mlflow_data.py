"""What a run learns from, and is measured on, as MLflow's dataset inputs: names, digests and places, no data."""

import json
from typing import TYPE_CHECKING

from ratchet.store import layout
from ratchet.store.manifest import Manifest
from ratchet.store.run import Run

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput

PREPROCESS = "preprocess/"
"""What the names of stages begin with that bring data in."""
CONTEXTS = {"train": "training", "val": "validation"}
"""Split -> how MLflow calls what it is for; its pages show this beside the name."""
_DIGEST = 36
"""Characters of a digest that MLflow stores."""


def datasets(run: Run, manifest: Manifest) -> "list[DatasetInput]":
    """Return the tables of a preprocess stage; none for any other."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    if not manifest.content.stage.startswith(PREPROCESS):
        return []
    split = manifest.content.stage.removeprefix(PREPROCESS)
    found = []
    for role, artifact in manifest.provenance.artifacts.items():
        uri = f"{run.uri}/{artifact.folder}"
        dataset = Dataset(
            name=layout.stage_folder(manifest.content.stage, None),
            digest=artifact.digest[:_DIGEST],
            source_type="s3" if uri.startswith("s3://") else "local",
            source=json.dumps({"uri": uri}),
            profile=json.dumps({"num_rows": artifact.rows, "role": role}),
        )
        tags = {"mlflow.data.context": CONTEXTS.get(split, split), "ratchet.sha256": artifact.digest}
        found.append(DatasetInput(dataset, [InputTag(key, value) for key, value in tags.items()]))
    return found
