"""One completion of a step with everything that was said of it, and the update that it fed.

Each table is one that the step's policy update was made from, proven by the manifests between the two; only the tables
of this step and the run's prompts are read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ratchet.data import schemas
from ratchet.data.join import prompts_by_id
from ratchet.data.parquet import read_table
from ratchet.errors import ConfigError, DamagedError, DataError, NotCommittedError
from ratchet.grains.audit.records import StageRecord
from ratchet.grains.status.chain import in_parallel
from ratchet.store import layout
from ratchet.store.artifacts import read_bytes
from ratchet.store.chain import Fault, manifest_key
from ratchet.store.lineage import Lineage
from ratchet.store.manifest import Artifact
from ratchet.store.run import CRITIC_UPDATE, POLICY_UPDATE, Run
from ratchet.tracking.show import no_rollouts

_BY_TOKEN = {
    "policy_scores": ("policy_log_probs", "sum_pi_squared"),
    "reference_scores": ("reference_log_probs",),
    "values": ("values",),
    "trajectories": ("advantages", "returns", "token_rewards", "loss_mask", "behaviour_log_probs"),
    "importance_weights": ("importance_weights",),
}
"""Table -> its columns with one entry for each completion token."""
_SCHEMAS = {
    "rollouts": schemas.ROLLOUTS,
    "rewards": schemas.REWARDS,
    "trajectories": schemas.TRAJECTORIES,
    "values": schemas.VALUES,
    "importance_weights": schemas.IMPORTANCE_WEIGHTS,
    "reference_scores": schemas.scores("reference"),
}
_GROUP = ("behaviour_source", "group_reward_mean", "group_reward_std", "group_size")
_TOKENIZER = "tokenizer.json"
_PROMPTS = layout.stage_folder("preprocess/train", None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One completion and what became of it."""

    run: str
    step: int
    group_id: str
    sample_index: int
    group_rewards: tuple[float | None, ...]
    """Of all samples of the group, by their index; None where one is not graded yet."""
    prompt_id: str
    prompt: Mapping[str, Any]
    """Its row among the prompts: messages, data_source, reward_model, extra_info as JSON."""
    prompt_token_ids: Sequence[int]
    completion: str
    finish_reason: str
    policy_version: int
    """The policy that sampled it."""
    seed: int
    tokens: Mapping[str, Sequence[Any]]
    """Column -> one entry for each completion token: token_ids, texts, sampler_log_probs, advantages, loss_mask, ..."""
    reward: Mapping[str, Any] | None
    """reward, reward_breakdown, extracted, is_parseable and error; None before it is graded."""
    group: Mapping[str, Any]
    """How it stands in its group: behaviour_source, group_reward_mean, group_reward_std, group_size."""
    update: StageRecord | None
    """The policy update that it fed; None before that is committed."""
    update_metrics: Mapping[str, float]
    """Of that update."""
    stages: tuple[StageRecord, ...]
    """Those whose tables were read."""
    faults: tuple[Fault, ...]


def find_sample(run: Run, step: int, wanted: str) -> Sample:
    """Return the completion that `wanted` names: GROUP/INDEX, or GROUP or PROMPT_ID for the first of its samples.

    GROUP is <step>/<prompt_id>, and may be left at the prompt's id. ConfigError for one that the step has not;
    NotCommittedError without committed rollouts, DamagedError where they are others than those that it learnt from.
    """
    lineage = _step_lineage(run, step)
    artifacts = _artifacts(lineage, step)
    tables = dict(
        zip(artifacts, in_parallel(lambda role: _read(run, role, artifacts[role]), list(artifacts)), strict=True)
    )
    group_id, index = _parse(step, wanted)
    rollouts = _group(tables["rollouts"], group_id)
    if not rollouts:
        raise ConfigError(_unknown(step, wanted, tables["rollouts"]))
    if index not in (None, *rollouts):
        raise ConfigError(f"{group_id} has the samples {', '.join(map(str, rollouts))}, and no sample {index}")
    chosen = min(rollouts) if index is None else index
    rollout = rollouts[chosen]
    others = {role: _group(table, group_id) for role, table in tables.items() if role != "rollouts"}
    rows = {role: found[chosen] for role, found in others.items() if chosen in found}
    reward = rows.get("rewards")
    update = lineage.manifests.get(layout.stage_folder(POLICY_UPDATE, step))
    records = {place: StageRecord.of(one, lineage.sha256[place]) for place, one in lineage.manifests.items()}
    return Sample(
        run=run.uri,
        step=step,
        group_id=group_id,
        sample_index=chosen,
        group_rewards=tuple(
            others["rewards"][one]["reward"] if one in others.get("rewards", {}) else None for one in sorted(rollouts)
        ),
        prompt_id=rollout["prompt_id"],
        prompt=_prompt(lineage, rollout["prompt_id"]),
        prompt_token_ids=rollout["prompt_token_ids"],
        completion=rollout["completion"],
        finish_reason=rollout["finish_reason"],
        policy_version=rollout["policy_version"],
        seed=rollout["seed"],
        tokens=_tokens(run, rollout, rows),
        reward=None if reward is None else _reward(reward),
        group={name: rows["trajectories"][name] for name in _GROUP} if "trajectories" in rows else {},
        update=records.get(layout.stage_folder(POLICY_UPDATE, step)),
        update_metrics={} if update is None else update.metrics,
        stages=tuple(one for one in records.values() if one.stage != POLICY_UPDATE),
        faults=tuple(lineage.faults),
    )


