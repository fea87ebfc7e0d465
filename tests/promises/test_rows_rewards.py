"""Rows 6, 7 and 10 of the promises: rewards as a user writes them, each in a run of its own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ratchet import (
    CustomReward,
    DataProto,
    FSDPPolicyUpdate,
    GRPOAdvantage,
    HFRollout,
    NaiveRewardManager,
    PPOTrainer,
    RewardModel,
    RLDataFlow,
    RuleReward,
    WeightedReward,
    load_config,
    register_reward,
)
from ratchet.engines.model import load_tokenizer
from tests.promises.conftest import QUESTIONS
from tests.promises.results import rewards, rollouts, run_of, trajectories
from tests.runs import train_tiny

MAX_TOKENS = 24


def _fit(model: Path, reward: Any, config: dict[str, Any], run_id: str) -> Any:
    flow = RLDataFlow(
        rollout=HFRollout(str(model), n=2, max_tokens=MAX_TOKENS, dtype="float32"),
        reward=reward,
        advantage=GRPOAdvantage(),
        policy_update=FSDPPolicyUpdate(lr=1e-4, dtype="float32"),
    )
    return PPOTrainer(data_flow=flow, config=config).fit(run_id=run_id)


class Seen:
    """A reward of the user's own that remembers what it was shown."""

    def __init__(self) -> None:
        self.data: list[DataProto] = []

    def __call__(self, data: DataProto) -> list[float]:
        self.data.append(data)
        return [float(index) for index, item in enumerate(data)]


def test_row_06_what_a_reward_is_shown_in_a_run(tiny_model: Path, two_questions: Path, rest: Any) -> None:
    reward, tokenizer = Seen(), load_tokenizer(tiny_model)
    result = _fit(tiny_model, reward, rest(two_questions), "seen")
    (data,) = reward.data
    assert isinstance(data, DataProto)
    assert len(data) == len(list(data)) == 4
    sampled = {row["completion"]: row for row in rollouts(result)}
    for item in data:
        prompts, responses, mask = (item.batch[name] for name in ("prompts", "responses", "attention_mask"))
        assert mask.shape == (len(prompts) + len(responses),)
        over_prompt, over_response = mask[: len(prompts)], mask[len(prompts) :]
        assert over_prompt.tolist() == sorted(over_prompt.tolist()), "prompts are padded on the left"
        assert over_response.tolist() == sorted(over_response.tolist(), reverse=True), "responses on the right"
        row = sampled[item.completion]
        assert prompts[over_prompt.bool()].tolist() == row["prompt_token_ids"]
        assert responses[over_response.bool()].tolist() == row["completion_token_ids"]
        assert tokenizer.decode(responses[over_response.bool()], skip_special_tokens=True) == item.completion
        assert item.prompt in QUESTIONS
        assert item.ground_truth == str(42 + QUESTIONS.index(item.prompt))
        assert item.non_tensor_batch["reward_model"]["ground_truth"] == item.ground_truth
    widths = {len(row["prompt_token_ids"]) for row in rollouts(result)}
    assert len(widths) == 2, "the prompts differ in length, so that there was something to pad"
    assert sorted(row["reward"] for row in rewards(result)) == [0, 1, 2, 3]


def _on_tokens(data: DataProto) -> torch.Tensor:
    """0.5 on the first token of each completion, and 1 on its last."""
    found = torch.zeros(data.batch["responses"].shape)
    for index, item in enumerate(data):
        found[index, 0] += 0.5
        found[index, len(item.completion_token_ids) - 1] += 1.0
    return found


RETURNED = {
    "tensor": lambda data: torch.full((len(data),), 1.5),
    "list": lambda data: [1.5] * len(data),
    "per-token": _on_tokens,
}


@pytest.mark.parametrize("kind", RETURNED)
def test_row_06_a_reward_returns_a_tensor_a_list_or_token_rewards(
    kind: str, tiny_model: Path, two_questions: Path, rest: Any
) -> None:
    result = _fit(tiny_model, RETURNED[kind], rest(two_questions), f"returned-{kind}")
    assert [row["reward"] for row in rewards(result)] == [1.5] * 4
    for row in trajectories(result):
        first, *others = row["token_rewards"]
        assert (first, sum(others)) == ((0.5, 1.0) if kind == "per-token" else (0.0, 1.5))


HOOKS = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(ground_truth)

def as_dict(data_source, solution_str, ground_truth, extra_info):
    return {"score": float(ground_truth), "length": len(solution_str), "pred": data_source}
