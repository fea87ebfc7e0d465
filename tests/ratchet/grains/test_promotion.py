"""Promotion of committed runs: what is decided, what it is compared with, and what is decided again."""

import logging
import math
import re
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ratchet.config import RunConfig
from ratchet.errors import ConfigError, NotCommittedError, StoreError
from ratchet.grains import promotion
from ratchet.store import champions
from ratchet.store.champions import Decision
from ratchet.store.run import Run
from tests.promotion import exported_files, finished_run, promotion_config
from tests.runs import tiny_config, train_tiny, write_problems


@pytest.fixture(autouse=True)
def _no_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "runs")


def right(count: int, of: int = 20) -> list[float]:
    return [1.0] * count + [0.0] * (of - count)


def promote(run: Run, config: RunConfig, **more: Any) -> Decision:
    found = promotion.promote(run, config, **more)
    assert found is not None
    return found


def finish_and_promote(root: str, run_id: str, rewards: Any, **more: Any) -> Decision:
    return promote(*finished_run(root, run_id, rewards, **more))


# -- the first champion -----------------------------------------------------------------------------------------------


def test_the_first_policy_has_to_clear_the_absolute_bar_alone(root: str) -> None:
    config = promotion_config(**{"promotion.min_accuracy": 0.5})
    refused = finish_and_promote(root, "weak", right(9), config=config)
    assert (refused.verdict, refused.targets, refused.compared_with) == ("refused", None, None)
    assert refused.reasons[0].startswith("accuracy 0.4500 [")
    assert champions.champion(root, "math") is None

    run, config = finished_run(root, "strong", right(10), config=config)
    found = promote(run, config, submission_id="pipeline-1", by="an operator")
    assert (found.number, found.verdict, found.targets, found.reasons) == (2, "promoted", 2, ())
    assert (found.run, found.step, found.run_id) == (run.uri, 1, "strong")
    assert (found.submission_id, found.by, found.bars.min_accuracy) == ("pipeline-1", "an operator", 0.5)
    assert champions.champion(root, "math") == found
    # What it rests on can be found again from the record.
    export = run.require("checkpoint_export", 1).output("export")
    assert (found.export.uri, found.export.digest) == (f"{run.uri}/{export.folder}", export.digest)
    assert found.base.path == "some/model"
    assert found.base.digest == run.require("policy_update", 0).output("policy").digest
    assert found.evaluation.table == run.require("evaluate", 1).output("evaluations").digest
    assert found.evaluation.held_out == run.require("preprocess/val", None).output("prompts").digest
    assert (found.data.source, found.data.source_digest) == ("train.jsonl", "5" * 64)
    assert found.data.train == run.require("preprocess/train", None).output("prompts").digest
    assert champions.exported(root, found) == export


def test_the_accuracy_is_the_mean_over_prompts_of_the_mean_over_samples(root: str) -> None:
    found = finish_and_promote(root, "run", [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0], [0.5]])
    assert (found.evaluation.accuracy, found.evaluation.prompts) == (pytest.approx((0.25 + 1 + 0.5) / 3), 3)


def test_without_a_name_nothing_is_decided(root: str) -> None:
    run, config = finished_run(root, "run", right(20), config=promotion_config(**{"promotion.name": ""}))
    assert promotion.promote(run, config) is None
    assert not Path(root, "champions").exists()


def test_a_name_that_cannot_be_a_folder_is_refused(root: str) -> None:
    run, _ = finished_run(root, "run", right(20))
    with pytest.raises(ConfigError, match="champion 'a/b'"):
        promotion.promote(run, promotion_config(**{"promotion.name": "a/b"}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": {0: right(20)}}, r"step 1 is not evaluated.*ratchet evaluate .*run --step 1"),
        ({"rewards": right(20), "is_exported": False}, r"step 1 is not exported; ratchet export .*run --step 1"),
    ],
)
def test_a_policy_that_is_not_evaluated_or_not_exported_is_no_candidate(
    root: str, changes: dict[str, Any], message: str
) -> None:
    run, config = finished_run(root, "run", **changes)
    with pytest.raises(NotCommittedError, match=message):
        promotion.promote(run, config)
    assert not Path(root, "champions").exists()


def test_a_policy_that_cannot_be_evaluated_is_refused_for_its_config(root: str) -> None:
    # An earlier task's failure is what NotCommittedError would be taken for.
    run, config = finished_run(root, "run", {}, config=promotion_config(**{"data.val_files": None}))
    with pytest.raises(ConfigError, match=r"a run without data\.val_files has no held-out prompts"):
        promotion.promote(run, config)


