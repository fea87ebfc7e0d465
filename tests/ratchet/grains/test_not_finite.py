"""A number that is not finite ends a segment before its step is published, whatever is still being committed."""

from pathlib import Path
from typing import Any

import pytest

from ratchet.engines.sharded import ShardedTrainer
from ratchet.errors import NumericsError
from ratchet.store.run import Run
from tests.runs import content_digests, tiny_config, train_tiny, write_problems

BAD = 3


def _overflowing(monkeypatch: pytest.MonkeyPatch, role: str) -> None:
    """Let the update of step BAD of the policy or the critic move every weight out of range."""
    original = ShardedTrainer._learning_rate

    def rate(self: Any, step: int) -> float:
        return 1e39 if self.role == role and step == BAD else original(self, step)

    monkeypatch.setattr(ShardedTrainer, "_learning_rate", rate)


@pytest.mark.parametrize(
    ("role", "overrides"),
    [
        pytest.param("actor", {}, id="actor"),
        pytest.param(
            "critic",
            {"algorithm.adv_estimator": "gae", "critic.model.path": "", "actor_rollout_ref.rollout.n": 1},
            id="critic",
        ),
    ],
)
def test_a_segment_publishes_nothing_of_the_step_and_nothing_after_it(
    role: str, overrides: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    problems = write_problems(tmp_path / "problems.jsonl")
    values: dict[str, Any] = {
        "trainer.grain": "segment",
        "trainer.total_training_steps": 4,
        "trainer.steps_per_segment": 4,
        "trainer.commit_lag": 2,
        **overrides,
    }
    if "critic.model.path" in values:
        values["critic.model.path"] = str(tiny_model)
    config = tiny_config(tiny_model, problems, **values)
    with pytest.MonkeyPatch.context() as patch:
        _overflowing(patch, role)
        with pytest.raises(NumericsError, match=f"expected finite weights after step {BAD}, got others in"):
            train_tiny(tmp_path / "bad", "run", config)
    run = Run(str(tmp_path / "bad"), "run")
    update = "policy_update" if role == "actor" else "critic_update"
    # What was done before is committed, though it was behind when the update failed.
    assert run.last_step() == BAD - 1
    assert run.require(update, BAD - 1)
    assert run.manifest(update, BAD) is None
    assert run.manifest("policy_update", BAD) is None
    assert run.steps()[-1] <= BAD
    good = train_tiny(tmp_path / "good", "run", config)
    assert content_digests(run).items() <= content_digests(good).items()
    assert content_digests(train_tiny(tmp_path / "bad", "run", config)) == content_digests(good)
