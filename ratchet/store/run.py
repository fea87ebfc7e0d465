"""A run in object storage: its identity, who may commit to it, and its chain of manifests.

Safety rests on create-only puts and on `previous`, never on clocks: whoever loses a put must drop what it holds in
memory and read the chain again.
"""

import json
import logging
import os
import socket
import threading
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ratchet.errors import (
    CommitConflictError,
    ConfigError,
    DamagedError,
    NotCommittedError,
    OwnershipLostError,
    StoreError,
)
from ratchet.store import layout
from ratchet.store.manifest import Manifest, canonical_json
from ratchet.store.objects import ObjectNotFoundError, ObjectStore, open_store
from ratchet.store.pending import PendingManifest
from ratchet.store.submission import parse

logger = logging.getLogger(__name__)

FORMAT = 1
POLICY_UPDATE = "policy_update"
CRITIC_UPDATE = "critic_update"

_MANIFESTS_IN_MEMORY = 512


@dataclass(frozen=True, slots=True)
class Owner:
    """The right to commit that one runner claimed."""

    epoch: int
    host: str
    pid: int


class Run:
    """One run below a root. Reading needs no claim; committing needs the newest one. Threads may share it."""

    def __init__(self, root: str, run_id: str) -> None:
        self.run_id = layout.check_run_id(run_id)
        self.root = root.rstrip("/")
        self.store: ObjectStore = open_store(self.root).child(self.run_id)
        self.owner: Owner | None = None
        self._manifests: dict[str, Manifest] = {}
        self._manifests_lock = threading.Lock()
        self._pending: dict[str, PendingManifest] = {}
        self._own_from: int | None = None

    @property
    def uri(self) -> str:
        """Where the run lies."""
        return self.store.uri

    # -- identity ----------------------------------------------------------------------------------------------------

    def create_or_check(self, semantic: Mapping[str, Any]) -> bool:
        """Write `run.json`, or check that the run that exists has the same semantic config. True if it is new.

        A difference is a ConfigError that names every key with both values. Storage whose create-only puts replace
        what is there is a StoreError: nothing would keep two owners apart.
        """
        body = canonical_json({"format": FORMAT, "run_id": self.run_id, "semantic": semantic})
        try:
            # Where create-only puts replace what is there, the bytes of an existing run must be its own.
            existing = self.store.get(layout.RUN)
        except ObjectNotFoundError:
            existing = None
        is_new = existing is None and self.store.put_create(layout.RUN, body)
        if (is_new or existing is not None) and self.store.put_create(layout.RUN, existing or body):
            raise StoreError(
                f"{self.uri}: this storage ignores create-only puts (If-None-Match: *), so commits are unsafe"
            )
        if is_new:
            logger.info("created run %s", self.uri)
        else:
            self.check(semantic)
        return is_new

    def check(self, semantic: Mapping[str, Any]) -> None:
        """Check that the run, which exists, has the same semantic config; a difference is a ConfigError."""
        check_same(self.uri, self.semantic(), semantic)

    def semantic(self) -> dict[str, Any]:
        """Return the semantic config that the run was created with."""
        try:
            body = self._json(layout.RUN)
        except ObjectNotFoundError as error:
            raise NotCommittedError(f"no run at {self.uri}: {layout.RUN} is missing") from error
        if body.get("format") != FORMAT or not isinstance(body.get("semantic"), dict):
            found = body.get("format")
            raise StoreError(
                f"{self.uri}/{layout.RUN}: format {found}, but this version of Ratchet reads format {FORMAT}"
            )
        return dict(body["semantic"])

    # -- ownership ---------------------------------------------------------------------------------------------------

    def claim(self, submission: Mapping[str, Any]) -> Owner:
        """Claim the next epoch, record the submission under it, and return the claim. Earlier owners lose the run."""
        owner = Owner(self.newest_epoch() + 1, socket.gethostname(), os.getpid())
        # In containers host and pid repeat; the claim's own name tells a lost response from a lost race.
        claim = uuid.uuid4().hex
        while not self._put_or_find(layout.owner(owner.epoch), canonical_json({**asdict(owner), "claim": claim})):
            owner = Owner(owner.epoch + 1, owner.host, owner.pid)
        self.store.put_create(layout.submission(owner.epoch), canonical_json({**submission, "epoch": owner.epoch}))
        self.owner = owner
        logger.info("claimed epoch %d of run %s", owner.epoch, self.uri)
        return owner

    def adopt(self, epoch: int) -> dict[str, Any]:
        """Act under an epoch that the submission claimed elsewhere (a pod of its pipeline); return the submission."""
        submission = self.submission(epoch)
        self.owner = Owner(epoch, socket.gethostname(), os.getpid())
        return submission

    def submission(self, epoch: int) -> dict[str, Any]:
        """Return what was submitted under `epoch`; DamagedError where something else lies there."""
        key = layout.submission(epoch)
        try:
            return parse(self.store.get(key), epoch)
        except ObjectNotFoundError as error:
            raise NotCommittedError(f"run {self.uri} has no submission {epoch}") from error
        except ValueError as error:
            raise DamagedError(f"{self.uri}/{key} is damaged: {error}") from error

    def submissions(self) -> Iterator[dict[str, Any]]:
        """Yield what was submitted, newest first, to be looked at: a damaged one is logged, and is only its epoch."""
        for epoch in self._submitted():
            try:
                yield self.submission(epoch)
            except DamagedError as error:
                logger.warning("%s; what it said is left out", error)
                yield {"epoch": epoch}

    def newest_submission(self) -> dict[str, Any] | None:
        """Return what was submitted last, to go by; None if nothing was, DamagedError if that cannot be known."""
        return next(map(self.submission, self._submitted()), None)

    def epoch_of(self, submission_id: str) -> int | None:
        """Return the epoch that the submission with this id claimed, or None if it claimed none yet.

        DamagedError for a damaged submission on the way, which may be the one.
        """
        epochs = (epoch for epoch in self._submitted() if self.submission(epoch).get("submission_id") == submission_id)
        return next(epochs, None)

    def config_of(self, submission: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config of a submission to this run; DamagedError where it has none."""
        if "config" not in submission:
            raise DamagedError(f"{self.uri}/{layout.submission(submission['epoch'])} is damaged: it has no config")
        return dict(submission["config"])

    def _submitted(self) -> Iterator[int]:
        """Yield the claims that have a submission, newest first: a runner may die before it can submit."""
        for epoch in range(self.newest_epoch(), 0, -1):
            if self.store.size(layout.submission(epoch)) is not None:
                yield epoch

    def newest_epoch(self) -> int:
        """Return the newest epoch that was claimed, 0 if none was."""
        epochs = (layout.parse_owner(info.key) for info in self.store.list_objects("owner"))
        return max((epoch for epoch in epochs if epoch is not None), default=0)

    def check_ownership(self) -> Owner:
        """Return this runner's claim if it is still the newest; OwnershipLostError names the winner otherwise."""
        if self.owner is None:
            raise OwnershipLostError(f"nobody claimed run {self.uri} for this process; it may only read")
        # Claims are consecutive: any later one would have had to take the next epoch.
        if self.store.size(layout.owner(self.owner.epoch + 1)) is not None:
            newest = self.newest_epoch()
            winner = self._json(layout.owner(newest))
            raise OwnershipLostError(
                f"run {self.uri}: epoch {self.owner.epoch} lost it to epoch {newest} "
                f"(process {winner.get('pid')} on {winner.get('host')}); nothing more is committed here"
            )
        return self.owner

    def is_owner(self) -> bool:
        """Whether this process holds the newest claim, as far as storage can be asked."""
        try:
            self.check_ownership()
        except StoreError:
            return False
        return True

    def new_attempt(self) -> str:
        """Return a name that no other attempt has."""
        return f"{self.owner.epoch if self.owner else 0:04d}-{uuid.uuid4().hex[:12]}"

    # -- the chain ---------------------------------------------------------------------------------------------------

    def manifest(self, stage: str, step: int | None) -> Manifest | None:
        """Return a stage's manifest, or None if it is not committed.

        One whose commit this process has under way is returned as it is (`expect`).
        """
        key = layout.manifest(stage, step)
        manifest = self._pending.get(key) or self._manifests.get(key)
        if manifest is None:
            if self._own_from is not None and step is not None and step >= self._own_from:
                return None
            try:
                manifest = Manifest.from_json(self.store.get(key), key=f"{self.uri}/{key}")
            except ObjectNotFoundError:
                return None
            self._remember(key, manifest)
        return manifest

    def require(self, stage: str, step: int | None) -> Manifest:
        """Return a stage's manifest; NotCommittedError if there is none. This is the fence between stages."""
        manifest = self.manifest(stage, step)
        if manifest is None:
            raise NotCommittedError(f"run {self.uri}: {layout.stage_folder(stage, step)} is not committed")
        return manifest

    def commit(self, manifest: Manifest) -> Manifest:
        """Publish `manifest`, whose parts are all written; afterwards the stage is done.

        Raises OwnershipLostError if another runner claimed the run, and CommitConflictError if another attempt has
        published this stage. A put whose response was lost is resolved by reading back. After any other StoreError it
        is open whether the manifest was published; committing the same one again settles it.
        """
        owner = self.check_ownership()
        if manifest.provenance.epoch != owner.epoch:
            epoch = manifest.provenance.epoch
            raise StoreError(f"run {self.uri}: epoch {owner.epoch} cannot commit a manifest of epoch {epoch}")
        key = layout.manifest(manifest.content.stage, manifest.content.step)
        if not self.store.put_create(key, manifest.to_json()):
            published = Manifest.from_json(self.store.get(key), key=f"{self.uri}/{key}")
            if published.provenance.attempt != manifest.provenance.attempt:
                raise CommitConflictError(
                    f"{self.uri}/{key} was published by attempt {published.provenance.attempt} "
                    f"while attempt {manifest.provenance.attempt} was at it"
                )
        self._remember(key, manifest)
        self._pending.pop(key, None)
        logger.info("committed %s", layout.stage_folder(manifest.content.stage, manifest.content.step))
        return manifest

    def expect(self, pending: PendingManifest) -> None:
        """Count a stage as made whose commit is under way: this process may build on it."""
        self._pending[layout.manifest(pending.stage, pending.step)] = pending

    def assume_own_from(self, step: int) -> None:
        """Ask storage for no manifest of `step` or later that is not known, until `forget`.

        For a process that alone makes these steps. If another one does, the commit will tell.
        """
        self._own_from = step

    def forget(self) -> None:
        """Drop every manifest held in memory, to read the chain again."""
        with self._manifests_lock:
            self._manifests.clear()
        self._pending.clear()
        self._own_from = None

    def steps(self) -> list[int]:
        """Return every step that has a folder, in order; the last ones may be unfinished."""
        found = (layout.parse_step_folder(name) for name in self.store.list_folders(""))
        return sorted(step for step in found if step is not None)

    def last_step(self) -> int:
        """Return the newest step whose policy is committed; 0 if training has committed none."""
        return next((step for step in reversed(self.steps()) if step > 0 and self.manifest(POLICY_UPDATE, step)), 0)

    def step_manifests(self, step: int) -> list[Manifest]:
        """Return the committed manifests of one step, in the order in which they ended."""
        names = self.store.list_folders(layout.step_folder(step))
        found = [manifest for name in names if (manifest := self.manifest(name, step))]
        return sorted(found, key=lambda manifest: (manifest.provenance.ended, manifest.content.stage))

    def _put_or_find(self, key: str, body: bytes) -> bool:
        """Create an object, whose bytes no other writer has; True also where only the response was lost."""
        return self.store.put_create(key, body) or self.store.get(key) == body

    def _json(self, key: str) -> dict[str, Any]:
        data = self.store.get(key)
        try:
            return dict(json.loads(data))
        except (ValueError, TypeError) as error:
            raise StoreError(f"{self.uri}/{key} is damaged: {error}") from error

    def _remember(self, key: str, manifest: Manifest) -> None:
        # What is published never changes, so that keeping it is safe; a long run has too many to keep all.
        with self._manifests_lock:
            self._manifests[key] = manifest
            while len(self._manifests) > _MANIFESTS_IN_MEMORY:
                dropped = self._manifests.pop(next(iter(self._manifests)))
                if self._own_from is not None and dropped.step is not None:
                    # It is no longer known here; that it is committed, storage still says.
                    self._own_from = max(self._own_from, dropped.step + 1)


def check_same(place: str, existing: Mapping[str, Any], semantic: Mapping[str, Any]) -> None:
    """Refuse a semantic config that is not the `existing` one of the run at `place`; every key is named with both."""
    differences = _differences(existing, json.loads(canonical_json(semantic)))
    if differences:
        lines = "\n".join(
            f"  {key}: the run has {_shown(old)}, this submission {_shown(new)}" for key, old, new in differences
        )
        raise ConfigError(f"run {place} exists with another configuration:\n{lines}\nUse another run id.")


def _shown(value: Any) -> str:
    """A key that a config leaves out has its default there."""
    return "its default" if value is None else f"{value}"


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], path: str = "") -> list[tuple[str, Any, Any]]:
    found: list[tuple[str, Any, Any]] = []
    for key in sorted(old.keys() | new.keys()):
        left, right = old.get(key), new.get(key)
        if isinstance(left or right, dict) and isinstance(left or {}, dict) and isinstance(right or {}, dict):
            found += _differences(left or {}, right or {}, f"{path}{key}.")
        elif left != right:
            found.append((f"{path}{key}", left, right))
    return found
