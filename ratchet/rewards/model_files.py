"""Opens a reward model by its path; torch is imported when one is opened, and not before."""

from typing import Any

from ratchet.config import RunConfig
from ratchet.rewards.parts import OpenModel


def open_reward_model(config: RunConfig, device: str | None = None) -> OpenModel:
    """What opens a reward model as `config` says, on `device` or on that of trainer.device.

    It raises EngineError for a folder without a head or a tokenizer with a chat template.
    """

    def opened(path: str) -> Any:
        from ratchet.engines.model import resolve_model_folder
        from ratchet.engines.reward_model import RewardModel

        return RewardModel.from_folder(
            resolve_model_folder(path),
            compute_dtype=config.reward_model.dtype,
            max_tokens_per_micro_batch=config.reward_model.max_token_len_per_gpu,
            device=device or config.trainer.device,
        )

    return opened
