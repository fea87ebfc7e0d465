"""Whether a run is what it was when it was committed: every manifest, every stored file, every byte.

The manifests prove each other: `previous` holds the sha256 of those that a stage read, and they hold that of every
file. Trap: nothing holds the digest of a manifest that no other one read, nor of a claim or a submission, so of these
only the form can be checked.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from ratchet.errors import ConfigError, StoreError, StoreUnavailableError
from ratchet.store import champions, layout, stored_files
from ratchet.store.chain import Chain, Fault, Leftover, StoredFile, manifest_key, open_chain
from ratchet.store.decision import Decision
from ratchet.store.index import index_faults
from ratchet.store.manifest import Artifact, Manifest, digest_of
from ratchet.store.objects import ObjectInfo, open_store
from ratchet.store.retired import TRAINER_STATE, WEIGHTS, by_role
from ratchet.store.retired_faults import retired_faults
from ratchet.store.run import POLICY_UPDATE, Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """What a verification has looked at, and what it found."""

    run: str
    is_fast: bool
    """Whether no file was read."""
    manifests: int
    files: int
    """Stored files that manifests name."""
    bytes: int
    """Of these files."""
    retired: int
    """Trainer states, policies and critics that were deleted on purpose, as records say: no fault."""
    decisions: int
    """On champions, about this run."""
    faults: tuple[Fault, ...]
    leftovers: tuple[Leftover, ...]


def verify(run: Run, *, fast: bool = False) -> Verification:
    """Check a run against its manifests and against the decisions that name it.

    With `fast`, the manifests, and of each stored file that it is there with its size. Otherwise every stored file is
    hashed as well, and the weights at the end of each chain of deltas are made and compared with their digest, for
    which RATCHET_SCRATCH must hold one version. StoreError only where storage cannot be read.
    """
    chain = read_chain(run)
    faults = list(chain.faults)
    if not fast:
        faults += stored_files.hash_files(chain)
        faults += stored_files.rebuild_weights(chain, faults)
    decisions, contradictions = _check_decisions(chain)
    return Verification(
        run=run.uri,
        is_fast=fast,
        manifests=len(chain.sha256),
        files=len(chain.files),
        bytes=sum(file.bytes for file in chain.files),
        retired=len(chain.retired),
        decisions=decisions,
        faults=(*faults, *contradictions, *index_faults(chain)),
        leftovers=chain.leftovers,
    )


def read_chain(run: Run) -> Chain:
    """List a run and read its manifests, and check them against each other and the listing; no other file is read."""
    chain = open_chain(run)
    named: set[str] = set()
    for place, manifest in sorted(chain.manifests.items()):
        chain.faults += [*_check_content(chain, place, manifest), *_check_bases(chain, place, manifest)]
        named |= _check_files(chain, place, manifest)
    chain.faults += [*_check_previous(chain), *retired_faults(chain)]
    _sort_out_the_rest(chain, named)
    return chain


# -- the manifests -----------------------------------------------------------------------------------------------------


def _check_content(chain: Chain, place: str, manifest: Manifest) -> Iterator[Fault]:
    """Compare what a manifest says of its inputs and outputs with its own artifacts and with what it was made from."""
    content, provenance, key = manifest.content, manifest.provenance, manifest_key(place)
    claim = layout.owner(provenance.epoch)
    if chain.size(claim) is None:
        yield Fault(place=claim, expected=f"the claim under which {place} was committed", found="nothing")
    # A record of what is stored nowhere, such as a replayed policy, names no artifact at all.
    made = {role: artifact.digest for role, artifact in provenance.artifacts.items()} or content.outputs
    for role in sorted(made.keys() | content.outputs.keys()):
        if made.get(role) != content.outputs.get(role):
            yield Fault(
                place=key,
                expected=f"{role} to be {content.outputs.get(role)}, as its content says",
                found=f"files of {made.get(role)}",
            )
    read = {other: chain.manifests[other].content.outputs for other in provenance.previous if other in chain.manifests}
    digests = set(content.inputs.values())
    for role, digest in content.inputs.items():
        # What comes from outside the run, or under another name, no manifest has under this role.
        offered = {outputs[role] for outputs in read.values() if role in outputs}
        if offered and digest not in offered | {one for outputs in read.values() for one in outputs.values()}:
            yield Fault(place=key, expected=f"the input {role} to be {' or '.join(sorted(offered))}", found=digest)
    for other, outputs in read.items():
        if digests.isdisjoint(outputs.values()):
            yield Fault(
                place=key, expected=f"an output of {other} among its inputs, as it was made from it", found="none"
            )


def _check_previous(chain: Chain) -> Iterator[Fault]:
    """Compare each manifest with what those that were made from it recorded of it."""
    readers: dict[tuple[str, str], list[str]] = defaultdict(list)
    for place, manifest in chain.manifests.items():
        for other, sha256 in manifest.provenance.previous.items():
            readers[other, sha256].append(place)
    for (other, sha256), places in sorted(readers.items()):
        found = chain.sha256.get(other)
        is_unreadable = found is not None and other not in chain.manifests
        if found != sha256 and not is_unreadable:
            yield Fault(
                place=manifest_key(other),
                expected=f"sha256 {sha256}, which was read for {', '.join(sorted(places))}",
                found="nothing" if found is None else f"sha256 {found}",
            )


def _check_bases(chain: Chain, place: str, manifest: Manifest) -> Iterator[Fault]:
    """Check that each delta's base is there and the one that it was made from; steps that sink end at a whole copy."""
    for role, artifact in manifest.provenance.artifacts.items():
        delta = artifact.delta
        if delta is None:
            continue
        base_place = layout.stage_folder(manifest.stage, delta.step)
        base = chain.manifests.get(base_place)
        found = base.provenance.artifacts.get(role) if base is not None else None
        if manifest.step is None or delta.step >= manifest.step:
            yield Fault(
                place=manifest_key(place), expected=f"{role} to build on an earlier step", found=f"step {delta.step}"
            )
        elif found is None:
            # Where the manifest is there and cannot be read, that has been said.
            if base_place not in chain.sha256 or base is not None:
                yield Fault(
                    place=manifest_key(base_place),
                    expected=f"{role} {delta.base}, on which {place} builds",
                    found="nothing",
                )
        elif found.digest != delta.base:
            yield Fault(
                place=manifest_key(base_place),
                expected=f"{role} {delta.base}, on which {place} builds",
                found=found.digest,
            )


