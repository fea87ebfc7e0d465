"""What is to be audited: from the name of a model, a champion or an export to the run and step that it came from."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ratchet.errors import ConfigError, NotCommittedError, StoreError
from ratchet.store import champions, layout
from ratchet.store.artifacts import describe_folder
from ratchet.store.champions import EXPORT_STAGE, Decision
from ratchet.store.objects import open_store
from ratchet.store.place import open_run
from ratchet.store.run import Run

_MODEL = re.compile(r"models:/([^/@]+)(?:/(\d+)|@([^/@]+))")
_CHAMPION = re.compile(rf"(?:(?P<root>.+)/)?{layout.CHAMPIONS}/(?P<name>[^/]+)(?:/(?P<number>\d+)(?:\.json)?)?")
_EXPORT = re.compile(rf"(?P<run>.+)/(?P<step>step-\d{{6,}})/{EXPORT_STAGE}(?:/[^/]+(?:/export)?)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelVersion:
    """A version of a registered model in MLflow."""

    name: str
    version: str
    aliases: tuple[str, ...]
    source: str
    mlflow_run_id: str
    decision: int
    """Number of the decision that it mirrors."""
    export_digest: str
    """As its tag says; empty where it has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """What was asked about, and where that comes from."""

    asked: str
    run: Run
    step: int | None
    """The step whose policy it is; None for the whole run."""
    decision: Decision | None = None
    """The decision on this policy that is asked about; None for a run or an export."""
    history: Sequence[Decision] = ()
    """Every decision on that name."""
    model: ModelVersion | None = None
    digest: str = ""
    """Of the export, where somebody else than its manifest says it: a decision, or the bytes of a folder."""


def find_subject(asked: str, *, root: str | None = None, tracking_uri: str | None = None) -> Subject:
    """Find what `asked` names; ConfigError or StoreError says what is expected, or what is not there.

    models:/NAME/VERSION or models:/NAME@ALIAS    a registered model of MLflow
    ROOT/champions/NAME[/NUMBER]                  the champion of a name, or what one decision was about
    ROOT/RUN-ID/step-000050/checkpoint_export/... an export in its run
    ROOT/RUN-ID                                   a run

    With `root`, NAME or NAME/NUMBER is a champion's. A local folder of a model without a run around it is known by the
    digest of its bytes, among the exports below `root`.
    """
    place = asked.rstrip("/")
    if place.startswith("models:"):
        return _of_model(place, tracking_uri)
    is_folder = not place.startswith("s3://") and Path(place, "config.json").is_file()
    if match := _EXPORT.fullmatch(place):
        return _of_export(place, open_run(match["run"]), match["step"])
    if is_folder:
        return _of_folder(place, root)
    if match := _CHAMPION.fullmatch(place if root is None else f"{root.rstrip('/')}/{layout.CHAMPIONS}/{place}"):
        return _of_champion(asked, match["root"] or ".", match["name"], match["number"])
    return Subject(asked=asked, run=open_run(place), step=None)


def _of_champion(asked: str, root: str, name: str, number: str | None, model: ModelVersion | None = None) -> Subject:
    history = champions.decisions(root, name)
    serving = champions.serving(history)
    if number is None:
        if serving is None:
            raise NotCommittedError(f"nothing serves as {name} below {root}; {len(history)} decisions were made on it")
        decision = serving
    else:
        if not 0 < int(number) <= len(history):
            raise NotCommittedError(f"{name} below {root} has {len(history)} decisions, and no decision {number}")
        decision = _decided(history, history[int(number) - 1])
    return Subject(
        asked=asked,
        run=Run(root, decision.run_id),
        step=decision.step,
        decision=decision,
        history=history,
        model=model,
        digest=decision.export.digest,
    )


def _decided(history: Sequence[Decision], decision: Decision) -> Decision:
    """Return the decision that a rollback went back to, else the decision itself."""
    if decision.verdict == "rolled_back" and decision.targets is not None:
        return history[decision.targets - 1]
    return decision


def _of_model(asked: str, tracking_uri: str | None) -> Subject:
    match = _MODEL.fullmatch(asked)
    if match is None:
        raise ConfigError(f"{asked!r}: expected models:/NAME/VERSION or models:/NAME@ALIAS")
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    from ratchet.tracking.mlflow_runs import default_tracking_uri, problem, set_client_defaults, without_passwords
    from ratchet.tracking.registry import DECISION_TAG, PLACE_TAG

    name, version, alias = match.groups()
    set_client_defaults()
    uri = tracking_uri or default_tracking_uri()
    try:
        client = MlflowClient(tracking_uri=uri)
        if version is None:
            version = str(client.get_model_version_by_alias(name, alias).version)
        found, registered = client.get_model_version(name, version), client.get_registered_model(name)
    except (MlflowException, SQLAlchemyError, OSError) as error:
        raise StoreError(
            f"MLflow at {without_passwords(uri)} has no {asked}, or cannot be used: {problem(error)}"
        ) from error
    place, number = registered.tags.get(PLACE_TAG, ""), found.tags.get(DECISION_TAG, "")
    root, _, mirrored = place.rpartition(f"/{layout.CHAMPIONS}/")
    if not root or not number.isdecimal():
        raise StoreError(
            f"{asked} was not registered by Ratchet: expected the tag {PLACE_TAG} on the model and {DECISION_TAG} on "
            "its version"
        )
    model = ModelVersion(
        name=name,
        version=version,
        aliases=tuple(sorted(alias for alias, one in registered.aliases.items() if str(one) == version)),
        source=str(found.source or ""),
        mlflow_run_id=str(found.run_id or ""),
        decision=int(number),
        export_digest=found.tags.get("ratchet.export_digest", ""),
    )
    return _of_champion(asked, root, mirrored, number, model)


def _of_export(asked: str, run: Run, folder: str) -> Subject:
    return Subject(asked=asked, run=run, step=layout.parse_step_folder(folder))


def _of_folder(asked: str, root: str | None) -> Subject:
    if root is None:
        raise ConfigError(f"{asked} is a folder without a run around it; say by --root below which its run lies")
    digest = describe_folder("export", Path(asked)).digest
    store = open_store(root.rstrip("/") or "/")
    for name in store.list_folders(layout.CHAMPIONS):
        for decision in champions.decisions(root, name):
            if decision.export.digest == digest and decision.verdict != "rolled_back":
                return _of_champion(asked, root, name, str(decision.number))
    for run_id in store.list_folders(""):
        if run_id in (layout.CHAMPIONS, layout.PREPARED):
            continue
        run = Run(root, run_id)
        for step in reversed(run.steps()):
            exported = run.manifest(EXPORT_STAGE, step)
            if exported is not None and exported.has("export") and exported.output("export").digest == digest:
                return Subject(asked=asked, run=run, step=step, digest=digest)
    raise NotCommittedError(f"no run below {root} has exported the files in {asked}: their digest is {digest}")
