"""Jobs, and what the systems' settings are made of them."""

from pathlib import Path

import pytest

from benchmarks import run_ratchet, run_trl, run_verl
from benchmarks.jobs import Job
from benchmarks.speed_reward import compute_score


def job(system: str = "ratchet", **facts: object) -> Job:
    return Job(system=system, model="/models/tiny", prompts="/data/prompts.jsonl", **facts)  # type: ignore[arg-type]


def test_a_job_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = job("trl", micro_batch=64, overrides=("a=1",), trl_settings={"torch_compile": True})
    written.write(tmp_path / "job.json")
    assert Job.read(tmp_path / "job.json") == written
    assert written.name == "tiny-32x8x256-13steps-trl-mb64-r0"


def test_all_systems_are_told_the_same_batch() -> None:
    config = run_ratchet.config_of(job())
    trl, verl = run_trl.settings_of(job("trl", micro_batch=64)), run_verl.settings_of(job("verl"), "p.parquet")
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    assert trl["per_device_train_batch_size"] * trl["gradient_accumulation_steps"] == 256
    assert config.data.train_batch_size * rollout.n == 256
    assert verl["data.train_batch_size"] * verl["actor_rollout_ref.rollout.n"] == 256
    assert config.data.max_response_length == trl["max_completion_length"] == verl["data.max_response_length"] == 256
    assert actor.optim.lr == trl["learning_rate"] == verl["actor_rollout_ref.actor.optim.lr"]
    assert rollout.ignore_eos
    assert trl["generation_kwargs"] == {"ignore_eos": True}
    assert actor.loss_agg_mode == "token-mean"
    assert trl["loss_type"] == "dapo"
    assert not config.data.shuffle
    assert not trl["shuffle_dataset"]


def test_overlap_corrects_for_the_older_policy() -> None:
    config = run_ratchet.config_of(job("ratchet-overlap"))
    assert config.trainer.async_level == 1
    assert config.algorithm.rollout_correction.rollout_is == "token"
    assert config.actor_rollout_ref.rollout.calculate_log_probs


def test_only_the_durable_row_saves_and_corrects() -> None:
    plain, durable = run_trl.settings_of(job("trl")), run_trl.settings_of(job("trl-durable"))
    assert (plain["save_strategy"], durable["save_strategy"]) == ("no", "steps")
    assert durable["save_steps"] == 1
    assert not plain["vllm_importance_sampling_correction"]
    assert durable["vllm_importance_sampling_correction"]


def test_verls_console_line_is_read() -> None:
    line = (
        "(TaskRunner pid=7) step:3 - actor/pg_loss:np.float64(0.5) - timing_s/gen:1.25 - timing_s/update_actor:0.5 - "
        "perf/total_num_tokens:90112 - perf/max_memory_allocated_gb:2.0\n"
    )
    facts = run_verl.facts_of(line)
    assert facts["tokens"] == 90112
    assert facts["split"] == {"generate": 1.25, "update": 0.5}
    assert facts["allocated"] == 2 * 2**30


@pytest.mark.parametrize(("text", "base"), [("#### 12", 1.0), ("#### 13", 0.0)])
def test_the_reward_is_right_or_wrong_and_a_little_by_text(text: str, base: float) -> None:
    assert base <= compute_score("openai/gsm8k", text, "12") <= base + 0.06
    assert len({compute_score("openai/gsm8k", letter, "12") for letter in "abcdefghij"}) > 1
