"""Measures TRL's GRPOTrainer on the benchmark's workload, with the settings that make it fastest.

Trap: its defaults are not those settings. It recomputes activations, loads masters in the folder's dtype, and takes
vLLM's dtype from the folder, so the folder must be bfloat16.
"""

import json
import shutil
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.jobs import MAX_PROMPT_TOKENS, Job
from benchmarks.measure import StepTimes, environment, memory, peak
from benchmarks.speed_reward import compute_score

PREPARE = "GRPOTrainer._prepare_inputs"


def settings_of(job: Job) -> dict[str, Any]:
    """GRPOConfig's fields: vLLM in process and awake, one update a step, token-mean loss, no KL."""
    is_durable = job.system == "trl-durable"
    micro_batch = job.micro_batch or job.num_completions
    settings: dict[str, Any] = {
        "output_dir": job.folder,
        "learning_rate": job.lr,
        "lr_scheduler_type": "constant",
        "max_steps": job.steps,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": job.num_completions // micro_batch,
        "num_generations": job.group_size,
        "num_iterations": 1,
        "max_completion_length": job.num_tokens,
        "temperature": 1.0,
        "top_p": 1.0,
        "beta": 0.0,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "shuffle_dataset": False,
        "gradient_checkpointing": False,
        "bf16": job.sampler == "vllm",
        "model_init_kwargs": {"dtype": "float32", "attn_implementation": "sdpa"},
        "vllm_importance_sampling_correction": is_durable,
        "save_strategy": "steps" if is_durable else "no",
        "save_steps": 1,
        "save_total_limit": 2,
        "logging_steps": 1,
        "report_to": "none",
        "log_completions": False,
        "disable_tqdm": True,
        "dataloader_num_workers": 0,
    }
    if job.sampler == "vllm":
        settings |= {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_enable_sleep_mode": False,
            "vllm_gpu_memory_utilization": job.memory_share,
            "vllm_max_model_length": MAX_PROMPT_TOKENS + job.num_tokens,
            "generation_kwargs": {"ignore_eos": True},
        }
    else:
        settings |= {"use_cpu": True, "generation_kwargs": {"min_new_tokens": job.num_tokens}}
    return settings | job.trl_settings


def measure(job: Job) -> dict[str, Any]:
    """Train for the job's steps in this process; return times, tokens and memory."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.extras.profiling import ProfilingContext

    from ratchet.data.sources import load_rows

    if job.sampler == "vllm":
        _check_dtype(Path(job.model))
    shutil.rmtree(job.folder, ignore_errors=True)
    rows = load_rows(job.prompts, split="train")
    dataset = Dataset.from_list(
        [{"prompt": row.prompt, "ground_truth": row.reward_model["ground_truth"]} for row in rows]
    )
    times, spent = StepTimes(), defaultdict[str, float](float)

    def reward(completions: list[Any], ground_truth: list[str], **_: Any) -> list[float]:
        texts = [messages[0]["content"] for messages in completions]
        return [compute_score("openai/gsm8k", text, truth) for text, truth in zip(texts, ground_truth, strict=True)]

    def note(context: Any, duration: float) -> None:
        spent[context.name] += duration

    class Callback(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            _wait()
            generate = next((spent[name] for name in spent if name.endswith(".generate")), 0.0)
            split = {"generate": generate, "prepare": spent[PREPARE]}
            used = memory(len(times.steps) + 1, job.steps)
            times.add(time.time(), phases=dict(spent), split=split, **used)
            spent.clear()

    # TRL reports these to trackers on the network only.
    ProfilingContext._log_metrics = note
    settings = settings_of(job)
    trainer = GRPOTrainer(
        model=job.model,
        args=GRPOConfig(**settings),
        reward_funcs=reward,
        train_dataset=dataset,
        callbacks=[Callback()],
    )
    trainer.train()
    counts = [entry["num_tokens"] for entry in trainer.state.log_history if "num_tokens" in entry]
    for step, count, before in zip(times.steps, counts, [0, *counts], strict=False):
        step["tokens"] = round(count - before)
        prepare = step["split"].pop("prepare")
        step["split"]["update"] = (step["seconds"] or prepare) - prepare
    return {
        "steps": times.steps,
        "start_to_first_step": times.first,
        "peak": peak(trainer.vllm_generation.llm if job.sampler == "vllm" else None),
        "settings": settings,
        "environment": environment(),
    }


def _check_dtype(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    found = config.get("dtype") or config.get("torch_dtype")
    if found != "bfloat16":
        raise SystemExit(
            f"{folder}: expected a bfloat16 model, or TRL's vLLM would not sample in bfloat16; got {found}"
        )


def _wait() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
