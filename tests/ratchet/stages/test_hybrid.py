"""Rewards and demonstrations in one update: how many examples a step imitates, which, and that a resume repeats it."""

import json
from pathlib import Path
from typing import Any

import pytest

from ratchet.config import RunConfig
from ratchet.data import schemas
from ratchet.data.order import imitated_positions
from ratchet.grains import loop
from ratchet.grains.checks.finding import PipelineFacts
from ratchet.grains.checks.sources import named_sources
from ratchet.stages.example_rows import examples_of, imitated_examples
from ratchet.store.run import Run
from tests.runs import (
    CUT,
    RIGHT,
    WRONG,
    Stopped,
    content_digests,
    prepared,
    stop_at,
    table_rows,
    tiny_config,
    train_tiny,
    write_problems,
)

STEPS = 4


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("hybrid")
    rows = [{"prompt": f"Say {number}.", "response": f"It is {number}." + " yes" * number} for number in range(8)]
    examples = folder / "sft.jsonl"
    examples.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return write_problems(folder / "problems.jsonl", 6), examples


def _config(model: Path, files: tuple[Path, Path], **overrides: Any) -> RunConfig:
    values: dict[str, Any] = {
        "algorithm.objective": "hybrid",
        "algorithm.hybrid.sft_files": str(files[1]),
        "data.max_response_length": 40,
        "trainer.total_training_steps": STEPS,
        "trainer.steps_per_segment": STEPS,
        "trainer.trainer_state_freq": 2,
    }
    return tiny_config(model, files[0], **{**values, **overrides})


def test_examples_are_taken_in_an_order_of_the_step_until_their_tokens_suffice() -> None:
    ids, counts = [f"sft-{number}" for number in range(50)], list(range(1, 51))
    first = imitated_positions(1, ids, counts, seed=7, wanted=100.0)
    total = sum(counts[place] for place in first)
    assert total - counts[first[-1]] < 100 <= total
    assert len(set(first)) == len(first)
    assert imitated_positions(1, ids, counts, seed=7, wanted=100.0) == first
    assert imitated_positions(2, ids, counts, seed=7, wanted=100.0) != first
    assert imitated_positions(1, ids, counts, seed=8, wanted=100.0) != first
    longer = imitated_positions(1, ids, counts, seed=7, wanted=1e9)
    assert longer[: len(first)] == first, "more tokens are more of the same order"
    assert sorted(longer) == list(range(50)), "each is taken once at most"
    assert imitated_positions(1, ids, counts, seed=7, wanted=0.0) == []


def test_the_ratio_is_of_the_tokens_in_the_loss(tmp_path: Path, tiny_model: Path, files: tuple[Path, Path]) -> None:
    # 2 prompts x 3 completions; of 3 + 6 + 3 tokens a prompt, those of the one that was cut are left out of the loss.
    more = {"algorithm.mask_truncated_completions": True, "actor_rollout_ref.rollout.n": 3}
    config = _config(tiny_model, files, **more, **{"algorithm.hybrid.mix_ratio": 0.75})
    with prepared(tmp_path, config, RIGHT, CUT, WRONG) as session:
        loop.run_step(session, 1)
        run = session.store_run
        rows = table_rows(run, "advantage", "trajectories", schemas.TRAJECTORIES)
        assert sum(sum(row["loss_mask"]) for row in rows) == 12
        # 0.75 of all: three times as many.
        taken = imitated_examples(run.store, examples_of(run, "sft"), config, 1, 12)
        counts = [sum(mask) for mask in taken["chosen_loss_mask"].to_pylist()]
        assert sum(counts) - counts[-1] < 36 <= sum(counts)
        metrics = run.require("policy_update", 1).provenance.metrics
        assert metrics["actor/sft_tokens"] == sum(counts)
        assert "sft_examples" in run.require("policy_update", 1).content.inputs


def test_what_is_demonstrated_is_learnt_and_a_resumed_run_is_the_same(
    tmp_path: Path, tiny_model: Path, files: tuple[Path, Path]
) -> None:
    config = _config(tiny_model, files)
    whole = train_tiny(tmp_path, "whole", config)
    losses = [whole.require("policy_update", step).provenance.metrics["actor/sft_loss"] for step in range(1, STEPS + 1)]
    assert losses[-1] < losses[0] - 1.0
    with pytest.raises(Stopped):
        train_tiny(tmp_path, "stopped", config, stop_at("step-000004/advantage", is_committed=True))
    assert content_digests(train_tiny(tmp_path, "stopped", config)) == content_digests(whole)
    stages = {item.content.stage for item in Run(str(tmp_path), "whole").step_manifests(1)}
    assert stages == {"rollout", "reward", "advantage", "policy_update"}


def test_a_learning_rate_of_its_own_scales_the_loss_of_the_examples(
    tmp_path: Path, tiny_model: Path, files: tuple[Path, Path]
) -> None:
    def loss(name: str, **more: Any) -> dict[str, float]:
        run = train_tiny(tmp_path, name, _config(tiny_model, files, **{"trainer.total_training_steps": 1, **more}))
        return dict(run.require("policy_update", 1).provenance.metrics)

    plain, halved = loss("plain"), loss("halved", **{"algorithm.hybrid.sft_lr": 5e-4})
    # All rewards are equal, so that the policy's own loss is the entropy's: 0.7 of it, and 0.3 of the examples' loss.
    assert plain["actor/sft_loss"] == halved["actor/sft_loss"]
    difference = plain["actor/loss"] - halved["actor/loss"]
    assert difference == pytest.approx(0.3 * (1 - 0.5) * plain["actor/sft_loss"], rel=1e-4)


def test_preflight_reads_the_examples_beside_the_prompts(
    tmp_path: Path, tiny_model: Path, files: tuple[Path, Path]
) -> None:
    found = named_sources(_config(tiny_model, files), str(tmp_path), PipelineFacts())
    assert found.refusals == []
    assert [one.message for one in found.findings if one.check in ("prompts", "examples")] == [
        "6 train prompts",
        "8 sft examples",
    ]
    assert found.num_prompts == 6
