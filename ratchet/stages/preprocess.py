"""From what users bring to the run's prompts: read, check, number, drop or refuse what is too long, commit.

Prompts that another run below the same root has prepared from the same rows are copied from there: what costs is to
tokenise all of them. Trap: that is only a speed-up; whatever cannot be had from there is made anew.
"""

import functools
import io
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from ratchet.config import RunConfig
from ratchet.config.semantics import selected
from ratchet.data import schemas
from ratchet.data.parquet import table_from_rows, write_table
from ratchet.data.sources import PromptRow, load_rows, resolved_source
from ratchet.environment import code_revision
from ratchet.errors import ConfigError, DataError, RatchetError, StoreError, StoreUnavailableError
from ratchet.rewards.graders import Grader
from ratchet.stages.base import Context, Input, Result, Stage
from ratchet.store import prepared
from ratchet.store.artifacts import scratch, write_bytes
from ratchet.store.manifest import Artifact, digest_of
from ratchet.store.objects import ObjectStore, open_store
from ratchet.store.prepared import PreparedPrompts
from ratchet.store.run import POLICY_UPDATE, Run

logger = logging.getLogger(__name__)

_SOFTWARE = ("jinja2", "pyarrow", "tokenizers", "transformers")
"""Whose versions may change a prompt's length or the bytes of a table."""

Numbered = list[tuple[str, PromptRow]]
"""(prompt_id, row), in the source's order."""


@dataclass(frozen=True, slots=True)
class Reused:
    """A table of prompts that another run has committed, read and checked."""

    run_id: str
    artifact: Artifact
    """As it lies in that run."""
    files: dict[str, bytes]
    prompts: Numbered
    """The source's rows that are in it."""


@dataclass(frozen=True, slots=True)
class Usable:
    """The prompts of one split that a run can use."""

    prompts: Numbered
    num_overlong: int
    """How many more are over the length limit."""
    key: str | None
    """Digest of all that they were made from; None where the tokenizer cannot be compared with others."""
    reused: Reused | None
    is_stale: bool
    """Whether there is a record of a table that turned out to be of no use."""


