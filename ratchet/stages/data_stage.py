"""From what users bring to a table of the run: read, check, number, drop or refuse what is too long, commit.

A table that another run below the same root has prepared from the same rows is copied from there: what costs is to
tokenise all of them. Trap: that is only a speed-up; whatever cannot be had from there is made anew.
"""

import functools
import json
import logging
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, ClassVar, Literal

import pyarrow as pa

from ratchet.config import RunConfig
from ratchet.config.semantics import selected
from ratchet.data.parquet import from_bytes, write_table
from ratchet.data.sources import PromptRow, load_rows, resolved_source
from ratchet.environment import code_revision
from ratchet.errors import ConfigError, DataError, RatchetError, StoreError, StoreUnavailableError
from ratchet.rewards.graders import Grader
from ratchet.stages.base import Context, Input, Result, Stage
from ratchet.store import prepared
from ratchet.store.artifacts import scratch, write_bytes
from ratchet.store.manifest import Artifact, digest_of
from ratchet.store.objects import open_store
from ratchet.store.prepared import PreparedPrompts
from ratchet.store.run import POLICY_UPDATE, Run

logger = logging.getLogger(__name__)

Split = Literal["train", "val", "sft"]

_SOFTWARE = ("jinja2", "pyarrow", "tokenizers", "transformers")
"""Whose versions may change a text's length or the bytes of a table."""
_SOURCES = {"train": "data.train_files", "val": "data.val_files", "sft": "algorithm.hybrid.sft_files"}

Numbered = list[tuple[str, PromptRow]]
"""(id, row), in the source's order."""


@dataclass(frozen=True, slots=True)
class Reused:
    """A table that another run has committed, read and checked."""

    run_id: str
    artifact: Artifact
    """As it lies in that run."""
    files: dict[str, bytes]
    rows: Numbered
    """The source's rows that are in it."""

    def table(self) -> pa.Table:
        """Return the table."""
        return pa.concat_tables([from_bytes(data) for _, data in sorted(self.files.items())])


@dataclass(frozen=True, slots=True)
class Made:
    """What is made of the source's rows: those that are within the limits, and their table."""

    rows: Numbered
    table: Callable[[], pa.Table]


@dataclass(frozen=True, slots=True)
class Usable:
    """The rows of one split that a run can use."""

    rows: Numbered
    num_overlong: int
    """How many more are over the limits on length."""
    key: str | None
    """Digest of all that they were made from; None where the tokenizer cannot be compared with others."""
    made: Reused | Made
    is_stale: bool
    """Whether there is a record of a table that turned out to be of no use."""


