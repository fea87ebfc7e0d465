"""Schedules that find nothing new to learn, and know it by digests."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from ratchet.config import RunConfig, semantic
from ratchet.errors import DataError
from ratchet.stages import gate, preprocess
from ratchet.stages.base_models import model_digest
from ratchet.stages.prepared import data_digest, unchanged
from ratchet.store import champions
from ratchet.store.decision import Bars, BaseModel, Export, TrainingData
from ratchet.store.manifest import digest_of
from ratchet.store.run import Run
from tests.promotion import decision
from tests.ratchet.stages.preparing import prepare, records
from tests.runs import tiny_config, train_tiny, write_problems
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.usefixtures("tokenised")


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    return write_problems(tmp_path / "problems.jsonl", 4)


# -- nothing new -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_prepared", [True, False])
def test_the_data_digest_is_that_of_the_prompts_a_run_would_commit(
    tmp_path: Path, tiny_model: Path, problems: Path, is_prepared: bool, tokenised: list[Any]
) -> None:
    config = tiny_config(tiny_model, problems)
    manifest = prepare(tmp_path / "runs", "first", config)
    tokenised.clear()
    preprocess._known_overlong.clear()
    root = tmp_path / ("runs" if is_prepared else "nothing")
    assert data_digest(str(root), config) == manifest.content.outputs["prompts"]
    assert len(tokenised) == (0 if is_prepared else 4)
    assert not (tmp_path / "nothing").exists(), "to ask writes nothing"
    assert len(records(tmp_path / "runs")) == 1


def _decided(root: Path, config: RunConfig, *verdicts: Any, **changes: Any) -> list[champions.Decision]:
    """Append a decision for each verdict, as about runs under `config`."""
    found = []
    for verdict in verdicts:
        number = len(champions.decisions(str(root), "math")) + 1
        new = decision(
            number,
            verdict,
            targets=1 if number > 1 else None,
            base=BaseModel(path=config.actor_rollout_ref.model.path, digest="b" * 64),
            data=TrainingData(train=data_digest(str(root), config), source="", source_digest=""),
            config_digest=digest_of(semantic(config)),
            **changes,
        )
        found.append(champions.append(str(root), "math", lambda history, new=new: new))
    return found


@pytest.mark.parametrize("verdict", ["promoted", "refused"])
def test_the_same_data_under_the_same_config_are_nothing_new(
    tmp_path: Path, tiny_model: Path, problems: Path, verdict: str
) -> None:
    root, config = str(tmp_path / "runs"), tiny_config(tiny_model, problems)
    assert unchanged(root, "math", config) is None, "nothing was decided yet"
    _decided(tmp_path / "runs", config, verdict)
    found = unchanged(root, "math", config)
    assert found is not None
    assert (found.number, found.run) == (1, "s3://bucket/runs/night-1")
    assert unchanged(root, "other", config) is None
    elsewhere = Path(shutil.copy(problems, tmp_path / "elsewhere.jsonl"))
    for same in (
        tiny_config(tiny_model, elsewhere),
        tiny_config(tiny_model, problems, **{"trainer.grain": "step", "trainer.total_training_steps": 9}),
    ):
        assert unchanged(root, "math", same) == found, "places, resources and extent are no news"


def test_other_rows_another_config_or_another_base_are_news(tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    root, config = tmp_path / "runs", tiny_config(tiny_model, problems)
    _decided(root, config, "promoted")
    another = make_tiny_model(tmp_path / "another", seed=1)
    for new in (
        tiny_config(tiny_model, write_problems(tmp_path / "more.jsonl", 5)),
        tiny_config(tiny_model, problems, **{"actor_rollout_ref.actor.optim.lr": 1e-4}),
        tiny_config(tiny_model, problems, **{"data.train_max_samples": 3}),
        tiny_config(another, problems),
    ):
        assert unchanged(str(root), "math", new) is None


def test_a_newer_champion_to_start_from_is_nothing_new(tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    root, config = tmp_path / "runs", tiny_config(tiny_model, problems)
    export = shutil.copytree(tiny_model, tmp_path / "export")
    (first,) = _decided(root, config, "promoted", export=Export(uri=str(export), digest="1" * 64))
    assert unchanged(str(root), "math", tiny_config(export, problems)) == first


def test_the_newest_alike_counts_and_rollbacks_do_not(tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    root, config = tmp_path / "runs", tiny_config(tiny_model, problems)
    other = tiny_config(tiny_model, write_problems(tmp_path / "more.jsonl", 5))
    _decided(root, config, "promoted", "refused")
    _decided(root, other, "refused", "rolled_back")
    newest = unchanged(str(root), "math", config)
    assert newest is not None
    assert newest.number == 2
    last = unchanged(str(root), "math", other)
    assert last is not None
    assert last.number == 3


def test_data_are_read_only_where_a_decision_could_match(tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    config = tiny_config(tiny_model, problems)
    _decided(tmp_path / "runs", config, "promoted")
    gone = tiny_config(tiny_model, tmp_path / "gone.jsonl", **{"trainer.seed": 5})
    assert unchanged(str(tmp_path / "runs"), "math", gone) is None
    with pytest.raises(DataError, match=r"gone\.jsonl: no such file"):
        unchanged(str(tmp_path / "runs"), "math", tiny_config(tiny_model, tmp_path / "gone.jsonl"))


def test_what_a_gate_decides_on_a_run_is_what_the_next_schedule_compares(
    tmp_path: Path, tiny_model: Path, problems: Path
) -> None:
    held_out = write_problems(tmp_path / "held_out.jsonl", 2)
    values = {"data.val_files": str(held_out), "trainer.total_training_steps": 1}
    root, config = str(tmp_path / "runs"), tiny_config(tiny_model, problems, **values)
    candidate = gate.candidate(train_tiny(root, "night-1", config), config)
    bars = Bars(min_accuracy=0.0, min_improvement=0.0, significant=False)
    names: dict[str, Any] = {"number": 1, "name": "math", "submission_id": "", "by": "a test", "time": 1.0}
    made = champions.append(root, "math", lambda history: gate.decide(candidate, bars, None, **names))
    assert made.verdict == "promoted"
    assert made.data.train == data_digest(root, config)
    # The next night starts from the export; a run from there has the export's digest as its base's.
    next_night = tiny_config(made.export.uri, problems, **values)
    assert unchanged(root, "math", next_night) == made
    assert model_digest(made.export.uri) == made.export.digest
    more = tiny_config(made.export.uri, write_problems(tmp_path / "more.jsonl", 5), **values)
    assert unchanged(root, "math", more) is None
    prepare(root, "night-2", more)
    base = Run(root, "night-2").require("policy_update", 0)
    assert base.content.inputs["base_model"] == base.content.outputs["policy"] == made.export.digest