class Preprocess(Stage):
    """Commit the prompts of one split under `data/<split>`."""

    config_keys = (
        "data.train_batch_size",
        "data.prompt_key",
        "data.data_source",
        "data.max_prompt_length",
        "data.filter_overlong_prompts",
        "data.train_max_samples",
        "data.val_max_samples",
    )

    def __init__(self, split: Literal["train", "val"]) -> None:
        self.split = split
        self.name = f"preprocess/{split}"
        # Read once: the digest and the rows must be of the same bytes.
        self._load = functools.lru_cache(maxsize=1)(_rows_and_digest)

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
        residents = context.residents
        usable = self.usable(context.config, residents.tokenizer(), residents.grader(), root=root)
        distinct = {json.dumps(row.prompt, sort_keys=True) for _, row in usable.prompts}
        metrics = {
            f"data/{self.split}/num_prompts": float(len(usable.prompts)),
            f"data/{self.split}/num_overlong_prompts": float(usable.num_overlong),
            f"data/{self.split}/num_duplicate_prompts": float(len(usable.prompts) - len(distinct)),
        }
        folder = f"{context.folder}/prompts"
        if usable.reused is not None:
            artifact = write_bytes(context.store, folder, usable.reused.files, rows=len(usable.prompts))
            metrics[f"data/{self.split}/is_reused"] = 1.0
            return Result(outputs={"prompts": artifact}, metrics=metrics)
        artifact = _write_prompts(context.store, folder, usable.prompts)
        return Result(
            outputs={"prompts": artifact},
            metrics=metrics,
            on_commit=lambda: self._record(context.run, context.config, usable, artifact),
        )

    def usable(self, config: RunConfig, tokenizer: Any, grader: Grader, *, root: str | None = None) -> Usable:
        """Find the usable prompts; those that a run below `root` has prepared before need not be tokenised.

        Everything that can be wrong with prompts is found here, before a run or a GPU is taken for them.
        """
        numbered, key = self._numbered(config), self._key(config, tokenizer)
        reused, is_stale = self._reusable(root, key, config, numbered)
        kept = reused.prompts if reused is not None else self._within_limit(config, tokenizer, numbered, key)
        num_overlong, batch_size = len(numbered) - len(kept), config.data.train_batch_size
        if num_overlong:
            logger.warning("%s: %d of %d prompts are over the limit", self.name, num_overlong, len(numbered))
        if not kept:
            raise DataError(f"{self._source(config)}: no {self.split} prompt is left")
        if self.split == "train" and len(kept) < batch_size:
            raise ConfigError(f"data.train_batch_size is {batch_size}, but the run has {len(kept)} training prompts")
        grader.check_prompts(row for _, row in kept)
        return Usable(kept, num_overlong, key, reused, is_stale)

    def digest(self, root: str, config: RunConfig, tokenizer: Any) -> str:
        """Return the digest of the table that a run below `root` would commit under this config now."""
        numbered, key = self._numbered(config), self._key(config, tokenizer)
        reused, _ = self._reusable(root, key, config, numbered)
        if reused is not None:
            return reused.artifact.digest
        with scratch() as folder:
            kept = self._within_limit(config, tokenizer, numbered, key)
            return _write_prompts(open_store(str(folder)), "prompts", kept).digest

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
            reused = Reused(found.run_id, found.artifact, files, _those_in(files, numbered))
        except (StoreError, ConfigError, DataError) as error:
            logger.warning("%s: prompts are prepared anew; what there was is of no use: %s", self.name, error)
            # Storage that does not answer says nothing about what lies there.
            return None, not isinstance(error, StoreUnavailableError)
        logger.info("%s: the prompts are those that run %s prepared, from %s", self.name, found.run_id, found.source)
        return reused, False

    def _check_chain(self, run: Run, config: RunConfig, found: PreparedPrompts) -> None:
        """Raise unless the run has committed that table, from these rows under this config: records only point."""
        manifest = run.require(self.name, None)
        content = manifest.content
        if (
            manifest.output("prompts") != found.artifact
            or content.inputs.get("source") != self._read(config)[1]
            or content.config != digest_of(selected(config, self.keys(config)))
        ):
            raise DataError(f"run {run.uri} has committed other prompts than the record says")

    def _record(self, run: Run, config: RunConfig, usable: Usable, artifact: Artifact) -> None:
        """Let other runs find the committed table; where that cannot be, they make their own."""
        if usable.key is None:
            return
        try:
            source = resolved_source(self._source(config), split=self._data_split)
            entry = PreparedPrompts(run_id=run.run_id, artifact=artifact, source=source)
            prepared.record(run.root, usable.key, entry, replace=usable.is_stale)
        except (StoreError, DataError) as error:
            logger.warning("%s: no other run will find these prompts: %s", self.name, error)

    def _key(self, config: RunConfig, tokenizer: Any) -> str | None:
        from ratchet.engines.model import tokenizer_digest

        digest = tokenizer_digest(tokenizer)
        if digest is None:
            return None
        return digest_of(
            {
                "split": self.split,
                "source": self._read(config)[1],
                "config": selected(config, self.config_keys),
                "tokenizer": digest,
                "columns": str(schemas.PROMPTS),
                "code": code_revision(),
                "software": {name: version(name) for name in _SOFTWARE},
            }
        )

    def _source(self, config: RunConfig) -> str:
        key = f"data.{self.split}_files"
        source = config.data.train_files if self.split == "train" else config.data.val_files
        if not source:
            raise ConfigError(
                f"{key} is not set: expected a file, an s3:// object, a dataset id or ratchet/word-problems?level=1"
            )
        return source

    @property
    def _data_split(self) -> str:
        # Data sets call their held-out split test.
        return "train" if self.split == "train" else "test"

    def _read(self, config: RunConfig) -> tuple[Sequence[PromptRow], str]:
        """Read the source and the digest of its rows; DataError, ConfigError or StoreError where that cannot be."""
        data = config.data
        # Whether a row needs a ground truth is the grader's to say (`usable`).
        return self._load(
            self._source(config),
            split=self._data_split,
            data_source=data.data_source,
            prompt_key=data.prompt_key,
            needs_ground_truth=False,
        )

    def _numbered(self, config: RunConfig) -> Numbered:
        rows = self._read(config)[0]
        limit = config.data.train_max_samples if self.split == "train" else config.data.val_max_samples
        return [
            (f"{self.split}-{position:07d}", row) for position, row in enumerate(rows[:limit] if limit >= 0 else rows)
        ]

    def _within_limit(self, config: RunConfig, tokenizer: Any, numbered: Numbered, key: str | None) -> Numbered:
        limit = config.data.max_prompt_length
        overlong = _overlong(tokenizer, numbered, limit, key)
        if overlong and not config.data.filter_overlong_prompts:
            first = min(overlong)
            raise DataError(
                f"{self._source(config)}: {len(overlong)} of {len(numbered)} prompts are longer than "
                f"data.max_prompt_length={limit} tokens; the first is row {first} with {overlong[first]}. Raise the "
                "limit, or set data.filter_overlong_prompts=true to leave them out"
            )
        return [item for index, item in enumerate(numbered) if index not in overlong]


