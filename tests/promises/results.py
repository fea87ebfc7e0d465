"""What a finished run holds, for the tests of promises."""

from typing import Any

from ratchet.data import schemas
from ratchet.store.run import Run
from tests.runs import table_rows


def run_of(result: Any) -> Run:
    """The run that `PPOTrainer.fit` returned the result of."""
    root, _, run_id = result.run.removeprefix("file://").rpartition("/")
    return Run(root, run_id)


def stages(result: Any, step: int = 1) -> list[str]:
    """What was committed in a step, in order."""
    return [manifest.content.stage for manifest in run_of(result).step_manifests(step)]


def rewards(result: Any, step: int = 1) -> list[dict[str, Any]]:
    """The rewards table's rows, each breakdown as a dict."""
    rows = table_rows(run_of(result), "reward", "rewards", schemas.REWARDS, step)
    return [{**row, "reward_breakdown": dict(row["reward_breakdown"])} for row in rows]


def rollouts(result: Any, step: int = 1) -> list[dict[str, Any]]:
    """The rollouts table's rows."""
    return table_rows(run_of(result), "rollout", "rollouts", schemas.ROLLOUTS, step)


def trajectories(result: Any, step: int = 1) -> list[dict[str, Any]]:
    """The trajectories table's rows."""
    return table_rows(run_of(result), "advantage", "trajectories", schemas.TRAJECTORIES, step)


def prompts(result: Any) -> dict[str, dict[str, Any]]:
    """prompt_id -> the row of the training prompts."""
    return _training_data(result, "prompts", "prompt_id", schemas.PROMPTS)


def examples(result: Any) -> dict[str, dict[str, Any]]:
    """example_id -> the row of the training examples of an offline objective."""
    return _training_data(result, "examples", "example_id", schemas.EXAMPLES)


def _training_data(result: Any, role: str, key: str, schema: Any) -> dict[str, dict[str, Any]]:
    from ratchet.data.parquet import read_table

    run = run_of(result)
    table = read_table(run.store, run.require("preprocess/train", None).output(role), schema)
    return {row[key]: row for row in table.to_pylist()}
