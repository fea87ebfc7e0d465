"""What the critic expects of each completion from each of its tokens on."""

from ratchet.config import RunConfig
from ratchet.data import schemas
from ratchet.data.parquet import read_table, table_from_rows, write_table
from ratchet.stages.base import Context, Input, Result, Stage, step_inputs
from ratchet.store.run import CRITIC_UPDATE, Run


class Values(Stage):
    """Score the step's rollouts with critic version step - 1; in the graph only where the estimator reads values."""

    name = "values"
    timing = "values"
    config_keys = ("critic.fsdp_config.dtype",)

    def needs(self, config: RunConfig) -> tuple[str, ...]:
        return ("rollout",)

    def inputs(self, run: Run, config: RunConfig, step: int | None) -> dict[str, Input]:
        assert step is not None
        return {
            **step_inputs(run, self.needs(config), step),
            "critic": Input(run.require(CRITIC_UPDATE, step - 1), "critic"),
        }

    def compute(self, context: Context) -> Result:
        columns = ["group_id", "sample_index", "prompt_token_ids", "completion_token_ids"]
        rollouts = read_table(context.run.store, context.inputs["rollouts"].artifact, schemas.ROLLOUTS).select(columns)
        rows = rollouts.to_pylist()
        scorer = context.residents.value_scorer(context.inputs["critic"])
        values = scorer.values([row["prompt_token_ids"] for row in rows], [row["completion_token_ids"] for row in rows])
        scored = [
            {"group_id": row["group_id"], "sample_index": row["sample_index"], "values": one}
            for row, one in zip(rows, values, strict=True)
        ]
        artifact = write_table(context.store, f"{context.folder}/values", table_from_rows(scored, schemas.VALUES))
        return Result(outputs={"values": artifact}, policy_version=context.inputs["critic"].manifest.step)
