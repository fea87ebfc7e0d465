import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ratchet.errors import ConfigError
from ratchet.tracking import open_trackers

NAMES: dict[str, Any] = {"experiment": "e", "run_name": "n", "params": {}}


def test_importing_the_trackers_loads_none_of_what_they_use() -> None:
    code = (
        "import ratchet.tracking, sys; "
        "print(sorted({'mlflow', 'torch', 'boto3', 'yaml', 'sqlalchemy', 'tensorboard'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("name", ["wandb", "swanlab", "Console", ""])
def test_an_unknown_tracker_is_refused_with_the_known_ones(chain, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{name}'; expected some of console, jsonl, mlflow, tensorboard"):
        open_trackers(["console", name], chain.run, **NAMES)


def test_several_trackers_see_the_same_run(chain, tmp_path: Path) -> None:
    lines: list[str] = []
    chain.step(1)
    trackers = open_trackers(["console", "jsonl", "console"], chain.run, **NAMES, echo=lines.append, folder=tmp_path)
    assert trackers.catch_up() == 3
    for manifest in chain.step(2):
        trackers.log(manifest)
    trackers.finish("FAILED")
    assert [line[:7] for line in lines] == ["step: 2", "run r1:"]
    assert len((tmp_path / "r1.jsonl").read_text().splitlines()) == 6


def test_a_tracker_that_cannot_write_costs_its_lines_and_one_warning(
    chain, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines: list[str] = []
    (tmp_path / "file").write_text("")
    trackers = open_trackers(
        ["jsonl", "console"], chain.run, **NAMES, echo=lines.append, folder=tmp_path / "file" / "below"
    )
    for manifest in chain.step(1):
        trackers.log(manifest)
    assert len(lines) == 1
    assert [record.message[:19] for record in caplog.records if record.levelname == "WARNING"] == [
        "JsonlTracker failed"
    ]


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is not None, reason="tensorboard is installed")
def test_tensorboard_without_its_package_says_what_to_install(chain) -> None:
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        open_trackers(["tensorboard"], chain.run, **NAMES)


def test_tensorboard_gets_every_point_once_over_restarts(chain, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    chain.step(1)
    for _ in range(2):
        trackers = open_trackers(["tensorboard"], chain.run, **NAMES, folder=tmp_path)
        trackers.catch_up()
        trackers.finish("FINISHED")
    trackers = open_trackers(["tensorboard"], chain.run, **NAMES, folder=tmp_path)
    for manifest in chain.step(2):
        trackers.log(manifest)
    trackers.finish("FINISHED")
    events = EventAccumulator(str(tmp_path / "tensorboard" / "r1"))
    events.Reload()
    assert [(point.step, round(point.value, 3)) for point in events.Scalars("critic/score/mean")] == [
        (1, 0.1),
        (2, 0.2),
    ]
