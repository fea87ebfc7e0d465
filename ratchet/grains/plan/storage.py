"""How many bytes a run holds in storage, step by step, and what retention leaves of them.

What goes and what stays is decided by the code that decides it in a run (`ratchet.store.retention`), over versions and
states that nobody has written.
"""

from dataclasses import dataclass, field

from ratchet.config import RunConfig
from ratchet.grains.plan.facts import Facts, Model
from ratchet.grains.plan.measured import Measured
from ratchet.grains.plan.tables import evaluation_table, step_tables
from ratchet.grains.plan.work import Tokens, evaluations
from ratchet.grains.storage import rules_of
from ratchet.stages.graph import step_stages
from ratchet.store import retention
from ratchet.store.manifest import Artifact, Delta, FileEntry
from ratchet.store.retired import TRAINER_STATE, WEIGHTS
from ratchet.store.survey import Item, Survey

_STATE_BYTES = 12
"""Of a trained weight: master and two moments, float32."""
_STATE_TENSOR_BYTES = 7356
"""Of a trained weight's three tensors, what torch writes around them."""
_MANIFEST_BYTES, _RECORD_BYTES = 1450, 7100
"""Of one manifest, and of what there is once in a run: its config and one submission."""
_INDEX_STEPS, _INDEX_SHARE = 50, 0.4
"""Complete runs of so many steps have their manifests once more, compressed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """Bytes below the run; what is said of deltas is an upper bound where `deltas_are_known` is false."""

    per_step: dict[str, int]
    """Table -> bytes of one step."""
    by_kind: dict[str, int]
    """Kind, as `ratchet gc` names it -> bytes at the end."""
    policy_bytes: int
    """Of one full version."""
    state_bytes: int
    """Of one trainer state."""
    peak: int
    final: int
    deltas_are_known: bool
    notes: tuple[str, ...] = field(default=())


@dataclass(frozen=True, kw_only=True, slots=True)
class Learned:
    """A model of the run whose versions are published."""

    stage: str
    model: Model
    version_bytes: int
    trained: int
    """Weights that are trained; with adapters, theirs."""
    num_trained_tensors: int


def lay_out(
    config: RunConfig, facts: Facts, tokens: Tokens, steps: int, learned: list[Learned], measured: Measured
) -> Storage:
    """Add up what a run of that many steps commits, and what is retired meanwhile."""
    mean = tokens.completion_bound if tokens.completion_expected is None else tokens.completion_expected
    completion = round(mean / max(tokens.rows, 1))
    tables = step_tables(config, facts, facts.positions(config, 1), completion)
    evaluated = evaluations(config, steps)
    val = evaluation_table(config, facts, tokens.evaluated_rows // len(evaluated), completion) if evaluated else 0
    num_stages = len(step_stages(config))
    indexed = _INDEX_SHARE * (steps // _INDEX_STEPS * _INDEX_STEPS) * num_stages
    once = len(facts.splits) + len(learned) + len(evaluated) + 1
    manifests = _RECORD_BYTES + _MANIFEST_BYTES * (steps * num_stages + once + indexed)
    found = _Held(config, learned, set(evaluated) | {steps}, measured.delta_share)
    per_step = sum(tables.values())
    data = sum(split.table_bytes for split in facts.splits.values())
    bases = sum(one.model.folder_bytes for one in learned)
    fixed, peak = data + bases, 0
    for step in range(1, steps + 1):
        held = found.commit(step, is_kept=_keeps_state(config, step, steps))
        peak = max(peak, round(fixed + step * per_step + val * sum(one <= step for one in evaluated) + held))
    policy = learned[0]
    export = policy.version_bytes + policy.model.texts_bytes
    kinds = found.kinds()
    by_kind = {
        "policies": kinds["policy"] + policy.model.folder_bytes,
        **({"critics": kinds["critic"] + learned[1].model.folder_bytes} if len(learned) > 1 else {}),
        "trainer states": kinds[TRAINER_STATE],
        "exports": export,
        "tables": data + steps * per_step + val * len(evaluated),
        "manifests and records": round(manifests),
    }
    final = sum(by_kind.values())
    return Storage(
        per_step=tables,
        by_kind=by_kind,
        policy_bytes=policy.version_bytes,
        state_bytes=state_bytes(policy),
        peak=max(peak, final),
        final=final,
        deltas_are_known=found.deltas_are_known,
        notes=() if found.deltas_are_known else (_UNKNOWN_DELTAS,),
    )


_UNKNOWN_DELTAS = (
    "how much of the weights a step changes is not known: policies are counted as if all of it did (--like)"
)


def state_bytes(learned: Learned) -> int:
    """Return the bytes of one trainer state."""
    return _STATE_BYTES * learned.trained + _STATE_TENSOR_BYTES * learned.num_trained_tensors


def _keeps_state(config: RunConfig, step: int, steps: int) -> bool:
    trainer = config.trainer
    if trainer.grain != "segment":
        return True
    is_last = step == steps or step % trainer.steps_per_segment == 0
    return (
        is_last or step % trainer.trainer_state_freq == 0 or (trainer.save_freq > 0 and step % trainer.save_freq == 0)
    )


class _Held:
    """Versions and states as they come and go."""

    def __init__(self, config: RunConfig, learned: list[Learned], named: set[int], share: float | None) -> None:
        self._config = config
        self._learned = learned
        self._named = named
        self._share = share
        self._rules = rules_of(config)
        self._survey = Survey({}, set(), 0)
        self._versions = {WEIGHTS[one.stage]: 0 for one in learned}
        """Bytes of those that no rule looks at, because all of them stay."""
        self.deltas_are_known = True
        for one in learned:
            self._add(one, 0, WEIGHTS[one.stage], 0, None)

    def commit(self, step: int, *, is_kept: bool) -> int:
        """Publish a step and retire what is due; return the most bytes that were there."""
        trainer = self._config.trainer
        # A process's first step has no version before it in memory.
        is_first = (step - 1) % trainer.steps_per_segment == 0
        is_full = trainer.grain != "segment" or is_first or step % trainer.full_weights_freq == 0
        for one in self._learned:
            size, base = one.version_bytes, None if is_full else step - 1
            if base is not None:
                self.deltas_are_known = self._share is not None
                size = round(size * (1.0 if self._share is None else self._share))
            self._add(one, step, WEIGHTS[one.stage], size, base)
            if is_kept:
                self._add(one, step, TRAINER_STATE, state_bytes(one), None)
        if step in self._named:
            self._survey.named.add(step)
        most = sum(self.kinds().values())
        for due in retention.plan(self._survey, self._rules):
            del self._survey.items[due.item.key]
        return most

    def kinds(self) -> dict[str, int]:
        """Return role -> bytes of what is there."""
        sizes = {"policy": 0, "critic": 0, TRAINER_STATE: 0} | self._versions
        for item in self._survey.items.values():
            sizes[item.role] += item.bytes
        return sizes

    def _add(self, learned: Learned, step: int, role: str, size: int, base: int | None) -> None:
        if role != TRAINER_STATE and self._rules.versions is None:
            self._versions[role] += size
            return
        files = (FileEntry(path="model.safetensors", bytes=size, sha256=""),)
        delta = None if base is None else Delta(base="", step=base, folder="", files=files)
        artifact = Artifact(folder="", files=files, delta=delta)
        item = Item(stage=learned.stage, step=step, role=role, artifact=artifact, condition="here")
        self._survey.items[item.key] = item
