"""What one measurement of a step's time is told: which system, which model, how many tokens.

Trap: the systems are compared by what they do in a step, so everything that decides it stands here once, and each
system's own file turns it into that system's settings.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SYSTEMS = ("ratchet", "ratchet-off", "ratchet-overlap", "ratchet-s3", "trl", "trl-durable", "verl")
REWARD = Path(__file__).with_name("speed_reward.py")
MAX_PROMPT_TOKENS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One measurement: a system in a process of its own."""

    system: str
    """One of SYSTEMS."""
    model: str
    """Hugging Face folder."""
    prompts: str
    """JSON Lines in GSM8K's format; every system takes them in this order."""
    num_prompts: int = 32
    group_size: int = 8
    num_tokens: int = 256
    """Completion tokens, exactly."""
    steps: int = 13
    lr: float = 1e-6
    micro_batch: int | None = None
    """Completions of one forward pass, where the system counts so; None takes the system's own budget."""
    sampler: str = "vllm"
    """"hf" lets every system sample with Hugging Face: for tests without vLLM."""
    memory_share: float = 0.3
    """vLLM's share of the GPU in TRL and verl; it is TRL's default."""
    folder: str = ""
    """Where the system writes runs and checkpoints; deleted afterwards."""
    repeat: int = 0
    overrides: tuple[str, ...] = ()
    """Ratchet's config, `key=value`."""
    trl_settings: dict[str, Any] = field(default_factory=dict)
    """Fields of TRL's GRPOConfig."""

    @property
    def num_completions(self) -> int:
        """Completions of a step."""
        return self.num_prompts * self.group_size

    @property
    def workload(self) -> str:
        """What is compared with each other: model and shape."""
        return f"{Path(self.model).name} {self.num_prompts} x {self.group_size} x {self.num_tokens}"

    @property
    def name(self) -> str:
        """The stem of the measurement's file."""
        batch = "" if self.micro_batch is None else f"-mb{self.micro_batch}"
        place = self.workload.replace(" x ", "x").replace(" ", "-")
        return f"{place}-{self.steps}steps-{self.system}{batch}-r{self.repeat}"

    def write(self, path: Path) -> None:
        """Write the job as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "Job":
        """Read what `write` wrote."""
        raw = json.loads(path.read_text(encoding="utf-8"))
        return cls(**(raw | {"overrides": tuple(raw["overrides"])}))
