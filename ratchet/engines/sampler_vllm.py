"""Sampling with vLLM inside this process, its weights replaced in place after every policy update.

Trap: vLLM's defaults are made for serving. Its log-probs ignore the temperature, generation_config.json changes the
sampling, a stale prefix cache answers for the old policy, and on CPU a reload leaves packed output embeddings as they
were: wrong log-probs and no error. All of that is set or repaired here.
"""

import contextlib
import dataclasses
import difflib
import gc
import importlib.util
import logging
import os
import random
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from ratchet.engines.model import (
    WeightLayout,
    check_weights,
    decode,
    end_token_ids,
    load_config,
    load_tokenizer,
    torch_dtype,
)
from ratchet.engines.sampler import Completion, SampleRequest, SamplingParams, check_requests
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
    "enable_sleep_mode", "worker_extension_cls",
)  # fmt: skip


class WorkerExtension:
    """Methods that vLLM adds to its worker; named in `worker_extension_cls`."""

    reload_weights: Any
    model_runner: Any

    def ratchet_load_weights(self, weights: dict[str, torch.Tensor] | None, weights_path: str | None) -> None:
        """Reload from tensors or from a folder of safetensors, packed copies included."""
        iterator = None if weights is None else iter(weights.items())
        self.reload_weights(weights_iterator=iterator, weights_path=weights_path)
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            _repack_embeddings(self.model_runner.get_model())