def test_a_policy_whose_export_is_gone_is_no_candidate(root: str) -> None:
    run, config = finished_run(root, "run", right(20))
    artifact = run.require("checkpoint_export", 1).output("export")
    run.store.delete(f"{artifact.folder}/model.safetensors")
    with pytest.raises(StoreError, match=r"files of the export .* are missing or cut short"):
        promotion.promote(run, config)


def test_rewards_outside_zero_and_one_are_refused_with_their_numbers(root: str) -> None:
    found = finish_and_promote(root, "run", [0.0, 1.0, 2.5])
    assert found.verdict == "refused"
    assert "outside [0, 1]" in found.reasons[0]
    assert (found.evaluation.low, found.evaluation.high) == (None, None)
    # A mean in [0, 1] of rewards that are not is no accuracy either.
    assert finish_and_promote(root, "other", [[2.0, -1.0]]).verdict == "refused"


# -- against the champion ---------------------------------------------------------------------------------------------


def test_the_champions_own_evaluation_is_compared_with_on_the_same_prompts(root: str) -> None:
    first = finish_and_promote(root, "first", right(10))
    second = finish_and_promote(root, "second", [*right(14, of=19), 0.0])
    assert (second.verdict, second.compared_with, second.targets) == ("promoted", 1, 2)
    assert second.improvement is not None
    assert second.improvement.mean == pytest.approx(0.2)
    assert second.improvement.champion_accuracy == 0.5
    assert second.improvement.champion_table == first.evaluation.table
    assert second.improvement.measured_in == f"{first.run}/step-000001"
    third = finish_and_promote(root, "third", right(14))
    assert (third.verdict, third.compared_with, third.targets) == ("refused", 2, 2)
    assert third.reasons[0].startswith("improvement over champion 2 +0.0000 [")
    significant = promotion_config(**{"promotion.significant": True})
    fourth = finish_and_promote(root, "fourth", right(15), config=significant)
    assert "the lower end of its 95% interval does not exceed promotion.min_improvement=0" in fourth.reasons[0]
    assert [one.verdict for one in champions.decisions(root, "math")] == ["promoted"] * 2 + ["refused"] * 2


def test_a_run_that_started_from_the_champion_is_compared_with_its_own_step_0(root: str) -> None:
    finish_and_promote(root, "first", right(18))
    # On these prompts the champion does worse than on those that it was promoted with.
    found = finish_and_promote(
        root, "second", {0: right(8), 1: right(12)}, base=exported_files("first"), held_out="new prompts"
    )
    assert found.verdict == "promoted"
    assert found.improvement is not None
    assert found.improvement.champion_accuracy == 0.4
    assert found.improvement.measured_in.endswith("second/step-000000")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"held_out": "new prompts"}, "the champion was measured on other held-out prompts"),
        (
            {"config": promotion_config(**{"data.max_response_length": 64})},
            "the champion's answers were sampled or graded with other settings",
        ),
        ({"sources": {"reward_model": "9" * 64}}, "sampled or graded with other settings"),
        (
            {"held_out": "new prompts", "base": exported_files("first")},
            r"its step 0 is not evaluated \(ratchet evaluate .*second --step 0\); the champion was measured on other",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused_with_what_to_do(root: str, changes: dict[str, Any], reason: str) -> None:
    first = finish_and_promote(root, "first", right(2))
    found = finish_and_promote(root, "second", right(20), **changes)
    assert (found.verdict, found.compared_with, found.improvement, found.targets) == ("refused", 1, None, 1)
    assert re.search(f"not comparable with champion 1: .*{reason}", found.reasons[0])
    assert f"starts from {first.export.uri}" in found.reasons[0]
    assert re.search(r"ratchet promote .*second --again --baseline ROOT/RUN-ID", found.reasons[0])
    assert found.evaluation.accuracy == 1.0


def test_a_champion_whose_run_is_gone_cannot_be_compared_with(root: str) -> None:
    finish_and_promote(root, "first", right(2))
    shutil.rmtree(Path(root, "first"))
    found = finish_and_promote(root, "second", right(20))
    assert "the champion's evaluation is gone from" in found.reasons[0]


def test_a_champions_table_that_was_changed_is_an_error_and_no_decision(root: str) -> None:
    finish_and_promote(root, "first", right(2))
    (part,) = Path(root, "first").glob("step-000001/evaluate/*/evaluations/part-00000.parquet")
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    run, config = finished_run(root, "second", right(20))
    with pytest.raises(StoreError, match="is damaged"):
        promotion.promote(run, config)
    assert len(champions.decisions(root, "math")) == 1


def test_another_seed_is_no_other_question(root: str) -> None:
    finish_and_promote(root, "first", right(2))
    found = finish_and_promote(root, "second", right(20), config=promotion_config(**{"trainer.seed": 7}))
    assert found.verdict == "promoted"


def test_a_baseline_run_measures_the_champion_on_new_prompts(root: str) -> None:
    first = finish_and_promote(root, "first", right(18))
    run, config = finished_run(root, "second", right(12), held_out="new prompts")
    assert promote(run, config).verdict == "refused"
    measures, _ = finished_run(root, "measures", {0: right(8)}, base=exported_files("first"), held_out="new prompts")
    found = promote(run, config, again=True, baseline=measures)
    assert (found.number, found.verdict, found.compared_with) == (3, "promoted", first.number)
    assert found.improvement is not None
    assert found.improvement.measured_in.endswith("measures/step-000000")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base": {"model.safetensors": b"?"}, "held_out": "new"}, "did not start from the export of champion 1"),
        ({"base": exported_files("first")}, "has other held-out prompts than run"),
        (
            {
                "base": exported_files("first"),
                "held_out": "new",
                "config": promotion_config(**{"data.max_response_length": 64}),
            },
            "has other settings of sampling and grading than run",
        ),
    ],
)
def test_a_baseline_that_says_nothing_about_the_champion_is_refused(
    root: str, changes: dict[str, Any], message: str
) -> None:
    finish_and_promote(root, "first", right(2))
    run, config = finished_run(root, "second", right(20), held_out="new")
    baseline, _ = finished_run(root, "measures", {0: right(8)}, **changes)
    with pytest.raises(ConfigError, match=message):
        promotion.promote(run, config, baseline=baseline)
    assert len(champions.decisions(root, "math")) == 1


