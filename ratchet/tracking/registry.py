"""MLflow's model registry as a mirror of what serves under a name: a version for each policy that was decided on, the
alias `champion` on the one that serves, and `challenger` on the newest that was decided on.

Trap: MLflow is written here and never asked. Its versions have no key of their own, so that a request sent twice makes
two; a version is known by the number of its decision, and of several with one number the oldest is kept.
"""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ratchet.errors import StoreError
from ratchet.store import champions, layout
from ratchet.store.champions import Decision
from ratchet.store.objects import open_store
from ratchet.store.run import Run
from ratchet.tracking.mlflow_runs import (
    ROOT_TAG,
    check_database_folder,
    default_tracking_uri,
    is_plain,
    problem,
    set_client_defaults,
    tagged_run,
    without_passwords,
)
from ratchet.tracking.show_champions import decision_line

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import RegisteredModel

logger = logging.getLogger(__name__)

CHAMPION = "champion"
CHALLENGER = "challenger"
PLACE_TAG = "ratchet.champions"
"""On a registered model: where the decisions are that it mirrors."""
DECISION_TAG = "ratchet.decision"
"""On a version: the number of its decision."""

_MAX_DESCRIPTION = 4000


def sync(root: str, name: str, *, tracking_uri: str | None = None) -> bool:
    """Bring MLflow's registered model `name` to what the decisions below `root` say. True if it is there afterwards.

    Whatever MLflow lacks is created, and whatever its aliases say is set back, so that one call repairs what earlier
    ones could not do. An MLflow that cannot be used is a warning: the decisions stand.
    """
    history = champions.decisions(root, name)
    while history:
        if not _attempt(root, name, history, tracking_uri):
            return False
        # A mirror that had read fewer decisions may have set its aliases after this one: whoever is last reads again.
        newest = champions.decisions(root, name)
        if len(newest) == len(history):
            break
        history = newest
    return True


def _attempt(root: str, name: str, history: Sequence[Decision], tracking_uri: str | None) -> bool:
    set_client_defaults()
    uri = tracking_uri or default_tracking_uri()
    place = f"{open_store(root).uri}/{layout.CHAMPIONS}/{name}"
    try:
        check_database_folder(uri)
        return _mirror(_client(uri), root, place, name, history)
    except Exception as error:
        # Of any class, as for the tracker; the decision is made.
        logger.warning(
            "MLflow at %s cannot be used; the decision stands, and ratchet champions %s --root %s --sync brings it "
            "there: %s",
            without_passwords(uri),
            name,
            root,
            problem(error),
            exc_info=not is_plain(error),
        )
        return False


def _client(tracking_uri: str) -> "MlflowClient":
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=tracking_uri)


def _mirror(client: "MlflowClient", root: str, place: str, name: str, history: Sequence[Decision]) -> bool:
    model = _registered_model(client, name, place)
    found = model.tags.get(PLACE_TAG)
    if found != place:
        logger.warning(
            "the registered model %s of MLflow mirrors %s, so it is left alone; give the champions of %s another name, "
            "or delete the model's tag %s",
            name,
            found,
            place,
            PLACE_TAG,
        )
        return False
    versions = _versions(client, name)
    candidates = [decision for decision in history if decision.verdict != "rolled_back"]
    missing = [decision for decision in candidates if decision.number not in versions]
    if not all(_create_version(client, root, decision) for decision in missing):
        return False
    if missing:
        # Read back: another process may have created the same ones, and the older are kept.
        versions = _versions(client, name)
    serving = champions.serving(history)
    meant = {CHALLENGER: candidates[-1], **({} if serving is None else {CHAMPION: serving})}
    gone = [decision.number for decision in meant.values() if decision.number not in versions]
    if gone:
        logger.warning(
            "MLflow's version of decision %d of %s was deleted while it was mirrored; the decision stands, and ratchet "
            "champions %s --root ... --sync makes it again",
            gone[0],
            name,
            name,
        )
        return False
    wanted = {alias: versions[decision.number] for alias, decision in meant.items()}
    # Aliases as they are now, after versions were deleted.
    aliases = {alias: str(version) for alias, version in client.get_registered_model(name).aliases.items()}
    for alias in (CHALLENGER, CHAMPION):
        if alias not in wanted:
            if alias in aliases:
                client.delete_registered_model_alias(name, alias)
        elif aliases.get(alias) != wanted[alias]:
            client.set_registered_model_alias(name, alias, wanted[alias])
    return True


