"""Log-probs of the sampled tokens under the reference, or under the policy before its update."""

from typing import Literal

from ratchet.config import RunConfig
from ratchet.data import schemas
from ratchet.data.parquet import read_table, table_from_rows, write_table
from ratchet.stages.base import Context, Input, Result, Stage, step_inputs
from ratchet.store.run import POLICY_UPDATE, Run


class Scores(Stage):
    """Score the step's rollouts; in the graph only where the objective needs it."""

    config_keys = ("actor_rollout_ref.rollout.temperature", "actor_rollout_ref.actor.fsdp_config.dtype")

    def __init__(self, role: Literal["policy", "reference"]) -> None:
        self.role: Literal["policy", "reference"] = role
        self.name = f"{role}_scores"
        self.timing = {"policy": "old_log_prob", "reference": "ref"}[role]

    def needs(self, config: RunConfig) -> tuple[str, ...]:
        return ("rollout",)

    def inputs(self, run: Run, config: RunConfig, step: int | None) -> dict[str, Input]:
        assert step is not None
        version = step - 1 if self.role == "policy" else 0
        return {
            **step_inputs(run, self.needs(config), step),
            "policy": Input(run.require(POLICY_UPDATE, version), "policy"),
        }

    def compute(self, context: Context) -> Result:
        rollouts = read_table(context.run.store, context.inputs["rollouts"].artifact, schemas.ROLLOUTS)
        scorer = context.residents.scorer(self.role, context.inputs["policy"])
        log_probs = scorer.log_probs(
            rollouts["prompt_token_ids"].to_pylist(), rollouts["completion_token_ids"].to_pylist()
        )
        keys = rollouts.select(list(schemas.ROLLOUT_KEY)).to_pylist()
        rows = [key | {f"{self.role}_log_probs": values} for key, values in zip(keys, log_probs, strict=True)]
        artifact = write_table(
            context.store, f"{context.folder}/{self.name}", table_from_rows(rows, schemas.scores(self.role))
        )
        policy_version = context.inputs["policy"].manifest.content.step
        return Result(outputs={self.name: artifact}, policy_version=policy_version)
