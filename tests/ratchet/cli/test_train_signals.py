"""`ratchet train` at SIGTERM: as at Ctrl-C, commits under way are given their time, and the run can be resumed."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import ratchet.config
from ratchet.cli.local import train
from ratchet.store.manifest import Manifest
from ratchet.store.pending import PendingManifest
from ratchet.store.run import POLICY_UPDATE, Run
from tests.runs import attempts, tiny_config, write_problems


@pytest.mark.parametrize("struck", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_training_after_the_commits_under_way(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, struck: signal.Signals
) -> None:
    """The signal comes while the writer commits step 1 and step 2 is computed and waits behind it."""
    problems = write_problems(tmp_path / "problems.jsonl")
    config = tiny_config(tiny_model, problems, **{"trainer.total_training_steps": 4, "trainer.steps_per_segment": 4})
    monkeypatch.setattr(ratchet.config, "load_config", lambda *_: config)
    commit, settle, is_step_2_made = Run.commit, PendingManifest.settle, threading.Event()

    def note(pending: PendingManifest, committed: Any) -> None:
        # By now its commit waits with the writer.
        settle(pending, committed)
        if (pending.stage, pending.step) == (POLICY_UPDATE, 2):
            is_step_2_made.set()

    def strike(run: Run, manifest: Manifest) -> Manifest:
        if (manifest.stage, manifest.step) == (POLICY_UPDATE, 1):
            assert is_step_2_made.wait(60)
            os.kill(os.getpid(), struck)
        return commit(run, manifest)

    monkeypatch.setattr(PendingManifest, "settle", note)
    monkeypatch.setattr(Run, "commit", strike)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit if struck == signal.SIGTERM else KeyboardInterrupt) as end:
        train(root=str(tmp_path), run_id="run")
    if isinstance(end.value, SystemExit):
        assert end.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before
    run = Run(str(tmp_path), "run")
    assert run.last_step() >= 2

    monkeypatch.setattr(Run, "commit", commit)
    committed = attempts(run)
    train(root=str(tmp_path), run_id="run")
    assert committed.items() <= attempts(run).items()
    assert run.last_step() == 4
