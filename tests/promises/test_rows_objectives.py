"""Rows 13, 14 and 19 of the promises: DPO and SFT, SFT beside RL in one update, and a reward model from preferences.

Losses are computed a second time by transformers and torch alone, from the export of a run that ends after step 1 and
is then continued: the weights that step 2 began with.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from ratchet import (
    DPOAdvantage,
    DPOPolicyUpdate,
    FSDPPolicyUpdate,
    GRPOAdvantage,
    HFRollout,
    HybridDataFlow,
    PPOTrainer,
    RewardModel,
    RewardModelUpdate,
    RLDataFlow,
    RLTask,
    SFTPolicyUpdate,
    SFTTask,
)
from tests.promises.results import prompts, rewards, rollouts, run_of, stages, trajectories

PIPELINES = Path(__file__).resolve().parents[2] / "pipelines"
PAIRS = [
    {"prompt": "How many loaves?", "chosen": "42 loaves.", "rejected": "Many of them, I would say."},
    {"prompt": "Who bakes?", "chosen": "Ann bakes.", "rejected": "Nobody."},
]
STEPS = 4
LEARNING: dict[str, Any] = {"lr": 1e-3, "dtype": "float32"}


class ByLength:
    """A reward that differs within most groups."""

    def __call__(self, data: Any) -> list[float]:
        return [float(sum(item.completion_token_ids)) % 7 for item in data]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    path.write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS), encoding="utf-8")
    return path


def _fit(flow: Any, config: dict[str, Any], run_id: str) -> Any:
    return PPOTrainer(data_flow=flow, config=config).fit(run_id=run_id)


def _fit_twice(flow: Any, examples: Path, rest: Any, run_id: str) -> tuple[Any, Path]:
    """Train one step, then the others; return the result, and the export after the first step."""
    of_weights = {"rollout": {"dtype": "float32"}}
    first, result = (
        _fit(flow, rest(examples, actor_rollout_ref=of_weights, trainer={"total_training_steps": steps}), run_id)
        for steps in (1, STEPS)
    )
    return result, Path(first.export.removeprefix("file://"))


def _losses(result: Any) -> list[float]:
    return [_metrics(result, step)["actor/loss"] for step in range(1, STEPS + 1)]


def _metrics(result: Any, step: int) -> dict[str, float]:
    return dict(run_of(result).require("policy_update", step).provenance.metrics)


def _log_probs(folder: Path, tokenizer: Any, prompt: str, completion: str) -> torch.Tensor:
    """Of the assistant's tokens, with the one that ends its turn."""
    message = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    before = tokenizer(text, add_special_tokens=False)["input_ids"]
    after = tokenizer(f"{completion}<|im_end|>", add_special_tokens=False)["input_ids"]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        scores: torch.Tensor = model(torch.tensor([before + after])).logits[0, len(before) - 1 : -1].log_softmax(-1)
    return scores.gather(-1, torch.tensor(after)[:, None])[:, 0]


def test_row_13_dpo_by_swapping_the_advantage_and_the_policy_update(tiny_model: Path, pairs: Path, rest: Any) -> None:
    flow = RLDataFlow(
        rollout=None,
        advantage=DPOAdvantage(),
        policy_update=DPOPolicyUpdate(beta=0.5, model=str(tiny_model), **LEARNING),
    )
    result, policy = _fit_twice(flow, pairs, rest, "dpo")
    assert stages(result, 2) == ["reference_scores", "policy_update"]
    losses = _losses(result)
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert losses[-1] < losses[0] / 2

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    expected = []
    for pair in PAIRS:
        chosen, rejected = (
            (_log_probs(policy, tokenizer, *text) - _log_probs(tiny_model, tokenizer, *text)).sum()
            for text in ((pair["prompt"], pair["chosen"]), (pair["prompt"], pair["rejected"]))
        )
        # arXiv:2305.18290, equation 7.
        expected.append(-logsigmoid(0.5 * (chosen - rejected)))
    assert losses[1] == pytest.approx(float(torch.stack(expected).mean()), abs=1e-4)
    assert AutoModelForCausalLM.from_pretrained(result.export.removeprefix("file://"))


def test_row_13_sft_on_what_was_chosen(tiny_model: Path, pairs: Path, rest: Any) -> None:
    flow = RLDataFlow(policy_update=SFTPolicyUpdate(model=str(tiny_model), **LEARNING))
    result, policy = _fit_twice(flow, pairs, rest, "sft")
    assert stages(result, 2) == ["policy_update"]
    losses = _losses(result)
    assert losses == sorted(losses, reverse=True)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    log_probs = torch.cat([_log_probs(policy, tokenizer, pair["prompt"], pair["chosen"]) for pair in PAIRS])
    assert losses[1] == pytest.approx(-float(log_probs.mean()), abs=1e-4)