# -- the files ---------------------------------------------------------------------------------------------------------


def _check_files(chain: Chain, place: str, manifest: Manifest) -> set[str]:
    """Check that everything that a manifest names is there with its size; return the keys that it names.

    What a record says is retired need not be there; what is left of it is no fault either.
    """
    named: set[str] = set()
    for role, artifact in by_role(manifest).items():
        files = list(_stored(place, role, artifact, manifest))
        named |= {file.key for file in files}
        sizes = [chain.size(file.key) for file in files]
        if (place, role) in chain.retired or (None in sizes and chain.retired_since(manifest, role) is not None):
            continue
        for file, size in zip(files, sizes, strict=True):
            if size == file.bytes:
                chain.files.append(file)
                continue
            chain.faults.append(
                Fault(
                    place=file.key,
                    expected=f"{file.bytes} bytes, says {file.named_by}",
                    found="nothing" if size is None else f"{size} bytes",
                )
            )
    return named


def _stored(place: str, role: str, artifact: Artifact, manifest: Manifest) -> Iterator[StoredFile]:
    folder, entries = artifact.stored
    may_go = role in (WEIGHTS.get(manifest.stage), TRAINER_STATE)
    owner = (manifest.stage, manifest.step, role) if may_go and manifest.step else None
    for entry in entries:
        yield StoredFile(f"{folder}/{entry.path}", entry.bytes, entry.sha256, manifest_key(place), owner)


