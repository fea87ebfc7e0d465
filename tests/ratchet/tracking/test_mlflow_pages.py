"""Completions on MLflow's own pages, in a real browser; screenshots are left where RATCHET_SCREENSHOTS says."""

import os
from pathlib import Path

import pytest

from ratchet.tracking.mlflow_tables import CompletionTables
from ratchet.tracking.mlflow_tracker import MLflowTracker
from tests.browser import CHROMIUM, Page, open_page
from tests.ratchet.tracking.report_runs import learning_run

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")]

MODE = "workflowType=machine_learning"
"""Of two kinds of pages that MLflow has, those of training."""


def shows(tab: Page, *texts: str) -> None:
    for text in texts:
        tab.wait(f"document.body?.innerText.includes({text!r})")


def test_mlflow_shows_a_step_s_completions_as_a_table_and_compares_runs_by_them(
    tmp_path: Path, server_uri: str
) -> None:
    from mlflow import MlflowClient

    run = learning_run(str(tmp_path / "runs"), 2)
    tracker = MLflowTracker(
        run,
        experiment="pages of completions",
        run_name="gsm8k-grpo",
        params={},
        tracking_uri=server_uri,
        exhibits=[CompletionTables(2)],
    )
    tracker.catch_up()
    assert tracker.run_id is not None
    experiment = MlflowClient(tracking_uri=server_uri).get_run(tracker.run_id).info.experiment_id
    shots = Path(os.environ.get("RATCHET_SCREENSHOTS") or tmp_path / "shots")
    place = f"{server_uri}/#/experiments/{experiment}"
    with open_page() as tab:
        tab.look(width=1600, height=900)
        tab.open(f"{place}/runs/{tracker.run_id}/artifacts/completions/train/step-000002.json?{MODE}")
        shows(tab, "View as table", "ground_truth", "She has ")
        tab.run("document.querySelector('[aria-label=Close]')?.click()")
        tab.screenshot(shots / "mlflow-completions.png")
        tab.open("about:blank")
        tab.open(f"{place}/runs?compareRunsMode=ARTIFACT&{MODE}")
        # By itself MLflow compares the second column, for each value of the first.
        shows(
            tab, "Group by:\nprompt\nCompare:\ncompletion", "Ann has 0 pears and buys 1 more. How many?", "held out 0"
        )
        tab.screenshot(shots / "mlflow-compare.png")
        assert tab.run("document.title") != "hacked"
