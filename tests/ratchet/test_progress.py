"""What a person at a terminal sees, and what a log file gets."""

import os
import pty
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.runs import CONFIGS, tiny_config, write_problems


def train(folder: Path, model: Path, stderr: int) -> str:
    """Train two steps with stderr on `stderr`; return what stdout got."""
    config = folder / "config.yaml"
    problems = write_problems(folder / "train.jsonl", 4)
    options = {"trainer.total_training_steps": 2, "trainer.logger": ["console"]}
    config.write_text(tiny_config(model, problems, **options).model_dump_json(exclude_none=True))
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "ratchet.cli",
        "train",
        "--config",
        str(config),
        "--root",
        str(folder),
    ]
    environment = {**os.environ, "TERM": "xterm", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=CONFIGS.parent, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True, check=True
    )
    return done.stdout


def read_all(master: int) -> str:
    """Read a terminal until its other end is closed, which Linux reports as an error."""
    chunks = []
    try:
        while chunk := os.read(master, 4096):
            chunks.append(chunk)
    except OSError:
        pass
    return b"".join(chunks).decode()


def test_a_terminal_gets_a_bar_and_one_line_a_step(tiny_model: Path, tmp_path: Path) -> None:
    master, slave = pty.openpty()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_all, master)
        try:
            train(tmp_path, tiny_model, slave)
        finally:
            os.close(slave)
        seen = reading.result()
    os.close(master)
    # The bar names the stage that runs and counts steps; lines of steps stand above it.
    assert re.search(r"step-00000\d/(rollout|reward|advantage|policy_update)", seen)
    assert "2 steps" in seen
    assert "step: 1 |" in seen


def test_a_log_file_gets_plain_lines_only(tiny_model: Path, tmp_path: Path) -> None:
    with (tmp_path / "stderr").open("w") as sink:
        printed = train(tmp_path, tiny_model, sink.fileno())
    assert [line.split(" |")[0] for line in printed.splitlines() if line.startswith("step:")][:2] == [
        "step: 1",
        "step: 2",
    ]
    assert "\x1b" not in printed + (tmp_path / "stderr").read_text()
