"""Measures verl on the benchmark's workload, where it is installed, from what its console logger prints."""

import re
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.jobs import MAX_PROMPT_TOKENS, REWARD, Job
from benchmarks.measure import StepTimes, environment

_LINE = re.compile(r"\bstep:(\d+) - ")
_PAIR = re.compile(r"([\w/@.-]+):(?:np\.\w+\()?(-?[\d.]+(?:e[+-]?\d+)?)")


def measure(job: Job) -> dict[str, Any]:
    """Run main_ppo for the job's steps; a step's time is between two of its lines."""
    if find_spec("verl") is None:
        raise SystemExit("verl is not installed")
    from ratchet.data.sources import preprocess

    folder = Path(job.folder)
    folder.mkdir(parents=True, exist_ok=True)
    (file,) = preprocess(job.prompts, str(folder), data_source="openai/gsm8k")
    settings = settings_of(job, file)
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *(f"{key}={value}" for key, value in settings.items())]
    times, tail = StepTimes(), ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            tail = (tail + line)[-2000:]
            if _LINE.search(line):
                times.add(time.time(), **facts_of(line))
    if process.returncode or len(times.steps) < job.steps:
        raise SystemExit(f"verl ended with {process.returncode} after {len(times.steps)} steps: {tail}")
    largest = max(step.pop("allocated", 0) for step in times.steps)
    return {
        "steps": times.steps,
        "start_to_first_step": times.first,
        "peak": {"allocated": largest} if largest else {},
        "settings": settings,
        "environment": environment(),
    }


def facts_of(line: str) -> dict[str, Any]:
    """Tokens, phases and memory of one line of verl's console logger."""
    values = {name: float(value) for name, value in _PAIR.findall(line)}
    phases = {name.partition("/")[2]: value for name, value in values.items() if name.startswith("timing_s/")}
    return {
        "tokens": round(values.get("perf/total_num_tokens", 0)),
        "phases": phases,
        "split": {"generate": phases.get("gen", 0.0), "update": phases.get("update_actor", 0.0)},
        "allocated": round(values.get("perf/max_memory_allocated_gb", 0) * 2**30),
    }


def settings_of(job: Job, file: str) -> dict[str, Any]:
    """main_ppo's keys: engine awake, packed batches, no recomputation, no second forward."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return {
        "algorithm.adv_estimator": "grpo",
        "algorithm.rollout_correction.bypass_mode": True,
        "data.train_files": file,
        "data.val_files": file,
        "data.shuffle": False,
        "data.train_batch_size": job.num_prompts,
        "data.max_prompt_length": MAX_PROMPT_TOKENS,
        "data.max_response_length": job.num_tokens,
        "actor_rollout_ref.model.path": job.model,
        "actor_rollout_ref.model.use_remove_padding": True,
        "actor_rollout_ref.model.use_fused_kernels": True,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        f"{actor}.strategy": "fsdp2",
        f"{actor}.optim.lr": job.lr,
        f"{actor}.ppo_mini_batch_size": job.num_prompts,
        f"{actor}.use_dynamic_bsz": True,
        f"{actor}.ppo_max_token_len_per_gpu": 65536,
        f"{actor}.use_kl_loss": False,
        f"{actor}.entropy_coeff": 0,
        f"{actor}.loss_agg_mode": "token-mean",
        f"{rollout}.name": "vllm",
        f"{rollout}.n": job.group_size,
        f"{rollout}.ignore_eos": True,
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.gpu_memory_utilization": job.memory_share,
        f"{rollout}.free_cache_engine": False,
        f"{rollout}.enforce_eager": False,
        f"{rollout}.max_num_seqs": job.num_completions,
        f"{rollout}.max_num_batched_tokens": 8192,
        f"{rollout}.log_prob_max_token_len_per_gpu": 131072,
        f"{rollout}.agent.num_workers": 2,
        "custom_reward_function.path": str(REWARD),
        "trainer.n_gpus_per_node": 1,
        "trainer.nnodes": 1,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.logger": "[console]",
        "trainer.default_local_dir": job.folder,
        "trainer.total_training_steps": job.steps,
    }
