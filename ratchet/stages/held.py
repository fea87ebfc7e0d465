"""What the engines of a process hold, for the provenance of what they make: the device's name, and how many of it."""

from dataclasses import dataclass

from ratchet.config import RunConfig


@dataclass(frozen=True, slots=True)
class Held:
    """Accelerators that are taken while a stage runs, whichever of them works.

    Example: Held("NVIDIA H200", 3) in a segment that trains on one and samples on two.
    """

    device: str
    """The accelerator's name, or cpu."""
    accelerators: int

    def gpu_seconds(self, seconds: float) -> float:
        """Return what `seconds` of it are, over all accelerators."""
        return seconds * self.accelerators


def num_held(config: RunConfig, *, is_training: bool, is_scoring: bool, is_sampling: bool) -> int:
    """Return how many accelerators the engines of a process hold that trains, scores or samples."""
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    # Scorers and the trainer share their accelerators with the sampler, unless it has its own.
    own = trainer.n_gpus_per_node * trainer.nnodes if is_training else int(is_scoring)
    if is_sampling and rollout.dedicated_gpus:
        return own + rollout.dedicated_gpus
    if is_sampling:
        return max(own, rollout.tensor_model_parallel_size if rollout.name == "vllm" else 1)
    return own


def accelerators(device_type: str, count: int) -> Held:
    """Return `count` accelerators of torch's device type; none of a CPU."""
    if count == 0 or device_type == "cpu":
        return Held("cpu", 0)
    from ratchet.engines.model import accelerator_name

    return Held(accelerator_name(), count)
