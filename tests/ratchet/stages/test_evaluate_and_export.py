"""What a run publishes at its end: held-out accuracy and a folder that serves."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ratchet.algorithms.statistics import wilson_interval
from ratchet.data import schemas
from ratchet.errors import ConfigError
from ratchet.grains import loop
from ratchet.stages.base_models import model_digest
from ratchet.stages.evaluate import accuracy_metrics
from ratchet.stages.mlmodel import mlmodel
from ratchet.store.artifacts import read_folder
from ratchet.store.run import POLICY_UPDATE
from tests.runs import (
    CUT,
    EMPTY,
    RIGHT,
    WRONG,
    one_step_config,
    prepared,
    table_rows,
    write_problems,
)


def _evaluation(prompt: str, reward: float, *, source: str = "a", is_parseable: bool = True) -> dict[str, Any]:
    return {"prompt_id": prompt, "reward": reward, "data_source": source, "is_parseable": is_parseable}


def test_accuracy_is_the_mean_over_prompts_of_each_data_source() -> None:
    rows = [
        _evaluation("p1", 1.0),
        _evaluation("p1", 0.0, is_parseable=False),
        _evaluation("p2", 1.0),
        _evaluation("p2", 1.0),
        _evaluation("q1", -1.0, source="b"),
        _evaluation("q2", 2.0, source="b"),
    ]
    low, high = wilson_interval(1.5, 2)
    assert accuracy_metrics(rows) == {
        "val-core/a/acc/mean@2": 0.75,
        "val-aux/a/parseable_ratio": 0.75,
        "val-aux/a/acc/ci95_low@2": low,
        "val-aux/a/acc/ci95_high@2": high,
        # Rewards outside 0 to 1 are no proportion: no interval.
        "val-core/b/acc/mean@1": 0.5,
        "val-aux/b/parseable_ratio": 1.0,
    }


def test_evaluation_grades_the_held_out_prompts(tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    held_out = write_problems(tmp_path / "held_out.jsonl", 4)
    config = one_step_config(tiny_model, problems, **{"data.val_files": str(held_out)})
    # The answers are 1, 3, 5, 7: the first is right.
    with prepared(tmp_path, config, RIGHT, WRONG, CUT, EMPTY) as session:
        loop.evaluate_base(session)
        manifest = session.store_run.require("evaluate", 0)
        rows = table_rows(session.store_run, "evaluate", "evaluations", schemas.EVALUATIONS, 0)
    assert [row["prompt_id"] for row in rows] == [f"val-{number:07d}" for number in range(4)]
    assert [row["reward"] for row in rows] == [1.0, 0.0, 0.0, 0.0]
    metrics = manifest.provenance.metrics
    assert metrics["val-core/openai/gsm8k/acc/mean@1"] == 0.25
    assert metrics["val-aux/openai/gsm8k/parseable_ratio"] == 0.5
    assert metrics["val-aux/openai/gsm8k/acc/ci95_low@1"] == pytest.approx(0.0456, abs=1e-4)
    assert metrics["val-aux/openai/gsm8k/acc/ci95_high@1"] == pytest.approx(0.6994, abs=1e-4)
    assert manifest.content.policy_version == 0


def test_a_run_without_held_out_prompts_cannot_be_evaluated(tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    from ratchet.stages.evaluate import Evaluate

    with prepared(tmp_path, one_step_config(tiny_model, problems)) as session:
        assert loop.evaluate_last(session) is None
        with pytest.raises(ConfigError, match=r"data\.val_files is not set"):
            session.run(Evaluate(), 0)


# -- export ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("step", [0, 1])
def test_an_export_loads_in_plain_transformers_and_is_the_policy(
    tmp_path: Path, tiny_model: Path, problems: Path, dtype: str, step: int
) -> None:
    from ratchet.stages.checkpoint_export import CheckpointExport

    config = one_step_config(tiny_model, problems, **{"actor_rollout_ref.rollout.dtype": dtype})
    with prepared(tmp_path, config) as session:
        if step:
            loop.run_step(session, 1)
        manifest = session.run(CheckpointExport(), step)
        run = session.store_run
    read_folder(run.store, manifest.output("export"), tmp_path / "export")
    read_folder(run.store, run.require(POLICY_UPDATE, step).output("policy"), tmp_path / "policy")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype="auto", local_files_only=True)
    weights = model.state_dict()
    for name, tensor in load_file(tmp_path / "policy" / "model.safetensors").items():
        assert weights[name].dtype == getattr(torch, dtype)
        assert torch.equal(weights[name], tensor.to(weights[name].dtype)), name
    assert manifest.provenance.metrics["export/max_log_prob_difference"] < 1e-3
    assert AutoTokenizer.from_pretrained(tmp_path / "export", local_files_only=True).chat_template
    assert (tmp_path / "export" / "generation_config.json").is_file()
    # A run that starts from it copies the model's files, and is known by their digest.
    assert model_digest(str(tmp_path / "export")) == manifest.output("export").digest
    assert manifest.output("mlmodel").folder == manifest.output("export").folder


@pytest.mark.parametrize(
    ("is_classifier", "outputs"),
    [
        (False, "['choices': Array({finish_reason: string (required), index: long (required), message: {content: "),
        (True, "['score': double (required)]"),
    ],
)
def test_mlflow_reads_what_an_export_takes_and_gives(tmp_path: Path, is_classifier: bool, outputs: str) -> None:
    from mlflow.models import Model
    from mlflow.types.llm import ChatMessage

    for name, data in mlmodel(is_classifier=is_classifier).items():
        (tmp_path / name).write_bytes(data)
    signature = Model.load(str(tmp_path)).signature
    assert signature is not None
    assert str(signature.outputs).startswith(outputs)
    message = signature.inputs.input_dict()["messages"].type.dtype
    assert {field.name for field in message.properties} <= ChatMessage(role="user", content="x").to_dict().keys()
    assert all(field.required for field in message.properties)
