"""Runs of many steps that nobody trained: one real step, copied under new numbers with the digests that follow.

Weights are not copied, as no audit reads them: every policy has the digest of the step that is copied.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa

from ratchet.data import schemas
from ratchet.data.parquet import read_table, write_table
from ratchet.store import layout
from ratchet.store.manifest import Artifact, Manifest
from ratchet.store.run import POLICY_UPDATE, Run

_TABLES = {"rollouts": schemas.ROLLOUTS, "rewards": schemas.REWARDS, "trajectories": schemas.TRAJECTORIES}
_AT_THE_END = ("evaluate", "checkpoint_export")


def lengthen(run: Run, steps: int, *, tables_of: Collection[int]) -> None:
    """Copy the last step of a finished local `run` until it has `steps`, and its evaluation and export to the last one.

    Of the steps `tables_of` the tables are copied, too, with their groups renamed. The others' manifests name the
    copied step's own.
    """
    last = run.last_step()
    manifests = run.step_manifests(last)
    policy = run.require(POLICY_UPDATE, last)
    shas = {layout.stage_folder(one.stage, last): one.sha256 for one in manifests}
    for step in range(last + 1, steps + 1):
        digests = {policy.content.inputs["policy"]: policy.content.outputs["policy"]}
        for one in manifests:
            if one.stage in _AT_THE_END and step < steps:
                continue
            artifacts = dict(one.provenance.artifacts)
            if step in tables_of:
                artifacts |= {role: _renamed(run, one, step, role) for role in artifacts.keys() & _TABLES.keys()}
            digests |= {one.content.outputs[role]: artifact.digest for role, artifact in artifacts.items()}
            body = _copy(one, step, artifacts, digests, shas).to_json()
            shas[layout.stage_folder(one.stage, step)] = hashlib.sha256(body).hexdigest()
            path = Path(run.uri, layout.manifest(one.stage, step))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(body)
    for stage in _AT_THE_END:
        run.store.delete(layout.manifest(stage, last))
    run.forget()


def _copy(
    source: Manifest, step: int, artifacts: dict[str, Artifact], digests: dict[str, str], shas: dict[str, str]
) -> Manifest:
    """`source` as a manifest of `step`: what it read are the copies."""
    content, provenance = source.content, source.provenance
    assert source.step is not None
    moved, version = step - source.step, content.policy_version
    previous = {}
    for place, sha256 in provenance.previous.items():
        folder, _, stage = place.partition("/")
        old = layout.parse_step_folder(folder)
        new = place if old is None else layout.stage_folder(stage, old + moved)
        previous[new] = sha256 if old is None else shas[new]
    return Manifest(
        content=dataclasses.replace(
            content,
            step=step,
            policy_version=None if version is None else version + moved,
            inputs={role: digests.get(digest, digest) for role, digest in content.inputs.items()},
            outputs={role: artifact.digest for role, artifact in artifacts.items()},
        ),
        provenance=dataclasses.replace(
            provenance,
            artifacts=artifacts,
            previous=previous,
            started=provenance.started + 60 * moved,
            ended=provenance.ended + 60 * moved,
            trainer_state=None,
        ),
    )


def _renamed(run: Run, source: Manifest, step: int, role: str) -> Artifact:
    table = read_table(run.store, source.output(role), _TABLES[role])
    groups = [f"{step:06d}/{group.partition('/')[2]}" for group in table["group_id"].to_pylist()]
    table = table.set_column(table.schema.get_field_index("group_id"), "group_id", pa.array(groups, pa.string()))
    folder = f"{layout.attempt_folder(source.stage, step, source.provenance.attempt)}/{role}"
    return write_table(run.store, folder, table)


def upload(run: Run, root: str, *, leaving_out: Callable[[str], bool] = lambda key: False) -> Run:
    """Copy everything that lies below a local run to another root, but for the keys that are to be left out."""
    copied = Run(root, run.run_id)
    folder = Path(run.uri)
    files = [path for path in folder.rglob("*") if path.is_file()]
    paths = [path for path in files if not leaving_out(path.relative_to(folder).as_posix())]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda path: copied.store.put(path.relative_to(folder).as_posix(), path.read_bytes()), paths))
    return copied
