"""Flows that train here: a tiny model, two prompts a step."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from ratchet import (
    DataProto,
    FSDPPolicyUpdate,
    GAEAdvantage,
    GRPOAdvantage,
    HFRollout,
    PPOTrainer,
    RLDataFlow,
    register_advantage,
)
from ratchet.data import schemas
from ratchet.errors import ConfigError
from ratchet.store.run import Run
from tests.runs import table_rows, write_problems

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_problems(tmp_path_factory.mktemp("problems") / "problems.jsonl")


def _rest(problems: Path, **trainer: Any) -> dict[str, Any]:
    return {
        "data": {"train_files": str(problems), "train_batch_size": 2, "max_prompt_length": 128},
        "trainer": {"total_training_steps": 1, "device": "cpu", "logger": ["console"], **trainer},
    }


def _flow(model: Path, reward: Any, **parts: Any) -> RLDataFlow:
    update = FSDPPolicyUpdate(lr=1e-3, dtype="float32", max_token_len_per_gpu=512)
    rollout = HFRollout(str(model), n=2, max_tokens=6, dtype="float32")
    return RLDataFlow(rollout=rollout, reward=reward, **{"policy_update": update, **parts})


class ByPosition:
    """1, 2, 3, ... for the rows of a batch."""

    def __call__(self, data: DataProto) -> torch.Tensor:
        assert data[0].batch["prompts"].ndim == 1
        return torch.arange(1, len(data) + 1, dtype=torch.float32)


def test_fit_trains_with_a_reward_object_and_says_what_it_came_to(
    tmp_path: Path,
    tiny_model: Path,
    problems: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    trainer = PPOTrainer(data_flow=_flow(tiny_model, ByPosition()), config=_rest(problems))
    result = trainer.fit(root=str(tmp_path), run_id="one")
    assert result.steps == 1
    assert result.run.endswith("/one")
    run = Run(str(tmp_path), "one")
    assert sorted(row["reward"] for row in table_rows(run, "reward", "rewards", schemas.REWARDS)) == [1, 2, 3, 4]
    assert result.metrics["critic/score/mean"] == 2.5
    assert "actor/pg_loss" in result.metrics
    assert result.export is not None
    assert (Path(result.export.removeprefix("file://")) / "config.json").is_file()
    assert "step: 1" in capsys.readouterr().out
    assert run.submission(1)["config"]["custom_reward_function"]["name"] == "ByPosition"
    # A second call finds everything committed.
    assert trainer.fit(root=str(tmp_path), run_id="one") == result


def test_fit_takes_objects_that_live_in_this_process_only(tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    seen = []

    def closure(data: DataProto) -> list[float]:
        seen.append(len(data))
        return [0.25] * len(data)

    result = PPOTrainer(data_flow=_flow(tiny_model, closure), config=_rest(problems)).fit(
        root=str(tmp_path), run_id="a"
    )
    assert seen == [4]
    assert result.metrics["critic/score/mean"] == 0.25


def test_a_registered_function_makes_the_advantages(tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    @register_advantage("flow_fit_constant")
    def constant(batch: Any, options: Any) -> Any:
        advantages = batch.mask * 0.5
        return advantages, advantages

    flow = _flow(tiny_model, lambda data: [0.0] * len(data), advantage=constant)
    PPOTrainer(data_flow=flow, config=_rest(problems)).fit(root=str(tmp_path), run_id="a")
    rows = table_rows(Run(str(tmp_path), "a"), "advantage", "trajectories", schemas.TRAJECTORIES)
    assert {value for row in rows for value in row["advantages"]} == {0.5}


def test_swapping_the_advantage_is_all_that_makes_it_ppo(tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    parts = [("grpo", GRPOAdvantage(kl_coef=0.1)), ("ppo", GAEAdvantage(lam=0.95, critic_lr=1e-3))]
    stages = {}
    for name, advantage in parts:
        flow = _flow(tiny_model, ByPosition(), advantage=advantage)
        config = (
            _rest(problems) | {"critic": {"fsdp_config": {"dtype": "float32"}}} if name == "ppo" else _rest(problems)
        )
        PPOTrainer(data_flow=flow, config=config).fit(root=str(tmp_path), run_id=name)
        stages[name] = {manifest.content.stage for manifest in Run(str(tmp_path), name).step_manifests(1)}
    assert "reference_scores" in stages["grpo"]
    assert stages["ppo"] - stages["grpo"] == {"values", "critic_update"}


def test_a_config_that_disagrees_is_refused_before_anything_runs(tiny_model: Path, problems: Path) -> None:
    config = _rest(problems) | {"actor_rollout_ref": {"rollout": {"n": 3}}}
    with pytest.raises(ConfigError, match=r"rollout\.n is 3 in the config and 2 in HFRollout"):
        PPOTrainer(data_flow=_flow(tiny_model, None), config=config)


def test_a_script_without_a_guard_trains_with_the_classes_that_it_defines(
    tmp_path: Path, tiny_model: Path, problems: Path
) -> None:
    rest = tmp_path / "rest.yaml"
    rest.write_text(yaml.safe_dump(_rest(problems)))
    script = tmp_path / "script.py"
    script.write_text(
        "from ratchet import *\n"
        "print('loaded', __name__)\n"
        "class Mine:\n"
        "    def __call__(self, data):\n"
        "        return [0.75] * len(data)\n"
        "@register_advantage('of_the_script')\n"
        "def mine(batch, options):\n"
        "    return batch.token_rewards, batch.token_rewards\n"
        f"rollout = HFRollout({str(tiny_model)!r}, n=2, max_tokens=6, dtype='float32')\n"
        "flow = RLDataFlow(rollout=rollout, reward=Mine(), advantage=mine,\n"
        "                  policy_update=FSDPPolicyUpdate(dtype='float32'))\n"
        f"print(PPOTrainer(data_flow=flow, config={str(rest)!r}).fit(root={str(tmp_path)!r}, run_id='script'))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert finished.stdout.count("loaded __main__") == 1, "executed once"
    assert finished.stdout.count("loaded") == 1
    run = Run(str(tmp_path), "script")
    assert {row["reward"] for row in table_rows(run, "reward", "rewards", schemas.REWARDS)} == {0.75}
    code = run.submission(1)["config"]["code"]
    assert [entry["source"] for entry in code] == [script.read_text()]
