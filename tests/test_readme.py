"""The README's Python, executed."""

import shutil
from pathlib import Path

import pytest

from ratchet.store.run import Run
from tests.pages import ROOT, code_blocks, enter_folder, run_blocks
from tests.runs import write_problems

PAGE = "README.md"


def test_the_custom_reward_is_the_example_that_ships() -> None:
    (shown,) = [block for block in code_blocks(PAGE) if "class ShownWork" in block]
    shipped = (ROOT / "examples" / "custom_reward.py").read_text(encoding="utf-8")
    assert shipped.endswith(shown)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_flow_of_the_readme_trains_with_its_own_reward(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(tiny_model, tmp_path / "my-model")
    shutil.copyfile(ROOT / "examples" / "custom_reward.py", tmp_path / "custom_reward.py")
    problems = write_problems(tmp_path / "problems.jsonl", 2)
    enter_folder(tmp_path, monkeypatch)
    flow_block, _, objectives = code_blocks(PAGE)
    # What a reader of the README has and a test has not: the hub, and patience.
    small = {
        '{"data": {"train_files": "openai/gsm8k"}}': "CONFIG",
        "n=8)": "n=2, max_tokens=8)",
    }
    for written, meant in small.items():
        assert written in flow_block
        flow_block = flow_block.replace(written, meant)
    config = {
        "data": {"train_files": str(problems), "train_batch_size": 2, "max_prompt_length": 256},
        "actor_rollout_ref": {"model": {"enable_gradient_checkpointing": False}},
        "trainer": {"total_training_steps": 1, "device": "cpu", "logger": []},
    }
    names = run_blocks(PAGE, [flow_block], {"CONFIG": config})
    assert "reference_scores" in capsys.readouterr().out
    assert Path("grpo.yaml").is_file()
    assert Run("runs", "grpo").last_step() == 1

    flows = run_blocks(PAGE, [objectives], names)
    declared = {name: flows[name].config().algorithm.objective for name in ("sft", "dpo", "preferences", "mixed")}
    assert declared == {"sft": "sft", "dpo": "dpo", "preferences": "reward_model", "mixed": "hybrid"}

    from custom_reward import ShownWork  # type: ignore[import-not-found]

    from ratchet import PPOTrainer, RLDataFlow

    parts = names["flow"]
    flow = RLDataFlow(
        rollout=parts.rollout, reward=ShownWork(), advantage=parts.advantage, policy_update=parts.policy_update
    )
    result = PPOTrainer(data_flow=flow, config=config).fit(run_id="own")
    assert result.steps == 1