def _repack_embeddings(model: torch.nn.Module) -> None:
    """Pack the output embeddings anew: on CPU a reload leaves the packed copy of the old ones in use."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


class VLLMSampler:
    """A Sampler over a vLLM engine held in this process; see `ratchet.engines.sampler.Sampler`."""

    def __init__(
        self,
        model_folder: Path,
        *,
        dtype: str,
        seed: int = 0,
        gpu_memory_utilization: float | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int | None = None,
        max_model_len: int | None = None,
        tensor_parallel_size: int = 1,
        enforce_eager: bool | None = None,
        enable_chunked_prefill: bool | None = None,
        enable_prefix_caching: bool | None = None,
        **engine_args: Any,
    ) -> None:
        """Start the engine; None leaves a setting to vLLM, except for the two below.

        `gpu_memory_utilization` is the share of all memory that must be free and may be used: None is 0.5, and 0.2 on
        CPU. `enforce_eager` None compiles and captures graphs on a GPU only. `engine_args` go to vLLM by its own names.
        Raises EngineError where vLLM cannot be imported or started, or does not know an argument.
        """
        torch_dtype(dtype)
        vllm = _import_vllm()
        _check_engine_args(engine_args)
        self._tokenizer = load_tokenizer(model_folder)
        self._end_ids = sorted(end_token_ids(model_folder, self._tokenizer))
        self._layout = WeightLayout.of_folder(model_folder)
        self._vocab_size = int(load_config(model_folder).get_text_config().vocab_size)
        platform = "cpu" if _is_cpu() else "cuda"
        settings = {
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_model_len": max_model_len,
            "enable_chunked_prefill": enable_chunked_prefill,
            "enable_prefix_caching": enable_prefix_caching,
        }
        self._owns_process_group = not torch.distributed.is_initialized()
        try:
            with _random_state_kept():
                self._llm: Any = vllm.LLM(
                    model=str(model_folder),
                    skip_tokenizer_init=True,
                    trust_remote_code=False,
                    dtype=dtype,
                    seed=seed,
                    # On CPU vLLM refuses to start unless nearly all memory is free, so this is always given.
                    gpu_memory_utilization=gpu_memory_utilization or _GPU_MEMORY_UTILIZATION[platform],
                    max_num_seqs=max_num_seqs,
                    tensor_parallel_size=tensor_parallel_size,
                    enforce_eager=platform == "cpu" if enforce_eager is None else enforce_eager,
                    logprobs_mode="processed_logprobs",
                    generation_config="vllm",
                    worker_extension_cls=f"{WorkerExtension.__module__}.{WorkerExtension.__qualname__}",
                    **{name: value for name, value in settings.items() if value is not None},
                    **engine_args,
                )
        except (ValueError, RuntimeError, OSError, AssertionError, NotImplementedError) as error:
            raise EngineError(f"vLLM cannot serve the model in {str(model_folder)!r}: {error}") from error
        self._context = int(self._llm.model_config.max_model_len)
        in_process = os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        self._passes_tensors = in_process and self._llm.llm_engine.vllm_config.parallel_config.world_size == 1

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Completion]:
        """Draw one completion for each request, in the order of the requests.

        Greedy log-probs are those of temperature 1 without truncation.
        """
        check_requests(requests, params, vocab_size=self._vocab_size, context_length=self._context)
        if not requests:
            return []
        from vllm import SamplingParams as EngineParams
        from vllm import TokensPrompt

        outputs = self._llm.generate(
            [TokensPrompt(prompt_token_ids=list(request.prompt_token_ids)) for request in requests],
            [
                EngineParams(
                    temperature=params.temperature,
                    top_p=params.top_p,
                    top_k=params.top_k or 0,
                    max_tokens=params.max_tokens,
                    seed=request.seed,
                    stop_token_ids=None if params.ignore_eos else self._end_ids,
                    ignore_eos=params.ignore_eos,
                    logprobs=0 if params.with_log_probs else None,
                    detokenize=False,
                )
                for request in requests
            ],
            use_tqdm=False,
        )
        if len(outputs) != len(requests):
            raise EngineError(f"vLLM returned {len(outputs)} completions for {len(requests)} requests")
        return [self._completion(index, output.outputs[0]) for index, output in enumerate(outputs)]

    def _completion(self, index: int, output: Any) -> Completion:
        token_ids = [int(token_id) for token_id in output.token_ids]
        if output.finish_reason not in ("stop", "length"):
            raise EngineError(f"vLLM ended request {index} with {output.finish_reason!r}, expected stop or length")
        log_probs = None
        if output.logprobs is not None:
            log_probs = [
                float(entry[token_id].logprob) for token_id, entry in zip(token_ids, output.logprobs, strict=True)
            ]
        text = decode(self._tokenizer, token_ids)
        return Completion(token_ids=token_ids, log_probs=log_probs, text=text, finish_reason=output.finish_reason)

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace the weights in place and forget every cached prefix. See `Sampler.load_weights`."""
        checked = check_weights(weights, self._layout.shapes, self._layout.tied)
        if self._passes_tensors:
            self._reload(checked, None)
        else:
            # Tensors do not survive the way to another process; a folder of safetensors does.
            with tempfile.TemporaryDirectory(prefix="ratchet-weights-") as folder:
                tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in checked.items()}
                save_file(tensors, Path(folder) / "model.safetensors")
                self._reload(None, folder)
        if not self._llm.reset_prefix_cache():
            raise EngineError("vLLM did not forget its cached prefixes after new weights: requests are still running")

    def _reload(self, weights: dict[str, torch.Tensor] | None, folder: str | None) -> None:
        self._llm.collective_rpc("ratchet_load_weights", kwargs={"weights": weights, "weights_path": folder})

    def close(self) -> None:
        """Give the memory back; the sampler is not usable afterwards.

        A default process group that was there before the engine stays; one that the engine made ends with it.
        """
        if self._llm is None:
            return
        with contextlib.nullcontext() if self._owns_process_group else _default_group_kept():
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None
            gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@contextlib.contextmanager
def _default_group_kept() -> Iterator[None]:
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


def _import_vllm() -> Any:
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


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    """An engine that starts in process seeds every global generator; the trainer's must go on as if it had not."""
    python, numpy_state = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        yield
    random.setstate(python)
    np.random.set_state(numpy_state)


def _is_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _check_engine_args(engine_args: dict[str, Any]) -> None:
    from vllm import EngineArgs

    known = [field.name for field in dataclasses.fields(EngineArgs)]
    for name in engine_args:
        if name in _RESERVED:
            raise EngineError(f"vLLM argument {name!r} is set by the sampler and cannot be changed")
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0)
            raise EngineError(f"vLLM has no argument {name!r}; the nearest is {nearest[0]!r}")
