"""Reads the lineage of a model or a run. However long it was, no table is read, and few requests are made.

Trap: the config is read as it was submitted and never parsed, since parsing runs the Python files that it may hold.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ratchet.errors import DamagedError, NotCommittedError
from ratchet.grains.audit.records import Audit, Data, StageRecord, Submission
from ratchet.grains.audit.subject import Subject
from ratchet.grains.status.chain import in_parallel, value_at
from ratchet.store import champions, index, layout
from ratchet.store.chain import Fault
from ratchet.store.champions import EXPORT_STAGE, Decision
from ratchet.store.lineage import Lineage
from ratchet.store.manifest import digest_of
from ratchet.store.objects import ObjectNotFoundError, open_store
from ratchet.store.run import CRITIC_UPDATE, POLICY_UPDATE, Run
from ratchet.store.status import read_statuses
from ratchet.tracking.cost import Prices, cost, prices_of
from ratchet.tracking.work import Work

_EVALUATE = "evaluate"
_RECOVERY = "recovery"
_SPLITS = {
    "data/train": "data.train_files",
    "data/val": "data.val_files",
    "data/sft": "algorithm.hybrid.sft_files",
}
"""Folder of prompts or examples -> the key of the config that says where they came from."""


def audit(subject: Subject, prices: Prices | None = None) -> Audit:
    """Return the lineage of what was asked about; `prices` go before those of the newest submission in it.

    Every manifest in it was read from storage, or has the sha256 that another one of the lineage names; `faults` says
    what does not fit. StoreError only where storage cannot be read or there is nothing to begin with.
    """
    run, step = subject.run, subject.step
    last = run.last_step() if step is None else step
    lineage = Lineage(run)
    indexed = lineage.use_indexes(last)
    lineage.trace(POLICY_UPDATE if step is None else EXPORT_STAGE, last)
    # What no other manifest was made from: indexes name it, but for what came after them, at the end of their steps.
    ends = {one for one in indexed if one % index.STEPS == 0}
    listed = lineage.places([one for one in range(last + 1) if one not in indexed or one in ends or one == last])
    beside = [place for place in sorted({*lineage.others, *listed}) if _step_of(place) <= last]
    lineage.read([*beside, *_SPLITS])
    records = {place: StageRecord.of(one, lineage.sha256[place]) for place, one in lineage.manifests.items()}
    submissions, damaged = _submissions(run, Counter(one.epoch for one in records.values()))
    raw = {one: config for one, (_, config) in submissions.items()}
    exports = _of_stage(records, EXPORT_STAGE)
    if step is not None:
        exports = tuple(one for one in exports if one.step == step)
    decisions, serving = _decisions(subject, step)
    semantic = run.semantic()
    table = prices_of(raw[max(raw)] if raw else {}, prices)
    trained = [one for one in records.values() if one.step and one.stage not in (EXPORT_STAGE, _EVALUATE)]
    base = tuple(one for one in _of_stage(records, POLICY_UPDATE, CRITIC_UPDATE) if one.step == 0)
    return Audit(
        asked=subject.asked,
        run=run.uri,
        step=last,
        model=subject.model,
        decisions=decisions,
        serving=serving,
        exports=exports,
        config=semantic,
        config_digest=digest_of(semantic),
        seed=value_at(semantic, "trainer.seed"),
        base_model=str(value_at(raw[base[0].epoch], "actor_rollout_ref.model.path", "")) if base else "",
        submissions=tuple(one for one, _ in submissions.values()),
        base=base,
        data=tuple(_data(records[place], key, raw) for place, key in _SPLITS.items() if place in records),
        steps=_by_step([one for one in trained if not one.stage.endswith(_RECOVERY)], last),
        evaluations=_of_stage(records, _EVALUATE),
        recoveries=_of_stage(records, _RECOVERY, f"critic_{_RECOVERY}"),
        rollouts=sum(one.rows for one in trained),
        cost=cost(map(Work.of, lineage.manifests.values()), table, read_statuses(run.store)),
        # A manifest that several were made from contradicts each of them.
        faults=tuple(dict.fromkeys((*lineage.faults, *damaged, *_digest_faults(subject, exports)))),
    )


def _step_of(place: str) -> int:
    return layout.parse_step_folder(place.partition("/")[0]) or 0


def _of_stage(records: Mapping[str, StageRecord], *stages: str) -> tuple[StageRecord, ...]:
    return tuple(sorted((one for one in records.values() if one.stage in stages), key=lambda one: one.step or 0))


def _by_step(records: Sequence[StageRecord], last: int) -> tuple[tuple[StageRecord, ...], ...]:
    steps: list[list[StageRecord]] = [[] for _ in range(last)]
    for one in records:
        assert one.step is not None
        steps[one.step - 1].append(one)
    return tuple(tuple(sorted(stages, key=lambda one: (one.ended, one.stage))) for stages in steps)


def _data(prompts: StageRecord, key: str, configs: Mapping[int, Mapping[str, Any]]) -> Data:
    return Data(
        split=prompts.stage.rpartition("/")[2],
        source=str(value_at(configs.get(prompts.epoch, {}), key, "")),
        source_digest=prompts.inputs.get("source", ""),
        prompts=prompts,
    )


def _submissions(
    run: Run, stages: Mapping[int, int]
) -> tuple[dict[int, tuple[Submission, dict[str, Any]]], list[Fault]]:
    """Return epoch -> the submission, and its config as it was submitted; and a fault for each that is damaged."""
    damaged: dict[int, Fault] = {}

    def read(epoch: int) -> tuple[Submission, dict[str, Any]]:
        said: dict[str, Any] = {}
        try:
            said = run.submission(epoch)
        except NotCommittedError:
            pass
        except DamagedError as error:
            damaged[epoch] = Fault(
                place=layout.submission(epoch), expected="a submission as it was written", found=str(error.__cause__)
            )
        try:
            host = str(json.loads(run.store.get(layout.owner(epoch))).get("host", ""))
        except (ObjectNotFoundError, ValueError):
            host = ""
        config = said.get("config") or {}
        submission = Submission(
            epoch=epoch,
            submission_id=said.get("submission_id") or "",
            host=host,
            grain=said.get("grain") or "",
            version=said.get("version") or "",
            image=said.get("image") or "",
            accelerators=dict(_accelerators(config.get("device_map") or {})),
            stages=stages[epoch],
            is_damaged=epoch in damaged,
        )
        return submission, config

    epochs = sorted(stages)
    found = dict(zip(epochs, in_parallel(read, epochs), strict=True))
    return found, [damaged[epoch] for epoch in sorted(damaged)]


def _accelerators(device_map: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for pod, asked in device_map.items():
        count = value_at(asked, "accelerator_count", 0)
        if count:
            labels = " ".join(f"{key}={label}" for key, label in (asked.get("node_selector") or {}).items())
            yield pod, f"{count} {asked.get('accelerator_type', '')} {labels}".rstrip()


def _decisions(subject: Subject, step: int | None) -> tuple[tuple[Decision, ...], tuple[Decision, ...]]:
    """Return the decisions on what was asked about, and those of them by which it serves now."""
    root = subject.run.root or "/"
    if subject.decision is not None:
        histories = [subject.history]
    else:
        names = open_store(root).list_folders(layout.CHAMPIONS)
        histories = [champions.decisions(root, name) for name in names]
    found: list[Decision] = []
    serving: list[Decision] = []
    for history in histories:
        about = [one for one in history if one.run_id == subject.run.run_id and (step is None or one.step == step)]
        placed = champions.placed_by(history)
        found += about
        serving += [placed] if placed is not None and placed in about else []
    return tuple(found), tuple(serving)


def _digest_faults(subject: Subject, exports: Sequence[StageRecord]) -> Iterator[Fault]:
    if subject.step is None or not exports:
        return
    found = exports[0].outputs["export"].digest if "export" in exports[0].outputs else ""
    said = {
        "the decision or the folder": subject.digest,
        "MLflow": subject.model.export_digest if subject.model else "",
    }
    for who, digest in said.items():
        if digest and digest != found:
            yield Fault(place=exports[0].place, expected=f"the export {digest}, says {who}", found=found or "none")