class DataStage(Stage):
    """Commit the table of one split under `data/<split>`."""

    role: ClassVar[str]
    """Of the table, and what its rows are called: "prompts" or "examples"."""
    id_column: ClassVar[str]
    schema: ClassVar[pa.Schema]
    is_graded: ClassVar[bool]
    """Whether a reward has to be able to grade completions of its rows."""

    def __init__(self, split: Split) -> None:
        self.split = split
        self.name = f"preprocess/{split}"
        # Data sets call their held-out split test.
        self._data_split = "test" if split == "val" else "train"
        # Read once: the digest and the rows must be of the same bytes.
        self._load = functools.lru_cache(maxsize=1)(_rows_and_digest)

    @abstractmethod
    def check(self, config: RunConfig, grader: Grader | None, rows: Numbered) -> None:
        """Raise for what is wrong with the rows that are used; `grader` is what grades completions of them, if any."""

    @abstractmethod
    def make(self, config: RunConfig, tokenizer: Any, numbered: Numbered, key: str | None) -> Made:
        """Tokenise the rows, and drop or refuse those over the limits; `key` is the digest of all that decides it."""

    def inputs(self, run: Run, config: RunConfig, step: int | None) -> dict[str, Input]:
        return {"policy": Input(run.require(POLICY_UPDATE, 0), "policy")}

    def outside_inputs(self, config: RunConfig) -> dict[str, str] | None:
        try:
            return {"source": self._read(config)[1]}
        except RatchetError:
            return None

    def compute(self, context: Context) -> Result:
        # A replay proves what a stage makes of its inputs: it makes everything itself.
        root = context.run.root if context.store is context.run.store else None
        residents, config = context.residents, context.config
        grader = residents.grader() if self.is_graded else None
        usable = self.usable(config, residents.tokenizer(), grader, root=root)
        distinct = {json.dumps(row.prompt, sort_keys=True) for _, row in usable.rows}
        metrics = {
            f"data/{self.split}/num_{self.role}": float(len(usable.rows)),
            f"data/{self.split}/num_overlong_{self.role}": float(usable.num_overlong),
            f"data/{self.split}/num_duplicate_prompts": float(len(usable.rows) - len(distinct)),
        }
        folder = f"{context.folder}/{self.role}"
        if isinstance(usable.made, Reused):
            artifact = write_bytes(context.store, folder, usable.made.files, rows=len(usable.rows))
            metrics[f"data/{self.split}/is_reused"] = 1.0
            return Result(outputs={self.role: artifact}, metrics=metrics)
        artifact = write_table(context.store, folder, usable.made.table())
        return Result(
            outputs={self.role: artifact},
            metrics=metrics,
            on_commit=lambda: self._record(context.run, config, usable, artifact),
        )

    def usable(self, config: RunConfig, tokenizer: Any, grader: Grader | None, *, root: str | None = None) -> Usable:
        """Find the usable rows; those that a run below `root` has prepared before need not be tokenised.

        Everything that can be wrong with them is found here, before a run or a GPU is taken for them.
        """
        numbered, key = self._numbered(config), self._key(config, tokenizer)
        reused, is_stale = self._reusable(root, key, config, numbered)
        made = reused if reused is not None else self.make(config, tokenizer, numbered, key)
        kept, num_overlong = made.rows, len(numbered) - len(made.rows)
        if num_overlong:
            logger.warning("%s: %d of %d %s are over the limit", self.name, num_overlong, len(numbered), self.role)
        if not kept:
            raise DataError(f"{self.source(config)}: no {self.split} {self.role.removesuffix('s')} is left")
        if self.split == "train":
            check_batch_size(config, len(kept), self.role)
        self.check(config, grader, kept)
        return Usable(kept, num_overlong, key, made, is_stale)

    def digest(self, root: str, config: RunConfig, tokenizer: Any) -> str:
        """Return the digest of the table that a run below `root` would commit under this config now."""
        numbered, key = self._numbered(config), self._key(config, tokenizer)
        reused, _ = self._reusable(root, key, config, numbered)
        if reused is not None:
            return reused.artifact.digest
        with scratch() as folder:
            table = self.make(config, tokenizer, numbered, key).table()
            return write_table(open_store(str(folder)), self.role, table).digest

    def source(self, config: RunConfig) -> str:
        """Return what the config names; ConfigError where it names nothing."""
        key = _SOURCES[self.split]
        found: str = config.value(key)
        if not found:
            raise ConfigError(
                f"{key} is not set: expected a file, an s3:// object, a dataset id or ratchet/word-problems?level=1"
            )
        return found

    def _reusable(
        self, root: str | None, key: str | None, config: RunConfig, numbered: Numbered
    ) -> tuple[Reused | None, bool]:
        """Return what a run below `root` has prepared under `key`, and whether that turned out to be of no use."""
        if root is None or key is None:
            return None, False
        try:
            found = prepared.find(root, key)
            if found is None:
                return None, False
            self._check_chain(Run(root, found.run_id), config, found)
            files = prepared.read(root, found)
            reused = Reused(found.run_id, found.artifact, files, self._those_in(files, numbered))
        except (StoreError, ConfigError, DataError) as error:
            logger.warning("%s: %s are prepared anew; what there was is of no use: %s", self.name, self.role, error)
            # Storage that does not answer says nothing about what lies there.
            return None, not isinstance(error, StoreUnavailableError)
        logger.info(
            "%s: the %s are those that run %s prepared, from %s", self.name, self.role, found.run_id, found.source
        )
        return reused, False

    def _check_chain(self, run: Run, config: RunConfig, found: PreparedPrompts) -> None:
        """Raise unless the run has committed that table, from these rows under this config: records only point."""
        manifest = run.require(self.name, None)
        content = manifest.content
        if (
            manifest.output(self.role) != found.artifact
            or content.inputs.get("source") != self._read(config)[1]
            or content.config != digest_of(selected(config, self.keys(config)))
        ):
            raise DataError(f"run {run.uri} has committed other {self.role} than the record says")

    def _record(self, run: Run, config: RunConfig, usable: Usable, artifact: Artifact) -> None:
        """Let other runs find the committed table; where that cannot be, they make their own."""
        if usable.key is None:
            return
        try:
            source = resolved_source(self.source(config), split=self._data_split)
            entry = PreparedPrompts(run_id=run.run_id, artifact=artifact, source=source)
            prepared.record(run.root, usable.key, entry, replace=usable.is_stale)
        except (StoreError, DataError) as error:
            logger.warning("%s: no other run will find these %s: %s", self.name, self.role, error)

    def _key(self, config: RunConfig, tokenizer: Any) -> str | None:
        from ratchet.engines.model import tokenizer_digest

        digest = tokenizer_digest(tokenizer)
        if digest is None:
            return None
        return digest_of(
            {
                "split": self.split,
                "source": self._read(config)[1],
                "config": selected(config, self.keys(config)),
                "tokenizer": digest,
                "columns": str(self.schema),
                "code": code_revision(),
                "software": {name: version(name) for name in _SOFTWARE},
            }
        )

    def _read(self, config: RunConfig) -> tuple[Sequence[PromptRow], str]:
        """Read the source and the digest of its rows; DataError, ConfigError or StoreError where that cannot be."""
        data = config.data
        # Whether a row needs a ground truth is the grader's to say (`check`).
        return self._load(
            self.source(config),
            split=self._data_split,
            data_source=data.data_source,
            prompt_key=data.prompt_key,
            needs_ground_truth=False,
        )

    def _numbered(self, config: RunConfig) -> Numbered:
        rows = self._read(config)[0]
        limit = {"train": config.data.train_max_samples, "val": config.data.val_max_samples}.get(self.split, -1)
        return [
            (f"{self.split}-{position:07d}", row) for position, row in enumerate(rows[:limit] if limit >= 0 else rows)
        ]

    def _those_in(self, files: dict[str, bytes], numbered: Numbered) -> Numbered:
        """Return the rows that a table holds; DataError where it holds others."""
        try:
            parts = [from_bytes(data).select([self.id_column]) for _, data in sorted(files.items())]
        except (pa.ArrowException, OSError, KeyError) as error:
            raise DataError(f"expected tables of {self.role} ({error})") from error
        ids = [row_id for part in parts for row_id in part[self.id_column].to_pylist()]
        wanted = set(ids)
        kept = [item for item in numbered if item[0] in wanted]
        if [row_id for row_id, _ in kept] != ids:
            raise DataError(f"expected {len(ids)} {self.role} of the source's {len(numbered)}, in its order")
        return kept


def check_batch_size(config: RunConfig, count: int, role: str) -> None:
    """Raise ConfigError where the run has fewer training rows than one step takes."""
    if count < config.data.train_batch_size:
        raise ConfigError(
            f"data.train_batch_size is {config.data.train_batch_size}, but the run has {count} training {role}"
        )


def row_values(row: PromptRow) -> dict[str, Any]:
    """Return a row as the columns of a table have it."""
    return {
        "data_source": row.data_source,
        "prompt": [dict(message) for message in row.prompt],
        "ability": row.ability,
        "reward_model": dict(row.reward_model),
        "extra_info": json.dumps(row.extra_info, sort_keys=True, ensure_ascii=False),
    }


def _rows_and_digest(spec: str, **options: Any) -> tuple[list[PromptRow], str]:
    rows = load_rows(spec, **options)
    return rows, digest_of([row_values(row) for row in rows])
