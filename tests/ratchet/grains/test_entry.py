"""What the components of a pipeline call, in the order in which a pipeline calls them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from ratchet.config import RunConfig
from ratchet.errors import ConfigError, NotCommittedError
from ratchet.grains import entry, loop, promotion
from ratchet.grains.session import open_session, submit
from ratchet.grains.tasks import (
    EvaluateTask,
    ExportTask,
    PlanTask,
    PreflightTask,
    PreprocessTask,
    SegmentTask,
    StageTask,
)
from ratchet.store.run import Run
from tests.ratchet.grains.test_outputs import Artifact
from tests.runs import content_digests, tiny_config, train_tiny, write_problems

KL_IN_LOSS = {"actor_rollout_ref.actor.use_kl_loss": True}


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_problems(tmp_path_factory.mktemp("problems") / "problems.jsonl")


def _config(model: Path, problems: Path, **overrides: Any) -> RunConfig:
    return tiny_config(model, problems, **{"data.val_files": str(problems), **overrides})


def _preflight(root: Path, config: RunConfig, **more: Any) -> dict[str, str]:
    at = {"root": str(root), "run_id": "run", "submission_id": "pipeline-1"}
    text = yaml.safe_dump(config.model_dump(mode="json"))
    decision = entry.preflight(PreflightTask(**at, config=text, grain=config.trainer.grain, **more))
    assert decision[0] == "train"
    return at


def test_segments_in_processes_of_their_own_make_the_run_that_one_process_makes(
    tmp_path: Path, tiny_model: Path, problems: Path
) -> None:
    config = _config(tiny_model, problems, **{"trainer.steps_per_segment": 2})
    at = _preflight(tmp_path, config)
    entry.preprocess(PreprocessTask(**at))
    starts = [one["start"] for one in entry.plan(PlanTask(**at))]
    assert starts == [1, 3]
    with pytest.raises(NotCommittedError, match="step-000002/policy_update is not committed"):
        entry.segment(SegmentTask(**at, start=starts[1]))
    page, whole_page = Artifact(tmp_path / "page"), Artifact(tmp_path / "whole-page")
    digests = [entry.segment(SegmentTask(**at, start=start), page=page) for start in starts]
    assert entry.plan(PlanTask(**at)) == []
    assert entry.evaluate(EvaluateTask(**at, version="last"))
    export = entry.checkpoint_export(ExportTask(**at), page=whole_page)
    assert (Path(export) / "model.safetensors").is_file()
    assert "<title>run, steps 3 to 3</title>" in Path(page.path).read_text()
    assert "<title>run</title>" in Path(whole_page.path).read_text()

    run = Run(at["root"], "run")
    assert digests[-1] == run.require("policy_update", 3).content_digest
    whole = train_tiny(tmp_path, "whole", _config(tiny_model, problems, **{"trainer.steps_per_segment": 3}))
    assert content_digests(run) == content_digests(whole)


def test_stages_in_processes_of_their_own_make_the_run_that_one_process_makes(
    tmp_path: Path, tiny_model: Path, problems: Path
) -> None:
    values = {"trainer.total_training_steps": 2, **KL_IN_LOSS}
    at = _preflight(tmp_path, _config(tiny_model, problems, **values, **{"trainer.grain": "stage"}))
    entry.preprocess(PreprocessTask(**at))
    assert entry.evaluate(EvaluateTask(**at, version="base"))
    for step in [one["start"] for one in entry.plan(PlanTask(**at))]:
        for name in ("rollout", "reward"):
            assert entry.stage(StageTask(**at, step=step), name=name)
        assert (
            entry.scores(StageTask(**at, step=step))
            == Run(at["root"], "run").require("reference_scores", step).content_digest
        )
        # A pod that starts again finds its own work done.
        assert entry.stage(StageTask(**at, step=step), name="rollout") == entry.stage(
            StageTask(**at, step=step), name="rollout"
        )
        for name in ("advantage", "policy_update"):
            assert entry.stage(StageTask(**at, step=step), name=name)
    entry.evaluate(EvaluateTask(**at, version="2"))
    entry.checkpoint_export(ExportTask(**at))
    whole = train_tiny(tmp_path, "whole", _config(tiny_model, problems, **values))
    assert content_digests(Run(at["root"], "run")) == content_digests(whole)


def test_scores_that_nothing_reads_are_left_out(tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    at = _preflight(tmp_path, tiny_config(tiny_model, problems))
    assert entry.scores(StageTask(**at, step=1)) == ""
    assert entry.evaluate(EvaluateTask(**at, version="last")) == "", "there are no held-out prompts"


def test_a_version_that_is_none_is_refused(tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    at = _preflight(tmp_path, _config(tiny_model, problems))
    with pytest.raises(ConfigError, match='version \'newest\': expected "base", "last" or a step'):
        entry.evaluate(EvaluateTask(**at, version="newest"))


def test_preflight_takes_a_file_or_its_text_and_what_the_form_says(
    tmp_path: Path, tiny_model: Path, problems: Path
) -> None:
    config = _config(tiny_model, problems)
    text = json.dumps(config.model_dump(mode="json"))
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    at = {"root": str(tmp_path), "submission_id": "s"}
    for number, given in enumerate((str(path), text)):
        entry.preflight(PreflightTask(**at, run_id=f"run-{number}", config=given, total_steps=2, grain="step"))
        newest = next(Run(str(tmp_path), f"run-{number}").submissions())
        assert newest["config"]["trainer"]["total_training_steps"] == 2
        assert newest["grain"] == "step"
    # The same submission again is the same claim; nothing is left beside the runs.
    entry.preflight(PreflightTask(**at, run_id="run-0", config=text, total_steps=2, grain="step"))
    assert Run(str(tmp_path), "run-0").newest_epoch() == 1
    folders = {path.name for path in tmp_path.iterdir() if path.is_dir() and list(path.rglob("*.*"))}
    assert folders == {"run-0", "run-1"}


def test_without_a_name_the_run_has_that_of_its_submission(tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    text = json.dumps(_config(tiny_model, problems).model_dump(mode="json"))
    at = {"root": str(tmp_path), "run_id": "", "submission_id": "9f1c-77"}
    entry.preflight(PreflightTask(**at, config=text))
    entry.preprocess(PreprocessTask(**at))
    assert Run(str(tmp_path), "9f1c-77").manifest("preprocess/train", None) is not None


def test_a_finished_run_is_not_claimed_again(tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    config = _config(tiny_model, problems, **{"trainer.total_training_steps": 1})
    run = train_tiny(tmp_path, "run", config)
    text = json.dumps(config.model_dump(mode="json"))
    task = PreflightTask(root=str(tmp_path), run_id="run", submission_id="later", config=text)
    assert entry.preflight(task)[0] == "finished"
    assert run.newest_epoch() == 1
    # More steps are more work.
    assert entry.preflight(dataclasses.replace(task, total_steps=2))[0] == "train"
    assert Run(str(tmp_path), "run").newest_epoch() == 2


def test_where_pods_run_comes_from_the_config_and_over_it_the_form(
    tmp_path: Path, tiny_model: Path, problems: Path
) -> None:
    config = _config(tiny_model, problems, **{"device_map.segment.cpu": "2", "device_map.evaluate.memory": "9Gi"})
    asked = {"segment": {"accelerator_count": 1.0, "cpu": 3, "tolerations": [{"key": "gpu", "operator": "Exists"}]}}
    images = {"segment": "registry/segment:1", "evaluate": "registry/rollout:1"}
    at = {"root": str(tmp_path), "run_id": "run", "submission_id": "s"}
    text = json.dumps(config.model_dump(mode="json"))
    _, *where = entry.preflight(PreflightTask(**at, config=text, device_map=asked, images=images))
    assert where == ["registry/rollout:1", "", "0", "1", "9Gi", {}, []]
    entry.preprocess(PreprocessTask(**at))
    assert entry.plan(PlanTask(**at)) == [
        {
            "start": 1,
            "segment_image": "registry/segment:1",
            "segment_accelerator_type": "nvidia.com/gpu",
            "segment_accelerator_count": "1",
            "segment_cpu": "3",
            "segment_memory": "8Gi",
            "segment_node_selector": {},
            "segment_tolerations": [{"key": "gpu", "operator": "Exists"}],
        }
    ]


def test_a_nightly_run_starts_from_the_champion_of_the_day_it_was_begun(
    tmp_path: Path, tiny_model: Path, problems: Path
) -> None:
    config = _config(tiny_model, problems, **{"trainer.total_training_steps": 1, "promotion.name": "policy"})
    first = promotion.promote(train_tiny(tmp_path, "first", config), config)
    assert first is not None
    at = {"root": str(tmp_path), "champion": "policy", "from_champion": True}
    same = PreflightTask(**at, run_id="second", submission_id="s", config=config.model_dump_json())
    assert entry.preflight(same)[0] == "unchanged"
    assert Run(str(tmp_path), "second").newest_epoch() == 0

    others = write_problems(tmp_path / "others.jsonl", 4)
    new = _config(tiny_model, others, **{"trainer.total_training_steps": 1})
    task = PreflightTask(**at, run_id="third", submission_id="s", config=new.model_dump_json())
    assert entry.preflight(task)[0] == "train"

    def base_of(run_id: str) -> str:
        newest = next(Run(str(tmp_path), run_id).submissions())
        return str(newest["config"]["actor_rollout_ref"]["model"]["path"])

    assert base_of("third") == first.export.uri
    # Another champion by the time the run is resumed changes nothing.
    promotion.promote(train_tiny(tmp_path, "other", config), config, again=True)
    assert entry.preflight(dataclasses.replace(task, submission_id="later"))[0] == "train"
    assert base_of("third") == first.export.uri


def test_a_pipeline_that_starts_from_a_champion_needs_its_name(
    tmp_path: Path, tiny_model: Path, problems: Path
) -> None:
    text = _config(tiny_model, problems).model_dump_json()
    task = PreflightTask(root=str(tmp_path), run_id="run", submission_id="s", config=text, from_champion=True)
    with pytest.raises(ConfigError, match="give its name"):
        entry.preflight(task)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"rolout": {"cpu": 1}}, "rollout"),
        ({"rollout": {"gpus": 1}}, "device_map.rollout.gpus"),
        ({"rollout": {"memory": "16 GB"}}, "device_map.rollout.memory"),
        ({"rollout": 1}, "expected a mapping"),
        ({"rollout": {"tolerations": [{"name": "gpu"}]}}, r"tolerations\.0\.name"),
        ({"rollout": {"tolerations": [{"key": "gpu", "operator": "exists"}]}}, r"tolerations\.0\.operator"),
        ({"rollout": {"tolerations": [{"key": "gpu", "value": True}]}}, r"tolerations\.0\.value"),
        ({"rollout": {"tolerations": [{"key": "gpu", "operator": "Exists", "value": "h200"}]}}, "takes no value"),
        ({"rollout": {"tolerations": [{"effect": "NoSchedule"}]}}, "without a key"),
        ({"rollout": {"tolerations": [{"key": "gpu", "tolerationSeconds": 5}]}}, "needs effect: NoExecute"),
        ({"rollout": {"node_selector": {"pool": "gpu nodes"}}}, "device_map.rollout.node_selector"),
        ({"rollout": {"accelerator_type": "gpu"}}, "device_map.rollout.accelerator_type"),
    ],
)
def test_a_device_map_that_means_nothing_is_refused(
    tmp_path: Path, tiny_model: Path, problems: Path, asked: dict[str, Any], message: str
) -> None:
    text = json.dumps(_config(tiny_model, problems).model_dump(mode="json"))
    task = PreflightTask(root=str(tmp_path), run_id="run", submission_id="s", config=text, device_map=asked)
    with pytest.raises(ConfigError, match=message):
        entry.preflight(task)


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
    grain = "stage" if "trainer.grain=stage" in overrides else "segment"
    values = dict(one.split("=") for one in overrides if "grain" not in one)
    tree = _config(tiny_model, problems).model_dump(mode="json")
    for key, value in values.items():
        _put(tree, key, int(value) if value.isdecimal() else value)
    task = PreflightTask(root=str(tmp_path), run_id="run", submission_id="s", config=yaml.safe_dump(tree), grain=grain)
    with pytest.raises(ConfigError, match=message):
        entry.preflight(task)
    assert not (tmp_path / "run" / "run.json").exists()


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        tree = tree[section]
    tree[name] = value


def test_a_plan_of_more_iterations_than_a_pipeline_should_have_is_refused(
    tmp_path: Path, tiny_model: Path, problems: Path
) -> None:
    config = _config(tiny_model, problems)
    with open_session(submit(str(tmp_path), "run", config), config) as session:
        assert loop.plan(session, 80, 2) == list(range(1, 80, 2))
        assert loop.plan(session, 3, 50) == [1]
        with pytest.raises(ConfigError, match=r"81 steps in segments of 2 make 41 iterations, more than the 40"):
            loop.plan(session, 81, 2)
