"""Rows 22 and 23 of the promises: the data that people have, from their files to the tokens of a run."""

import json
from pathlib import Path
from typing import Any

import pandas
import pytest

from ratchet import (
    DPOPolicyUpdate,
    FSDPPolicyUpdate,
    GRPOAdvantage,
    GSM8KReward,
    HFRollout,
    PPOTrainer,
    RLDataFlow,
    SFTPolicyUpdate,
)
from ratchet.data.frames import to_training_set
from ratchet.engines.model import load_tokenizer
from ratchet.errors import DataError
from tests.promises.results import examples, prompts, rollouts


def _trainer(model: Path, config: dict[str, Any], reward: Any = None) -> PPOTrainer:
    flow = RLDataFlow(
        rollout=HFRollout(str(model), n=2, max_tokens=4, dtype="float32"),
        reward=GSM8KReward() if reward is None else reward,
        advantage=GRPOAdvantage(),
        policy_update=FSDPPolicyUpdate(dtype="float32"),
    )
    return PPOTrainer(data_flow=flow, config=config)


def _lines(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


PREFERENCES = [
    {"prompt": "How many?", "chosen": "#### 42", "rejected": "Many."},
    {"prompt": "Who?", "chosen": "Ann.", "rejected": ""},
]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_row_22_preferences_under_a_rule_are_refused_with_the_fix_before_a_run_exists(
    kind: str, tmp_path: Path, tiny_model: Path, rest: Any
) -> None:
    path = tmp_path / f"preferences.{kind}"
    frame = pandas.DataFrame(PREFERENCES)
    if kind == "jsonl":
        _lines(path, *PREFERENCES)
    elif kind == "csv":
        frame.to_csv(path, index=False)
    else:
        to_training_set(frame, path)
    config = rest(path, data={"data_source": "openai/gsm8k"}, trainer={"default_local_dir": str(tmp_path / "runs")})
    if kind == "parquet":  # in verl's schema, each row names its source
        to_training_set(frame, path, data_source="openai/gsm8k")
    with pytest.raises(DataError) as caught:
        _trainer(tiny_model, config).fit(run_id="refused")
    message = str(caught.value)
    assert f"preferences.{kind}, " in message
    assert "no ground truth" in message
    assert "Add a column answer or ground_truth" in message
    assert "reward_model.type=model, api or custom" in message
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").rglob("*.json"))
    # What needs no ground truth trains on the same data.
    assert _trainer(tiny_model, config, lambda data: [0.0] * len(data)).fit(run_id="taken").steps == 1


@pytest.mark.parametrize("kind", ["csv", "frame"])
def test_row_22_two_lines_make_a_training_set(kind: str, tmp_path: Path, tiny_model: Path, rest: Any) -> None:
    frame: Any = pandas.DataFrame({"question": ["6 * 7?", "1 + 1?"], "answer": ["It is 42.\n#### 42", "#### 2"]})
    if kind == "csv":
        frame.to_csv(tmp_path / "mine.csv", index=False)
        frame = str(tmp_path / "mine.csv")

    path = tmp_path / "train.parquet"
    to_training_set(frame, path)

    result = _trainer(tiny_model, rest(path)).fit(run_id=f"two-lines-{kind}")
    first, second = prompts(result).values()
    assert first["data_source"] == "openai/gsm8k"
    assert first["prompt"][0]["content"].startswith("6 * 7? Let's think step by step")
    assert [row["reward_model"]["ground_truth"] for row in (first, second)] == ["42", "2"]


def test_row_22_a_frame_of_preferences_becomes_one_too(tmp_path: Path, tiny_model: Path, rest: Any) -> None:
    path = tmp_path / "train.parquet"
    to_training_set(pandas.DataFrame(PREFERENCES), path)

    assert pandas.read_parquet(path)[["chosen", "rejected"]].fillna("").to_dict("records")[0] == {
        "chosen": "#### 42",
        "rejected": "Many.",
    }
    seen: list[Any] = []
    reward = lambda data: [seen.append(item) or 0.0 for item in data]  # noqa: E731 - as people write them
    result = _trainer(tiny_model, rest(path), reward).fit(run_id="preferences")
    assert {item.ground_truth for item in seen} == {None}
    assert [row["prompt"] for row in prompts(result).values()] == [
        [{"role": "user", "content": "How many?"}],
        [{"role": "user", "content": "Who?"}],
    ], "a plain text is a chat of one turn"


TURNS = [
    {"role": "system", "content": "You are a baker."},
    {"role": "user", "content": "12 loaves, and 30?"},
    {"role": "assistant", "content": "42."},
    {"role": "user", "content": "And one more?"},
]


def test_row_23_json_lines_of_prompts_and_responses_with_turns_and_a_system_prompt(
    tmp_path: Path, tiny_model: Path, rest: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _lines(tmp_path / "file.jsonl", {"prompt": "How many?", "response": "42"}, {"prompt": TURNS, "response": "43"})
    monkeypatch.chdir(tmp_path)
    seen: list[Any] = []
    reward = lambda data: [seen.append(item) or 0.0 for item in data]  # noqa: E731
    result = _trainer(tiny_model, rest("json:./file.jsonl"), reward).fit(run_id="turns")
    assert {(len(item.messages), item.ground_truth) for item in seen} == {(1, "42"), (4, "43")}

    tokenizer: Any = load_tokenizer(tiny_model)
    asked = prompts(result)
    assert asked["train-0000001"]["prompt"] == TURNS
    for row in rollouts(result):
        messages = asked[row["prompt_id"]]["prompt"]
        text = tokenizer.decode(row["prompt_token_ids"])
        assert text == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert text.count("<|im_start|>") == len(messages) + 1, "the template once, and the completion's turn"


def test_row_23_the_same_as_a_rules_data(tmp_path: Path, tiny_model: Path, rest: Any) -> None:
    path = _lines(tmp_path / "file.jsonl", *[{"prompt": "How many?", "response": f"So:\n#### {n}"} for n in (42, 43)])
    config = rest(f"json:{path}", data={"data_source": "openai/gsm8k"})
    result = _trainer(tiny_model, config).fit(run_id="json-rule")
    assert [row["reward_model"]["ground_truth"] for row in prompts(result).values()] == ["42", "43"]


ANSWERED = [*TURNS, {"role": "assistant", "content": "43."}]
SPOKEN = "<|im_start|>{role}\n{content}<|im_end|>\n"


@pytest.mark.parametrize(
    "record",
    [{"prompt": TURNS, "response": "43."}, {"prompt": TURNS, "chosen": ANSWERED[-1:]}],
    ids=["prompt,response", "prompt,chosen"],
)
def test_row_23_a_demonstration_behind_turns_is_the_last_turn(
    record: dict[str, Any], tmp_path: Path, tiny_model: Path, rest: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _lines(tmp_path / "file.jsonl", record, {"prompt": "How many?", "response": "42"})
    monkeypatch.chdir(tmp_path)
    flow = RLDataFlow(policy_update=SFTPolicyUpdate(model=str(tiny_model), dtype="float32"))
    result = PPOTrainer(data_flow=flow, config=rest("json:./file.jsonl")).fit(run_id=f"demonstrations-{[*record][1]}")

    tokenizer: Any = load_tokenizer(tiny_model)
    first, second = examples(result).values()
    assert first["prompt"] == TURNS
    asked = "".join(SPOKEN.format(**message) for message in TURNS) + "<|im_start|>assistant\n"
    assert tokenizer.decode(first["prompt_token_ids"]) == asked, "the template once, with the system prompt"
    assert tokenizer.decode(first["chosen_token_ids"]) == "43.<|im_end|>", "and the token that ends the turn"
    assert all(first["chosen_loss_mask"])
    assert tokenizer.decode(second["chosen_token_ids"]) == "42<|im_end|>"


def test_row_23_of_whole_conversations_every_turn_of_the_assistants_is_learned(
    tmp_path: Path, tiny_model: Path, rest: Any
) -> None:
    path = _lines(tmp_path / "file.jsonl", *[{"messages": ANSWERED}] * 2)
    flow = RLDataFlow(policy_update=SFTPolicyUpdate(model=str(tiny_model), dtype="float32"))
    result = PPOTrainer(data_flow=flow, config=rest(path)).fit(run_id="conversations")
    tokenizer: Any = load_tokenizer(tiny_model)
    row = examples(result)["train-0000001"]
    assert row["prompt"] == TURNS[:2]
    whole = tokenizer.apply_chat_template(ANSWERED, tokenize=False)
    assert tokenizer.decode(row["prompt_token_ids"] + row["chosen_token_ids"]) + "\n" == whole
    learned = [token for token, kept in zip(row["chosen_token_ids"], row["chosen_loss_mask"], strict=True) if kept]
    assert tokenizer.decode(learned) == "42.<|im_end|>43.<|im_end|>"


def test_row_23_preferences_may_be_whole_conversations_that_share_their_prompt(
    tmp_path: Path, tiny_model: Path, rest: Any
) -> None:
    other = [*TURNS, {"role": "assistant", "content": "None."}]
    path = _lines(tmp_path / "file.jsonl", *[{"chosen": ANSWERED, "rejected": other}] * 2)
    flow = RLDataFlow(policy_update=DPOPolicyUpdate(model=str(tiny_model), dtype="float32", reference_free=True))
    result = PPOTrainer(data_flow=flow, config=rest(path)).fit(run_id="preferred-conversations")
    tokenizer: Any = load_tokenizer(tiny_model)
    row = examples(result)["train-0000000"]
    assert (row["prompt"], row["chosen"], row["rejected"]) == (TURNS, "43.", "None.")
    assert tokenizer.decode(row["rejected_token_ids"]) == "None.<|im_end|>"