def _registered_model(client: "MlflowClient", name: str, place: str) -> "RegisteredModel":
    """Return the registered model, which mirrors `place` if it mirrored nothing before."""
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name, tags={PLACE_TAG: place})
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    model = client.get_registered_model(name)
    if PLACE_TAG not in model.tags:
        client.set_registered_model_tag(name, PLACE_TAG, place)
        model = client.get_registered_model(name)
    return model


def _versions(client: "MlflowClient", name: str) -> dict[int, str]:
    """Return decision -> version; of several versions of one decision all but the oldest are deleted."""
    found: list[tuple[int, int]] = []
    token: str | None = None
    while True:
        page = client.search_model_versions(f"name = '{name}'", page_token=token)
        numbered = [(version.tags.get(DECISION_TAG, ""), int(version.version)) for version in page]
        found += [(int(number), version) for number, version in numbered if number.isdecimal()]
        token = page.token
        if not token:
            break
    kept: dict[int, str] = {}
    for number, version in sorted(found):
        if number in kept:
            _delete_version(client, name, str(version))
        kept.setdefault(number, str(version))
    return kept


def _delete_version(client: "MlflowClient", name: str, version: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.delete_model_version(name, version)
    except MlflowException as error:
        # Another process tidies up, too.
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise


def _create_version(client: "MlflowClient", root: str, decision: Decision) -> bool:
    """Create the version of a decision; False, with a warning, where MLflow cannot take its export's place."""
    from mlflow.exceptions import MlflowException

    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    tracked = tagged_run(client, experiments, decision.run)
    try:
        client.create_model_version(
            decision.name,
            decision.export.uri,
            run_id=None if tracked is None else tracked.info.run_id,
            tags=_tags(root, decision),
            description="\n".join([decision_line(decision), *decision.reasons])[:_MAX_DESCRIPTION],
            await_creation_for=0,
        )
    except MlflowException as error:
        if error.error_code != "INVALID_PARAMETER_VALUE" or "://" in decision.export.uri:
            raise
        logger.warning(
            "MLflow's server takes no folder of a machine as a model's source, and the export of decision %d of %s is "
            "in one: %s; only runs in object storage can be mirrored there",
            decision.number,
            decision.name,
            decision.export.uri,
        )
        return False
    return True


def _tags(root: str, decision: Decision) -> dict[str, str]:
    """Return what MLflow's page says of a version: where it comes from, what it learnt from, and who let it through."""
    tags = {
        DECISION_TAG: str(decision.number),
        ROOT_TAG: decision.run,
        "ratchet.verdict": decision.verdict,
        "ratchet.step": str(decision.step),
        "ratchet.export_digest": decision.export.digest,
        "ratchet.manifest": _manifest_digest(root, decision),
        "ratchet.base_model": decision.base.path,
        "ratchet.base_model_digest": decision.base.digest,
        "ratchet.data": decision.data.source,
        "ratchet.data_digest": decision.data.train,
        "ratchet.config_digest": decision.config_digest,
        "ratchet.decided_by": decision.by,
        "ratchet.accuracy": f"{decision.evaluation.accuracy:.6g}",
    }
    if decision.improvement is not None:
        tags["ratchet.improvement"] = f"{decision.improvement.mean:.6g}"
        tags["ratchet.compared_with"] = str(decision.compared_with)
    return {key: value for key, value in tags.items() if value}


def _manifest_digest(root: str, decision: Decision) -> str:
    """Return the sha256 of the export's manifest, which proves all that led to it; empty where it is gone."""
    try:
        manifest = Run(root, decision.run_id).manifest(champions.EXPORT_STAGE, decision.step)
    except StoreError as error:
        logger.warning(
            "the version of decision %d of %s goes without its digest: %s", decision.number, decision.name, error
        )
        return ""
    is_same = manifest is not None and manifest.content.outputs.get("export") == decision.export.digest
    return manifest.sha256 if manifest is not None and is_same else ""