def _sort_out_the_rest(chain: Chain, named: set[str]) -> None:
    """Tell apart what belongs beside the chain, what attempts left behind, and what should not be there."""
    committed = {f"{place}/{manifest.provenance.attempt}" for place, manifest in chain.manifests.items()}
    left: dict[tuple[str, int], list[ObjectInfo]] = defaultdict(list)
    newest = max((epoch for key in chain.objects if (epoch := layout.parse_owner(key))), default=0)
    for key, info in chain.objects.items():
        attempt, sha256 = layout.parse_attempt(key), layout.parse_code(key)
        if sha256 is not None:
            chain.files.append(StoredFile(key, info.size, sha256, "its folder's name"))
        elif attempt is not None and key not in named and attempt[0] not in committed:
            left[attempt].append(info)
        elif layout.is_probe(key):
            left[key, newest].append(info)
        elif key not in named and not layout.is_beside_the_chain(key) and layout.parse_manifest(key) is None:
            chain.faults.append(
                Fault(place=key, expected="no such object: no manifest names it", found=f"{info.size} bytes")
            )
    for info in chain.unfinished:
        attempt = layout.parse_attempt(info.key)
        left[attempt if attempt in left else (info.key, attempt[1] if attempt else newest)].append(info)
    of_the_run = [Leftover(folder=folder, epoch=epoch, objects=tuple(found)) for (folder, epoch), found in left.items()]
    beside = [
        Leftover(folder=info.key, epoch=newest, objects=(info,), is_beside_the_run=True)
        for info in chain.unfinished_beside
    ]
    chain.leftovers = (*sorted(of_the_run, key=lambda one: one.folder), *beside)


# -- the decisions -----------------------------------------------------------------------------------------------------


def _check_decisions(chain: Chain) -> tuple[int, list[Fault]]:
    """Compare each decision on this run with it. Returns how many there are, and the faults."""
    root, faults, number = chain.run.root or "/", list[Fault](), 0
    store = open_store(root)
    for name in store.list_folders(layout.CHAMPIONS):
        try:
            history = champions.decisions(root, name)
        except StoreUnavailableError:
            raise
        except (StoreError, ConfigError) as error:
            place = f"{store.uri}/{layout.CHAMPIONS}/{name}"
            faults.append(Fault(place=place, expected="decisions as they were made", found=str(error)))
            continue
        for decision in history:
            if decision.run_id == chain.run.run_id and decision.verdict != "rolled_back":
                number += 1
                place = f"{store.uri}/{layout.champion(name, decision.number)}"
                faults += _check_decision(chain, decision, place)
    return number, faults


def _check_decision(chain: Chain, decision: Decision, place: str) -> Iterator[Fault]:
    def committed(stage: str, step: int | None) -> dict[str, str]:
        manifest = chain.manifests.get(layout.stage_folder(stage, step))
        return {} if manifest is None else manifest.content.inputs | manifest.content.outputs

    evaluated, trained = committed("evaluate", decision.step), committed("preprocess/train", None)
    # An objective that learns from examples has others.
    data, table = ("examples", "evaluations_offline") if "examples" in trained else ("prompts", "evaluations")
    recorded = {
        "the export": (decision.export.digest, committed(champions.EXPORT_STAGE, decision.step).get("export")),
        "the evaluations": (
            decision.evaluation.table,
            evaluated.get(table),
        ),
        "the held-out prompts": (decision.evaluation.held_out, evaluated.get(data)),
        "the training prompts": (decision.data.train, trained.get(data)),
        "the training data": (decision.data.source_digest, trained.get("source", "")),
        "the base": (decision.base.digest, committed(POLICY_UPDATE, 0).get("policy")),
        "the config": (decision.config_digest, digest_of(chain.semantic)),
    }
    expected, found = recorded["the export"]
    if decision.verdict == "refused" and expected != found:
        # About another run that had this name: nothing of it serves.
        return
    for what, (expected, found) in recorded.items():
        if expected != found:
            yield Fault(
                place=place, expected=f"{what} of step {decision.step} to be {expected}", found=str(found or "none")
            )
