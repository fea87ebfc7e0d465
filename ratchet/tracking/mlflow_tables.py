"""Completions in MLflow, with their rewards: a table for every few steps and for every evaluation.

Traps: `mlflow.log_table` appends to what is there, so that what is sent twice stands there twice; here every table is a
file of its own, which is replaced. And MLflow's pages show as a table only the files that a tag of the run lists, whose
length is limited.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ratchet.store import layout
from ratchet.store.manifest import Manifest
from ratchet.store.run import Run
from ratchet.tracking.report_completions import Example, Prompts, evaluated_rows, evenly, graded_rows

if TYPE_CHECKING:
    from mlflow import MlflowClient

FOLDER = "completions"
"""Of tables among MLflow's artifacts."""
LISTED_TAG = "mlflow.loggedArtifacts"
"""What MLflow's pages show as tables, as JSON: [{"path": .., "type": "table"}, ..]."""
ROWS = 16
"""Of a table."""

_MAX_TAG = 8000
"""Characters of a tag's value that MLflow stores."""
_MAX_TEXT = 3000
"""Characters of one cell."""
_MAX_PARTS = 8
"""Parts of a reward that have a column."""
_MAX_PROMPTS = 64 << 20
"""Bytes of the table of prompts that is read for the sake of a few texts."""
_GRADED, _EVALUATED = "reward", "evaluate"

Row = dict[str, Any]


class CompletionTables:
    """Sends `completions/train/step-000010.json` for every `every`-th step and the first, one in `completions/val` for
    every evaluation: `ROWS` completions from the best to the worst reward.
    """

    def __init__(self, every: int) -> None:
        self._every = every

    def wants(self, manifest: Manifest) -> bool:
        """Whether the manifest is that of rewards, of a step that is shown, or of an evaluation by sampling."""
        content = manifest.content
        if content.stage == _EVALUATED:
            # An evaluation on examples has losses and no completions.
            return "examples" not in content.inputs
        is_shown = content.step == 1 or (content.step or 0) % self._every == 0
        return content.stage == _GRADED and content.step is not None and is_shown

    def send(self, client: "MlflowClient", mlflow_run_id: str, run: Run, manifest: Manifest) -> None:
        """Make the table from the committed ones and put it in the place of its like."""
        step = manifest.content.step or 0
        if manifest.content.stage == _EVALUATED:
            split, table = "val", held_out_table(run, step)
        else:
            split, table = "train", graded_table(run, step)
        text = json.dumps(table, ensure_ascii=False, allow_nan=False)
        client.log_text(mlflow_run_id, text, f"{FOLDER}/{split}/{layout.step_folder(step)}.json")
        _list_tables(client, mlflow_run_id)


def graded_table(run: Run, step: int) -> dict[str, list[Any]]:
    """Return `ROWS` of a step's completions, evenly from the best to the worst, as {"columns": [..], "data": [[..]]}.

    Every column is there for every row; `prompt` and `completion` come first, which MLflow compares by default.
    """
    return _table(run, "train", evenly(_ranked(graded_rows(run, step)), ROWS))


def held_out_table(run: Run, step: int) -> dict[str, list[Any]]:
    """Return the first completion of `ROWS` held-out prompts, the same ones at each evaluation, as `graded_table`."""
    firsts = sorted(
        (row for row in evaluated_rows(run, step) if row["sample_index"] == 0), key=lambda row: str(row["prompt_id"])
    )
    return _table(run, "val", _ranked(evenly(firsts, ROWS)))


def _ranked(rows: Sequence[Row]) -> list[Row]:
    """Return the rows from the best to the worst reward; those whose reward is not finite come last."""

    def key(row: Row) -> tuple[float, str, int]:
        worth = -row["reward"] if math.isfinite(row["reward"]) else math.inf
        return worth, row["prompt_id"], row["sample_index"]

    return sorted(rows, key=key)


def _table(run: Run, split: str, rows: Sequence[Row]) -> dict[str, list[Any]]:
    prompts = Prompts(run, split, most_bytes=_MAX_PROMPTS)
    shown = [_cells(row, prompts.example(row)) for row in rows]
    parts = sorted({name for example, _ in shown for name in example.parts})[:_MAX_PARTS]
    records = [cells | {f"reward/{name}": example.parts.get(name) for name in parts} for example, cells in shown]
    columns = list(records[0]) if records else []
    return {"columns": columns, "data": [[_cell(record[name]) for name in columns] for record in records]}


def _cells(row: Row, example: Example) -> tuple[Example, dict[str, Any]]:
    return example, {
        # Of prompts that are too many to be looked up, their ids.
        "prompt": example.prompt or row["prompt_id"],
        "completion": example.completion,
        "reward": example.reward,
        "ground_truth": example.wanted,
        "extracted": example.extracted,
        "finish_reason": example.finish_reason,
        "error": example.error,
        "prompt_id": row["prompt_id"],
        "sample_index": row["sample_index"],
        "step": example.step,
    }


def _cell(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # no number of JSON's
    if isinstance(value, str) and len(value) > _MAX_TEXT:
        # Of a long completion its end says most.
        left = (_MAX_TEXT - 40) // 2
        return f"{value[:left]}\n[.. {len(value) - 2 * left} characters ..]\n{value[-left:]}"
    return value


def _list_tables(client: "MlflowClient", mlflow_run_id: str) -> None:
    """Set the tag by which MLflow shows files as tables: our newest ones, and whatever of others it listed."""
    tags = client.get_run(mlflow_run_id).data.tags
    listed = _listed(tags)
    others = [entry for entry in listed if not str(entry.get("path", "")).startswith(f"{FOLDER}/")]
    # As they are there, not as this process knows: another one may have sent some at the same time.
    there = (
        file.path for split in layout.DATA_SPLITS for file in client.list_artifacts(mlflow_run_id, f"{FOLDER}/{split}")
    )
    ours = sorted((path for path in there if path.endswith(".json")), key=lambda path: path.rpartition("/")[2])
    wanted = [*others, *({"path": path, "type": "table"} for path in ours)]
    while len(wanted) > len(others) and len(json.dumps(wanted)) > _MAX_TAG:
        del wanted[len(others)]
    if wanted != listed:
        client.set_tag(mlflow_run_id, LISTED_TAG, json.dumps(wanted))


def _listed(tags: Mapping[str, str]) -> list[dict[str, Any]]:
    try:
        found = json.loads(tags.get(LISTED_TAG, "[]"))
    except ValueError:
        return []
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []
