"""The record of one decision on what serves under a name: what was decided on, with its numbers and its bars.

Trap: a record is read strictly. Bytes that are not its canonical JSON, a type that is not the field's, or another
format are refused, so that a damaged record never promotes anything.
"""

import functools
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from ratchet.errors import StoreError
from ratchet.store.manifest import canonical_json

if TYPE_CHECKING:
    from pydantic import TypeAdapter

FORMAT = 1

Verdict = Literal["promoted", "refused", "rolled_back"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """A Hugging Face folder that a run exported."""

    uri: str
    """Where it was when it was decided on: a folder's path or s3://..."""
    digest: str
    """sha256 over its files, as its manifest has it; a run that starts from it has this as its base's digest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseModel:
    """What the run started from."""

    path: str
    """As the config names it: a Hugging Face id, a folder, or an earlier champion's export."""
    digest: str
    """sha256 over its files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingData:
    """What the run was trained on."""

    train: str
    """Digest of the committed training prompts."""
    source: str
    """Where they came from, as the config names it."""
    source_digest: str
    """Digest of the rows at the source, before the run's own limits; empty where it was not recorded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """How the policy did on the held-out prompts."""

    accuracy: float
    """Mean over prompts of the mean reward of their samples."""
    low: float | None
    """Lower end of the 95% interval (Wilson); None where rewards leave [0, 1] and are no accuracy."""
    high: float | None
    """Upper end."""
    prompts: int
    """Held-out prompts."""
    table: str
    """Digest of the table of completions and rewards."""
    held_out: str
    """Digest of the committed held-out prompts."""
    settings: str
    """Digest of how they were sampled and graded, the seed left out; equal ones can be compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Improvement:
    """By how much the policy did better than the champion on the same prompts, prompt by prompt."""

    mean: float
    """Mean difference of accuracy over prompts."""
    low: float
    """Lower end of its 95% interval."""
    high: float
    """Upper end."""
    champion_accuracy: float
    """The champion's accuracy on these prompts."""
    champion_table: str
    """Digest of the champion's table that was compared with."""
    measured_in: str
    """Run and step of that table: ROOT/RUN-ID/step-000000."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bars:
    """What was asked for: `promotion` of the config."""

    min_accuracy: float
    min_improvement: float
    significant: bool
    """Whether the lower ends of the intervals had to clear the bars, or the means."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """One decision on what serves under a name.

    Example: Decision(number=3, name="math", verdict="refused", run="s3://b/runs/nightly-0412", step=50,
    export=Export(uri="s3://b/runs/nightly-0412/step-000050/checkpoint_export/0001-5e../export", digest="c0.."),
    base=BaseModel(path="s3://b/runs/nightly-0411/...", digest="9f.."), evaluation=Evaluation(accuracy=0.55, low=0.52,
    high=0.58, prompts=1319, ..), compared_with=2, improvement=Improvement(mean=-0.15, low=-0.18, high=-0.12, ..),
    bars=Bars(min_accuracy=0.5, min_improvement=0.0, significant=True), reasons=("not better than champion 2: ..",),
    data=TrainingData(..), config_digest="77..", submission_id="6f0c..", by="ratchet-nightly-x-promote",
    time=1775900000.0, targets=2).
    """

    number: int
    """From 1, without gaps."""
    name: str
    """What the policies serve under."""
    verdict: Verdict
    """promoted and rolled_back change the champion, refused does not."""
    run: str
    """Whose policy it is about, ROOT/RUN-ID; of a rollback, the policy that serves again."""
    step: int
    """The step that published the policy."""
    export: Export
    base: BaseModel
    evaluation: Evaluation
    compared_with: int | None
    """Number of the promoted decision that was champion then; None if there was none."""
    improvement: Improvement | None
    """None without a champion, where the two could not be compared (see `reasons`), and of a rollback."""
    bars: Bars
    """Of a rollback: those that its policy had passed."""
    reasons: tuple[str, ...]
    """Why it was refused, or rolled back; empty for a promotion."""
    data: TrainingData
    config_digest: str
    """Digest of the run's semantic config."""
    submission_id: str
    """The pipeline run that decided; empty outside a pipeline."""
    by: str
    """Who decided: a pod, or a person at a machine."""
    time: float
    """Unix seconds."""
    targets: int | None
    """Number of the promoted decision whose policy serves after this one; None if none does."""

    @property
    def run_id(self) -> str:
        """The run's name below the root, wherever the root is by now."""
        return self.run.rpartition("/")[2]

    def to_json(self) -> bytes:
        """Return the record's bytes: canonical, so that reading and writing again changes nothing."""
        return canonical_json({"format": FORMAT, "decision": asdict(self)})

    @classmethod
    def from_json(cls, data: bytes, *, place: str) -> "Decision":
        """Read a record; StoreError, with `place`, for one that is damaged or of another format."""
        try:
            raw = json.loads(data)
            found = raw["format"]
            if found != FORMAT:
                raise StoreError(f"{place}: format {found!r}, but this version of Ratchet reads format {FORMAT}")
            decision: Decision = _adapter().validate_json(json.dumps(raw["decision"]), strict=True)
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{place} is not a decision: {_fault(error)}") from error
        if decision.to_json() != data:
            raise StoreError(f"{place} is not as it was written: its bytes are not a decision's canonical JSON")
        return decision


@functools.cache
def _adapter() -> "TypeAdapter[Any]":
    from pydantic import TypeAdapter

    return TypeAdapter(Decision)


def _fault(error: Exception) -> str:
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return repr(error)
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
