"""Who samples the completions, and how."""

import warnings
from typing import ClassVar

from ratchet.flow.part import Part, declared, part, plain, sets

_ROLLOUT = "actor_rollout_ref.rollout"


@part
class Rollout(Part):
    """What both samplers take."""

    name_key: ClassVar[str | None] = f"{_ROLLOUT}.name"
    model: str = sets("actor_rollout_ref.model.path")
    """Hub id, local folder or s3:// folder of the policy: weights, tokenizer and chat template."""
    temperature: float = sets(f"{_ROLLOUT}.temperature", default=1.0)
    top_p: float = sets(f"{_ROLLOUT}.top_p", default=1.0)
    top_k: int = sets(f"{_ROLLOUT}.top_k", default=-1)
    max_tokens: int = sets("data.max_response_length", default=512)
    """Most tokens of a completion."""
    n: int = sets(f"{_ROLLOUT}.n", default=8)
    """Completions of one prompt: the group size."""
    tensor_parallel_size: int = sets(f"{_ROLLOUT}.tensor_model_parallel_size", default=1)
    gpu_memory_utilization: float | None = sets(f"{_ROLLOUT}.gpu_memory_utilization", default=None)
    max_num_batched_tokens: int = sets(f"{_ROLLOUT}.max_num_batched_tokens", default=8192)
    max_num_seqs: int = sets(f"{_ROLLOUT}.max_num_seqs", default=256)
    enable_chunked_prefill: bool = sets(f"{_ROLLOUT}.enable_chunked_prefill", default=True)
    enforce_eager: bool | None = sets(f"{_ROLLOUT}.enforce_eager", default=None)
    dtype: str = sets(f"{_ROLLOUT}.dtype", default="bfloat16")
    ignore_eos: bool = sets(f"{_ROLLOUT}.ignore_eos", default=False)
    max_prompt_length: int = sets("data.max_prompt_length", default=512)
    """Most tokens of a prompt."""
    calculate_log_probs: bool = sets(f"{_ROLLOUT}.calculate_log_probs", default=True)
    """Report the log-prob of every token; without it sampling is faster, and the update's own are the behaviour's."""
    log_probs_share: float = sets(f"{_ROLLOUT}.log_probs_share", default=0.05)
    """Share of the rollouts whose log-probs are reported all the same."""
    max_log_prob_drift: float = sets(f"{_ROLLOUT}.max_log_prob_drift", default=0.2)
    """Mean difference, in nats, of sampler and trainer on a fixed prompt above which a step fails."""
    free_cache_engine: bool = sets(f"{_ROLLOUT}.free_cache_engine", default=False)
    """Let vLLM give its memory back while the policy is trained."""
    sleep_level: int = sets(f"{_ROLLOUT}.sleep_level", default=2)
    """With free_cache_engine: 1 keeps vLLM's weights in the host's memory, 2 drops them."""
    use_torch_compile: bool = sets(f"{_ROLLOUT}.use_torch_compile", default=False)
    """Have vLLM compile the model's layers on a GPU: a later start, and somewhat faster decoding."""


ENGINE_ONLY = (
    "tensor_parallel_size",
    "gpu_memory_utilization",
    "max_num_batched_tokens",
    "max_num_seqs",
    "enable_chunked_prefill",
    "enforce_eager",
    "use_torch_compile",
    "free_cache_engine",
    "sleep_level",
)


@part
class VLLMRollout(Rollout):
    """Sample with vLLM."""

    name: ClassVar[str] = "vllm"


@part
class HFRollout(Rollout):
    """Sample with Hugging Face transformers.

    It takes VLLMRollout's arguments, so that the name is the one thing to change; those about vLLM's engine have no
    effect here, and a warning says so. They stay in the config, for the way back.
    """

    name: ClassVar[str] = "hf"

    def __post_init__(self) -> None:
        unused = [name for name in ENGINE_ONLY if plain(getattr(self, name)) != plain(_DEFAULTS[name])]
        if unused:
            warnings.warn(f"HFRollout has no use for {', '.join(unused)}: vLLM's engine alone has", stacklevel=4)


_DEFAULTS = {one.name: one.default for one in declared(Rollout) if one.name in ENGINE_ONLY}

ROLLOUTS: dict[str, type[Rollout]] = {VLLMRollout.name: VLLMRollout, HFRollout.name: HFRollout}
