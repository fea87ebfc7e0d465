"""A vLLM engine inside this process: its import, its arguments, its start and its end.

Trap: vLLM's defaults are made for serving. Its log-probs ignore the temperature, generation_config.json changes the
sampling, its start seeds every global generator, its end destroys the default process group, and on CPU a reload
leaves packed output embeddings as they were: wrong log-probs and no error. All of that is set or repaired here.
"""

import contextlib
import dataclasses
import difflib
import importlib.util
import logging
import math
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig

from ratchet.engines.fingerprint import fingerprint
from ratchet.engines.model import context_length, torch_dtype
from ratchet.errors import EngineError

logger = logging.getLogger(__name__)

_ENVIRONMENT = {
    # In process: no second start of Python, and weights pass by reference.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # GiB, on CPU only; without it the cache takes its share of all memory.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Its warnings name every layer without weights at every reload.
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
_GPU_MEMORY_UTILIZATION = {"cpu": 0.2, "cuda": 0.5}
_RESERVED = (
    "model", "tokenizer", "skip_tokenizer_init", "trust_remote_code", "logprobs_mode", "generation_config",
    "enable_sleep_mode", "worker_extension_cls", "scheduler_cls",
)  # fmt: skip
# Dense decoders that vLLM 0.24 implements by the classes of those for which it chooses its faster model runner itself.
_V2_RUNNER_ARCHITECTURES = {"Qwen2ForCausalLM", "Phi3ForCausalLM"}
_V2_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
_VLLM_GRAPHS = 512
_GRAPH_SETTINGS = {"max_cudagraph_capture_size", "cudagraph_capture_sizes", "compilation_config"}
SCHEDULED_VERSIONS = ("0.24.", "0.32.")
"""The versions of vLLM that Ratchet's scheduler was written against."""
LOG_PROBS = "log_probs"
"""Where `RequestOutput.kv_transfer_params`, which vLLM passes through untouched, holds a request's log-probs."""


def import_vllm() -> Any:
    """The module `vllm`, in an environment made for training; EngineError where it cannot be imported."""
    if importlib.util.find_spec("vllm") is None:
        raise EngineError("vLLM is not installed; install it, or sample with 'hf'")
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if importlib.util.find_spec("torchvision") is not None:
        try:
            importlib.import_module("torchvision")
        except (ImportError, RuntimeError, OSError) as error:
            raise EngineError(
                f"torchvision is installed but does not import ({error}), which breaks vLLM and transformers; "
                "uninstall torchvision, torchaudio and torchcodec, or install those built for this PyTorch"
            ) from error
    try:
        return importlib.import_module("vllm")
    except (ImportError, RuntimeError, OSError) as error:
        raise EngineError(f"vLLM is installed but does not import: {error}") from error


def check_engine_args(engine_args: dict[str, Any]) -> None:
    """Raise EngineError for an argument that vLLM does not know, or that is not the user's to give."""
    from vllm import EngineArgs

    known = [field.name for field in dataclasses.fields(EngineArgs)]
    for name in engine_args:
        if name in _RESERVED:
            raise EngineError(f"vLLM argument {name!r} is set by the sampler and cannot be changed")
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0)
            raise EngineError(f"vLLM has no argument {name!r}; the nearest is {nearest[0]!r}")


