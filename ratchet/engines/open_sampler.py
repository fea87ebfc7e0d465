"""The one place that knows which samplers there are.

Trap: importing vLLM takes seconds and changes the process, so each engine is imported when it is asked for.
"""

from pathlib import Path
from typing import Any

from ratchet.engines.sampler import Sampler
from ratchet.errors import ConfigError


def open_sampler(
    name: str, model_folder: Path, *, dedicated_gpus: int = 0, first_gpu: int = 0, **settings: Any
) -> Sampler:
    """The sampler called `name` over `model_folder`, with its own `settings` (see HFSampler and VLLMSampler).

    With `dedicated_gpus`, as many processes from GPU `first_gpu` on (see DedicatedSamplers). `name` is "hf" or "vllm";
    another raises ConfigError.
    """
    if dedicated_gpus:
        from ratchet.engines.dedicated_samplers import DedicatedSamplers

        return DedicatedSamplers(name, model_folder, count=dedicated_gpus, first_gpu=first_gpu, settings=settings)
    if name == "hf":
        from ratchet.engines.sampler_hf import HFSampler

        return HFSampler(model_folder, **settings)
    if name == "vllm":
        from ratchet.engines.sampler_vllm import VLLMSampler

        return VLLMSampler(model_folder, **settings)
    raise ConfigError(f"expected a sampler called 'hf' or 'vllm', got {name!r}")
