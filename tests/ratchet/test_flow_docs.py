"""docs/flow.md, executed from its first block to its last."""

import shutil
from pathlib import Path

import pytest

from ratchet.store.run import Run
from tests.kfp_endpoint import kfp_endpoint
from tests.pages import code_blocks, enter_folder, run_blocks
from tests.runs import write_problems

PAGE = "docs/flow.md"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_every_block_of_the_page_runs(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    write_problems(tmp_path / "train.jsonl")
    enter_folder(tmp_path, monkeypatch)
    monkeypatch.setenv("HOME", str(tmp_path))
    with kfp_endpoint() as (url, seen):
        monkeypatch.setenv("KF_PIPELINES_ENDPOINT", url)
        run_blocks(PAGE, code_blocks(PAGE))
    finished = {name: Run("runs", name).last_step() for name in ("grpo", "ppo", "reward", "advantage")}
    assert finished == {"grpo": 1, "ppo": 1, "reward": 1, "advantage": 1}
    assert Path("pipeline.yaml").is_file()
    assert any(method == "POST" and "/runs" in path for method, path, _ in seen)
    shown = capsys.readouterr().out
    assert "s3://bucket/runs/short-and-right" in shown
    assert code_blocks(PAGE, "text")[0] in shown
