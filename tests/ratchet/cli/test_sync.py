"""A run that MLflow never heard of, brought to it afterwards by the verb sync."""

from pathlib import Path

import pytest

from ratchet.store.run import Run
from tests.command_line import Ratchet, in_this_process
from tests.runs import manifests, tiny_config, train_tiny, write_problems

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated:DeprecationWarning"),
]


@pytest.fixture
def ratchet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ratchet:
    """Run the command line in this process, as its entry point does."""
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    return in_this_process(monkeypatch, capsys)


def test_a_run_whose_mlflow_was_down_from_first_to_last_is_brought_to_it_whole(
    ratchet: Ratchet, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    problems = write_problems(tmp_path / "problems.jsonl")
    values = {"trainer.logger": ["mlflow"], "trainer.total_training_steps": 2, "trainer.grain": "segment"}
    run = train_tiny(tmp_path, "run", tiny_config(tiny_model, problems, **values))
    # Whoever brings it there later has other code than whoever trained.
    monkeypatch.setenv("RATCHET_REVISION", "of-the-auditor")
    refused = ratchet("sync", tmp_path / "run")
    assert refused.code == 1
    assert refused.out == ""

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    chain = [one for one in manifests(run).values() if one.metrics]
    done = ratchet("sync", tmp_path / "run", "--tracking-uri", uri)
    assert done.code == 0
    assert done.out.endswith(f"at {uri}: {len(chain)} stages brought, the others were there\n")
    assert " 0 stages brought" in ratchet("sync", tmp_path / "run", "--tracking-uri", uri).out

    client = MlflowClient(tracking_uri=uri)
    (found,) = client.search_runs([client.get_experiment_by_name("ratchet").experiment_id])
    assert (found.info.status, found.data.tags["ratchet.root"]) == ("FINISHED", Run(str(tmp_path), "run").uri)
    assert found.data.tags["ratchet.revision"] == run.require("policy_update", 2).provenance.code_revision
    points = client.get_metric_history(found.info.run_id, "critic/score/mean")
    graded = [run.require("reward", step) for step in (1, 2)]
    assert [(p.step, p.value, p.timestamp) for p in points] == [
        (one.step, one.metrics["critic/score/mean"], int(one.provenance.ended * 1000)) for one in graded
    ]
    assert [one.dataset.name for one in found.inputs.dataset_inputs] == ["data/train"]
    files = {
        one.path: [part.path for part in client.list_artifacts(found.info.run_id, one.path)]
        for one in client.list_artifacts(found.info.run_id)
    }
    assert files["config.yaml"] == []
    assert files["reports"] == ["reports/run.html"]
    assert files["completions"] != []
