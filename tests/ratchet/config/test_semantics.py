import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from ratchet.config import load_config, semantic
from ratchet.config.load import known_keys
from ratchet.config.semantics import EXTENT, FIRST_KEYS, OPERATIONAL, schedule_reads_extent, selected
from ratchet.stages.base_models import BasePolicy
from ratchet.stages.checkpoint_export import CheckpointExport
from ratchet.stages.evaluate import Evaluate
from ratchet.stages.graph import step_stages
from ratchet.stages.preprocess import Preprocess
from ratchet.store.manifest import digest_of

OPTIM = "actor_rollout_ref.actor.optim"
EVERYTHING = [
    "algorithm.adv_estimator=gae",
    "actor_rollout_ref.rollout.n=4",
    "algorithm.rollout_correction.bypass_mode=false",
]
EVERYTHING += [
    "actor_rollout_ref.rollout.val_kwargs.temperature=0.6",
    "reward_model.path=m",
    "reward_model.type=rule",
    "data.train_batch_size=8",
]
FREE_FORM = {"code", "custom_reward_function.path"}
OTHERS: dict[str, list[Any]] = {
    "data_source": ["x"],
    "prompt_key": ["x"],
    "lr_scheduler_type": ["linear"],
    "ppo_mini_batch_size": [2],
    "loss_scale_factor": [2.0],
    "clip_ratio_low": [0.1],
    "clip_ratio_high": [0.1],
    "betas": [[0.5, 0.999]],
    "loss_agg_mode": ["token-sum"],
    "loss_mode": ["gspo"],
    "dro_beta": [0.5],
    "kl_loss_type": ["k1"],
    "kl_penalty": ["k3"],
    "dtype": ["float32"],
    "name": ["hf"],
    "temperature": [0.5],
    "n": [2],
    "min_lr_ratio": [0.5],
    "lr_warmup_steps_ratio": [0.5],
    "entropy_coeff": [0.5],
    "algorithm.kl_ctrl.type": ["adaptive"],
    "reward_model.type": ["model"],
    "path": ["other"],
    "weights": [{"rule": 2.0}],
    "gsm8k_mode": ["strict"],
    "rule": ["math"],
    "pattern": ["x"],
    "reward_model.judge.model": ["x"],
    "reward_model.judge.prompt": ["x"],
    "scale": [[0.0, 5.0]],
    "reward_model.length_penalty.weight": [0.5],
    "reward_manager": ["dapo"],
    "reward_kwargs": [{"x": 1}],
    "adv_estimator": ["grpo"],
    "objective": [],
    "loss_type": ["ipo"],
    "label_smoothing": [0.1],
    "sft_lr": [1e-5],
    "gdpo_reward_keys": [["a"]],
    "gdpo_reward_weights": [],
    "metric": ["acc"],
    "rollout_is": ["token"],
    "rollout_rs": [],
    "rollout_rs_threshold": [2.0],
    "compat": ["verl"],
    "target_modules": [["q_proj"]],
}
"""Other values of keys whose value is no number or switch; none where the key needs another one beside it."""


def _keys(tree: dict[str, Any], prefix: str = "") -> set[str]:
    found: set[str] = set()
    for name, value in tree.items():
        found |= _keys(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}"}
    return found


def test_every_operational_key_exists() -> None:
    assert not (OPERATIONAL | EXTENT) - set(known_keys())


def test_every_key_that_a_stage_reads_exists() -> None:
    everything = ["actor_rollout_ref.actor.use_kl_loss=true", "algorithm.rollout_correction.bypass_mode=false"]
    stages = [*step_stages(load_config(overrides=everything)), BasePolicy(), Preprocess("train"), Preprocess("val")]
    for more in (["algorithm.objective=dpo"], ["algorithm.objective=hybrid", "algorithm.hybrid.sft_files=d"]):
        stages += step_stages(load_config(overrides=more))
    keys = set(known_keys())
    sections = {key.rsplit(".", depth)[0] for key in keys for depth in range(1, 4)}
    for stage in [*stages, Evaluate(), CheckpointExport()]:
        assert not set(stage.config_keys) - keys - sections, stage.name


def test_a_run_of_defaults_is_the_keys_that_every_run_has() -> None:
    assert _keys(semantic(load_config())) == FIRST_KEYS - EXTENT - {"actor_rollout_ref.model", "actor_rollout_ref.ref"}


@pytest.mark.parametrize("key", sorted(set(known_keys()) - OPERATIONAL - EXTENT - FREE_FORM))
def test_a_key_that_is_not_operational_makes_another_run(key: str) -> None:
    usual = load_config(overrides=EVERYTHING)
    value = usual.value(key)
    name = key if key in OTHERS else key.rpartition(".")[2]
    others = OTHERS[name] if name in OTHERS else [value + 1 if isinstance(value, int) else value / 2]
    if isinstance(value, bool):
        others = [not value]
    for other in others:
        changed = load_config(overrides=[*EVERYTHING, f"{key}={json.dumps(other)}"])
        assert changed.value(key) != value
        assert semantic(changed) != semantic(usual)


def test_a_run_from_before_a_key_existed_is_the_same_run() -> None:
    written = semantic(load_config(overrides=["actor_rollout_ref.actor.ppo_epochs=2"]))
    assert written.keys() == {"data", "actor_rollout_ref", "reward_model", "algorithm", "trainer"}
    assert written["reward_model"] == {"gsm8k_mode": "default"}
    assert written["algorithm"]["kl_ctrl"] == {"type": "fixed", "kl_coef": 0.001}
    assert written["actor_rollout_ref"]["ref"] == written["actor_rollout_ref"]["model"] == {}
    adaptive = semantic(load_config(overrides=["algorithm.kl_ctrl.horizon=5"]))
    assert adaptive["algorithm"]["kl_ctrl"] == {"type": "fixed", "kl_coef": 0.001, "horizon": 5}


