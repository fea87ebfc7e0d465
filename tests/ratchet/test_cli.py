import json
import subprocess
import sys
from pathlib import Path

import pytest

from ratchet.store.run import Run
from tests.command_line import Ratchet, in_this_process
from tests.runs import CONFIGS, tiny_config, train_tiny, write_problems


@pytest.fixture
def ratchet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ratchet:
    """Run the command line in this process, as its entry point does."""
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    return in_this_process(monkeypatch, capsys)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """Folder of a finished run of two steps that was never evaluated but at its end."""
    root = tmp_path_factory.mktemp("trained")
    problems = write_problems(root / "problems.jsonl")
    values = {"data.val_files": str(problems), "data.val_max_samples": 2, "trainer.val_before_train": False}
    train_tiny(root, "run", tiny_config(tiny_model, problems, **values, **{"trainer.total_training_steps": 2}))
    return root / "run"


# -- score -----------------------------------------------------------------------------------------------------------

LINES = [
    {"completion": "She has 4.\n#### 4", "ground_truth": "4"},
    {"completion": "#### 5", "ground_truth": "4"},
    {"completion": "I do not know.", "ground_truth": "4"},
    {"completion": "She has 4 pears in all", "ground_truth": "4"},
    {"completion": "one\u2028#### 4", "ground_truth": "4"},
]


def _jsonl(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("mode", "rewards"),
    [("strict", [1.0, 0.0, 0.0, 0.0, 1.0]), ("flexible", [1.0, 0.0, 0.0, 1.0, 1.0])],
)
def test_score_gives_one_json_line_for_each_line_in_order(
    ratchet: Ratchet, tmp_path: Path, mode: str, rewards: list[float]
) -> None:
    finished = ratchet("score", _jsonl(tmp_path / "c.jsonl", LINES), "--mode", mode)
    rows = [json.loads(line) for line in finished.lines]
    assert [row["reward"] for row in rows] == rewards
    assert rows[0] == {"reward": 1.0, "extracted": "4", "is_parseable": True}
    assert set(rows[2]) == {"reward", "extracted", "is_parseable"}
    assert (finished.code, finished.err) == (0, "")


def test_score_reads_an_answer_by_the_default_grammar_unless_told_otherwise(ratchet: Ratchet, tmp_path: Path) -> None:
    path = _jsonl(tmp_path / "c.jsonl", LINES)
    assert ratchet("score", path).out == ratchet("score", path, "--mode", "default").out
    assert [json.loads(line)["reward"] for line in ratchet("score", path).lines][:3] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("third", "message"),
    [
        ("not json", "c.jsonl, line 3: expected a JSON object"),
        ("[1, 2]", "c.jsonl, line 3: expected one JSON object a line, got list"),
        ('{"completion": "#### 4"}', "c.jsonl, line 3: expected the keys completion and ground_truth"),
        ('{"completion": 4, "ground_truth": "4"}', "c.jsonl, line 3: expected completion to be a text"),
        ('{"completion": "#### 4", "ground_truth": "many"}', "c.jsonl, line 3: "),
    ],
)
def test_score_names_file_and_line_of_what_it_cannot_grade(
    ratchet: Ratchet, tmp_path: Path, third: str, message: str
) -> None:
    path = _jsonl(tmp_path / "c.jsonl", LINES[:2])
    path.write_text(path.read_text() + third + "\n")
    finished = ratchet("score", path)
    assert finished.code == 2
    assert finished.err.startswith("ratchet: ")
    assert message in finished.err
    # What comes before it has been graded.
    assert len(finished.lines) == 2


def test_score_of_a_file_that_is_not_there_or_of_unknown_data_is_refused(ratchet: Ratchet, tmp_path: Path) -> None:
    finished = ratchet("score", tmp_path / "absent.jsonl")
    assert (finished.code, finished.out) == (2, "")
    assert "absent.jsonl: cannot be read" in finished.err
    finished = ratchet("score", _jsonl(tmp_path / "c.jsonl", LINES), "--data-source", "mine")
    assert finished.code == 2
    assert "no reward function for data_source 'mine'" in finished.err


# -- preprocess ------------------------------------------------------------------------------------------------------


def test_preprocess_writes_what_training_reads(ratchet: Ratchet, tmp_path: Path) -> None:
    source = write_problems(tmp_path / "train.jsonl", 3)
    finished = ratchet("preprocess", "--source", source, "--local_dir", tmp_path / "out")
    path = tmp_path / "out" / "train.parquet"
    assert (finished.code, finished.lines) == (0, [f"{path}: 3 rows"])

    from ratchet.data.sources import load_rows

    assert load_rows(str(path), split="train") == load_rows(str(source), split="train")


def test_preprocess_of_nothing_is_refused(ratchet: Ratchet, tmp_path: Path) -> None:
    finished = ratchet("preprocess", "--source", tmp_path / "absent", "--local-dir", tmp_path / "out")
    assert finished.code == 2
    assert "absent: no such file or folder" in finished.err