def test_row_14_three_tenths_of_the_loss_tokens_come_from_the_sft_task(
    tiny_model: Path, problems: Path, tmp_path: Path, rest: Any
) -> None:
    demonstrations = tmp_path / "demonstrations.jsonl"
    lines = [{"prompt": f"Say {number}.", "chosen": "yes"} for number in range(40)]
    demonstrations.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    flow = HybridDataFlow(
        sft_task=SFTTask(str(demonstrations), 1e-3),
        rl_task=RLTask(
            str(problems),
            advantage=GRPOAdvantage(),
            rollout=HFRollout(str(tiny_model), n=8, max_tokens=6, dtype="float32"),
            reward=ByLength(),
            policy_update=FSDPPolicyUpdate(**LEARNING),
        ),
        mix_ratio=0.3,
    )
    config = rest(problems, trainer={"total_training_steps": STEPS})
    result = _fit(flow, config, "hybrid")
    assert stages(result) == ["rollout", "reward", "advantage", "policy_update"]
    for step in (1, STEPS):
        sampled = sum(sum(row["loss_mask"]) for row in trajectories(result, step))
        imitated = _metrics(result, step)["actor/sft_tokens"]
        # Whole examples of a few tokens each: the last one may go over.
        assert 0.3 <= imitated / (imitated + sampled) < 0.36
    assert _metrics(result, STEPS)["actor/sft_loss"] < _metrics(result, 1)["actor/sft_loss"] / 2


def test_row_14_the_two_tasks_are_all_that_must_be_said() -> None:
    flow = HybridDataFlow(
        sft_task=SFTTask("demonstrations.jsonl", lr=1e-5),
        rl_task=RLTask("openai/gsm8k", advantage=GRPOAdvantage()),
        mix_ratio=0.3,
    )
    config = flow.config({"actor_rollout_ref": {"model": {"path": "m"}}})
    assert config.algorithm.objective == "hybrid"
    assert (config.algorithm.hybrid.sft_files, config.data.train_files) == ("demonstrations.jsonl", "openai/gsm8k")
    assert (config.algorithm.hybrid.sft_lr, config.algorithm.hybrid.mix_ratio) == (1e-5, 0.3)


def test_row_19_a_reward_model_from_preferences_grades_the_next_run(
    tiny_model: Path, pairs: Path, problems: Path, rest: Any
) -> None:
    flow = RLDataFlow(policy_update=RewardModelUpdate(model=str(tiny_model), **LEARNING))
    result, classifier = _fit_twice(flow, pairs, rest, "bradley-terry")
    losses, tokenizer = _losses(result), AutoTokenizer.from_pretrained(tiny_model)
    assert losses[-1] < losses[0] / 2

    def score(folder: str | Path, prompt: list[dict[str, str]], completion: str) -> torch.Tensor:
        whole = [*prompt, {"role": "assistant", "content": completion}]
        ids = tokenizer(tokenizer.apply_chat_template(whole, tokenize=False), add_special_tokens=False)["input_ids"]
        model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            return torch.as_tensor(model(torch.tensor([ids])).logits[0, 0])

    def margin(folder: str | Path, pair: dict[str, str]) -> torch.Tensor:
        asked = [{"role": "user", "content": pair["prompt"]}]
        return score(folder, asked, pair["chosen"]) - score(folder, asked, pair["rejected"])

    # Bradley and Terry: the probability that one is preferred is the sigmoid of the difference of their scores.
    again = torch.stack([-logsigmoid(margin(classifier, pair)) for pair in PAIRS]).mean()
    assert losses[1] == pytest.approx(float(again), abs=1e-4)
    export = result.export.removeprefix("file://")
    assert all(margin(export, pair) > 0 for pair in PAIRS)

    graded = _fit(
        RLDataFlow(
            rollout=HFRollout(str(tiny_model), n=2, max_tokens=6, dtype="float32"),
            reward=RewardModel(export, dtype="float32"),
            policy_update=FSDPPolicyUpdate(**LEARNING),
        ),
        rest(problems),
        "graded",
    )
    asked, found = prompts(graded), {(row["group_id"], row["sample_index"]): row["reward"] for row in rewards(graded)}
    assert found
    for row in rollouts(graded):
        messages = [dict(one) for one in asked[row["prompt_id"]]["prompt"]]
        expected = score(export, messages, row["completion"])
        assert found[row["group_id"], row["sample_index"]] == pytest.approx(float(expected), abs=1e-4)


def test_row_19_it_has_a_pipeline_of_its_own() -> None:
    spec = next(iter(yaml.safe_load_all((PIPELINES / "reward_model" / "pipeline.yaml").read_text())))
    assert spec["pipelineInfo"]["name"] == "ratchet-reward-model"
    config = yaml.safe_load(spec["root"]["inputDefinitions"]["parameters"]["config"]["defaultValue"])
    assert isinstance(RLDataFlow.from_config(config).policy_update, RewardModelUpdate)
