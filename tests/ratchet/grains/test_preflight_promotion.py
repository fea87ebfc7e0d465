"""What preflight says about a promotion that could never be decided."""

from pathlib import Path
from typing import Any

import pytest

from ratchet.config import RunConfig
from ratchet.errors import StoreUnavailableError
from ratchet.grains import promotion
from ratchet.grains.checks.finding import Finding, PipelineFacts
from ratchet.grains.checks.promotion import promotion_findings
from ratchet.grains.preflight import check
from ratchet.store import layout
from ratchet.store.objects import open_store
from tests.promotion import finished_run, promotion_config
from tests.runs import tiny_config, write_problems

HERE = PipelineFacts()


@pytest.fixture(autouse=True)
def _nothing_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nonexistent")
    for name in ("KUBERNETES_SERVICE_HOST", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "runs")


def levels(config: RunConfig, root: str, facts: PipelineFacts = HERE) -> dict[str, str]:
    return {finding.level: finding.message for finding in promotion_findings(config, root, facts)}


def test_without_a_name_nothing_is_said_and_with_one_that_works_that_it_does(root: str) -> None:
    assert levels(promotion_config(**{"promotion.name": ""}), root) == {}
    assert levels(promotion_config(), root) == {"ok": "math: the last policy can be decided on"}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"promotion.name": "a b"}, "champion 'a b': expected 1 to 128 letters"),
        ({"promotion.name": "a/b"}, "champion 'a/b'"),
        ({"data.val_files": None}, "promotion.name is math, and data.val_files is not set"),
    ],
)
def test_a_champion_that_could_not_be_decided_on_is_refused(root: str, values: dict[str, Any], said: str) -> None:
    assert said in levels(promotion_config(**values), root)["error"]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"reward_model.type": "model", "reward_model.path": "some/judge"}, "a reward model grades"),
        (
            {"reward_model.weights": {"rule": 1.0, "api": 0.5}, "reward_model.url": "http://x"},
            "reward_model.weights add up to 1.5",
        ),
        (
            {"reward_model.weights": {"rule": 1.0, "api": -0.5}, "reward_model.url": "http://x"},
            "reward_model.weights has a negative weight",
        ),
    ],
)
def test_rewards_that_can_leave_zero_to_one_are_a_warning(root: str, values: dict[str, Any], said: str) -> None:
    found = levels(promotion_config(**values), root)
    assert set(found) == {"warning"}
    assert found["warning"].startswith(said)
    assert "no accuracy" in found["warning"]
    halves = {"reward_model.weights": {"rule": 0.5, "api": 0.5}, "reward_model.url": "http://x"}
    assert set(levels(promotion_config(**halves), root)) == {"ok"}


def test_a_run_from_the_champion_that_does_not_measure_it_is_a_warning(root: str) -> None:
    champion = promotion.promote(*finished_run(root, "first", [1.0, 0.0]))
    assert champion is not None
    from_champion = {"actor_rollout_ref.model.path": champion.export.uri}
    said = levels(promotion_config(**from_champion, **{"trainer.val_before_train": False}), root)
    assert "starts from champion 1, and trainer.val_before_train is false" in said["warning"]
    assert set(levels(promotion_config(**from_champion, **{"trainer.val_before_train": True}), root)) == {"ok"}
    assert set(levels(promotion_config(**{"trainer.val_before_train": False}), root)) == {"ok"}


def test_decisions_that_cannot_be_read_are_an_error_and_storage_that_does_not_answer_is_none(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_store(root).put(layout.champion("math", 1), b"{")
    assert "the decisions on math cannot be read" in levels(promotion_config(), root)["error"]

    def silent(root: str, name: str) -> None:
        raise StoreUnavailableError("503")

    monkeypatch.setattr("ratchet.store.champions.champion", silent)
    assert "cannot be read from here: 503" in levels(promotion_config(), root)["unknown"]
    with pytest.raises(StoreUnavailableError):
        levels(promotion_config(), root, PipelineFacts(in_pod=True))


def test_preflight_says_it_with_the_rest_and_measures_what_the_reward_gives(
    tmp_path: Path, tiny_model: Path, root: str
) -> None:
    problems = write_problems(tmp_path / "problems.jsonl")

    def found(**values: Any) -> list[Finding]:
        config = tiny_config(tiny_model, problems, **{"promotion.name": "math"}, **values)
        return [one for one in check(config, root=root, run_id="run", facts=HERE) if one.check == "promotion"]

    (refused,) = found()
    assert (refused.level, "data.val_files is not set" in refused.message) == ("error", True)
    code = tmp_path / "reward.py"
    code.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return 1.0 if ground_truth in solution_str else -1.0\n"
    )
    custom = {"custom_reward_function.path": str(code), "reward_model.type": "custom", "data.val_files": str(problems)}
    fine, outside = found(**custom)
    assert (fine.level, outside.level) == ("ok", "warning")
    assert "the custom reward of data_source" in outside.message
    assert "gave -1 here" in outside.message
