import re
import subprocess
import sys
from pathlib import Path

import pytest

from ratchet.config import RunConfig, load_config, parse_config, parse_text, read_config_text
from ratchet.config.load import known_keys
from ratchet.errors import ConfigError
from ratchet.tracking.trackers import TRACKERS

CONFIGS = sorted((Path(__file__).resolve().parents[3] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_config_file_loads(path: Path) -> None:
    assert load_config(path) != RunConfig()


def test_nothing_given_is_a_config_of_defaults() -> None:
    assert load_config() == parse_text("") == parse_config({}) == RunConfig()


def test_the_defaults_that_verl_users_count_on() -> None:
    config = RunConfig()
    assert config.data.train_batch_size == 1024
    assert config.data.max_prompt_length == config.data.max_response_length == 512
    assert config.actor_rollout_ref.actor.clip_ratio == 0.2
    assert config.actor_rollout_ref.actor.loss_agg_mode == "token-mean"
    assert config.actor_rollout_ref.actor.optim.lr == 1e-6
    assert config.algorithm.norm_adv_by_std_in_grpo


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("data.train_batchsize", "data.train_batch_size"),
        ("trainer.total_epoch", "trainer.total_epochs"),
        ("trainr.total_epochs", "trainer"),
        # A key in the wrong section is looked for by its own name.
        ("trainer.lr", "actor_rollout_ref.actor.optim.lr"),
        ("actor_rollout_ref.actor.path", "actor_rollout_ref.model.path"),
        # Of several keys with that name, the nearest one.
        ("actor_rollout_ref.rollout.val_kwarg.temperature", "actor_rollout_ref.rollout.val_kwargs"),
        # Under a short name of its section.
        ("rollout.temprature", "actor_rollout_ref.rollout.temperature"),
        ("critic.grad_clips", "critic.grad_clip"),
    ],
)
def test_an_unknown_key_is_refused_and_the_nearest_one_named(key: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match="no such key; the nearest is ") as caught:
        load_config(overrides=[f"{key}=1"])
    assert str(caught.value).endswith(f"the nearest is {nearest}")


def test_every_fault_is_named_at_once_with_its_key_and_value() -> None:
    tree = {"data": {"train_batch_size": "many"}, "trainer": {"gran": "step", "grain": "steps"}}
    with pytest.raises(ConfigError) as caught:
        parse_config(tree, source="mine.yaml")
    text = str(caught.value)
    assert text.startswith("mine.yaml does not make a run:")
    assert "data.train_batch_size: " in text
    assert "'many'" in text
    assert "trainer.gran: no such key; the nearest is trainer.grain" in text
    assert "trainer.grain: Input should be 'stage', 'step' or 'segment', but it is 'steps'" in text


@pytest.mark.parametrize(
    "override",
    [
        "data.train_batch_size=0",
        "data.train_batch_size=2.5",
        "data.train_batch_size=[1]",
        "data.shuffle=perhaps",
        "data=4",
        "actor_rollout_ref.rollout.temperature=0",
        "actor_rollout_ref.rollout.top_p=1.5",
        "actor_rollout_ref.actor.optim.lr=-1.0e-6",
        "actor_rollout_ref.actor.optim.lr=.nan",
        "actor_rollout_ref.actor.entropy_coeff=.inf",
        "actor_rollout_ref.actor.optim.betas=[0.9, 1.0]",
        "actor_rollout_ref.actor.clip_ratio_c=1.0",
        "trainer.seed=-1",
        "trainer.logger=[console, wandb]",
    ],
)
def test_a_value_that_cannot_be_meant_is_refused_by_its_key(override: str) -> None:
    with pytest.raises(ConfigError, match=override.partition("=")[0]):
        load_config(overrides=[override])


def test_every_tracker_may_be_named_and_nothing_else() -> None:
    assert load_config(overrides=[f"trainer.logger=[{', '.join(TRACKERS)}]"]).trainer.logger == TRACKERS


