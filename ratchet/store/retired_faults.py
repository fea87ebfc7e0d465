"""Whether what was retired may be gone: each record is about what a manifest names, and nothing that stays needs it."""

from collections.abc import Iterator

from ratchet.store import layout
from ratchet.store.chain import Chain, Fault, manifest_key
from ratchet.store.manifest import Artifact, Manifest
from ratchet.store.retired import TRAINER_STATE, WEIGHTS
from ratchet.store.run import POLICY_UPDATE
from ratchet.store.survey import NAMING


def retired_faults(chain: Chain) -> Iterator[Fault]:
    """Yield what speaks against a record: no such artifact, or one that must stay."""
    needed = _needed(chain)
    for (place, role), record in sorted(chain.retired.items()):
        manifest = chain.manifests.get(place)
        if manifest is None:
            # Where the manifest is there and cannot be read, that has been said.
            if place not in chain.sha256:
                yield Fault(place=record.key, expected=f"a manifest of {place}", found="nothing")
            continue
        artifact = _artifact(manifest, role)
        if artifact is None or not record.is_about(artifact):
            yield Fault(
                place=record.key,
                expected=f"what {manifest_key(place)} names as weights or as a trainer's state",
                found=f"{role} {record.digest} in {record.folder}",
            )
        elif (place, role) in needed and not _is_there(chain, artifact):
            yield Fault(place=record.key, expected=f"{role} to stay: {needed[place, role]}", found=str(record))


def _needed(chain: Chain) -> dict[tuple[str, str], str]:
    """Return what must stay -> why, by folder of the stage and role."""
    needed: dict[tuple[str, str], str] = {}
    for stage, role in WEIGHTS.items():
        versions = {m.step: place for place, m in chain.manifests.items() if m.stage == stage and m.step is not None}
        if versions:
            needed[versions[max(versions)], role] = "it is the newest"
            needed[layout.stage_folder(stage, 0), role] = "every version is made from it"
        for place in versions.values():
            artifact = chain.manifests[place].provenance.artifacts.get(role)
            if artifact is not None and artifact.delta is not None and (place, role) not in chain.retired:
                needed[layout.stage_folder(stage, artifact.delta.step), role] = f"{place} builds on it"
    for place, manifest in chain.manifests.items():
        if manifest.stage in NAMING and manifest.step is not None:
            needed[layout.stage_folder(POLICY_UPDATE, manifest.step), WEIGHTS[POLICY_UPDATE]] = f"{place} names it"
    return needed


def _artifact(manifest: Manifest, role: str) -> Artifact | None:
    """Return what may be retired of a stage."""
    if manifest.stage not in WEIGHTS or not manifest.step:
        return None
    if role == TRAINER_STATE:
        return manifest.provenance.trainer_state
    return manifest.provenance.artifacts.get(role) if role == WEIGHTS[manifest.stage] else None


def _is_there(chain: Chain, artifact: Artifact) -> bool:
    """Whether a deletion has not begun: the record alone takes nothing away."""
    folder, entries = artifact.stored
    return all(chain.size(f"{folder}/{entry.path}") == entry.bytes for entry in entries)