# -- train, show, evaluate, export, stage ----------------------------------------------------------------------------


def test_train_runs_to_its_end_tells_each_step_and_does_nothing_the_second_time(
    ratchet: Ratchet, tmp_path: Path, tiny_model: Path
) -> None:
    arguments = [
        "train",
        "--config", CONFIGS / "tiny.yaml",
        "--root", tmp_path / "runs",
        "--run-id", "mine",
        f"actor_rollout_ref.model.path={tiny_model}",
        f"data.train_files={write_problems(tmp_path / 'problems.jsonl')}",
        "data.max_response_length=6",
        "trainer.total_training_steps=2",
    ]  # fmt: skip
    finished = ratchet(*arguments)
    assert finished.code == 0, finished.err
    assert finished.lines[-1] == f"run: {tmp_path / 'runs' / 'mine'}"
    steps = [line for line in finished.lines if line.startswith("step: ")]
    assert any(line.startswith("step: 1 | ") and "actor/pg_loss: " in line for line in steps)
    assert any(line.startswith("step: 2 | ") for line in steps)

    again = ratchet(*arguments)
    assert again.code == 0
    assert again.lines[-1] == finished.lines[-1]
    assert Run(str(tmp_path / "runs"), "mine").last_step() == 2


def test_train_takes_root_and_run_id_from_the_config(ratchet: Ratchet, tmp_path: Path, tiny_model: Path) -> None:
    problems = write_problems(tmp_path / "problems.jsonl", 1)
    values = {
        "actor_rollout_ref.model.path": tiny_model,
        "data.train_files": problems,
        "data.train_batch_size": 1,
        "data.max_response_length": 4,
        "actor_rollout_ref.rollout.n": 1,
        "trainer.total_training_steps": 1,
        "trainer.default_local_dir": tmp_path / "elsewhere",
        "trainer.experiment_name": "named",
        "trainer.logger": "[]",
    }
    finished = ratchet("train", "--config", CONFIGS / "tiny.yaml", *(f"{key}={value}" for key, value in values.items()))
    assert finished.lines == [f"run: {tmp_path / 'elsewhere' / 'named'}"]


def test_show_lists_the_steps_and_a_steps_completions(ratchet: Ratchet, trained: Path) -> None:
    finished = ratchet("show", trained)
    assert finished.code == 0
    starts = [line.split(" | ")[0] for line in finished.lines]
    assert [start for start in starts if start.startswith("step: ") and start != "step: 0"] == ["step: 1", "step: 2"]
    table = finished.lines[finished.lines.index("") + 1 :]
    assert table[0].split() == ["stage", "times", "seconds", "GPU-seconds", "tokens", "tokens/s", "cost"]
    assert any(line.startswith("total ") for line in table)

    *rows, last = [json.loads(line) for line in ratchet("show", f"{trained}/", "--json", "--price", "cpu=2").lines]
    assert [row["step"] for row in rows] == [0, 1, 2]
    spent = last["cost"]
    assert spent["total"]["money"] == pytest.approx(spent["total"]["seconds"] / 3600 * 2)
    assert spent["total"]["tokens"] == sum(row["metrics"].get("perf/total_num_tokens", 0) for row in rows)
    assert rows[1]["stages"] == ["rollout", "reward", "advantage", "policy_update"]
    assert rows[1]["metrics"]["training/global_step"] == 1

    completions = ratchet("show", trained, "--step", 1)
    assert completions.lines[0].startswith("best: 000001/train-")
    assert any(line.startswith("worst: 000001/train-") for line in completions.lines)


def test_a_run_that_is_not_there_is_named_and_not_made(ratchet: Ratchet, tmp_path: Path, trained: Path) -> None:
    finished = ratchet("show", tmp_path / "absent")
    assert finished.code == 2
    assert finished.err == f"ratchet: no run at {tmp_path / 'absent'}: nobody has claimed it\n"
    assert not (tmp_path / "absent").exists()
    finished = ratchet("show", trained, "--step", 7)
    assert finished.code == 2
    assert "no committed rollouts of step 7" in finished.err


def test_evaluate_prints_what_is_committed_or_measures_it(ratchet: Ratchet, trained: Path) -> None:
    epoch = Run(str(trained.parent), "run").newest_epoch()
    finished = ratchet("evaluate", trained, "--step", 2)
    assert finished.code == 0
    assert any(line.startswith("val-core/openai/gsm8k/acc/mean@1: ") for line in finished.lines)
    # Only reading, it leaves the run to its owner.
    assert Run(str(trained.parent), "run").newest_epoch() == epoch

    finished = ratchet("evaluate", trained, "--step", 1)
    assert finished.code == 0, finished.err
    run = Run(str(trained.parent), "run")
    assert run.manifest("evaluate", 1) is not None
    assert run.newest_epoch() == epoch + 1


