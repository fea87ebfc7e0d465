"""Prompts that are prepared once for all runs of a root, and always as if they were prepared anew."""

import dataclasses
import json
import logging
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ratchet.data import schemas
from ratchet.data.parquet import read_table
from ratchet.errors import DataError, StoreError, StoreUnavailableError
from ratchet.grains.entry import replay_stage
from ratchet.grains.session import open_session, submit
from ratchet.stages import data_stage, preprocess
from ratchet.stages.base import run_stage
from ratchet.stages.base_models import BasePolicy
from ratchet.stages.prepared import data_digest
from ratchet.stages.preprocess import Preprocess
from ratchet.stages.residents import Residents
from ratchet.store import prepared
from ratchet.store.artifacts import write_bytes
from ratchet.store.manifest import Manifest
from ratchet.store.run import Run
from tests.ratchet.stages.preparing import REUSED, prepare, records
from tests.runs import tiny_config, write_problems
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.usefixtures("tokenised")


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    return write_problems(tmp_path / "problems.jsonl", 4)


def _first_file(root: Path, run_id: str, manifest: Manifest) -> Path:
    artifact = manifest.output("prompts")
    return root / run_id / artifact.folder / artifact.files[0].path


# -- reuse -----------------------------------------------------------------------------------------------------------


def test_prompts_that_another_run_prepared_are_the_same_content_and_not_tokenised_again(
    tmp_path: Path, tiny_model: Path, problems: Path, tokenised: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    held_out = write_problems(tmp_path / "held_out.jsonl", 3)
    config = tiny_config(tiny_model, problems, **{"data.val_files": str(held_out)})
    first = prepare(tmp_path / "runs", "first", config)
    assert len(tokenised) == 4 + 3, "the check before the run and its first stage tokenise once"
    tokenised.clear()
    with caplog.at_level(logging.INFO, logger="ratchet.stages.data_stage"):
        second = prepare(tmp_path / "runs", "second", config)
    assert tokenised == []
    assert f"preprocess/train: the prompts are those that run first prepared, from {problems}" in caplog.text
    anew = prepare(tmp_path / "elsewhere", "third", config)
    assert second.content == first.content == anew.content
    assert second.content_digest == anew.content_digest
    assert second.output("prompts").files == anew.output("prompts").files
    assert REUSED not in first.provenance.metrics
    assert second.provenance.metrics == {**anew.provenance.metrics, REUSED: 1.0}
    # The copy is the run's own: it stays when the run that it came from is deleted.
    shutil.rmtree(tmp_path / "runs" / "first")
    run = Run(str(tmp_path / "runs"), "second")
    table = read_table(run.store, second.output("prompts"), schemas.PROMPTS)
    assert table.num_rows == second.output("prompts").rows == 4


def test_a_record_says_which_run_holds_the_table_and_where_its_rows_came_from(
    tmp_path: Path, tiny_model: Path, problems: Path
) -> None:
    root = tmp_path / "runs"
    manifest = prepare(root, "first", tiny_config(tiny_model, problems))
    prepare(root, "second", tiny_config(tiny_model, problems))
    (key,) = records(root)
    body = json.loads((root / key).read_bytes())
    assert body["run_id"] == "first"
    assert body["source"] == str(problems)
    assert body["artifact"]["folder"] == manifest.output("prompts").folder
    assert body["artifact"]["rows"] == 4


def test_what_is_left_out_as_too_long_is_left_out_of_the_copy(
    tmp_path: Path, tiny_model: Path, tokenised: list[Any]
) -> None:
    short, long = write_problems(tmp_path / "short.jsonl", 3), write_problems(tmp_path / "long.jsonl", 1, words=300)
    lines = short.read_text().splitlines()
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text("\n".join([lines[0], long.read_text().strip(), *lines[1:]]))
    config = tiny_config(tiny_model, mixed)
    first = prepare(tmp_path / "runs", "first", config)
    tokenised.clear()
    second = prepare(tmp_path / "runs", "second", config)
    assert tokenised == []
    assert second.content == first.content
    assert second.provenance.metrics == {**first.provenance.metrics, REUSED: 1.0}
    assert second.provenance.metrics["data/train/num_overlong_prompts"] == 1.0


def test_one_file_for_both_splits_is_two_tables(tmp_path: Path, tiny_model: Path, tokenised: list[Any]) -> None:
    source = tmp_path / "verl.jsonl"
    row = {"data_source": "openai/gsm8k", "reward_model": {"style": "rule", "ground_truth": "4"}, "extra_info": {}}
    source.write_text("\n".join(json.dumps({**row, "prompt": f"What is {number}+1?"}) for number in range(3)))
    config = tiny_config(tiny_model, source, **{"data.val_files": str(source)})
    prepare(tmp_path / "runs", "first", config)
    assert len(records(tmp_path / "runs")) == 2
    tokenised.clear()
    prepare(tmp_path / "runs", "second", config)
    assert tokenised == []


def test_equal_rows_are_found_wherever_they_and_the_model_lie(
    tmp_path: Path, tiny_model: Path, problems: Path, tokenised: list[Any]
) -> None:
    prepare(tmp_path / "runs", "first", tiny_config(tiny_model, problems))
    tokenised.clear()
    other_weights = make_tiny_model(tmp_path / "other", seed=1)
    moved = Path(shutil.copy(problems, tmp_path / "moved.jsonl"))
    manifest = prepare(tmp_path / "runs", "second", tiny_config(other_weights, moved, **{"trainer.seed": 3}))
    assert tokenised == []
    assert REUSED in manifest.provenance.metrics


@pytest.mark.parametrize(
    "overrides",
    [
        {"data.max_prompt_length": 200},
        {"data.train_max_samples": 3},
        {"data.filter_overlong_prompts": False},
        {"data.data_source": "ratchet/word-problems"},
    ],
    ids=str,
)
def test_another_config_is_prepared_anew(
    tmp_path: Path, tiny_model: Path, problems: Path, overrides: dict[str, Any], tokenised: list[Any]
) -> None:
    first = prepare(tmp_path / "runs", "first", tiny_config(tiny_model, problems))
    tokenised.clear()
    second = prepare(tmp_path / "runs", "second", tiny_config(tiny_model, problems, **overrides))
    assert len(tokenised) == (3 if "data.train_max_samples" in overrides else 4)
    assert REUSED not in second.provenance.metrics
    assert second.content_digest != first.content_digest
    assert len(records(tmp_path / "runs")) == 2


def test_another_row_another_template_and_other_code_are_prepared_anew(
    tmp_path: Path, tiny_model: Path, problems: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, config = tmp_path / "runs", tiny_config(tiny_model, problems)
    prepare(root, "first", config)
    more = write_problems(tmp_path / "more.jsonl", 5)
    template = shutil.copytree(tiny_model, tmp_path / "template")
    (template / "chat_template.jinja").write_text((template / "chat_template.jinja").read_text() + " ")
    for run_id, changed in (("rows", tiny_config(tiny_model, more)), ("template", tiny_config(template, problems))):
        assert REUSED not in prepare(root, run_id, changed).provenance.metrics
    monkeypatch.setenv("RATCHET_REVISION", "another")
    assert REUSED not in prepare(root, "code", config).provenance.metrics
    assert len(records(root)) == 4
    assert REUSED in prepare(root, "again", config).provenance.metrics


# -- only a speed-up -------------------------------------------------------------------------------------------------


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda root, table, record: _flip(table),
        lambda root, table, record: table.unlink(),
        lambda root, table, record: shutil.rmtree(root / "first"),
        lambda root, table, record: record.write_bytes(b"not JSON"),
        lambda root, table, record: record.write_bytes(record.read_bytes().replace(b'"first"', b'"../first"')),
        lambda root, table, record: record.write_bytes(record.read_bytes().replace(b'"format":1', b'"format":9')),
    ],
    ids=["damaged", "vanished", "run deleted", "no record", "another folder", "another format"],
)
def test_what_cannot_be_used_is_prepared_anew_and_the_next_run_finds_that(
    tmp_path: Path,
    tiny_model: Path,
    problems: Path,
    spoil: Callable[[Path, Path, Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    root, config = tmp_path / "runs", tiny_config(tiny_model, problems)
    first = prepare(root, "first", config)
    (key,) = records(root)
    spoil(root, _first_file(root, "first", first), root / key)
    second = prepare(root, "second", config)
    assert "preprocess/train: prompts are prepared anew; what there was is of no use" in caplog.text
    assert REUSED not in second.provenance.metrics
    assert second.content == first.content
    assert json.loads((root / key).read_bytes())["run_id"] == "second"
    assert REUSED in prepare(root, "third", config).provenance.metrics


@pytest.mark.parametrize(("count", "words"), [(9, 0), (4, 1)], ids=["more", "as many"])
def test_a_record_that_points_to_other_prompts_is_not_followed(
    tmp_path: Path, tiny_model: Path, problems: Path, count: int, words: int
) -> None:
    root, others = tmp_path / "runs", write_problems(tmp_path / "other.jsonl", count, words=words)
    other = prepare(root, "other", tiny_config(tiny_model, others))
    config = tiny_config(tiny_model, problems)
    first = prepare(root, "first", config)
    for key in records(root):
        if json.loads((root / key).read_bytes())["run_id"] == "first":
            entry = prepared.PreparedPrompts(run_id="other", artifact=other.output("prompts"), source="")
            prepared.record(str(root), Path(key).stem, entry, replace=True)
    second = prepare(root, "second", config)
    assert REUSED not in second.provenance.metrics
    assert second.content == first.content


def test_another_table_beside_the_committed_one_is_not_used(tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    root, config = tmp_path / "runs", tiny_config(tiny_model, problems)
    other = prepare(root, "other", tiny_config(tiny_model, write_problems(tmp_path / "other.jsonl", 4, words=1)))
    first = prepare(root, "first", config)
    files = prepared.read(
        str(root), prepared.PreparedPrompts(run_id="other", artifact=other.output("prompts"), source="")
    )
    beside = write_bytes(Run(str(root), "first").store, "data/train/0009-x/prompts", files, rows=4)
    entry = prepared.PreparedPrompts(run_id="first", artifact=beside, source="")
    (key,) = [key for key in records(root) if b'"first"' in (root / key).read_bytes()]
    prepared.record(str(root), Path(key).stem, entry, replace=True)
    assert prepare(root, "second", config).content == first.content


def test_a_table_that_no_manifest_names_is_not_there(tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    root, config = tmp_path / "runs", tiny_config(tiny_model, problems)
    first = prepare(root, "first", config)
    (root / "first/data/train/manifest.json").unlink()
    second = prepare(root, "second", config)
    assert REUSED not in second.provenance.metrics
    assert second.content == first.content


@pytest.mark.parametrize("error", [StoreUnavailableError("no answer"), StoreError("refused")])
def test_storage_that_fails_costs_time_and_nothing_else(
    tmp_path: Path,
    tiny_model: Path,
    problems: Path,
    error: StoreError,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise error

    root, config = tmp_path / "runs", tiny_config(tiny_model, problems)
    with monkeypatch.context() as patch:
        patch.setattr(prepared, "record", fail)
        first = prepare(root, "first", config)
    assert "no other run will find these prompts" in caplog.text
    assert records(root) == []
    prepare(root, "second", config)
    for name in ("find", "read"):
        with monkeypatch.context() as patch:
            patch.setattr(prepared, name, fail)
            manifest = prepare(root, f"without-{name}", config)
        assert REUSED not in manifest.provenance.metrics
        assert manifest.content == first.content
    is_passing = isinstance(error, StoreUnavailableError)
    (key,) = records(root)
    assert json.loads((root / key).read_bytes())["run_id"] == ("second" if is_passing else "without-read")


def test_runs_that_prepare_at_the_same_time_do_not_disturb_each_other(
    tmp_path: Path, tiny_model: Path, problems: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, config = tmp_path / "runs", tiny_config(tiny_model, problems)
    runs = [submit(str(root), f"run-{number}", config) for number in range(2)]
    original, both = prepared.find, threading.Barrier(2)

    def find_together(*arguments: str) -> Any:
        found = original(*arguments)
        both.wait(30)
        return found

    def work(run: Run) -> Manifest:
        residents = Residents(run, config)
        for stage, step in ((BasePolicy(), 0), (Preprocess("train"), None)):
            manifest = run_stage(stage, run, config, step, residents)
        residents.close()
        return manifest

    monkeypatch.setattr(prepared, "find", find_together)
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(work, runs)
    monkeypatch.setattr(prepared, "find", original)
    assert one.content == other.content
    assert REUSED not in one.provenance.metrics | other.provenance.metrics
    assert len(records(root)) == 1
    assert REUSED in prepare(root, "third", config).provenance.metrics


def test_only_what_was_published_is_recorded(
    tmp_path: Path, tiny_model: Path, problems: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, config = tmp_path / "runs", tiny_config(tiny_model, problems)
    write, rival = data_stage.write_table, Run(str(root), "run")

    def be_second(*arguments: Any) -> Any:
        monkeypatch.setattr(data_stage, "write_table", write)
        rival.adopt(1)
        run_stage(Preprocess("train"), rival, config, None, Residents(rival, config))
        return write(*arguments)

    monkeypatch.setattr(data_stage, "write_table", be_second)
    manifest = prepare(root, "run", config)
    (key,) = records(root)
    assert json.loads((root / key).read_bytes())["artifact"]["folder"] == manifest.output("prompts").folder
    assert manifest == rival.require("preprocess/train", None)
    assert len(list((root / "run/data/train").glob("*/prompts"))) == 2


def test_what_cannot_be_graded_is_refused_with_its_line_although_it_was_prepared(
    tmp_path: Path, tiny_model: Path
) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text("\n".join(json.dumps({"prompt": f"{n}?", "answer": "4", "data_source": "mine"}) for n in "12"))
    reward = tmp_path / "reward.py"
    reward.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n")
    custom = {"custom_reward_function.path": str(reward), "reward_model.type": "custom"}
    prepare(tmp_path / "runs", "first", tiny_config(tiny_model, source, **custom))
    with pytest.raises(DataError, match=r"rows\.jsonl, line 1: .*'mine'"):
        submit(str(tmp_path / "runs"), "second", tiny_config(tiny_model, source))


def test_a_replay_makes_the_prompts_itself(
    tmp_path: Path, tiny_model: Path, problems: Path, tokenised: list[Any]
) -> None:
    config = tiny_config(tiny_model, problems)
    prepare(tmp_path / "runs", "first", config)
    prepare(tmp_path / "runs", "second", config)
    tokenised.clear()
    preprocess._known_overlong.clear()
    run = Run(str(tmp_path / "runs"), "second")
    ((committed, computed),) = replay_stage(Preprocess("train"), run, config, None).values()  # type: ignore[arg-type]
    assert committed == computed
    assert len(tokenised) == 4


def test_a_source_that_could_not_be_read_at_first_is_recorded_all_the_same(
    tmp_path: Path, tiny_model: Path, problems: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tiny_model, problems)
    expected = prepare(tmp_path / "whole", "run", config)
    original, failures = data_stage.load_rows, [DataError("not yet")]

    def load(*arguments: Any, **options: Any) -> Any:
        if failures:
            raise failures.pop()
        return original(*arguments, **options)

    with open_session(submit(str(tmp_path / "runs"), "run", config), config) as session:
        session.run(BasePolicy(), 0)
        monkeypatch.setattr(data_stage, "load_rows", load)
        manifest = session.run(Preprocess("train"), None)
    assert failures == []
    assert manifest.content == expected.content


def test_prompts_are_reused_and_compared_on_a_real_server(s3_root: str, tiny_model: Path, problems: Path) -> None:
    config = tiny_config(tiny_model, problems)
    first = prepare(s3_root, "first", config)
    second = prepare(s3_root, "second", config)
    assert REUSED in second.provenance.metrics
    assert second.content == first.content
    assert data_digest(s3_root, config) == first.content.outputs["prompts"]
    store = Run(s3_root, "first").store
    artifact = first.output("prompts")
    store.put(f"{artifact.folder}/{artifact.files[0].path}", b"damaged")
    third = prepare(s3_root, "third", config)
    assert REUSED not in third.provenance.metrics
    assert dataclasses.asdict(third.content) == dataclasses.asdict(first.content)
    assert REUSED in prepare(s3_root, "fourth", config).provenance.metrics
