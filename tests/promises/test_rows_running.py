"""Rows 27 and 28 of the promises: what is kept, evaluated and resumed, and where the metrics go."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ratchet import FSDPPolicyUpdate, GRPOAdvantage, HFRollout, PPOTrainer, RLDataFlow, load_config
from ratchet.errors import ConfigError
from ratchet.store import artifacts
from ratchet.store.run import POLICY_UPDATE, Run
from tests.promises.results import run_of
from tests.runs import CONFIGS, attempts, manifests, train_tiny


def _fit(model: Path, config: dict[str, Any], run_id: str | None) -> Any:
    flow = RLDataFlow(
        rollout=HFRollout(str(model), n=2, max_tokens=4, dtype="float32"),
        reward=lambda data: [float(sum(item.completion_token_ids) % 5) for item in data],
        advantage=GRPOAdvantage(),
        policy_update=FSDPPolicyUpdate(lr=1e-3, dtype="float32"),
    )
    return PPOTrainer(data_flow=flow, config=config).fit(run_id=run_id)


def _evaluated(result: Any) -> list[int]:
    places = manifests(run_of(result))
    return sorted(int(place.split("/")[0]) for place in places if place.endswith("/evaluate"))


def _kept(result: Any) -> list[int]:
    """Steps whose trainer state is still there."""
    run, found = run_of(result), []
    for step in range(1, result.steps + 1):
        state = run.require(POLICY_UPDATE, step).provenance.trainer_state
        if state is not None and artifacts.is_present(run.store, state):
            found.append(step)
    return found


def test_row_27_what_is_evaluated_and_what_is_kept(tiny_model: Path, problems: Path, rest: Any) -> None:
    trainer: dict[str, Any] = {"total_training_steps": 7, "grain": "step", "save_freq": 2, "test_freq": 3}
    data = {"val_files": str(problems), "val_max_samples": 1}
    often = _fit(tiny_model, rest(problems, data=data, trainer={**trainer, "val_before_train": True}), "often")
    assert _evaluated(often) == [0, 3, 6, 7]
    assert _kept(often) == [2, 4, 6, 7], "every second one, and the last two"
    seldom = {"total_training_steps": 1, "val_before_train": False, "test_freq": -1}
    assert _evaluated(_fit(tiny_model, rest(problems, data=data, trainer=seldom), "seldom")) == [1]


@pytest.mark.parametrize(("save_freq", "limit", "kept"), [(2, 2, [4, 6, 7]), (3, 1, [6, 7])])
def test_row_27_of_what_is_kept_for_good_only_the_newest_stay(
    save_freq: int, limit: int, kept: list[int], tiny_model: Path, problems: Path, rest: Any
) -> None:
    trainer = {"total_training_steps": 7, "grain": "step", "save_freq": save_freq, "max_actor_ckpt_to_keep": limit}
    assert _kept(_fit(tiny_model, rest(problems, trainer=trainer), f"limit-{save_freq}")) == kept


def test_row_27_the_modes_of_resuming(tmp_path: Path, tiny_model: Path, problems: Path, rest: Any) -> None:
    place = {"default_local_dir": str(tmp_path)}

    def fit(steps: int, **trainer: Any) -> Any:
        return _fit(tiny_model, rest(problems, trainer={**place, "total_training_steps": steps, **trainer}), "run")

    first = attempts(run_of(fit(1, resume_mode="disable")))
    with pytest.raises(ConfigError, match="resume_mode is disable; use another run id"):
        fit(2, resume_mode="disable")
    second = attempts(run_of(fit(2, resume_mode="auto")))
    assert second | first == second, "nothing that was committed is computed again"
    assert "2/policy_update" in second
    third = fit(3, resume_mode="resume_path", resume_from_path=f"{tmp_path}/run")
    assert third.steps == 3
    assert attempts(run_of(third)) | second == attempts(run_of(third))
    with pytest.raises(ConfigError, match=r"resume_from_path is .*/absent, but this is run .*/run"):
        fit(3, resume_mode="resume_path", resume_from_path=f"{tmp_path}/absent")


def test_row_27_the_path_alone_says_which_run_goes_on(
    tmp_path: Path, tiny_model: Path, problems: Path, rest: Any
) -> None:
    _fit(tiny_model, rest(problems, trainer={"default_local_dir": str(tmp_path)}), "run")
    resume = {"resume_mode": "resume_path", "resume_from_path": f"{tmp_path}/run", "total_training_steps": 2}
    assert _fit(tiny_model, rest(problems, trainer=resume), None).steps == 2


def _torchrun(processes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return subprocess.run(
        [*launcher, "-m", "ratchet.trainer.main_ppo", *arguments],
        cwd=CONFIGS.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_row_27_a_run_of_two_processes_goes_on_with_one(tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    keys = [
        *(f"actor_rollout_ref.model.path={tiny_model}", f"data.train_files={problems}", "data.train_batch_size=2"),
        *("actor_rollout_ref.rollout.n=2", "data.max_response_length=6", "trainer.grain=stage"),
        *("trainer.logger=[]", "actor_rollout_ref.actor.entropy_coeff=0.01"),
    ]
    more = [f"trainer.default_local_dir={tmp_path}", "trainer.experiment_name=two", "trainer.total_training_steps=1"]
    done = _torchrun(2, "--config", str(CONFIGS / "tiny.yaml"), *keys, *more)
    assert done.returncode == 0, done.stderr[-3000:]
    two = manifests(Run(str(tmp_path), "two"))["1/policy_update"].provenance
    assert two.trainer_state is not None
    ranks = {entry.path.split("_")[2] for entry in two.trainer_state.files if entry.path.startswith("__")}
    assert ranks == {"0", "1"}, "each process wrote its part of the state"

    config = load_config(CONFIGS / "tiny.yaml", [*keys, "trainer.total_training_steps=2"])
    resumed = train_tiny(tmp_path, "two", config)
    assert attempts(resumed)["1/policy_update"] == two.attempt
    alone = manifests(train_tiny(tmp_path, "one", config))
    # Batches are global: the same steps, up to rounding.
    for step in (1, 2):
        found = manifests(resumed)[f"{step}/policy_update"].provenance.metrics
        expected = alone[f"{step}/policy_update"].provenance.metrics
        for name in ("actor/grad_norm", "actor/entropy", "actor/lr"):
            assert found[name] == pytest.approx(expected[name], rel=1e-3)


NUMBER = r"-?(?:\d+\.?\d*(?:e[+-]\d+)?|inf|nan)"


def test_row_28_one_line_a_step_by_verls_names_and_json_lines_for_machines(
    tmp_path: Path,
    tiny_model: Path,
    problems: Path,
    rest: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    config = rest(problems, trainer={"total_training_steps": 2, "logger": ["console", "jsonl"]})
    result = _fit(tiny_model, config, "told")
    lines = [line for line in capsys.readouterr().out.splitlines() if "actor/pg_loss" in line]
    assert [line.split(" | ")[0] for line in lines] == ["step: 1", "step: 2"]
    for line in lines:
        assert re.fullmatch(rf"step: \d+(?: \| [\w./@-]+: {NUMBER})+", line), line
        names = {part.partition(":")[0] for part in line.split(" | ")}
        assert names >= {
            *("actor/pg_loss", "actor/grad_norm", "actor/lr", "actor/entropy", "actor/ppo_kl", "actor/pg_clipfrac"),
            *("critic/score/mean", "critic/rewards/mean", "critic/advantages/mean", "critic/returns/mean"),
            *("response_length/mean", "response_length/clip_ratio", "prompt_length/mean", "training/global_step"),
            *("timing_s/gen", "timing_s/step", "perf/throughput", "perf/total_num_tokens"),
        }
    records = [json.loads(line) for line in Path("told.jsonl").read_text().splitlines()]
    told = {(record["step"], record["stage"]): record["metrics"] for record in records}
    for step in (1, 2):
        printed = dict(part.split(": ") for part in lines[step - 1].split(" | "))
        assert float(printed["actor/pg_loss"]) == pytest.approx(told[step, POLICY_UPDATE]["actor/pg_loss"], rel=1e-3)
    assert told[2, POLICY_UPDATE]["actor/lr"] == result.metrics["actor/lr"] == 1e-3


@pytest.mark.parametrize("name", ["wandb", "swanlab", "trackio", "consol"])
def test_row_28_other_trackers_are_refused_by_name(name: str, problems: Path, rest: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=[f"trainer.logger=['console','{name}']"])
    message = str(caught.value)
    assert "trainer.logger" in message
    assert repr(name) in message
    assert all(known in message for known in ("console", "mlflow", "tensorboard"))
    with pytest.raises(ConfigError, match=name):
        PPOTrainer(data_flow=RLDataFlow(rollout=HFRollout("m")), config=rest(problems, trainer={"logger": [name]}))


@pytest.mark.slow
def test_row_28_mlflow_gets_the_steps_of_a_run(
    tmp_path: Path, tiny_model: Path, problems: Path, rest: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    trainer = {"total_training_steps": 2, "logger": "mlflow", "project_name": "promises"}
    result = _fit(tiny_model, rest(problems, trainer=trainer), "tracked")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (found,) = client.search_runs([client.get_experiment_by_name("promises").experiment_id])
    history = client.get_metric_history(found.info.run_id, "actor/grad_norm")
    assert [point.step for point in history] == [1, 2]
    assert history[-1].value == pytest.approx(result.metrics["actor/grad_norm"])


@pytest.mark.slow
def test_row_28_tensorboard_gets_the_steps_of_a_run(
    tmp_path: Path, tiny_model: Path, problems: Path, rest: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    _fit(tiny_model, rest(problems, trainer={"total_training_steps": 2, "logger": ["tensorboard"]}), "board")
    events = EventAccumulator(str(tmp_path / "tensorboard" / "board"))
    events.Reload()
    assert [point.step for point in events.Scalars("actor/grad_norm")] == [1, 2]