def test_overrides_are_yaml_and_the_last_one_counts() -> None:
    config = load_config(
        overrides=[
            "actor_rollout_ref.actor.optim.lr=1e-5",
            "trainer.logger=[console, jsonl]",
            "data.train_batch_size=8",
            "data.train_batch_size=16",
            "actor_rollout_ref.actor.ppo_mini_batch_size=null",
            "data.train_files=ratchet/word-problems?level=1&size=8",
        ]
    )
    assert config.actor_rollout_ref.actor.optim.lr == 1e-5
    assert config.trainer.logger == ("console", "jsonl")
    assert config.data.train_batch_size == 16
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size is None
    assert config.data.train_files == "ratchet/word-problems?level=1&size=8"


@pytest.mark.parametrize("override", ["data.shuffle", "=3", "data.shuffle=[", "~data.shuffle", "~data.shuffle=1"])
def test_an_override_that_is_none_is_refused_naming_it(override: str) -> None:
    with pytest.raises(ConfigError, match=f"override '{re.escape(override)}'"):
        load_config(overrides=[override])


def test_a_key_below_a_value_and_a_value_for_a_section_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.shuffle\.x: data\.shuffle is one value, not a section"):
        load_config(overrides=["data.shuffle.x=1"])
    with pytest.raises(ConfigError, match=r"actor: expected a section of keys, but it is 4"):
        load_config(overrides=["actor=4"])


def test_a_section_as_an_override_sets_its_keys_and_a_null_goes_back_to_the_defaults() -> None:
    tree = {"data": {"train_batch_size": 8, "max_prompt_length": 7}, "trainer": {"seed": 5}}
    config = parse_config(tree, ["data={train_batch_size: 16}", "trainer=null"])
    assert (config.data.train_batch_size, config.data.max_prompt_length, config.trainer.seed) == (16, 7, 0)
    config = parse_config(tree, ["data.train_batch_size=null", "+data.shuffle=false", "++trainer.seed=6"])
    assert (config.data.train_batch_size, config.data.shuffle, config.trainer.seed) == (1024, False, 6)


def test_a_mapping_of_free_names_is_replaced_whole_and_added_to_by_name() -> None:
    tree = {"reward_model": {"weights": {"rule": 1.0, "custom": 2.0}}, "custom_reward_function": {"path": __file__}}
    assert parse_config(tree, ["reward_model.weights={rule: 3}"]).reward_weights == {"rule": 3.0}
    added = parse_config(tree, ["reward_model.weights.rule=3", "custom_reward_function.reward_kwargs.scale=0.5"])
    assert added.reward_weights == {"rule": 3.0, "custom": 2.0}
    assert added.custom_reward_function.reward_kwargs == {"scale": 0.5}


def test_a_reference_to_another_key_is_refused_rather_than_taken_as_a_name() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.default_local_dir: .* refers to another key"):
        load_config(overrides=["trainer.default_local_dir=checkpoints/${trainer.project_name}"])


def test_numbers_are_what_they_look_like() -> None:
    config = load_config(
        overrides=[
            "algorithm.rollout_correction.rollout_is_threshold=0.5_5",
            "actor_rollout_ref.actor.optim.lr=1e-5",
            "actor_rollout_ref.actor.kl_loss_coef=.5",
            "trainer.experiment_name=1:30",
        ]
    )
    assert config.algorithm.rollout_correction.rollout_is_threshold == "0.5_5"
    assert config.actor_rollout_ref.actor.optim.lr == 1e-5
    assert config.actor_rollout_ref.actor.kl_loss_coef == 0.5
    assert config.trainer.experiment_name == "1:30"


def test_overrides_leave_the_mapping_that_they_came_with_as_it_was() -> None:
    tree = {"data": {"train_batch_size": 4}}
    parse_config(tree, ["data.train_batch_size=8", "trainer.seed=3"])
    assert tree == {"data": {"train_batch_size": 4}}


