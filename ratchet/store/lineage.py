"""What a manifest was made from, back to the base model and the prompts, each manifest proven by the one that names it.

Manifests hold the sha256 of all that their stage read (`previous`), so that what is read from storage at the head
proves everything behind it, wherever its bytes come from: an index of the run, or the run itself.
"""

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from ratchet.errors import NotCommittedError, StoreError
from ratchet.store import index, layout
from ratchet.store.chain import Fault, manifest_key
from ratchet.store.manifest import Manifest
from ratchet.store.objects import ObjectNotFoundError
from ratchet.store.run import Run

_READERS = 16


@dataclass(slots=True)
class Lineage:
    """Manifests of one run, found from a few heads."""

    run: Run
    manifests: dict[str, Manifest] = field(default_factory=dict)
    """Folder of a stage -> its manifest, as storage has it."""
    sha256: dict[str, str] = field(default_factory=dict)
    """Folder of a stage -> of its manifest's bytes."""
    faults: list[Fault] = field(default_factory=list)
    """Manifests that are missing, damaged, or others than those that were read."""
    others: set[str] = field(default_factory=set)
    """Folders of stages that indexes know of: there may be manifests that no other one was made from."""
    _known: dict[str, bytes] = field(default_factory=dict)
    """sha256 -> bytes, of which nothing is believed before a manifest names the sha256."""

    def use_indexes(self, step: int) -> set[int]:
        """Know what the run's indexes say of the steps up to `step`; return the steps that they are of."""
        found = index.read_up_to(self.run, step)
        for one in found:
            self.others |= one.bodies.keys()
            self._known |= {hashlib.sha256(body).hexdigest(): body for body in one.bodies.values()}
        return {step for one in found for step in range(one.last - index.STEPS + 1, one.last + 1)}

    def trace(self, stage: str, step: int | None, *, within: int | None = None) -> Manifest:
        """Return a committed manifest, read from storage, and add everything that it was made from.

        `within` keeps to the manifests of one step, and those that have none. NotCommittedError if it is not there,
        StoreError if it is damaged.
        """
        place = layout.stage_folder(stage, step)
        if not self.read([place]):
            damaged = next((fault for fault in self.faults if fault.place == manifest_key(place)), None)
            if damaged is not None:
                raise StoreError(f"{self.run.uri}: {damaged}")
            raise NotCommittedError(f"run {self.run.uri}: {place} is not committed")
        self._follow(place, within)
        return self.manifests[place]

    def read(self, places: Sequence[str]) -> list[Manifest]:
        """Return manifests, read from storage, without what they were made from; those that are not there are left out.

        Where what they were made from is known, it must be what they name.
        """
        wanted = [place for place in dict.fromkeys(places) if place not in self.manifests]
        for place, body in self._bodies(wanted):
            self._add(place, body, hashlib.sha256(body).hexdigest(), is_proven=False)
            for other, sha256 in self.manifests[place].provenance.previous.items() if place in self.manifests else ():
                self._compare(place, other, sha256, self.sha256.get(other))
        return [self.manifests[place] for place in places if place in self.manifests]

    def places(self, steps: Sequence[int]) -> list[str]:
        """Return the folders of all stages of these steps."""
        with ThreadPoolExecutor(_READERS) as pool:
            names = pool.map(lambda step: self.run.store.list_folders(layout.step_folder(step)), steps)
            return [
                f"{layout.step_folder(step)}/{name}" for step, found in zip(steps, names, strict=True) for name in found
            ]

    def _follow(self, place: str, within: int | None) -> None:
        frontier = [place]
        while frontier:
            named: dict[str, str] = {}
            for reader in frontier:
                for other, sha256 in self.manifests[reader].provenance.previous.items():
                    if within is None or layout.parse_step_folder(other.partition("/")[0]) in (within, None):
                        self._compare(reader, other, sha256, self.sha256.get(other) or named.get(other))
                        named.setdefault(other, sha256)
            fresh = {other: sha256 for other, sha256 in named.items() if other not in self.sha256}
            frontier = self._take(fresh, look_ahead=within is None)

    def _compare(self, reader: str, other: str, sha256: str, known: str | None) -> None:
        if known not in (None, sha256):
            self._fault(other, f"sha256 {sha256}, which was read for {reader}", f"sha256 {known}")

    def _take(self, named: dict[str, str], *, look_ahead: bool) -> list[str]:
        """Take the manifests that were named; return the places of those that are there, to go on from."""
        missing = [place for place, sha256 in named.items() if sha256 not in self._known]
        wanted = self._neighbours(missing) if look_ahead else missing
        read = {place: (body, hashlib.sha256(body).hexdigest()) for place, body in self._bodies(wanted)}
        self._known |= {sha256: body for body, sha256 in read.values()}
        for place, sha256 in named.items():
            body = self._known.get(sha256)
            if body is not None:
                self._add(place, body, sha256, is_proven=True)
            else:
                found = f"sha256 {read[place][1]}" if place in read else "nothing"
                self._fault(place, f"sha256 {sha256}, which another manifest was made from", found)
        return [place for place in named if place in self.manifests]

    def _neighbours(self, places: Sequence[str]) -> list[str]:
        """Return `places`, and the same stages of the steps before them that one index would hold.

        One step names only the one before it, so that asking for each when it is named would take a round for each.
        """
        wanted = dict.fromkeys(places)
        steps = {step for place in places if (step := layout.parse_step_folder(place.partition("/")[0]))}
        for step in steps:
            names = self.run.store.list_folders(layout.step_folder(step))
            for other in range(step, max(index.last_of(step) - index.STEPS, 0), -1):
                wanted |= dict.fromkeys(f"{layout.step_folder(other)}/{name}" for name in names)
        return [place for place in wanted if place not in self.manifests]

    def _bodies(self, places: Sequence[str]) -> list[tuple[str, bytes]]:
        if len(places) < 2:
            found = [self._get(place) for place in places]
        else:
            with ThreadPoolExecutor(min(_READERS, len(places))) as pool:
                found = list(pool.map(self._get, places))
        return [(place, body) for place, body in zip(places, found, strict=True) if body is not None]

    def _get(self, place: str) -> bytes | None:
        try:
            return self.run.store.get(manifest_key(place))
        except ObjectNotFoundError:
            return None

    def _add(self, place: str, body: bytes, sha256: str, *, is_proven: bool) -> None:
        try:
            manifest = Manifest.from_json(body, key=manifest_key(place), is_proven=is_proven)
        except StoreError as error:
            self._fault(place, "a manifest as it was written", str(error))
            return
        found = layout.stage_folder(manifest.stage, manifest.step)
        if found != place:
            self._fault(place, f"the manifest of {place}", f"that of {found}")
            return
        self.manifests[place] = manifest
        self.sha256[place] = sha256

    def _fault(self, place: str, expected: str, found: str) -> None:
        self.faults.append(Fault(place=manifest_key(place), expected=expected, found=found))