def _step_lineage(run: Run, step: int) -> Lineage:
    """Return the manifests of the step: from its update on, or as far as it has come."""
    lineage = Lineage(run)
    for stage in (POLICY_UPDATE, "advantage", "reward", "rollout"):
        try:
            lineage.trace(stage, step, within=step)
            break
        except NotCommittedError:
            continue
    for place in (layout.stage_folder("rollout", step), _PROMPTS):
        if place not in lineage.manifests:
            # What is there, and is not what the step was made from, is no source for a sample.
            told = [str(fault) for fault in lineage.faults if fault.place == manifest_key(place)]
            raise DamagedError(f"run {run.uri}: {told[0]}") if told else no_rollouts(run, step)
    if layout.stage_folder("values", step) in lineage.manifests:
        # The critic learns from it too, and no policy is made from what it learns.
        lineage.read([layout.stage_folder(CRITIC_UPDATE, step)])
    return lineage


def _artifacts(lineage: Lineage, step: int) -> dict[str, Artifact]:
    """Return role -> table, of those that say something of single completions."""
    found: dict[str, Artifact] = {}
    for one in lineage.manifests.values():
        if one.step == step:
            wanted = ("rollouts", "rewards", "token_rewards", *_BY_TOKEN)
            found |= {role: artifact for role, artifact in one.provenance.artifacts.items() if role in wanted}
    # What the reward gave to single tokens is in the trajectories, once there are any.
    if "trajectories" in found:
        found.pop("token_rewards", None)
    return found


def _read(run: Run, role: str, artifact: Artifact) -> pa.Table:
    if role == "token_rewards":
        return read_table(run.store, artifact, schemas.TOKEN_REWARDS)
    if role != "policy_scores":
        return read_table(run.store, artifact, _SCHEMAS[role])
    try:
        return read_table(run.store, artifact, schemas.scores("policy"))
    except DataError:
        return read_table(run.store, artifact, schemas.scores("policy", with_sum_pi_squared=True))


def _parse(step: int, wanted: str) -> tuple[str, int | None]:
    *before, last = wanted.strip("/").split("/")
    index = int(last) if before and last.isdecimal() else None
    parts = before if index is not None else [*before, last]
    if len(parts) == 1:
        return f"{step:06d}/{parts[0]}", index
    if len(parts) != 2 or not parts[0].isdecimal() or int(parts[0]) != step:
        raise ConfigError(
            f"{wanted!r}: expected GROUP, GROUP/INDEX or PROMPT_ID of step {step}: {step:06d}/train-0000007/0"
        )
    return f"{step:06d}/{parts[1]}", index


def _group(table: pa.Table, group_id: str) -> dict[int, dict[str, Any]]:
    """Return sample_index -> row, of one group."""
    return {row["sample_index"]: row for row in table.filter(pc.equal(table["group_id"], group_id)).to_pylist()}


def _unknown(step: int, wanted: str, rollouts: pa.Table) -> str:
    groups = rollouts["group_id"].unique().to_pylist()
    return f"step {step} has no completion of {wanted!r}; its {len(groups)} groups are {', '.join(groups[:5])}" + (
        ", ..." if len(groups) > 5 else ""
    )


def _prompt(lineage: Lineage, prompt_id: str) -> dict[str, Any]:
    prompts = lineage.manifests[_PROMPTS].output("prompts")
    return prompts_by_id(read_table(lineage.run.store, prompts, schemas.PROMPTS), [prompt_id])[prompt_id]


def _reward(row: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in row.items() if name not in schemas.ROLLOUT_KEY}
    return kept | {"reward_breakdown": dict(kept["reward_breakdown"] or ())}


def _tokens(run: Run, rollout: Mapping[str, Any], rows: Mapping[str, Mapping[str, Any]]) -> dict[str, list[Any]]:
    ids = rollout["completion_token_ids"]
    texts = _texts(run, ids)
    columns: dict[str, list[Any] | None] = {
        "token_ids": ids,
        "texts": texts,
        "sampler_log_probs": rollout["sampler_log_probs"],
        "token_rewards": rows.get("token_rewards", {}).get("token_rewards"),
    }
    for role, names in _BY_TOKEN.items():
        columns |= {name: rows[role].get(name) for name in names if role in rows}
    return {name: values for name, values in columns.items() if values is not None}


def _texts(run: Run, ids: Sequence[int]) -> list[str] | None:
    """Return what each token says; None where version 0 has no tokenizer in one file."""
    from tokenizers import Tokenizer

    base = run.manifest(POLICY_UPDATE, 0)
    files = () if base is None else base.output("policy").files
    entry = next((one for one in files if one.path == _TOKENIZER), None)
    if base is None or entry is None:
        return None
    [data] = read_bytes(run.store, Artifact(folder=base.output("policy").folder, files=(entry,)))
    tokenizer = Tokenizer.from_str(data.decode())
    return [tokenizer.decode([one], skip_special_tokens=False) for one in ids]