def test_sections_without_content_are_defaults_at_any_depth_and_can_be_overridden() -> None:
    text = "data:\nactor_rollout_ref:\n  actor:\n  rollout:\n    n: 3\n"
    config = parse_text(text, ["data.train_batch_size=8", "actor_rollout_ref.actor.optim.lr=0.5"])
    assert config.data.train_batch_size == 8
    assert config.actor_rollout_ref.actor.optim.lr == 0.5
    assert config.actor_rollout_ref.rollout.n == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", "expected a mapping of sections, found list"),
        ("just words", "expected a mapping of sections, found str"),
        ("data: [", "is not YAML"),
        ("1: {a: 2}", "does not make a run"),
        ("data:\n  1: 2", "does not make a run"),
    ],
)
def test_yaml_that_is_no_mapping_of_sections_is_refused_naming_the_file(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(path)
    assert str(path) in str(caught.value)


def test_a_config_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the config file .*absent\.yaml"):
        load_config(tmp_path / "absent.yaml")


def test_a_config_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "weights.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"weights\.yaml: it is not UTF-8"):
        load_config(tmp_path / "weights.yaml")


@pytest.mark.parametrize(
    ("overrides", "is_needed"),
    [
        ([], False),
        (["actor_rollout_ref.actor.use_kl_loss=true"], True),
        (["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_coef=0"], False),
        (["algorithm.use_kl_in_reward=true"], True),
        (["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0"], False),
        (["actor_rollout_ref.actor.kl_loss_coef=1"], False),
    ],
)
def test_the_reference_is_needed_only_where_a_term_with_weight_reads_it(overrides: list[str], is_needed: bool) -> None:
    assert load_config(overrides=overrides).reference_is_needed is is_needed


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.logger=[console, jsonl]"],
        ["critic.model.path=m", "actor.ppo_mini_batch_size=2", "actor.ppo_epochs=3"],
        ["data.seq_length=100", "reward_model.url=http://host"],
        ["algorithm.rollout_correction.rollout_is_threshold=0.5_5", "trainer.algorithm=rloo"],
    ],
)
def test_a_config_survives_its_own_json(overrides: list[str]) -> None:
    config = load_config(CONFIGS[0], overrides)
    assert parse_config(config.model_dump(mode="json")) == config


def test_every_known_key_can_be_read_and_a_section_reads_as_a_mapping() -> None:
    config, keys = RunConfig(), list(known_keys())
    assert len(keys) == len(set(keys)) > 60
    for key in keys:
        config.value(key)
    assert config.value("reward_model.overlong_buffer") == {"enable": False, "len": 512, "penalty_factor": 1.0}


def test_a_config_is_read_without_torch() -> None:
    program = "import sys; from ratchet.config import load_config; load_config(); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=CONFIGS[0].parents[1], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    "text",
    [
        '{"trainer":{"seed":5}}',
        "  {trainer: {seed: 5}}",
        "trainer:\n  seed: 5\n",
        "trainer: {seed: 5}",
        '{"trainer":{"seed":5,"default_local_dir":"s3://b/runs"}}',
    ],
)
def test_a_config_may_be_given_as_its_text(text: str) -> None:
    assert read_config_text(text).trainer.seed == 5
    assert read_config_text(text, ["trainer.seed=6"]).trainer.seed == 6


def test_a_config_that_is_no_text_is_a_files_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a:b.yaml").write_text("trainer: {seed: 5}")
    assert read_config_text("a:b.yaml").trainer.seed == 5
    assert read_config_text("").trainer.seed == RunConfig().trainer.seed
    assert read_config_text("trainer:") == read_config_text("")
    with pytest.raises(ConfigError, match=r"cannot read the config file gone\.yaml: No such file"):
        read_config_text("gone.yaml")
    with pytest.raises(ConfigError, match=r"the parameter does not make a run:\n  trainer\.sed: no such key"):
        read_config_text('{"trainer":{"sed":5}}', name="the parameter")
