"""Names that MLflow refuses: who comes first keeps the name, through every resume, and the way back is in a tag."""

import json
from typing import Any

import pytest

from ratchet.tracking.metric_names import NAMES_TAG, MetricNames, originals
from ratchet.tracking.mlflow_tracker import MLflowTracker


def logged(names: MetricNames, *wanted: str) -> dict[str, str]:
    return names.stored(wanted)


def test_what_is_renamed_is_told_and_a_process_that_goes_on_names_alike() -> None:
    first = MetricNames({}, ())
    assert logged(first, "actor/pg_loss", "val/acc/mean@1") == {
        "actor/pg_loss": "actor/pg_loss",
        "val/acc/mean@1": "val/acc/mean_at_1",
    }
    tags = first.new_tags()
    assert tags == {NAMES_TAG: '{"val/acc/mean_at_1": "val/acc/mean@1"}'}
    first.learn(tags)
    assert first.new_tags() == {}
    # Alone, a process would give the legal name its own and take it from the curve that has it.
    second = MetricNames(tags, ["actor/pg_loss", "val/acc/mean_at_1"])
    found = logged(second, "val/acc/mean_at_1", "val/acc/mean@1")
    assert found["val/acc/mean@1"] == "val/acc/mean_at_1"
    assert found["val/acc/mean_at_1"] == logged(first, "val/acc/mean_at_1")["val/acc/mean_at_1"] != "val/acc/mean_at_1"
    assert originals(second.new_tags()) == {there: name for name, there in found.items()}


def test_a_legal_name_that_came_first_keeps_its_curve() -> None:
    first = MetricNames({}, ())
    assert logged(first, "mean_at_1") == {"mean_at_1": "mean_at_1"}
    assert first.new_tags() == {NAMES_TAG: "{}"}, "a run that has the tag tells which names are their own"
    second = MetricNames(first.new_tags(), ["mean_at_1"])
    assert logged(second, "mean@1")["mean@1"].startswith("mean_at_1_")


def test_a_run_that_was_begun_without_the_tag_keeps_its_names() -> None:
    assert logged(MetricNames({}, ["mean_at_1"]), "mean@1") == {"mean@1": "mean_at_1"}


def test_what_other_processes_decided_meanwhile_is_taken_over() -> None:
    ours, others = MetricNames({}, ()), MetricNames({}, ())
    logged(ours, "a@1")
    logged(others, "b@1")
    ours.learn(others.new_tags())
    assert originals(ours.new_tags()) == {"b_at_1": "b@1", "a_at_1": "a@1"}


def test_many_long_names_fill_tags_of_the_length_that_mlflow_stores() -> None:
    names = [f"val-core/{'source' * 20}-{number}\u4e2d/acc/mean@1" for number in range(200)]
    first = MetricNames({}, ())
    found = logged(first, *names)
    tags = first.new_tags()
    assert len(tags) > 5
    assert set(tags) == {NAMES_TAG, *(f"{NAMES_TAG}.{number}" for number in range(2, len(tags) + 1))}
    assert all(len(value) <= 8000 for value in tags.values())
    assert originals(tags) == {there: name for name, there in found.items()}
    first.learn(tags)
    logged(first, "one@more")
    assert len(first.new_tags()) == 1, "full tags stay as they are"


def test_tags_of_others_are_no_names() -> None:
    tags = {NAMES_TAG: "[1]", f"{NAMES_TAG}.2": "no JSON", f"{NAMES_TAG}.x": json.dumps({"a": "b"}), "ratchet": "{}"}
    assert originals(tags) == {}


@pytest.mark.slow
@pytest.mark.parametrize("order", [("acc@1", "acc_at_1"), ("acc_at_1", "acc@1")])
def test_mlflow_keeps_two_curves_apart_through_a_resume(chain: Any, server_uri: str, order: tuple[str, str]) -> None:
    from mlflow import MlflowClient

    def track() -> str:
        tracker = MLflowTracker(
            chain.run, experiment=f"names of {order[0]}", run_name="r", params={}, tracking_uri=server_uri
        )
        tracker.catch_up()
        assert tracker.run_id is not None
        return tracker.run_id

    chain.commit("reward", 1, {order[0]: 1.0})
    track()
    # A new process, which has not seen what came first, gets both.
    chain.commit("reward", 2, {order[1]: 20.0, order[0]: 2.0})
    run_id = track()
    client = MlflowClient(tracking_uri=server_uri)
    data = client.get_run(run_id).data
    back = {there: originals(data.tags).get(there, there) for there in data.metrics}
    curves = {
        name: [(point.step, point.value) for point in client.get_metric_history(run_id, there)]
        for there, name in back.items()
    }
    assert curves == {order[0]: [(1, 1.0), (2, 2.0)], order[1]: [(2, 20.0)]}
    assert "acc_at_1" in data.metrics, "whoever came first has the plain name"
    assert back["acc_at_1"] == order[0]
