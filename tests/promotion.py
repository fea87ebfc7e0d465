"""Decisions and finished runs for the tests of promotion: committed as by training, with nothing trained."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ratchet.config import RunConfig, load_config
from ratchet.config.semantics import semantic
from ratchet.data import schemas
from ratchet.data.parquet import table_from_rows, write_table
from ratchet.store import layout
from ratchet.store.artifacts import write_bytes
from ratchet.store.champions import Bars, BaseModel, Decision, Evaluation, Export, Improvement, TrainingData
from ratchet.store.manifest import Artifact, Content, Manifest, Provenance
from ratchet.store.run import Run

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "tiny.yaml"
BASE = {"config.json": b"{}", "model.safetensors": b"the base"}

Rewards = Sequence[float | Sequence[float]]
"""Reward of each prompt's only sample, or those of its samples."""


def decision(number: int, verdict: Any = "promoted", targets: int | None = None, **changes: Any) -> Decision:
    """A decision of the name "math"; a promoted one targets itself."""
    found = Decision(
        number=number,
        name="math",
        verdict=verdict,
        run=f"s3://bucket/runs/night-{number}",
        step=50,
        export=Export(uri=f"s3://bucket/runs/night-{number}/step-000050/export", digest=f"{number:064x}"),
        base=BaseModel(path="some/model", digest="b" * 64),
        evaluation=Evaluation(
            accuracy=0.5, low=0.25, high=0.75, prompts=12, table="e" * 64, held_out="f" * 64, settings="5" * 64
        ),
        compared_with=None,
        improvement=None,
        bars=Bars(min_accuracy=0.25, min_improvement=0.0, significant=True),
        reasons=() if verdict == "promoted" else ("no better",),
        data=TrainingData(train="7" * 64, source="train.jsonl", source_digest="8" * 64),
        config_digest="c" * 64,
        submission_id="",
        by="a test",
        time=1_700_000_000.5,
        targets=number if verdict == "promoted" else targets,
    )
    return dataclasses.replace(found, **changes)


IMPROVEMENT = Improvement(
    mean=0.25,
    low=0.125,
    high=0.375,
    champion_accuracy=0.25,
    champion_table="d" * 64,
    measured_in="s3://bucket/runs/night-1/step-000050",
)


def promotion_config(**overrides: Any) -> RunConfig:
    """A run's config whose promotion has the name "math" and asks for nothing; `overrides` are dotted keys."""
    values = {
        "actor_rollout_ref.model.path": "some/model",
        "data.train_files": "train.jsonl",
        "data.val_files": "val.jsonl",
        "trainer.logger": [],
        "promotion.name": "math",
        "promotion.significant": False,
        **overrides,
    }
    return load_config(CONFIG, [f"{key}={json.dumps(value)}" for key, value in values.items()])


def finished_run(
    root: str,
    run_id: str,
    rewards: Rewards | Mapping[int, Rewards],
    *,
    config: RunConfig | None = None,
    base: Mapping[str, bytes] = BASE,
    export: Mapping[str, bytes] | None = None,
    held_out: str = "val",
    sources: Mapping[str, str] | None = None,
    is_exported: bool = True,
) -> tuple[Run, RunConfig]:
    """A run of one step. `rewards` are those of step 1, or of each evaluated step; `base` and `export` are files."""
    found = config or promotion_config()
    run = Run(root, run_id)
    run.create_or_check(semantic(found))
    run.claim({"submission_id": None, "config": found.model_dump(mode="json")})
    evaluated = rewards if isinstance(rewards, Mapping) else {1: rewards}
    chain = _Chain(run)
    chain.commit("policy_update", 0, "policy", files=base)
    chain.commit("preprocess/train", None, "prompts", files={"p": b"train"}, inputs={"source": "5" * 64})
    val = chain.commit("preprocess/val", None, "prompts", files={"p": held_out.encode()})
    chain.commit("policy_update", 1, "policy", files={"model.safetensors": run_id.encode()})
    for step, values in evaluated.items():
        chain.commit("evaluate", step, "evaluations", rewards=values, inputs={"prompts": val, **(sources or {})})
    if is_exported:
        chain.commit("checkpoint_export", 1, "export", files=export or exported_files(run_id))
    return run, found


def exported_files(run_id: str) -> dict[str, bytes]:
    """The files of the export of `finished_run`, for a run that starts from them."""
    return {"config.json": b"{}", "model.safetensors": run_id.encode()}


@dataclasses.dataclass
class _Chain:
    run: Run

    def commit(
        self,
        stage: str,
        step: int | None,
        role: str,
        *,
        files: Mapping[str, bytes] | None = None,
        rewards: Rewards = (),
        inputs: Mapping[str, str] | None = None,
    ) -> str:
        attempt = self.run.new_attempt()
        folder = f"{layout.attempt_folder(stage, step, attempt)}/{role}"
        if files is not None:
            artifact = write_bytes(self.run.store, folder, files)
        else:
            artifact = _evaluations(self.run, folder, rewards)
        content = Content(
            step=step,
            stage=stage,
            policy_version=step,
            inputs={**(inputs or {})},
            outputs={role: artifact.digest},
            config="c" * 64,
        )
        provenance = Provenance(
            run_id=self.run.run_id,
            attempt=attempt,
            epoch=self.run.check_ownership().epoch,
            artifacts={role: artifact},
            previous={},
            started=1.0,
            ended=2.0,
            device="cpu",
            gpu_seconds=0.0,
            code_revision="r",
            image="",
        )
        self.run.commit(Manifest(content=content, provenance=provenance))
        return artifact.digest


def _evaluations(run: Run, folder: str, rewards: Rewards) -> Artifact:
    rows = [
        {
            "prompt_id": f"val-{number:07d}",
            "sample_index": index,
            "data_source": "a" if number % 2 else "b",
            "prompt_token_ids": [1],
            "completion_token_ids": [2],
            "completion": "#### 1",
            "finish_reason": "stop",
            "reward": float(reward),
            "extracted": "1",
            "is_parseable": True,
        }
        for number, values in enumerate(rewards)
        for index, reward in enumerate(values if isinstance(values, Sequence) else [values])
    ]
    return write_table(run.store, folder, table_from_rows(rows, schemas.EVALUATIONS))