# -- again ------------------------------------------------------------------------------------------------------------


def test_a_pod_that_starts_again_gives_the_same_answer(root: str, caplog: pytest.LogCaptureFixture) -> None:
    finish_and_promote(root, "first", right(10))
    run, config = finished_run(root, "second", right(9))
    refused = promote(run, config)
    assert refused.verdict == "refused"
    assert promote(Run(root, "second"), config) == refused
    # Neither a later champion nor other bars change what was decided; the bars are told of.
    champions.append(root, "math", lambda history: _copy(history[0], len(history) + 1))
    caplog.clear()
    assert promote(run, promotion_config(**{"promotion.min_accuracy": 0.1})) == refused
    assert "decision 2 on this policy stands, though it was made under other bars" in caplog.text
    assert len(champions.decisions(root, "math")) == 3
    again = promote(run, config, again=True)
    assert (again.number, again.verdict, again.compared_with) == (4, "refused", 3)
    assert promote(run, config) == again


def _copy(found: Decision, number: int) -> Decision:
    import dataclasses

    return dataclasses.replace(found, number=number, targets=number)


def test_a_resumed_pod_does_not_undo_a_rollback(root: str) -> None:
    first = finish_and_promote(root, "first", right(10))
    run, config = finished_run(root, "second", right(20))
    second = promote(run, config)
    promotion.rollback(root, "math", by="an operator")
    assert promote(run, config) == second
    assert champions.champion(root, "math") == first
    # Asked anew it is decided against the champion of now.
    assert promote(run, config, again=True).compared_with == 1


def test_the_policy_that_serves_already_is_not_decided_again(root: str) -> None:
    first = finish_and_promote(root, "first", right(10))
    twin, config = finished_run(root, "twin", right(10), export=exported_files("first"))
    assert promote(twin, config) == first
    run, config = finished_run(root, "first-again", right(20), export=exported_files("first"))
    assert promote(run, config, again=True) == first
    assert len(champions.decisions(root, "math")) == 1


def test_a_run_that_was_made_anew_under_the_same_id_is_decided_on(root: str) -> None:
    finish_and_promote(root, "run", right(10))
    shutil.rmtree(Path(root, "run"))
    run, config = finished_run(root, "run", right(20), export={"model.safetensors": b"another"})
    found = promote(run, config)
    assert found.number == 2


def test_names_have_their_own_champions(root: str) -> None:
    finish_and_promote(root, "first", right(10))
    found = finish_and_promote(root, "second", right(1), config=promotion_config(**{"promotion.name": "other"}))
    assert (found.number, found.name, found.verdict) == (1, "other", "promoted")