def test_a_critic_belongs_to_a_run_that_reads_it() -> None:
    without = ["algorithm.adv_estimator=grpo", "critic.optim.lr=0.5", "critic.optim.lr_scheduler_type=cosine"]
    assert semantic(load_config(overrides=without)) == semantic(load_config())
    read = load_config(overrides=["algorithm.adv_estimator=gae", *without[1:], "critic.model.path=m"])
    assert semantic(read)["critic"] == {"optim": {"lr": 0.5, "lr_scheduler_type": "cosine"}}
    assert schedule_reads_extent(read)


def test_python_files_are_known_by_what_is_in_them(tmp_path: Path) -> None:
    def run(name: str, text: str) -> dict[str, Any]:
        (tmp_path / name).write_text(text)
        return semantic(load_config(overrides=[f"custom_reward_function.path={tmp_path / name}"]))

    text = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 0.0\n"
    here, elsewhere, other = run("a.py", text), run("b.py", text), run("a.py", f"{text}# another\n")
    assert here == elsewhere
    assert here != other
    assert here["code"] == [hashlib.sha256(text.encode()).hexdigest()]


@pytest.mark.parametrize(
    ("overrides", "reads_extent"),
    [
        ([], False),
        ([f"{OPTIM}.lr_warmup_steps=10"], False),
        ([f"{OPTIM}.lr_warmup_steps=10", f"{OPTIM}.lr_warmup_steps_ratio=0.1"], False),
        ([f"{OPTIM}.lr_warmup_steps_ratio=0.1"], True),
        ([f"{OPTIM}.lr_scheduler_type=cosine"], True),
        ([f"{OPTIM}.lr_scheduler_type=linear"], True),
    ],
)
def test_the_number_of_steps_is_semantic_only_where_the_learning_rate_reads_it(
    overrides: list[str], reads_extent: bool
) -> None:
    config = load_config(overrides=overrides)
    assert schedule_reads_extent(config) is reads_extent
    assert (_keys(semantic(config)) >= EXTENT) is reads_extent
    longer = load_config(overrides=[*overrides, "trainer.total_training_steps=99", "trainer.total_epochs=7"])
    assert (semantic(longer) != semantic(config)) is reads_extent


def test_how_and_where_a_run_runs_does_not_change_what_it_is() -> None:
    moved = ["trainer.grain=step", "trainer.device=cuda", "trainer.save_freq=5", "trainer.logger=[mlflow]"]
    assert semantic(load_config(overrides=moved)) == semantic(load_config())
    assert semantic(load_config(overrides=["trainer.seed=1"])) != semantic(load_config())


def test_a_stage_is_told_the_values_of_its_keys_and_sections() -> None:
    config = load_config(overrides=["trainer.total_training_steps=5", "trainer.seed=4"])
    found = selected(
        config, ["trainer.seed", "algorithm.kl_ctrl", "trainer.total_training_steps", "actor_rollout_ref.ref"]
    )
    assert found == {
        "trainer.seed": 4,
        "algorithm.kl_ctrl": {"type": "fixed", "kl_coef": 0.001},
        # Neither is semantic here: a section without semantic keys is empty, as a key that is left out is.
        "trainer.total_training_steps": {},
        "actor_rollout_ref.ref": {},
    }
    cosine = load_config(overrides=["trainer.total_training_steps=5", f"{OPTIM}.lr_scheduler_type=cosine"])
    assert selected(cosine, ["trainer.total_training_steps"]) == {"trainer.total_training_steps": 5}


def test_stages_have_the_config_digests_that_they_had_before_they_read_new_keys() -> None:
    """As the first runs recorded them, whose manifests a run that was begun then is compared with."""
    tiny = Path(__file__).resolve().parents[3] / "configs" / "tiny.yaml"
    more = ["actor_rollout_ref.actor.use_kl_loss=true", "algorithm.rollout_correction.bypass_mode=false"]
    config = load_config(tiny, more)
    stages = [*step_stages(config), Evaluate(), Preprocess("train"), CheckpointExport()]
    assert {stage.name: digest_of(selected(config, stage.keys(config)))[:12] for stage in stages} == {
        "rollout": "ea5c41539a71",
        "reward": "d13ff6ad07f4",
        "policy_scores": "aba9d0871498",
        "advantage": "2ee9ae4c3684",
        "reference_scores": "aba9d0871498",
        "policy_update": "8213aa572fb8",
        "evaluate": "72f7c6e7c763",
        "preprocess/train": "4ddb7fcdda6d",
        "checkpoint_export": "effa49161a36",
    }


@pytest.mark.parametrize("stage", ["advantage", "policy_update", "reward"])
def test_a_users_file_is_part_of_what_a_stage_is_made_from(stage: str, tmp_path: Path) -> None:
    def digest(bonus: int) -> str:
        (tmp_path / "mine.py").write_text(f"BONUS = {bonus}\n")
        config = load_config(overrides=[f"code=[{tmp_path / 'mine.py'}]"])
        (found,) = [one for one in step_stages(config) if one.name == stage]
        return digest_of(selected(config, found.keys(config)))

    assert digest(1) == digest(1) != digest(2)
