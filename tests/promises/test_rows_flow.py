"""Rows 1 to 4, 11 and 12 of the promises: a run declared as objects, as a user of the public package types it."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from ratchet import (
    AdaptiveKLController,
    FixedKLController,
    FSDPPolicyUpdate,
    GAEAdvantage,
    GRPOAdvantage,
    GSM8KReward,
    HFRollout,
    PPOTrainer,
    RLDataFlow,
    VLLMRollout,
)
from ratchet.data import schemas
from tests.kfp_endpoint import kfp_endpoint
from tests.promises.results import rollouts, run_of, stages, trajectories
from tests.runs import table_rows

KL = "actor/reward_kl_penalty"


class ByLength:
    """A reward that differs within most groups."""

    def __call__(self, data: Any) -> list[float]:
        return [float(sum(item.completion_token_ids)) % 7 for item in data]


def _flow(model: Path, advantage: Any, **update: Any) -> RLDataFlow:
    return RLDataFlow(
        rollout=HFRollout(str(model), temperature=1.0, n=2, max_tokens=6, dtype="float32"),
        reward=ByLength(),
        advantage=advantage,
        policy_update=FSDPPolicyUpdate(lr=1e-3, dtype="float32", **update),
    )


@pytest.fixture(scope="module")
def grpo(tiny_model: Path, problems: Path, rest: Any) -> Any:
    flow = _flow(tiny_model, GRPOAdvantage())
    return PPOTrainer(data_flow=flow, config=rest(problems)).fit(run_id="grpo")


@pytest.fixture(scope="module")
def ppo(tiny_model: Path, problems: Path, rest: Any) -> Any:
    flow = _flow(tiny_model, GAEAdvantage(gamma=0.9, lam=0.8, critic_model=str(tiny_model), critic_lr=1e-2))
    config = rest(problems, critic={"fsdp_config": {"dtype": "float32"}}, trainer={"total_training_steps": 2})
    return PPOTrainer(data_flow=flow, config=config).fit(run_id="ppo")


def test_row_01_a_flow_and_a_trainer_run_the_whole_thing_here(grpo: Any) -> None:
    assert grpo.steps == 1
    assert stages(grpo) == ["rollout", "reward", "advantage", "policy_update", "checkpoint_export"]
    assert (Path(grpo.export.removeprefix("file://")) / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_row_01_the_same_flow_is_written_as_a_pipeline_and_started_on_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # where kfp keeps its own
    flow = RLDataFlow(
        rollout=VLLMRollout("Qwen/Qwen2.5-0.5B-Instruct"),
        reward=GSM8KReward(),
        advantage=GRPOAdvantage(),
        policy_update=FSDPPolicyUpdate(),
    )
    path = tmp_path / "pipeline.yaml"
    flow.compile(path)
    written = next(iter(yaml.safe_load_all(path.read_text())))
    embedded = written["root"]["inputDefinitions"]["parameters"]["config"]["defaultValue"]
    assert RLDataFlow.from_config(yaml.safe_load(embedded)) == flow
    with kfp_endpoint() as (url, seen):
        started = flow.submit(host=url, root="s3://bucket/runs", run_id="first")
    assert started.run == "s3://bucket/runs/first"
    (sent,) = [body for method, place, body in seen if method == "POST" and "/runs" in place]
    root = sent["pipeline_spec"]["pipeline_spec"]["root"]
    assert root["inputDefinitions"]["parameters"]["config"]["defaultValue"] == embedded


def test_row_02_parts_have_names_and_a_printed_flow_shows_parts_config_and_graph() -> None:
    flow = RLDataFlow(
        rollout=VLLMRollout("Qwen/Qwen2.5-0.5B-Instruct", n=4),
        reward=GSM8KReward(),
        advantage=GRPOAdvantage(kl_coef=0.001),
        policy_update=FSDPPolicyUpdate(lr=1e-6),
    )
    assert flow.rollout.name == "vllm"
    assert flow.advantage.name == "grpo"
    lines = str(flow).splitlines()
    assert "  rollout        VLLMRollout(model='Qwen/Qwen2.5-0.5B-Instruct', n=4)" in lines
    assert "  advantage      GRPOAdvantage(kl_coef=0.001)" in lines
    assert "  actor_rollout_ref.model.path: Qwen/Qwen2.5-0.5B-Instruct" in lines
    assert "  actor_rollout_ref.actor.use_kl_loss: True" in lines
    graph = lines[lines.index("stages of a step") + 1 :]
    assert [line.split()[0] for line in graph] == [
        "rollout",
        "reward",
        "advantage",
        "reference_scores",
        "policy_update",
    ]
    assert graph[-1].split("<- ")[1] == "rollout, advantage, reference_scores"


def test_row_03_swapping_the_advantage_alone_adds_critic_values_and_value_loss(grpo: Any, ppo: Any) -> None:
    assert set(stages(ppo)) - set(stages(grpo)) == {"values", "critic_update"}
    assert set(stages(grpo)) <= {*stages(ppo), "checkpoint_export"}
    assert "critic/vf_loss" in ppo.metrics
    assert "critic/vf_loss" not in grpo.metrics
    printed = str(_flow(Path("m"), GAEAdvantage()))
    assert "values" in printed
    assert "critic_update" in printed
    assert "critic" not in str(_flow(Path("m"), GRPOAdvantage()))


def test_row_04_the_rollout_is_the_only_line_that_changes_to_leave_vllm(
    tiny_model: Path, problems: Path, rest: Any
) -> None:
    arguments: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "max_tokens": 6, "n": 2}
    arguments |= {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.4, "dtype": "float32"}
    others = {"reward": ByLength(), "advantage": GRPOAdvantage(), "policy_update": FSDPPolicyUpdate(dtype="float32")}
    before = RLDataFlow(rollout=VLLMRollout(str(tiny_model), **arguments), **others)
    with pytest.warns(UserWarning, match="HFRollout has no use for tensor_parallel_size, gpu_memory_utilization"):
        after = RLDataFlow(rollout=HFRollout(str(tiny_model), **arguments), **others)
    old, new = (flow.config(rest(problems)).model_dump() for flow in (before, after))
    assert old["actor_rollout_ref"]["rollout"].pop("name") == "vllm"
    assert new["actor_rollout_ref"]["rollout"].pop("name") == "hf"
    assert old == new
    assert PPOTrainer(data_flow=after, config=rest(problems)).fit(run_id="left-vllm").steps == 1


def test_row_11_every_argument_of_grpo_does_what_it_says(tiny_model: Path, problems: Path, rest: Any) -> None:
    advantage = GRPOAdvantage(
        kl_coef=0.05,
        kl_type="low_var_kl",
        kl_ctrl=AdaptiveKLController(init_kl_coef=0.05, target=1e-6, horizon=100),
        gamma=1.0,
        lam=0.95,
        norm_adv_by_std=False,
    )
    # A rate at which the policy has left the reference by the second step, if not by far.
    flow = RLDataFlow(
        rollout=HFRollout(str(tiny_model), n=2, max_tokens=6, dtype="float32"),
        reward=ByLength(),
        advantage=advantage,
        policy_update=FSDPPolicyUpdate(lr=3e-4, entropy_coeff=0.01, dtype="float32"),
    )
    config = flow.config(rest(problems))
    assert (config.algorithm.kl_penalty, config.algorithm.gamma, config.algorithm.lam) == ("low_var_kl", 1.0, 0.95)
    result = PPOTrainer(data_flow=flow, config=rest(problems, trainer={"total_training_steps": 3})).fit(run_id="kl")
    steps = [run_of(result).require("advantage", step).provenance.metrics for step in (1, 2, 3)]
    coefficients = [metrics[f"{KL}_coeff"] for metrics in steps]
    assert coefficients[0] == 0.05
    for before, after, metrics in zip(coefficients, coefficients[1:], steps, strict=False):
        # arXiv:1909.08593, section 2.2: the error is clipped to 0.2, and there are 4 rollouts to a horizon of 100.
        error = max(-0.2, min(0.2, metrics[KL] / 1e-6 - 1))
        assert after == pytest.approx(before * (1 + error * 4 / 100))
    assert steps[1][KL] < 0.08, "far below the default target"
    assert coefficients[2] > coefficients[1], "and above this one"

    # k3 of policy and reference on every token, and rewards less their group's mean, without a deviation.
    run = run_of(result)
    reference = table_rows(run, "reference_scores", "reference_scores", schemas.scores("reference"), 2)
    found = trajectories(result, 2)
    by_key = {(row["group_id"], row["sample_index"]): row["reference_log_probs"] for row in reference}
    scores = table_rows(run, "reward", "rewards", schemas.REWARDS, 2)
    outcome = {(row["group_id"], row["sample_index"]): row["reward"] for row in scores}
    totals: dict[tuple[str, int], float] = {}
    for row in found:
        key = (row["group_id"], row["sample_index"])
        penalty = sum(_k3(own, other) for own, other in zip(row["behaviour_log_probs"], by_key[key], strict=True))
        totals[key] = outcome[key] - coefficients[1] * penalty
    for row in found:
        group = [total for (group_id, _), total in totals.items() if group_id == row["group_id"]]
        expected = totals[row["group_id"], row["sample_index"]] - sum(group) / len(group)
        assert row["advantages"] == pytest.approx([expected] * len(row["advantages"]), abs=1e-4)


def _k3(log_prob: float, reference: float) -> float:
    from math import exp

    return exp(reference - log_prob) - (reference - log_prob) - 1


def test_row_11_a_coefficient_alone_penalises_in_the_loss_and_the_deviation_is_divided_by(
    tiny_model: Path, problems: Path, rest: Any
) -> None:
    flow = _flow(tiny_model, GRPOAdvantage(0.1, "low_var_kl"), entropy_coeff=0.01)
    config = rest(problems, trainer={"total_training_steps": 2})
    result = PPOTrainer(data_flow=flow, config=config).fit(run_id="kl-in-loss")
    assert result.metrics["actor/kl_coef"] == 0.1
    assert result.metrics["actor/kl_loss"] > 0
    for row in trajectories(result):
        # Two rewards a and b are (a - b) / 2 from their mean, and their sample deviation is |a - b| / sqrt(2).
        size = 0.0 if row["group_reward_std"] == 0 else 0.5**0.5
        assert [abs(value) for value in row["advantages"]] == pytest.approx([size] * len(row["advantages"]), abs=1e-5)
    fixed = GRPOAdvantage(kl_ctrl=FixedKLController(0.05))
    assert _flow(tiny_model, fixed).config().algorithm.kl_ctrl.type == "fixed"


def test_row_12_ppo_has_gamma_lam_and_a_critic_on_the_policys_own_backbone(ppo: Any, tiny_model: Path) -> None:
    run = run_of(ppo)
    config = run.submission(1)["config"]
    assert config["critic"]["model"]["path"] == config["actor_rollout_ref"]["model"]["path"] == str(tiny_model)
    table = table_rows(run, "values", "values", schemas.VALUES, 2)
    values = {(row["group_id"], row["sample_index"]): row["values"] for row in table}
    assert any(abs(value) > 1e-4 for row in values.values() for value in row), "after a step the critic says something"
    for row in trajectories(ppo, 2):
        own = values[row["group_id"], row["sample_index"]]
        advantages: list[float] = []
        following, carried = 0.0, 0.0
        for reward, value in zip(reversed(row["token_rewards"]), reversed(own), strict=True):
            carried = reward + 0.9 * following - value + 0.9 * 0.8 * carried
            following = value
            advantages.insert(0, carried)
        assert row["advantages"] == pytest.approx(advantages, abs=1e-4)
        assert row["returns"] == pytest.approx([a + v for a, v in zip(advantages, own, strict=True)], abs=1e-4)
    assert len(rollouts(ppo, 2)) == len(values)


def test_row_12_the_critics_path_may_be_a_key_too(tiny_model: Path, problems: Path, rest: Any) -> None:
    config = rest(problems, critic={"model": {"path": str(tiny_model)}})
    found = PPOTrainer(data_flow=_flow(tiny_model, GAEAdvantage(gamma=1.0, lam=0.95)), config=config).config
    assert found.critic.model.path == found.actor_rollout_ref.model.path
    assert found.critic_is_needed
