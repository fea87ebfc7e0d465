"""A run of two submissions of which one is damaged: looking at it goes on, and what must not guess refuses."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ratchet.config import RunConfig
from ratchet.errors import DamagedError
from ratchet.grains.session import join_submission, submit
from ratchet.stages.measurement import newest_config
from ratchet.store import layout
from ratchet.store.manifest import canonical_json
from ratchet.store.run import Run
from tests.command_line import Ratchet, in_this_process
from tests.runs import tiny_config, train_tiny, write_problems


@pytest.fixture
def ratchet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ratchet:
    """Run the command line in this process, as its entry point does."""
    return in_this_process(monkeypatch, capsys)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> RunConfig:
    """Of the second submission: two steps, at a price."""
    problems = write_problems(tmp_path_factory.mktemp("data") / "problems.jsonl")
    values = {"trainer.prices": {"cpu": 0.05}, "trainer.total_training_steps": 2}
    return tiny_config(tiny_model, problems, **values)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, config: RunConfig) -> Path:
    """Folder of a run of two steps, each of a submission of its own."""
    root = tmp_path_factory.mktemp("trained")
    shorter = config.model_copy(update={"trainer": config.trainer.model_copy(update={"total_training_steps": 1})})
    train_tiny(root, "run", shorter)
    train_tiny(root, "run", config)
    return root / "run"


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run, to be changed."""
    return shutil.copytree(trained, tmp_path / "run")


def changed(**fields: Any) -> Callable[[bytes], bytes]:
    return lambda body: canonical_json({**json.loads(body), **fields})


KINDS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "truncated": (lambda body: body[:5], "Unterminated string starting at: line 1 column 2 (char 1)"),
    "empty": (lambda body: b"", "it is empty"),
    "not UTF-8": (lambda body: b"\xff\xfe" + body[2:], "'utf-8' codec can't decode byte 0xff in position 0"),
    "list": (lambda body: b"[1,2]", "expected an object, found [1, 2]"),
    "other epoch": (changed(epoch=9), "that of epoch 9"),
    "other config": (changed(config=[1]), "config: expected an object, found [1]"),
}


def damage(folder: Path, epoch: int, kind: str = "truncated") -> tuple[Path, str]:
    """Damage a submission; return its place, and what is said of it."""
    path = folder / layout.submission(epoch)
    make, said = KINDS[kind]
    path.write_bytes(make(path.read_bytes()))
    return path, said


@pytest.mark.parametrize("epoch", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_reading_verbs_show_the_rest_and_name_what_is_damaged(
    ratchet: Ratchet, caplog: pytest.LogCaptureFixture, folder: Path, kind: str, epoch: int
) -> None:
    path, said = damage(folder, epoch, kind)
    other = 3 - epoch

    def warned() -> bool:
        (warning,) = caplog.messages or [""]
        caplog.clear()
        return warning.startswith(f"{path} is damaged: ") and said in warning

    shown = ratchet("show", folder)
    assert shown.code == 0, shown.err
    assert [line.split(" | ")[0] for line in shown.lines[:3]] == ["step: 0", "step: 1", "step: 2"]
    # Of the older one it shows nothing.
    assert warned() == (epoch == 2)

    reported = ratchet("report", folder, "--to", folder.with_name("run.html"))
    assert reported.code == 0, reported.err
    assert warned()
    assert folder.with_name("run.html").stat().st_size > 100_000

    audited = ratchet("audit", folder)
    assert (audited.code, audited.err) == (1, "")
    assert f"submission {epoch}: " in audited.out
    assert ", damaged, from " in next(line for line in audited.lines if f"submission {epoch}: " in line)
    assert ", outside a pipeline, from " in next(line for line in audited.lines if f"submission {other}: " in line)
    (fault,) = (line for line in audited.lines if "fault: " in line)
    assert fault.startswith(f"`- fault: {path.relative_to(folder)}: expected a submission as it was written; found ")
    assert said in fault
    assert "|  |- 2 steps, " in audited.out

    looked = ratchet("status", folder)
    assert (looked.code, looked.err) == (0, "")
    assert "reward 0 in step 1, 0 in step 2 " in looked.words
    # The screen breaks a long place anywhere.
    assert f"unasked{path}isdamaged:" in "".join(looked.out.split())
    (note,) = json.loads(ratchet("status", folder, "--json").out)["notes"]
    assert note.startswith(f"{path} is damaged: ")
    assert said in note

    verified = ratchet("verify", folder, "--fast")
    assert verified.code == 1
    assert verified.lines[0].startswith(f"fault: {path.relative_to(folder)}: expected ")
    assert verified.lines[1].startswith(f"{folder}: 1 faults | ")


def test_nothing_is_shown_for_what_the_damaged_one_said(ratchet: Ratchet, folder: Path) -> None:
    whole = [json.loads(ratchet("show", folder, "--json").lines[-1])["cost"]["prices"]]
    damage(folder, 2)
    whole.append(json.loads(ratchet("show", folder, "--json").lines[-1])["cost"]["prices"])
    assert whole == [{"cpu": 0.05}, {}]
    audited = json.loads(ratchet("audit", folder, "--json").out)
    assert [one["is_damaged"] for one in audited["submissions"]] == [False, True]
    assert audited["cost"]["prices"] == {}
    looked = json.loads(ratchet("status", folder, "--json").out)
    assert (looked["progress"]["steps"], looked["progress"]["total"]) == (2, None)
    assert looked["owner"]["has_damaged_submission"]


@pytest.mark.parametrize(
    "arguments", [("gc", "--retire"), ("replay", "--step", "1", "--stage", "reward"), ("sync",), ("logs",)]
)
def test_verbs_that_go_by_the_newest_submission_refuse_a_damaged_one(
    ratchet: Ratchet, folder: Path, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(folder / "none"))
    monkeypatch.setenv("HOME", str(folder))
    path, said = damage(folder, 2)
    finished = ratchet(arguments[0], folder, *arguments[1:])
    assert finished.code == 2
    assert f"{path} is damaged: {said}" in finished.err


@pytest.mark.parametrize("kind", KINDS)
def test_a_pipeline_refuses_where_a_damaged_submission_may_be_its_own(
    folder: Path, config: RunConfig, kind: str
) -> None:
    path, _ = damage(folder, 1, kind)
    root = str(folder.parent)
    with pytest.raises(DamagedError, match=f"{path} is damaged: "):
        submit(root, "run", config, submission_id="pipeline-1")
    with pytest.raises(DamagedError, match=f"{path} is damaged: "):
        join_submission(root, "run", "pipeline-1")
    assert Run(root, "run").newest_epoch() == 2


def test_a_config_that_was_never_submitted_is_asked_for_in_vain(folder: Path) -> None:
    path = folder / layout.submission(2)
    path.write_bytes(b'{"epoch":2}')
    with pytest.raises(DamagedError, match=f"{path} is damaged: it has no config"):
        newest_config(Run(str(folder.parent), "run"))


def test_training_here_needs_no_earlier_submission_and_mends_what_is_shown(
    ratchet: Ratchet, caplog: pytest.LogCaptureFixture, folder: Path, config: RunConfig
) -> None:
    damage(folder, 2)
    run = train_tiny(folder.parent, "run", config)
    assert run.newest_epoch() == 3
    looked = json.loads(ratchet("status", folder, "--json").out)
    assert (looked["progress"]["total"], looked["owner"]["has_damaged_submission"]) == (2, False)
    assert len(looked["notes"]) == 1
    assert ratchet("show", folder).code == 0
    assert not [message for message in caplog.messages if "is damaged" in message]
