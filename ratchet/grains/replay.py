"""Computing a committed stage again, and saying how far the result is from what was committed.

Trap: equal digests prove that the work is what it is said to be; different ones need not disprove it. On a GPU the last
bits of an update may differ, so of weights the largest difference is told.
"""

from dataclasses import dataclass
from pathlib import Path

from ratchet.config import RunConfig
from ratchet.grains.entry import replay_stage
from ratchet.stages.base import Stage
from ratchet.store.artifacts import read_folder, scratch
from ratchet.store.manifest import Artifact
from ratchet.store.objects import ObjectStore
from ratchet.store.run import CRITIC_UPDATE, POLICY_UPDATE, Run
from ratchet.store.weights import read_weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """One output of a stage, computed again."""

    role: str
    committed: str
    """Digest."""
    computed: str
    """Digest."""
    largest_difference: float | None
    """Of a weight, absolute; None where the digests are equal, and for tables."""

    @property
    def is_equal(self) -> bool:
        """Whether every byte is the committed one."""
        return self.committed == self.computed


def replay(stage: Stage, run: Run, config: RunConfig, step: int) -> list[Replayed]:
    """Compute a committed stage again from its inputs, and compare every output. Nothing is published."""
    differences: dict[str, float] = {}

    def look(store: ObjectStore, role: str, artifact: Artifact) -> None:
        manifest = run.require(stage.name, step)
        if stage.name not in (POLICY_UPDATE, CRITIC_UPDATE) or manifest.output(role).digest == artifact.digest:
            return
        with scratch() as committed, scratch() as computed:
            read_weights(run, manifest, role, committed)
            read_folder(store, artifact, computed)
            differences[role] = _largest_difference(committed, computed)

    return [
        Replayed(role=role, committed=old, computed=new, largest_difference=differences.get(role))
        for role, (old, new) in replay_stage(stage, run, config, step, look=look).items()
    ]


def _largest_difference(committed: Path, computed: Path) -> float:
    """Compare the weights of two model folders; infinite where they are not of the same names and shapes."""
    from safetensors.torch import load_file

    old, new = (
        {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}
        for folder in (committed, computed)
    )
    if {name: one.shape for name, one in old.items()} != {name: one.shape for name, one in new.items()}:
        return float("inf")
    return max(float((tensor.double() - new[name].double()).abs().max()) for name, tensor in old.items())
