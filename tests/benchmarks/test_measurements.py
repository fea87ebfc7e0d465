"""Measurements as the commands make them, of a tiny model on a CPU."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import learning, parity, steps

ON_CPU = (
    "trainer.device=cpu",
    "actor_rollout_ref.rollout.dtype=float32",
    "actor_rollout_ref.actor.fsdp_config.dtype=float32",
)


def measured(out: Path, model: Path, systems: str) -> dict[str, dict[str, Any]]:
    """System -> its file, of two prompts, four samples each and eight new tokens."""
    shape = ["--shape", "2", "4", "8", "--steps", "3", "--micro-batch", "8", "--sampler", "hf"]
    places = ["--model", str(model), "--out", str(out), "--scratch", str(out / "scratch")]
    command = [sys.executable, "-m", "benchmarks.steps", "run", "--only", systems, *shape, *places, *ON_CPU]
    subprocess.run(command, cwd=steps.ROOT, check=True)
    found = [json.loads(path.read_text()) for path in out.glob("*-r*.json")]
    return {one["job"]["system"]: one for one in found}


@pytest.mark.slow
def test_ratchet_is_measured_and_a_finished_measurement_is_not_made_again(tmp_path: Path, tiny_model: Path) -> None:
    found = measured(tmp_path, tiny_model, "ratchet,verl")
    assert "verl is not installed" in found["verl"]["error"]
    times = found["ratchet"]["steps"]
    assert [step["step"] for step in times] == [1, 2, 3]
    assert all(step["seconds"] > 0 for step in times[1:])
    assert all(step["commit_lag"] >= 0 for step in times)
    assert times[-1]["memory"]["host"] > 0
    assert str(tmp_path) not in json.dumps(found["ratchet"])
    assert found["ratchet"]["start_to_first_step"] > 0
    assert found["ratchet"]["stored_bytes"] > 0
    (path,) = tmp_path.glob("*-ratchet-r0.json")
    written = path.stat().st_mtime_ns
    assert measured(tmp_path, tiny_model, "ratchet").keys() == {"ratchet", "verl"}
    assert path.stat().st_mtime_ns == written


@pytest.mark.slow
def test_trl_trains_on_as_many_tokens(tmp_path: Path, tiny_model: Path) -> None:
    pytest.importorskip("trl")
    found = measured(tmp_path, tiny_model, "ratchet,trl,trl-durable")
    counts = {system: [step["tokens"] for step in one["steps"]] for system, one in found.items()}
    assert counts["trl"] == counts["trl-durable"] == counts["ratchet"]
    assert {"generate", "update"} == found["trl"]["steps"][1]["split"].keys()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_trls_loss_and_gradients_are_the_same(tiny_model: Path) -> None:
    pytest.importorskip("trl")
    batch = parity.record(tiny_model, 2, 2, 16)
    for shift in (0.0, parity.SHIFT):
        found = parity.compare(tiny_model, batch, shift)
        assert max(found["loss"], found["worst_gradient"]) < parity.LIMIT


@pytest.mark.slow
def test_a_seed_is_trained_piece_by_piece_and_drawn(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "results"
    command = [
        "learning",
        "run",
        "--task",
        "word_problems",
        "--model",
        str(tiny_model),
        "--root",
        str(tmp_path / "runs"),
    ]
    small = [
        *ON_CPU,
        *("data.train_batch_size=2", "data.max_prompt_length=400", "data.max_response_length=8"),
        *("actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.rollout.n=2", "data.val_max_samples=4"),
        *("trainer.steps_per_segment=1", "trainer.test_freq=1", "trainer.logger=[]"),
    ]
    # A second segment would probably end later than at once.
    for within in ("0.001", "600"):
        arguments = [*command, "--steps", "2", "--within", within, "--out", str(out), *small]
        monkeypatch.setattr(sys, "argv", arguments)
        learning.main()
        assert (out / "learning-word_problems-seed0.json").exists() == (within == "600")
    monkeypatch.setattr(sys, "argv", ["learning", "draw", "--out", str(out), "--chart", str(tmp_path / "chart.svg")])
    learning.main()
    numbers = json.loads((out / "learning-word_problems-seed0.json").read_text())
    assert [step["step"] for step in numbers["steps"]] == [1, 2]
    assert [one["step"] for one in numbers["held_out"]] == [0, 1, 2]
    assert numbers["cost"]["durable_bytes"] > 0
    assert "held-out accuracy" in (tmp_path / "chart.svg").read_text()