# -- races ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["local", pytest.param("s3", marks=pytest.mark.slow)])
def test_of_two_gates_that_race_the_worse_is_decided_against_the_better(
    kind: str, root: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = root if kind == "local" else request.getfixturevalue("s3_root")
    finish_and_promote(place, "v3", right(10))
    racers = [finished_run(place, "a", right(14)), finished_run(place, "b", right(11))]
    barrier, published = threading.Barrier(2), champions._create
    order = {"a": threading.Event(), "b": threading.Event()}

    def create(store: Any, key: str, body: bytes) -> bool:
        racer = "a" if b"/a" in body.partition(b'"run":')[2][: len(place) + 4] else "b"
        if key.endswith("0002.json"):
            barrier.wait()  # both were decided against the old champion
            if racer == "b":
                order["a"].wait(30)
        try:
            return published(store, key, body)
        finally:
            order[racer].set()

    monkeypatch.setattr(champions, "_create", create)
    with ThreadPoolExecutor(2) as pool:
        a, b = pool.map(lambda racer: promote(*racer), racers)
    assert (a.number, a.verdict, a.compared_with) == (2, "promoted", 1)
    # Against the champion that both had read, b would have been better by 0.05.
    assert (b.number, b.verdict, b.compared_with) == (3, "refused", 2)
    assert b.improvement is not None
    assert b.improvement.mean == pytest.approx(-0.15)
    assert b.improvement.measured_in == f"{a.run}/step-000001"
    assert champions.champion(place, "math") == a
    assert champions.decisions(place, "math")[1:] == [a, b]


def test_two_pods_of_one_run_decide_once(root: str) -> None:
    _, config = finished_run(root, "run", right(10))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda number: promote(Run(root, "run"), config, by=f"pod {number}"), range(4)))
    assert champions.decisions(root, "math") == [found[0]]
    assert found[1:] == found[:-1]


# -- what is said -----------------------------------------------------------------------------------------------------


def test_a_decision_is_told_in_a_sentence_in_numbers_and_in_a_report(root: str) -> None:
    finish_and_promote(root, "first", right(10))
    found = finish_and_promote(root, "second", right(9))
    text = promotion.sentence(found)
    assert text.startswith("math 2: refused | second step 1 | accuracy 0.4500 [")
    assert " on 20 prompts | -0.0500 [" in text
    assert "; improvement over champion 1 " in text
    numbers = promotion.numbers(found)
    assert numbers["promotion/accuracy"] == 0.45
    assert numbers["promotion/improvement"] == pytest.approx(-0.05)
    assert all(math.isfinite(value) for value in numbers.values())
    report = "\n".join(promotion.report(found))
    assert report.startswith("### math: decision 2, refused")
    assert found.export.uri in report
    assert "| serves now | decision 1 |" in report
    outside = finish_and_promote(root, "third", [5.0])
    assert "promotion/accuracy_ci95_low" not in promotion.numbers(outside)
    assert "accuracy 5.0000 on 1 prompts" in promotion.sentence(outside)


def test_who_decides_is_the_pod_or_the_user_even_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_POD_NAME", "ratchet-nightly-x-promote")
    assert promotion.who() == "ratchet-nightly-x-promote"
    monkeypatch.delenv("RATCHET_POD_NAME")
    monkeypatch.setenv("LOGNAME", "ann")
    assert promotion.who().startswith("ann at ")

    def unknown() -> str:
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr("getpass.getuser", unknown)
    assert promotion.who().startswith("uid ")


def test_mlflow_is_left_alone_where_nobody_names_it_and_its_outage_stops_nothing(
    root: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    synced: list[Sequence[Any]] = []
    monkeypatch.setattr("ratchet.tracking.registry.sync", lambda *arguments: synced.append(arguments))
    finish_and_promote(root, "first", right(10))
    assert synced == []
    finish_and_promote(root, "second", right(11), config=promotion_config(**{"trainer.logger": ["mlflow"]}))
    # The run of decision 1, which serves again, was not tracked by MLflow.
    promotion.rollback(root, "math")
    assert synced == [(root, "math")]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with caplog.at_level(logging.WARNING):
        promotion.rollback(root, "math", 2)
    assert synced == [(root, "math")] * 2


# -- a real run -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_from_the_champions_export_is_known_by_its_digest(tmp_path: Path, tiny_model: Path) -> None:
    problems = write_problems(tmp_path / "problems.jsonl", 3)
    common = {
        "data.val_files": str(problems),
        "trainer.total_training_steps": 1,
        "promotion.name": "pears",
        "promotion.significant": False,
    }
    config = tiny_config(tiny_model, problems, **common)
    first = promote(train_tiny(tmp_path, "first", config), config)
    assert first.verdict == "promoted"
    config = tiny_config(first.export.uri, problems, **common)
    second = train_tiny(tmp_path, "second", config)
    assert second.require("policy_update", 0).output("policy").digest == first.export.digest
    found = promote(second, config)
    assert found.compared_with == 1
    assert found.improvement is not None
    assert found.improvement.measured_in == f"{second.uri}/step-000000"
    # The same weights on the same prompts with the same noise: measured twice, they agree.
    assert found.improvement.champion_table == first.evaluation.table