_MOST_KNOWN = 8
_known_overlong: dict[str, dict[int, int]] = {}
"""By the digest of what decides it: the check before a run and its first stage would both tokenise everything."""


def _overlong(tokenizer: Any, numbered: Numbered, limit: int, key: str | None) -> dict[int, int]:
    """Index and length, in tokens, of the prompts that are longer than `limit`."""
    if key is not None and key in _known_overlong:
        return _known_overlong[key]
    from ratchet.engines.model import chat_prompts_ids

    lengths = map(len, chat_prompts_ids(tokenizer, [row.prompt for _, row in numbered]))
    found = {index: length for index, length in enumerate(lengths) if length > limit}
    if key is not None:
        while len(_known_overlong) >= _MOST_KNOWN:
            _known_overlong.pop(next(iter(_known_overlong)), None)
        _known_overlong[key] = found
    return found


def _rows_and_digest(spec: str, **options: Any) -> tuple[list[PromptRow], str]:
    rows = load_rows(spec, **options)
    return rows, digest_of([_row_values(row) for row in rows])


def _write_prompts(store: ObjectStore, folder: str, prompts: Numbered) -> Artifact:
    rows = [{"prompt_id": prompt_id, **_row_values(row)} for prompt_id, row in prompts]
    return write_table(store, folder, table_from_rows(rows, schemas.PROMPTS))


def _those_in(files: dict[str, bytes], numbered: Numbered) -> Numbered:
    """Return the prompts that a table of prompts holds; DataError where it holds others."""
    try:
        parts = [pq.read_table(io.BytesIO(data), columns=["prompt_id"]) for _, data in sorted(files.items())]
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"expected tables of prompts ({error})") from error
    ids = [prompt_id for part in parts for prompt_id in part["prompt_id"].to_pylist()]
    wanted = set(ids)
    kept = [item for item in numbered if item[0] in wanted]
    if [prompt_id for prompt_id, _ in kept] != ids:
        raise DataError(f"expected {len(ids)} prompts of the source's {len(numbered)}, in its order")
    return kept


def _row_values(row: PromptRow) -> dict[str, Any]:
    return {
        "data_source": row.data_source,
        "prompt": [dict(message) for message in row.prompt],
        "ability": row.ability,
        "reward_model": dict(row.reward_model),
        "extra_info": json.dumps(row.extra_info, sort_keys=True, ensure_ascii=False),
    }
