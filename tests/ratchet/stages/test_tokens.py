"""What is trained on is exactly what was sampled."""

from pathlib import Path

import pytest

from ratchet.engines.sampler import Completion
from ratchet.grains import loop
from ratchet.grains.session import open_session, submit
from ratchet.stages.graph import step_stage
from ratchet.stages.policy_update import training_rows
from tests.runs import ScriptedSampler, tiny_config, use_sampler, write_problems
from tests.tiny_models import tiny_tokenizer

END = 2


def unmerged_ids() -> list[int]:
    """Token ids of a text that the tokenizer itself would write with fewer tokens."""
    tokenizer = tiny_tokenizer()
    word = next(text for text, index in tokenizer.get_vocab().items() if text.isalpha() and len(text) > 2)
    return [tokenizer.get_vocab()[letter] for letter in word]


@pytest.mark.parametrize("is_truncated", [False, True])
def test_the_trainer_gets_the_sampled_ids_and_the_end_token_counts(
    is_truncated: bool, tiny_model: Path, tmp_path: Path
) -> None:
    tokenizer, body = tiny_tokenizer(), unmerged_ids()
    assert tokenizer.encode(tokenizer.decode(body), add_special_tokens=False) != body
    ids = body if is_truncated else [*body, END]
    log_probs = [-0.5 - index for index in range(len(ids))]
    completion = Completion(ids, log_probs, tokenizer.decode(body), "length" if is_truncated else "stop")
    options = {"algorithm.mask_truncated_completions": True, "data.max_response_length": 16}
    config = tiny_config(tiny_model, write_problems(tmp_path / "train.jsonl", 2), **options)
    with open_session(submit(str(tmp_path / "runs"), "run", config), config) as session:
        loop.prepare(session)
        use_sampler(session, ScriptedSampler([completion]))
        for name in ("rollout", "reward", "advantage"):
            stage = step_stage(name, config)
            assert stage is not None
            session.run(stage, 1)
        rows = training_rows(session.store_run, config, 1)
    for row in rows:
        assert list(row.completion_token_ids) == ids
        assert list(row.behaviour_log_probs) == pytest.approx(log_probs)
        # The end token is trained on like any other; a truncated completion is left out as a whole, as configured.
        assert list(row.loss_mask) == [not is_truncated] * len(ids)
