"""docs/flow.md, executed from its first block to its last."""

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from ratchet.store.run import Run
from tests.kfp_endpoint import kfp_endpoint
from tests.runs import write_problems

PAGE = Path(__file__).parents[2] / "docs" / "flow.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (\w+)\.py\n")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_every_block_of_the_page_runs(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    write_problems(tmp_path / "train.jsonl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    names: dict[str, Any] = {"__name__": "page"}
    with kfp_endpoint() as (url, seen):
        monkeypatch.setenv("KF_PIPELINES_ENDPOINT", url)
        for block in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
            name = FILE.match(block)
            if name:
                Path(f"{name[1]}.py").write_text(block)
                monkeypatch.delitem(sys.modules, name[1], raising=False)
            else:
                exec(compile(block, str(PAGE), "exec"), names)
    finished = {name: Run("runs", name).last_step() for name in ("grpo", "ppo", "reward", "advantage")}
    assert finished == {"grpo": 1, "ppo": 1, "reward": 1, "advantage": 1}
    assert Path("pipeline.yaml").is_file()
    assert any(method == "POST" and "/runs" in path for method, path, _ in seen)
    shown = capsys.readouterr().out
    assert "s3://bucket/runs/short-and-right" in shown
    printed = re.findall(r"^```text\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert printed[0] in shown