@pytest.mark.parametrize("verb", [["evaluate"], ["export", "--to", "TO"], ["stage", "reward"]])
def test_a_step_that_is_not_there_costs_the_runs_owner_nothing(
    ratchet: Ratchet, tmp_path: Path, trained: Path, verb: list[str]
) -> None:
    epoch = Run(str(trained.parent), "run").newest_epoch()
    arguments = [str(tmp_path / "to") if argument == "TO" else argument for argument in verb]
    finished = ratchet(*arguments, trained, "--step", 9)
    assert finished.code == 2
    assert "is not committed" in finished.err
    assert Run(str(trained.parent), "run").newest_epoch() == epoch


def test_export_writes_a_folder_that_does_not_exist_yet(ratchet: Ratchet, tmp_path: Path, trained: Path) -> None:
    finished = ratchet("export", trained, "--step", 2, "--to", tmp_path / "export")
    assert (finished.code, finished.lines) == (0, [f"{tmp_path / 'export'}: policy of step 2"])
    assert (tmp_path / "export" / "model.safetensors").is_file()
    assert (tmp_path / "export" / "tokenizer.json").is_file()
    finished = ratchet("export", trained, "--step", 2, "--to", tmp_path / "export")
    assert finished.code == 2
    assert "exists already" in finished.err


def test_stage_computes_a_committed_stage_again_and_compares(ratchet: Ratchet, trained: Path) -> None:
    finished = ratchet("stage", "policy_update", trained, "--step", 2)
    assert finished.code == 0, finished.err
    assert finished.lines[0].startswith("policy: equal (committed ")
    finished = ratchet("stage", "polish", trained, "--step", 2)
    assert finished.code == 2
    assert "no stage 'polish'" in finished.err


def test_stage_commits_the_next_one(ratchet: Ratchet, tmp_path: Path, tiny_model: Path) -> None:
    config = tiny_config(tiny_model, write_problems(tmp_path / "p.jsonl"), **{"trainer.total_training_steps": 1})
    run = train_tiny(tmp_path, "run", config)
    finished = ratchet("stage", "rollout", run.uri, "--step", 2)
    assert (finished.code, finished.lines) == (0, ["committed rollout of step 2"])
    assert Run(str(tmp_path), "run").manifest("rollout", 2) is not None


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trainer.grian=step"], "trainer.grian: no such key; the nearest is trainer.grain"),
        (["data.train_files"], "override 'data.train_files': expected key.subkey=value"),
        (["--config", "/absent.yaml"], "cannot read the config file /absent.yaml"),
        (["--root", "ftp://host/runs"], "expected a local folder or s3://bucket/prefix"),
        (["--run-id", "a/b"], "run id 'a/b': expected"),
        ([], "actor_rollout_ref.model.path is not set"),
        (["actor_rollout_ref.model.path=/absent/model", "data.train_files=x.jsonl"], "'/absent/model' does not exist"),
    ],
)
def test_what_cannot_work_ends_with_code_2_and_one_message(
    ratchet: Ratchet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    finished = ratchet("train", *arguments)
    assert finished.code == 2
    assert message in finished.err
    assert finished.err.startswith("ratchet: ")
    assert "Traceback" not in finished.err
    # The run id is still free.
    assert not (tmp_path / "runs" / "grpo").exists()


def test_a_root_that_cannot_be_written_is_named(ratchet: Ratchet, tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "file").write_text("")
    problems = write_problems(tmp_path / "train.jsonl", 2)
    model, problems = f"actor_rollout_ref.model.path={tiny_model}", f"data.train_files={problems}"
    finished = ratchet("train", "--root", tmp_path / "file" / "runs", model, problems, "data.train_batch_size=1")
    assert finished.code == 2
    assert str(tmp_path / "file" / "runs") in finished.err


def test_a_place_that_cannot_be_written_to_is_named_whatever_is_written(
    ratchet: Ratchet, tmp_path: Path, trained: Path
) -> None:
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / "out"
    source = write_problems(tmp_path / "train.jsonl", 1)
    for arguments in (
        ["preprocess", "--source", source, "--local-dir", place],
        ["export", trained, "--step", 2, "--to", place],
    ):
        finished = ratchet(*arguments)
        assert finished.code == 2
        assert finished.err.startswith("ratchet: ")
        assert str(place) in finished.err


def test_an_error_of_a_real_process_is_one_line_without_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ratchet.cli", "train", "trainer.grian=step"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 2
    assert finished.stdout == ""
    assert finished.stderr.startswith("ratchet: the command line does not make a run:\n  trainer.grian: ")
    assert finished.stderr.count("\n") == 2


def test_the_version_and_the_verbs_are_told(ratchet: Ratchet) -> None:
    import ratchet as package

    assert ratchet("--version", "show", "x").lines == [package.__version__]
    text = ratchet("--help").out
    assert all(verb in text for verb in ("train", "stage", "preprocess", "score", "evaluate", "export", "show"))