"""


def test_row_06_verls_hook_by_path_and_name(tmp_path: Path, tiny_model: Path, two_questions: Path, rest: Any) -> None:
    path = tmp_path / "hooks.py"
    path.write_text(HOOKS)
    result = _fit(tiny_model, CustomReward(str(path), "as_dict"), rest(two_questions), "hook-by-object")
    found = rewards(result)
    assert sorted(row["reward"] for row in found) == [42, 42, 43, 43]
    texts = {(row["group_id"], row["sample_index"]): row["completion"] for row in rollouts(result)}
    for row in found:
        assert row["reward_breakdown"]["length"] == len(texts[row["group_id"], row["sample_index"]])
        assert row["extracted"] == f"promises/{int(row['reward']) - 42}"

    # verl's keys: the path alone takes compute_score.
    keys = {
        "data": {"train_files": str(two_questions), "train_batch_size": 2, "max_response_length": 4},
        "actor_rollout_ref": {
            "model": {"path": str(tiny_model)},
            "rollout": {"name": "hf", "n": 2, "dtype": "float32"},
            "actor": {"fsdp_config": {"dtype": "float32"}},
        },
        "custom_reward_function": {"path": str(path)},
        "trainer": {"total_training_steps": 1, "device": "cpu", "logger": []},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(keys))
    run = train_tiny(tmp_path, "hook-by-key", load_config(tmp_path / "run.yaml"))
    (metrics,) = [item.provenance.metrics for item in run.step_manifests(1) if item.content.stage == "reward"]
    assert metrics["critic/score/mean"] == 42.5


def test_row_07_the_naive_manager_prints_what_it_examines_and_scores_by_data_source(
    tiny_model: Path, two_questions: Path, rest: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    @register_reward("promises/0")
    def short(solution_str: str, ground_truth: str) -> float:
        return 0.25

    @register_reward("promises/1")
    def long(solution_str: str, ground_truth: str) -> float:
        return 0.75

    tokenizer = load_tokenizer(tiny_model)
    reward = NaiveRewardManager(tokenizer=tokenizer, num_examine=1)
    result = _fit(tiny_model, reward, rest(two_questions), "naive")
    assert sorted(row["reward"] for row in rewards(result)) == [0.25, 0.25, 0.75, 0.75]
    lines = capsys.readouterr().out.splitlines()
    shown = [lines.index(f"[data_source] promises/{number}") for number in (0, 1)]
    assert len([line for line in lines if line.startswith("[data_source]")]) == 2, "one sample of each source"
    for number, start in enumerate(shown):
        sample = lines[start:]
        assert sample[1] == f"[prompt] {QUESTIONS[number]}"
        assert f"[ground_truth] {42 + number}" in sample
        assert next(line for line in sample if line.startswith("[reward]")) == f"[reward] {(0.25, 0.75)[number]}"
    # The same object grades by hand, with the tokenizer's text of the prompt.
    seen = Seen()
    _fit(tiny_model, seen, rest(two_questions), "naive-by-hand")
    capsys.readouterr()
    assert sorted(NaiveRewardManager(tokenizer, 2)(seen.data[0]).tolist()) == [0.25, 0.25, 0.75, 0.75]
    printed = capsys.readouterr().out
    assert printed.count("[completion] ") == 4
    assert "<|im_start|>user" in printed


def test_row_10_rule_and_model_are_added_with_weights_and_each_is_kept(
    tiny_model: Path, classifier: Path, two_questions: Path, rest: Any
) -> None:
    @register_reward("promises/0")
    @register_reward("promises/1")
    def rule(solution_str: str, ground_truth: str) -> float:
        return float(len(solution_str))

    mix = WeightedReward([(RuleReward(), 2.0), (RewardModel(str(classifier)), 0.5)])
    result = _fit(tiny_model, mix, rest(two_questions), "mix")
    texts = {(row["group_id"], row["sample_index"]): row["completion"] for row in rollouts(result)}
    found = rewards(result)
    for row in found:
        parts = row["reward_breakdown"]
        assert parts.keys() == {"rule", "model"}
        assert parts["rule"] == len(texts[row["group_id"], row["sample_index"]])
        assert row["reward"] == pytest.approx(2.0 * parts["rule"] + 0.5 * parts["model"])
    assert len({row["reward_breakdown"]["model"] for row in found}) == 4, "the model tells completions apart"

    alone = _fit(tiny_model, RewardModel(str(classifier)), rest(two_questions), "model-alone")
    assert [row["reward_breakdown"]["model"] for row in found] == pytest.approx(
        [row["reward"] for row in rewards(alone)]
    )
    section = run_of(result).submission(1)["config"]["reward_model"]
    assert section["weights"] == {"rule": 2.0, "model": 0.5}
    same = {"weights": {"rule": 2.0, "model": 0.5}, "path": str(classifier)}
    by_key = RLDataFlow.from_config({"reward_model": same, "actor_rollout_ref": {"model": {"path": str(tiny_model)}}})
    assert by_key.config().reward_model == run_config(result).reward_model


MINE = """
def brevity(data_source, solution_str, ground_truth, extra_info=None):
    return -len(solution_str) / 10
"""


def test_row_10_parts_and_shaping_are_added_and_each_is_kept_before_its_weight(
    tmp_path: Path, tiny_model: Path, two_questions: Path, rest: Any
) -> None:
    @register_reward("promises/0")
    @register_reward("promises/1")
    def rule(solution_str: str, ground_truth: str) -> float:
        return 1.0

    (tmp_path / "mine.py").write_text(MINE)
    mix = WeightedReward([(RuleReward(), 2.0), (CustomReward(str(tmp_path / "mine.py"), "brevity"), 0.5)])
    shaping = {
        "format": {"pattern": "(?s)e", "weight": 0.25},
        "length_penalty": {"weight": 0.75, "free_tokens": 4},
    }
    result = _fit(tiny_model, mix, rest(two_questions, reward_model=shaping), "shaped")
    samples = {(row["group_id"], row["sample_index"]): row for row in rollouts(result)}
    for row in rewards(result):
        sample = samples[row["group_id"], row["sample_index"]]
        text, num_tokens = sample["completion"], len(sample["completion_token_ids"])
        assert row["reward_breakdown"] == pytest.approx(
            {
                "rule": 1.0,
                "custom": -len(text) / 10,
                "format": float("e" in text),
                "length_penalty": -max(0, num_tokens - 4) / (MAX_TOKENS - 4),
            }
        )
        parts = row["reward_breakdown"]
        assert row["reward"] == pytest.approx(
            2.0 * parts["rule"] + 0.5 * parts["custom"] + 0.25 * parts["format"] + 0.75 * parts["length_penalty"]
        )


def run_config(result: Any) -> Any:
    """The config that a run was submitted with."""
    from ratchet.config import parse_config

    return parse_config(run_of(result).submission(1)["config"])
