"""What the components of a pipeline call, in the order in which a pipeline calls them."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from ratchet.config import RunConfig
from ratchet.errors import ConfigError, NotCommittedError
from ratchet.grains import entry, loop
from ratchet.grains.session import open_session, submit
from ratchet.store.run import Run
from tests.runs import content_digests, tiny_config, train_tiny, write_problems

KL_IN_LOSS = {"actor_rollout_ref.actor.use_kl_loss": True}


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_problems(tmp_path_factory.mktemp("problems") / "problems.jsonl")


def _config(model: Path, problems: Path, **overrides: Any) -> RunConfig:
    return tiny_config(model, problems, **{"data.val_files": str(problems), **overrides})


def _preflight(root: Path, config: RunConfig) -> tuple[str, str, str]:
    place = (str(root), "run", "pipeline-1")
    entry.preflight(*place, yaml.safe_dump(config.model_dump(mode="json")), [])
    return place


def test_segments_in_processes_of_their_own_make_the_run_that_one_process_makes(
    tmp_path: Path, tiny_model: Path, problems: Path
) -> None:
    config = _config(tiny_model, problems, **{"trainer.steps_per_segment": 2})
    place = _preflight(tmp_path, config)
    entry.preprocess(*place)
    starts = entry.plan(*place)
    assert starts == [1, 3]
    with pytest.raises(NotCommittedError, match="step-000002/policy_update is not committed"):
        entry.segment(*place, starts[1])
    digests = [entry.segment(*place, start) for start in starts]
    assert entry.plan(*place) == []
    assert entry.evaluate(*place, "last")
    export = entry.checkpoint_export(*place)
    assert (Path(export) / "model.safetensors").is_file()

    run = Run(*place[:2])
    assert digests[-1] == run.require("policy_update", 3).content_digest
    whole = train_tiny(tmp_path, "whole", _config(tiny_model, problems, **{"trainer.steps_per_segment": 3}))
    assert content_digests(run) == content_digests(whole)


def test_stages_in_processes_of_their_own_make_the_run_that_one_process_makes(
    tmp_path: Path, tiny_model: Path, problems: Path
) -> None:
    values = {"trainer.total_training_steps": 2, **KL_IN_LOSS}
    place = _preflight(tmp_path, _config(tiny_model, problems, **values, **{"trainer.grain": "stage"}))
    entry.preprocess(*place)
    assert entry.evaluate(*place, "base") == ""
    for step in entry.plan(*place):
        for name in ("rollout", "reward"):
            assert entry.stage(name, *place, step)
        assert entry.scores(*place, step) == Run(*place[:2]).require("reference_scores", step).content_digest
        # A pod that starts again finds its own work done.
        assert entry.stage("rollout", *place, step) == entry.stage("rollout", *place, step)
        for name in ("advantage", "policy_update"):
            assert entry.stage(name, *place, step)
    entry.evaluate(*place, "2")
    entry.checkpoint_export(*place)
    whole = train_tiny(tmp_path, "whole", _config(tiny_model, problems, **values))
    assert content_digests(Run(*place[:2])) == content_digests(whole)


def test_scores_that_nothing_reads_are_left_out(tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    place = _preflight(tmp_path, tiny_config(tiny_model, problems))
    assert entry.scores(*place, 1) == ""
    assert entry.evaluate(*place, "last") == "", "there are no held-out prompts"


def test_a_version_that_is_none_is_refused(tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    place = _preflight(tmp_path, _config(tiny_model, problems))
    with pytest.raises(ConfigError, match='version \'newest\': expected "base", "last" or a step'):
        entry.evaluate(*place, "newest")


def test_preflight_takes_a_file_or_its_text_and_overrides(tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    config = _config(tiny_model, problems)
    text = json.dumps(config.model_dump(mode="json"))
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    for number, given in enumerate((str(path), text)):
        uri = entry.preflight(str(tmp_path), f"run-{number}", "s", given, ["trainer.seed=3"])
        assert uri == str(tmp_path / f"run-{number}")
        assert Run(str(tmp_path), f"run-{number}").semantic()["trainer"]["seed"] == 3
    # The same submission again is the same claim; nothing is left beside the runs.
    entry.preflight(str(tmp_path), "run-0", "s", text, ["trainer.seed=3"])
    assert Run(str(tmp_path), "run-0").newest_epoch() == 1
    assert {path.name for path in tmp_path.iterdir() if path.is_dir() and list(path.rglob("*.*"))} == {"run-0", "run-1"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.n_gpus_per_node=2"], "needs trainer.grain=stage"),
        (["trainer.nnodes=2", "trainer.grain=stage"], "this version trains on one node"),
        (["actor_rollout_ref.model.path="], "actor_rollout_ref.model.path is not set"),
    ],
)
def test_preflight_refuses_what_no_pod_could_run_before_the_run_exists(
    tmp_path: Path, tiny_model: Path, problems: Path, overrides: list[str], message: str
) -> None:
    text = yaml.safe_dump(_config(tiny_model, problems).model_dump(mode="json"))
    with pytest.raises(ConfigError, match=message):
        entry.preflight(str(tmp_path), "run", "s", text, overrides)
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_plan_of_more_iterations_than_a_pipeline_should_have_is_refused(
    tmp_path: Path, tiny_model: Path, problems: Path
) -> None:
    config = _config(tiny_model, problems)
    with open_session(submit(str(tmp_path), "run", config), config) as session:
        assert loop.plan(session, 80, 2) == list(range(1, 80, 2))
        assert loop.plan(session, 3, 50) == [1]
        with pytest.raises(ConfigError, match=r"81 steps in segments of 2 make 41 iterations, more than the 40"):
            loop.plan(session, 81, 2)
