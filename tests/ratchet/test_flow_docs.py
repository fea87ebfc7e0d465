"""docs/flow.md, executed from its first block to its last."""

import json
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
    pairs = [{"prompt": f"{n} + 1?", "chosen": f"It is {n + 1}.", "rejected": "No."} for n in range(4)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    enter_folder(tmp_path, monkeypatch)
    monkeypatch.setenv("HOME", str(tmp_path))
    with kfp_endpoint() as (url, seen):
        monkeypatch.setenv("KF_PIPELINES_ENDPOINT", url)
        run_blocks(PAGE, code_blocks(PAGE))
    names = ("grpo", "ppo", "reward", "advantage", "dpo", "reward-model", "rlhf", "hybrid")
    assert {name: Run("runs", name).last_step() for name in names} == dict.fromkeys(names, 1)
    assert Path("pipeline.yaml").is_file()
    assert any(method == "POST" and "/runs" in path for method, path, _ in seen)
    shown = capsys.readouterr().out
    assert "s3://bucket/runs/short-and-right" in shown
    assert all(block in shown for block in code_blocks(PAGE, "text"))
