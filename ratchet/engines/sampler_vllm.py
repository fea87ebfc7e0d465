"""Sampling with vLLM inside this process, its weights replaced in place after every policy update.

Trap: what vLLM remembers outlives the weights that it came from. A stale prefix cache answers for the old policy, and
an engine that slept at level 2 has no weights until new ones come. How it is started is in `vllm_engine`.
"""

import contextlib
import gc
import logging
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ratchet.engines.engine_stream import EngineStream
from ratchet.engines.model import (
    WeightLayout,
    check_weights,
    decode,
    end_token_ids,
    load_config,
    load_tokenizer,
    torch_dtype,
)
from ratchet.engines.sampler import Completion, SampleRequest, SamplingParams, check_prompt, check_requests
from ratchet.engines.vllm_engine import (
    LOG_PROBS,
    check_engine_args,
    default_group_kept,
    drop_memory_pools,
    import_vllm,
    is_cpu,
    is_in_process,
    start_engine,
)
from ratchet.errors import ConfigError, EngineError

logger = logging.getLogger(__name__)


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
        use_torch_compile: bool = False,
        enable_chunked_prefill: bool | None = None,
        enable_prefix_caching: bool | None = None,
        free_cache_engine: bool = False,
        sleep_level: int = 2,
        fast_scheduler: bool | None = None,
        **engine_args: Any,
    ) -> None:
        """Start the engine; None leaves a setting to vLLM, except for those below.

        `gpu_memory_utilization` is the share of all memory that must be free and may be used. None is 0.2 on CPU; on a
        GPU it makes the KV cache just as large as `max_num_seqs` sequences of `max_model_len` tokens need, half the
        memory at most. `enforce_eager` None captures CUDA graphs on a GPU only; `use_torch_compile` compiles what they
        capture, which costs 11 to 27 s at the start (H200, 135M parameters). With `free_cache_engine`, `sleep` gives
        back GPU memory: the KV cache, and the weights to host memory (`sleep_level` 1) or to nothing (2: new ones must
        come before the next sample). `fast_scheduler` None takes Ratchet's scheduler (`vllm_scheduler`) where it serves
        this vLLM. `engine_args` go to vLLM by its own names. Raises EngineError where vLLM cannot be imported or
        started, or does not know an argument.
        """
        torch_dtype(dtype)
        if sleep_level not in (1, 2):
            raise ConfigError(f"expected a sleep level of 1 or 2, got {sleep_level}")
        vllm = import_vllm()
        check_engine_args(engine_args)
        self._tokenizer = load_tokenizer(model_folder)
        self._end_ids = sorted(end_token_ids(model_folder, self._tokenizer))
        self._layout = WeightLayout.of_folder(model_folder)
        config = load_config(model_folder)
        self._vocab_size = int(config.get_text_config().vocab_size)
        # Before the start, which may write to the environment.
        on_cpu, in_process = is_cpu(), is_in_process()
        if free_cache_engine and on_cpu:
            logger.warning("free_cache_engine is left out: vLLM gives back memory on GPUs only")
        self._sleeps = free_cache_engine and not on_cpu
        self._sleep_level = sleep_level
        self._asleep: set[str] = set()
        self._weights_lost = False
        settings: dict[str, Any] = {
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_model_len": max_model_len,
            "enable_chunked_prefill": enable_chunked_prefill,
            "enable_prefix_caching": enable_prefix_caching,
            "enable_sleep_mode": self._sleeps or None,
        }
        self._owns_process_group = not torch.distributed.is_initialized()
        self._stream = EngineStream(is_on_gpu=in_process and not on_cpu and tensor_parallel_size == 1)
        with self._stream.starting():
            self._llm = start_engine(
                vllm,
                model_folder,
                config,
                dtype=dtype,
                seed=seed,
                gpu_memory_utilization=gpu_memory_utilization,
                max_num_seqs=max_num_seqs,
                tensor_parallel_size=tensor_parallel_size,
                enforce_eager=enforce_eager,
                use_torch_compile=use_torch_compile,
                fast_scheduler=fast_scheduler,
                **{name: value for name, value in settings.items() if value is not None},
                **engine_args,
            )
        self._context = int(self._llm.model_config.max_model_len)
        self._passes_tensors = in_process and self._llm.llm_engine.vllm_config.parallel_config.world_size == 1
        self._packs_weights = on_cpu

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Completion]:
        """Draw one completion for each request, in the order of the requests.

        Greedy log-probs are those of temperature 1 without truncation.
        """
        check_requests(requests, params, vocab_size=self._vocab_size, context_length=self._context)
        if not requests:
            return []
        shared = {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or 0,
            "max_tokens": params.max_tokens,
            "stop_token_ids": None if params.ignore_eos else self._end_ids,
            "ignore_eos": params.ignore_eos,
        }
        outputs = self._generate(
            [request.prompt_token_ids for request in requests],
            [
                shared
                | {"seed": request.seed, "logprobs": 0 if params.with_log_probs and request.with_log_probs else None}
                for request in requests
            ],
        )
        texts = _decode_all(self._tokenizer, [output.outputs[0].token_ids for output in outputs])
        return [
            self._completion(index, output, text)
            for index, (output, text) in enumerate(zip(outputs, texts, strict=True))
        ]

    def _generate(self, prompts: Sequence[Sequence[int]], params: Sequence[dict[str, Any]]) -> list[Any]:
        """vLLM's outputs for `prompts`, each with its own `params`, in their order."""
        with self._stream.current():
            self._wake()
            from vllm import SamplingParams as EngineParams
            from vllm import TokensPrompt

            outputs: list[Any] = self._llm.generate(
                [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts],
                [EngineParams(**each, detokenize=False) for each in params],
                use_tqdm=False,
            )
        if len(outputs) != len(prompts):
            raise EngineError(f"vLLM returned {len(outputs)} completions for {len(prompts)} requests")
        return outputs

    def _completion(self, index: int, output: Any, text: str) -> Completion:
        completion = output.outputs[0]
        token_ids = list(completion.token_ids)
        if completion.finish_reason not in ("stop", "length"):
            raise EngineError(f"vLLM ended request {index} with {completion.finish_reason!r}, expected stop or length")
        log_probs: list[float] | None = None
        if output.kv_transfer_params is not None:
            log_probs = output.kv_transfer_params[LOG_PROBS]
        elif completion.logprobs is not None:
            log_probs = [
                float(entry[token_id].logprob) for token_id, entry in zip(token_ids, completion.logprobs, strict=True)
            ]
        if log_probs is not None and len(log_probs) != len(token_ids):
            raise EngineError(
                f"vLLM gave {len(log_probs)} log-probs for the {len(token_ids)} tokens of request {index}"
            )
        return Completion(token_ids=token_ids, log_probs=log_probs, text=text, finish_reason=completion.finish_reason)

    def prompt_log_probs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs of `token_ids[1:]`. See `Sampler.prompt_log_probs`."""
        check_prompt(token_ids, vocab_size=self._vocab_size, context_length=self._context)
        (output,) = self._generate([token_ids], [{"temperature": 0, "max_tokens": 1, "prompt_logprobs": 0}])
        pairs = zip(token_ids, output.prompt_logprobs, strict=True)
        return [float(entry[token_id].logprob) for token_id, entry in list(pairs)[1:]]

    def fingerprint(self) -> int | None:
        """The fingerprint of the weights; None on CPU, where copies are packed, and for workers in other processes."""
        if self._packs_weights or not self._passes_tensors:
            return None
        with self._stream.current():
            self._wake()
            (value,) = self._llm.collective_rpc("ratchet_fingerprint")
        return int(value)

    def sleep(self) -> None:
        """Give back the GPU memory until the next call; a no-op without `free_cache_engine`. See `Sampler.sleep`."""
        if not self._sleeps or self._asleep:
            return
        with self._stream.current():
            self._llm.sleep(level=self._sleep_level)
        self._asleep = {"weights", "kv_cache"}
        self._weights_lost = self._sleep_level == 2

    def _wake(self, *parts: str) -> None:
        """Bring back `parts`, or all, of what sleeps; EngineError for all while the weights are lost."""
        if not parts and self._weights_lost:
            raise EngineError("the engine slept at level 2 and has no weights: load_weights must come first")
        for part in parts or ("weights", "kv_cache"):
            if part in self._asleep:
                self._llm.wake_up(tags=[part])
                self._asleep.remove(part)

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace the weights in place and forget every cached prefix. See `Sampler.load_weights`."""
        with self._stream.current():
            checked = check_weights(weights, self._layout.shapes, self._layout.tied)
            self._wake("weights")
            if self._passes_tensors:
                self._reload(checked, None)
            else:
                # Tensors do not survive the way to another process; a folder of safetensors does.
                with tempfile.TemporaryDirectory(prefix="ratchet-weights-") as folder:
                    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in checked.items()}
                    save_file(tensors, Path(folder) / "model.safetensors")
                    self._reload(None, folder)
            self._weights_lost = False
            # Not before: the cache may need the memory that the new weights came in.
            self._wake()
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
        with contextlib.nullcontext() if self._owns_process_group else default_group_kept():
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None
            # vLLM takes what is there at its start out of the collector's sight; its own cycles end here all the same.
            gc.unfreeze()
            gc.collect()
        if self._sleeps and self._passes_tensors:
            drop_memory_pools()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _decode_all(tokenizer: PreTrainedTokenizerBase, sequences: Sequence[Sequence[int]]) -> list[str]:
    """`decode` of every sequence, in one parallel call of the Rust tokenizer where `decode` does no more than it."""
    kind: Any = type(tokenizer)
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or kind._decode is not PreTrainedTokenizerFast._decode:
        return [decode(tokenizer, token_ids) for token_ids in sequences]
    texts: list[str] = tokenizer.backend_tokenizer.decode_batch(
        [list(token_ids) for token_ids in sequences], skip_special_tokens=True
    )
    return texts
