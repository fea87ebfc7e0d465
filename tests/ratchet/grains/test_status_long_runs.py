"""The decision on a run's promotion in its status, and how much is read of a long run."""

import shutil
from pathlib import Path

import pytest

from ratchet.config import RunConfig
from ratchet.errors import NotCommittedError
from ratchet.grains import loop, promotion
from ratchet.grains.status import collect
from ratchet.store import champions, layout, open_store
from ratchet.store.decision import Bars, BaseModel, Decision, Evaluation, Export, TrainingData
from ratchet.store.local import LocalStore
from ratchet.store.run import Run
from tests.promotion import exported_files, finished_run, promotion_config
from tests.ratchet.grains.run_stories import KFP_RUN, Story, ago, kubeflow, look, page


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(str(tmp_path / "runs"))


# -- promotion ---------------------------------------------------------------------------------------------------------


def _decide(
    story: Story,
    verdict: str,
    number: int,
    targets: int | None,
    *reasons: str,
    run_id: str = "first",
    digest: str | None = None,
) -> None:
    if digest is None:
        exported = story.run.manifest("checkpoint_export", 100)
        assert exported is not None
        digest = exported.output("export").digest
    decision = Decision(
        number=number,
        name="math",
        verdict=verdict,  # type: ignore[arg-type]
        run=f"{story.root}/{run_id}",
        step=100,
        export=Export(uri="s3://b/export", digest=digest),
        base=BaseModel(path="m", digest="b" * 64),
        evaluation=Evaluation(
            accuracy=0.5, low=0.4, high=0.6, prompts=10, table="t" * 64, held_out="h" * 64, settings="s" * 64
        ),
        compared_with=None,
        improvement=None,
        bars=Bars(min_accuracy=0.6, min_improvement=0.0, significant=False),
        reasons=reasons,
        data=TrainingData(train="d" * 64, source="x", source_digest=""),
        config_digest="c" * 64,
        submission_id=KFP_RUN,
        by="pod",
        time=ago(10.0),
        targets=targets,
    )
    open_store(story.root).put(layout.champion("math", number), decision.to_json())


def test_a_run_that_is_to_be_promoted_is_finished_once_that_is_decided(story: Story) -> None:
    story.config["promotion"]["name"] = "math"
    story.prepared().finish()
    waits = look(story, pipeline_run=kubeflow("RUNNING"))
    assert (waits.state, waits.promotion) == ("running", None)
    assert "math: nothing is decided about this run yet" in page(waits)
    _decide(story, "promoted", 1, 1, run_id="other", digest="1" * 64)
    assert look(story, pipeline_run=kubeflow("RUNNING")).state == "running"
    _decide(story, "refused", 2, 1, "accuracy 0.5 is below 0.6")
    decided = look(story)
    assert decided.state == "finished"
    assert "math: refused by decision 2: accuracy 0.5 is below 0.6; decision 1 serves now" in page(decided)
    _decide(story, "promoted", 2, 2)
    assert "math: promoted by decision 2; it serves now" in page(look(story))


def test_a_first_candidate_that_is_refused_leaves_the_name_without_a_champion(story: Story) -> None:
    story.config["promotion"]["name"] = "math"
    story.prepared().finish()
    _decide(story, "refused", 1, None, "accuracy 0.5 is below 0.6")
    assert "refused by decision 1: accuracy 0.5 is below 0.6; nothing serves yet" in page(look(story))


def _agreed(run: Run, config: RunConfig) -> bool:
    """Whether the run is finished, to preflight and to `ratchet status`."""
    is_finished = loop.is_finished(run, config)
    status = collect(Run(run.root, run.run_id))
    assert (status.state == "finished") == is_finished
    assert (status.promotion is not None) == is_finished
    return is_finished


def test_preflight_and_status_agree_on_what_is_finished(tmp_path: Path) -> None:
    root, config = str(tmp_path / "runs"), promotion_config(**{"trainer.total_training_steps": 1})
    first, _ = finished_run(root, "first", [1.0] * 4, config=config)
    assert not _agreed(first, config)
    promotion.promote(first, config)
    assert _agreed(first, config)
    # What serves already needs no decision of its own.
    same, _ = finished_run(root, "same", [1.0] * 4, config=config, export=exported_files("first"))
    assert _agreed(same, config)
    assert promotion.promote(same, config) == champions.champion(root, "math")
    # A refused policy of another run says nothing about an equal one of this.
    refused, _ = finished_run(root, "refused", [0.0] * 4, config=config)
    promotion.promote(refused, config)
    assert _agreed(refused, config)
    equal, _ = finished_run(root, "equal", [0.0] * 4, config=config, export=exported_files("refused"))
    assert not _agreed(equal, config)
    # Under the id of a run that was decided on, another one is made.
    shutil.rmtree(Path(root, "first"))
    anew, _ = finished_run(root, "first", [1.0] * 4, config=config, export=exported_files("anew"))
    assert not _agreed(anew, config)
    assert not loop.is_finished(
        anew, config.model_copy(update={"trainer": config.trainer.model_copy(update={"total_training_steps": 2})})
    )


# -- long runs ---------------------------------------------------------------------------------------------------------


def test_no_more_objects_are_read_of_a_long_run_than_of_a_short_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    get = LocalStore.get
    monkeypatch.setattr(LocalStore, "get", lambda self, key: (reads.append(key), get(self, key))[1])
    counts = []
    for steps in (60, 90):
        story = Story(str(tmp_path / str(steps))).prepared().steps(1, steps, ended=ago(10.0))
        story.task("segment", "running", step=1)
        reads.clear()
        progress = look(story).progress
        assert progress is not None
        assert progress.steps == steps
        counts.append(len(reads))
    assert counts[0] == counts[1] <= 25


def test_a_run_on_s3_is_told_in_the_same_way(s3_root: str) -> None:
    story = Story(s3_root).prepared().steps(1, 3, ended=ago(20.0)).evaluate(0, ago(900.0), 0.2)
    status = look(story.task("segment", "running", step=1))
    assert status.progress is not None
    assert (status.run, status.state, status.progress.steps) == (f"{s3_root}/first", "running", 3)
    with pytest.raises(NotCommittedError, match="nothing is known of a run"):
        look(Story(s3_root, "firs"))
