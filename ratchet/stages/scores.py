"""Log-probs of the sampled tokens under the reference, or under the policy before its update."""

from typing import Literal

import pyarrow as pa

from ratchet.config import RunConfig
from ratchet.data import schemas
from ratchet.data.parquet import read_table, write_table
from ratchet.stages.base import Context, Input, Result, Stage, step_inputs
from ratchet.stages.example_rows import EXAMPLES_OF_STEP, examples_of, pair_keys, pair_sides, step_examples
from ratchet.store.run import POLICY_UPDATE, Run


class Scores(Stage):
    """Score the step's rollouts; in the graph only where the objective needs it."""

    config_keys = ("actor_rollout_ref.rollout.temperature", "actor_rollout_ref.actor.fsdp_config.dtype")

    def __init__(self, role: Literal["policy", "reference"]) -> None:
        self.role: Literal["policy", "reference"] = role
        self.name = f"{role}_scores"
        self.timing = {"policy": "old_log_prob", "reference": "ref"}[role]

    def keys(self, config: RunConfig) -> tuple[str, ...]:
        more = ("algorithm.adv_estimator",) if self._with_squares(config) else ()
        return (*self.config_keys, *more)

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
        prompts, completions = (rollouts[f"{part}_token_ids"].to_pylist() for part in ("prompt", "completion"))
        with_squares = self._with_squares(context.config)
        columns: dict[str, list[list[float]]] = {}
        if with_squares:
            columns[f"{self.role}_log_probs"], columns["sum_pi_squared"] = scorer.scores_with_sum_pi_squared(
                prompts, completions
            )
        else:
            columns[f"{self.role}_log_probs"] = scorer.log_probs(prompts, completions)
        keys = {name: rollouts[name].to_pylist() for name in schemas.ROLLOUT_KEY}
        table = pa.table({**keys, **columns}, schema=schemas.scores(self.role, with_sum_pi_squared=with_squares))
        artifact = write_table(context.store, f"{context.folder}/{self.name}", table)
        policy_version = context.inputs["policy"].manifest.step
        return Result(outputs={self.name: artifact}, policy_version=policy_version)

    def _with_squares(self, config: RunConfig) -> bool:
        return self.role == "policy" and "sum_pi_squared" in config.advantage_needs


class PairScores(Stage):
    """Score both completions of the step's pairs under the reference, which is version 0; in DPO's graph alone."""

    name = "reference_scores"
    timing = "ref"
    config_keys = (*EXAMPLES_OF_STEP, "actor_rollout_ref.actor.fsdp_config.dtype")

    def inputs(self, run: Run, config: RunConfig, step: int | None) -> dict[str, Input]:
        return {"examples": examples_of(run, "train"), "policy": Input(run.require(POLICY_UPDATE, 0), "policy")}

    def compute(self, context: Context) -> Result:
        assert context.step is not None
        examples = step_examples(context.run.store, context.inputs["examples"], context.config, context.step)
        scorer = context.residents.scorer("reference", context.inputs["policy"])
        columns = {**pair_keys(examples, context.step), "reference_log_probs": scorer.log_probs(*pair_sides(examples))}
        table = pa.table(columns, schema=schemas.scores("reference"))
        artifact = write_table(context.store, f"{context.folder}/{self.name}", table)
        return Result(outputs={self.name: artifact}, policy_version=0)
