"""Rollouts as custom rewards see them."""

import subprocess
import sys

import pytest

from ratchet.rewards.data_proto import DataProto, GradeRow

ROWS = [
    GradeRow(
        data_source="a",
        prompt=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}],
        completion="2",
        ground_truth="2",
        extra_info={"index": 7},
        prompt_token_ids=[5, 6, 7],
        completion_token_ids=[8, 0],
        finish_reason="stop",
    ),
    GradeRow(
        data_source="b",
        completion="abc",
        prompt_token_ids=[0],
        completion_token_ids=[9, 9, 9],
        finish_reason="length",
    ),
]


def test_items_have_texts_ids_and_ground_truth() -> None:
    data = DataProto(ROWS)
    assert len(data) == 2
    first, second = data
    assert first.prompt == "Be brief.\n1 + 1?"
    assert first.messages[1] == {"role": "user", "content": "1 + 1?"}
    assert first.completion == first.response == first.solution_str == "2"
    assert (first.data_source, first.ground_truth, first.extra_info) == ("a", "2", {"index": 7})
    assert (first.prompt_token_ids, first.completion_token_ids, first.finish_reason) == ([5, 6, 7], [8, 0], "stop")
    assert (second.ground_truth, second.extra_info, second.finish_reason) == (None, {}, "length")
    assert data[-1].completion == "abc"
    with pytest.raises(IndexError):
        data[2]


def test_prompts_are_padded_left_and_responses_right_under_one_mask() -> None:
    batch = DataProto(ROWS, pad_token_id=1).batch
    assert batch["prompts"].tolist() == [[5, 6, 7], [1, 1, 0]]
    assert batch["responses"].tolist() == [[8, 0, 1], [9, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1]]
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 0, 1], [1, 1, 0, 9, 9, 9]]
    assert batch["response_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]


def test_a_rows_valid_tokens_are_found_as_reward_managers_of_verl_find_them() -> None:
    for item, row in zip(DataProto(ROWS), ROWS, strict=True):
        prompts, responses, mask = (item.batch[key] for key in ("prompts", "responses", "attention_mask"))
        num_prompt_tokens = int(mask[: prompts.shape[-1]].sum())
        num_response_tokens = int(mask[prompts.shape[-1] :].sum())
        assert prompts[-num_prompt_tokens:].tolist() == row.prompt_token_ids
        assert responses[:num_response_tokens].tolist() == row.completion_token_ids
        assert item.non_tensor_batch["reward_model"]["ground_truth"] == row.ground_truth
        assert item.non_tensor_batch["data_source"] == row.data_source
        assert item.non_tensor_batch.get("extra_info", {}) == row.extra_info


def test_a_slice_is_padded_like_the_whole() -> None:
    part = DataProto(ROWS)[1:]
    assert len(part) == 1
    assert part.batch["attention_mask"].tolist() == [[0, 0, 1, 1, 1, 1]]
    assert part.non_tensor_batch["data_source"].tolist() == ["b"]


def test_a_reward_cannot_change_the_rows() -> None:
    data = DataProto(ROWS)
    data[0].extra_info["index"] = 8
    data[0].non_tensor_batch["extra_info"]["index"] = 8
    assert data[0].extra_info == {"index": 7}


def test_torch_is_imported_only_for_tensors() -> None:
    program = (
        "import sys\n"
        "from ratchet.rewards.graders import open_grader, DataProto, GradeRow\n"
        "from ratchet.rewards.naive_manager import NaiveRewardManager\n"
        "[item.completion for item in DataProto([GradeRow(data_source='a', completion='b')])]\n"
        "NaiveRewardManager(None, 1)\n"
        "assert not {'torch', 'requests', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