def is_cpu() -> bool:
    """Whether vLLM computes on the CPU."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def is_in_process() -> bool:
    """Whether an engine's core runs in this process; known once vLLM is imported."""
    return os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def start_engine(
    vllm: Any,
    model_folder: Path,
    config: PreTrainedConfig,
    *,
    dtype: str,
    gpu_memory_utilization: float | None,
    max_num_seqs: int,
    tensor_parallel_size: int,
    enforce_eager: bool | None,
    use_torch_compile: bool,
    fast_scheduler: bool | None,
    **engine_args: Any,
) -> Any:
    """Start an `LLM` of the module `vllm` over `model_folder`, whose config is `config`.

    `VLLMSampler` says what None means; `engine_args` go to vLLM as they are. EngineError where it does not start.
    """
    platform = "cpu" if is_cpu() else "cuda"
    scheduler = _scheduler(vllm.__version__, is_in_process(), fast_scheduler)
    if scheduler is not None:
        engine_args["scheduler_cls"] = scheduler
    if platform == "cuda" and gpu_memory_utilization is None and "kv_cache_memory_bytes" not in engine_args:
        length = engine_args.get("max_model_len") or context_length(config)
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        if length is not None:
            wanted = max_num_seqs * length * kv_bytes(config, dtype) / tensor_parallel_size
            engine_args["kv_cache_memory_bytes"] = min(math.ceil(1.02 * wanted) + (64 << 20), total // 2)
            # vLLM only checks at the start that this share is free, then takes the bytes asked for.
            gpu_memory_utilization = max(0.01, engine_args["kv_cache_memory_bytes"] / total)
    if is_in_process() and tensor_parallel_size == 1:
        # A class that does not import is vLLM's to refuse.
        with contextlib.suppress(ImportError):
            _inspect_here(vllm, config)
    if platform == "cuda" and not enforce_eager and _GRAPH_SETTINGS.isdisjoint(engine_args):
        engine_args |= graph_settings(max_num_seqs, use_torch_compile=use_torch_compile)
    try:
        with _random_state_kept(), _model_runner_chosen(vllm.__version__, config, platform):
            return vllm.LLM(
                model=str(model_folder),
                skip_tokenizer_init=True,
                trust_remote_code=False,
                dtype=dtype,
                # On CPU vLLM refuses to start unless nearly all memory is free, so this is always given.
                gpu_memory_utilization=gpu_memory_utilization or _GPU_MEMORY_UTILIZATION[platform],
                max_num_seqs=max_num_seqs,
                tensor_parallel_size=tensor_parallel_size,
                enforce_eager=platform == "cpu" if enforce_eager is None else enforce_eager,
                logprobs_mode="processed_logprobs",
                generation_config="vllm",
                worker_extension_cls=f"{WorkerExtension.__module__}.{WorkerExtension.__qualname__}",
                **engine_args,
            )
    except (ValueError, RuntimeError, OSError, AssertionError, NotImplementedError) as error:
        raise EngineError(f"vLLM cannot serve the model in {str(model_folder)!r}: {error}") from error


@contextlib.contextmanager
def default_group_kept() -> Iterator[None]:
    """An engine that stops destroys the default process group, whoever made it; here it ends its own groups only."""
    destroy = torch.distributed.destroy_process_group

    def destroy_named(group: Any = None) -> None:
        if group is not None:
            destroy(group)

    torch.distributed.destroy_process_group = destroy_named
    try:
        yield
    finally:
        torch.distributed.destroy_process_group = destroy


def graph_settings(max_num_seqs: int, *, use_torch_compile: bool) -> dict[str, Any]:
    """Arguments that make vLLM capture CUDA graphs for every number of sequences that may decode together.

    By itself it stops at 512: a step of 1,024 took 1.4 times as long for each token (H200, 135M parameters). And by
    itself it compiles the layers first, without which graphs are captured for decoding only.
    """
    settings: dict[str, Any] = {}
    if not use_torch_compile:
        settings["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    if max_num_seqs > _VLLM_GRAPHS:
        # The sizes that it captures are multiples of 16.
        settings["max_cudagraph_capture_size"] = math.ceil(max_num_seqs / 16) * 16
    return settings


def drop_memory_pools() -> None:
    """Let go of the memory of an engine that could sleep, once it is gone; vLLM refuses the next one until then."""
    from vllm.device_allocator import get_mem_allocator_instance

    allocator: Any = get_mem_allocator_instance()
    allocator.allocator_and_pools.clear()


class WorkerExtension:
    """Methods that vLLM adds to its worker; named in `worker_extension_cls`."""

    device: Any
    reload_weights: Any
    model_runner: Any

    def ratchet_load_weights(self, weights: dict[str, torch.Tensor] | None, weights_path: str | None) -> None:
        """Reload from tensors or from a folder of safetensors, packed copies included."""
        if weights is not None and torch.device(self.device).type == "cuda":
            # Nothing is packed there: the model copies each tensor to its place, from whatever device it is on.
            self.model_runner.get_model().load_weights(iter(weights.items()))
            return
        iterator = None if weights is None else iter(weights.items())
        self.reload_weights(weights_iterator=iterator, weights_path=weights_path)
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            _repack_embeddings(self.model_runner.get_model())

    def ratchet_fingerprint(self) -> int:
        """The fingerprint of the model's parameters as they lie in memory."""
        return fingerprint(self.model_runner.get_model().parameters())


def _repack_embeddings(model: torch.nn.Module) -> None:
    """Pack the output embeddings anew: on CPU a reload leaves the packed copy of the old ones in use."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def _inspect_here(vllm: Any, config: PreTrainedConfig) -> None:
    """Have vLLM look at the model's class in this process.

    By itself it starts another Python for that, to leave the GPU alone, which an engine in this process need not: 9 s
    where no process before has left what it found (two cores), longer where imports are slow.
    """
    registry = vllm.ModelRegistry
    for architecture in getattr(config, "architectures", None) or ():
        load = getattr(registry.models.get(architecture), "load_model_cls", None)
        if load is not None:
            registry.register_model(architecture, load())


def _scheduler(version: str, in_process: bool, wanted: bool | None) -> str | None:
    """The name of Ratchet's scheduler, or None for vLLM's own."""
    if wanted is False:
        return None
    if in_process and version.startswith(SCHEDULED_VERSIONS):
        # By name: another vLLM may lack what the module imports.
        return "ratchet.engines.vllm_scheduler.DecodeScheduler"
    reason = f"vLLM {version} is not one that it was written against" if in_process else "the engine is not in process"
    if wanted:
        raise EngineError(f"fast_scheduler cannot be used: {reason}")
    logger.warning("sampling with vLLM's own scheduler, which is slower: %s", reason)
    return None


def kv_bytes(config: PreTrainedConfig, dtype: str) -> int:
    """Bytes of one token's keys and values in all layers."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * text.num_hidden_layers * heads * width * torch_dtype(dtype).itemsize)


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    """An engine that starts in process seeds every global generator; the trainer's must go on as if it had not."""
    python, numpy_state = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        yield
    random.setstate(python)
    np.random.set_state(numpy_state)


@contextlib.contextmanager
def _model_runner_chosen(version: str, config: PreTrainedConfig, platform: str) -> Iterator[None]:
    """While an engine starts, choose vLLM 0.24's second model runner for more dense decoders than vLLM itself does."""
    known = not _V2_RUNNER_ARCHITECTURES.isdisjoint(getattr(config, "architectures", None) or ())
    if not known or platform != "cuda" or not version.startswith("0.24.") or _V2_RUNNER in os.environ:
        yield
        return
    os.environ[_V2_RUNNER] = "1"
    try:
        yield
    finally:
        del os.environ[_V2_RUNNER]
