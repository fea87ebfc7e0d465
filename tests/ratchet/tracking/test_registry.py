"""The mirror of decisions against MLflow itself: a server over HTTP, its SQLite database, and a gateway that fails."""

import dataclasses
import hashlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ratchet.store import champions, layout
from ratchet.store.champions import Decision
from ratchet.store.objects import open_store
from ratchet.tracking import registry
from ratchet.tracking.mlflow_tracker import MLflowTracker
from tests.promotion import IMPROVEMENT, decision, finished_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated:DeprecationWarning"),
]


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A registered model of the test's own: the server is the session's."""
    return f"{request.node.name[:60]}".replace("[", "-").replace("]", "")


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "runs")


def decide(root: str, *found: Decision, name: str) -> None:
    for one in found:
        champions.append(root, name, lambda history, one=one: dataclasses.replace(one, name=name))


def client_of(uri: str) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


def mirrored(uri: str, name: str) -> tuple[list[str], dict[str, str]]:
    """Decisions of the versions in order, and alias -> decision."""
    client = client_of(uri)
    versions = sorted(client.search_model_versions(f"name = '{name}'"), key=lambda version: int(version.version))
    by_version = {str(version.version): version.tags["ratchet.decision"] for version in versions}
    aliases = client.get_registered_model(name).aliases
    return list(by_version.values()), {alias: by_version[str(version)] for alias, version in aliases.items()}


def test_every_policy_that_was_decided_on_is_a_version_and_the_aliases_say_who_serves(
    root: str, name: str, server_uri: str
) -> None:
    assert registry.sync(root, name, tracking_uri=server_uri) is True  # nothing was decided, nothing is made
    decide(root, decision(1, "refused"), name=name)
    assert registry.sync(root, name, tracking_uri=server_uri) is True
    assert mirrored(server_uri, name) == (["1"], {"challenger": "1"})
    decide(root, decision(2), name=name)
    assert registry.sync(root, name, tracking_uri=server_uri) is True
    assert mirrored(server_uri, name) == (["1", "2"], {"challenger": "2", "champion": "2"})
    refused = decision(3, "refused", 2, compared_with=2, improvement=IMPROVEMENT, reasons=("no better", "and slow"))
    decide(root, refused, name=name)
    for _ in range(2):
        assert registry.sync(root, name, tracking_uri=server_uri) is True
        assert mirrored(server_uri, name) == (["1", "2", "3"], {"challenger": "3", "champion": "2"})

    version = client_of(server_uri).get_model_version_by_alias(name, "challenger")
    assert version.source == refused.export.uri
    assert version.tags == {
        "ratchet.decision": "3",
        "ratchet.verdict": "refused",
        "ratchet.root": refused.run,
        "ratchet.step": "50",
        "ratchet.export_digest": refused.export.digest,
        "ratchet.base_model": "some/model",
        "ratchet.base_model_digest": "b" * 64,
        "ratchet.data": "train.jsonl",
        "ratchet.data_digest": "7" * 64,
        "ratchet.config_digest": "c" * 64,
        "ratchet.decided_by": "a test",
        "ratchet.accuracy": "0.5",
        "ratchet.improvement": "0.25",
        "ratchet.compared_with": "2",
    }
    assert version.description.splitlines()[1:] == ["no better", "and slow"]
    model = client_of(server_uri).get_registered_model(name)
    assert model.tags["ratchet.champions"] == f"{root}/champions/{name}"


def test_one_call_repairs_whatever_was_missed_or_moved_by_hand(root: str, name: str, server_uri: str) -> None:
    decide(root, decision(1), decision(2), decision(3, "rolled_back", 1), decision(4, "refused", 1), name=name)
    assert registry.sync(root, name, tracking_uri=server_uri) is True
    wanted = (["1", "2", "4"], {"challenger": "4", "champion": "1"})
    assert mirrored(server_uri, name) == wanted
    client = client_of(server_uri)
    client.set_registered_model_alias(name, "champion", "2")
    client.delete_registered_model_alias(name, "challenger")
    # A request that MLflow's client sent twice, and a version that somebody made.
    client.create_model_version(name, "s3://bucket/x", tags={"ratchet.decision": "2"}, await_creation_for=0)
    client.create_model_version(name, "s3://bucket/y", tags={"ratchet.decision": "mine"}, await_creation_for=0)
    assert registry.sync(root, name, tracking_uri=server_uri) is True
    versions = client.search_model_versions(f"name = '{name}'")
    assert sorted(version.tags["ratchet.decision"] for version in versions) == ["1", "2", "4", "mine"]
    assert "s3://bucket/x" not in [version.source for version in versions]
    client.delete_model_version(name, "1")
    assert registry.sync(root, name, tracking_uri=server_uri) is True
    numbers, aliases = mirrored(server_uri, name)
    assert numbers == ["2", "4", "mine", "1"]
    assert aliases == wanted[1]


def test_a_champion_that_the_store_does_not_know_loses_its_alias(root: str, name: str, server_uri: str) -> None:
    client = client_of(server_uri)
    client.create_registered_model(name)
    client.create_model_version(name, "s3://bucket/x", tags={"ratchet.decision": "mine"}, await_creation_for=0)
    client.set_registered_model_alias(name, "champion", "1")
    client.set_registered_model_alias(name, "production", "1")
    decide(root, decision(1, "refused"), name=name)
    assert registry.sync(root, name, tracking_uri=server_uri) is True
    assert mirrored(server_uri, name)[1] == {"challenger": "1", "production": "mine"}


def test_processes_that_mirror_at_once_leave_one_version_each(root: str, name: str, server_uri: str) -> None:
    decide(root, *(decision(number) for number in (1, 2, 3)), name=name)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: registry.sync(root, name, tracking_uri=server_uri), range(3)))
    assert any(found)
    assert registry.sync(root, name, tracking_uri=server_uri) is True
    numbers, aliases = mirrored(server_uri, name)
    assert sorted(numbers) == ["1", "2", "3"]
    assert aliases == {"challenger": "3", "champion": "3"}


def test_a_mirror_that_was_overtaken_sets_the_newer_champion(
    root: str, name: str, server_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decide(root, decision(1), name=name)
    mirror, calls = registry._mirror, []

    def slow(*arguments: Any) -> bool:
        if not calls:  # while this one has read decision 1, another pod decides and mirrors
            calls.append("overtaken")
            decide(root, decision(2), name=name)
            registry.sync(root, name, tracking_uri=server_uri)
        return mirror(*arguments)

    monkeypatch.setattr(registry, "_mirror", slow)
    assert registry.sync(root, name, tracking_uri=server_uri) is True
    assert mirrored(server_uri, name) == (["1", "2"], {"challenger": "2", "champion": "2"})


def test_the_version_belongs_to_the_mlflow_run_of_its_training_run(
    chain: Any, root: str, name: str, server_uri: str
) -> None:
    tracker = MLflowTracker(chain.run, experiment=name, run_name="r", params={}, tracking_uri=server_uri)
    tracker.catch_up()
    decide(root, decision(1, run=chain.run.uri), decision(2), name=name)
    assert registry.sync(root, name, tracking_uri=server_uri) is True
    client = client_of(server_uri)
    runs = {
        version.tags["ratchet.decision"]: version.run_id for version in client.search_model_versions(f"name = '{name}'")
    }
    assert runs["1"] == tracker.run_id
    assert not runs["2"]


@pytest.mark.parametrize("mode", ["500", "drop"])
def test_an_outage_is_a_warning_and_the_next_call_catches_up(
    root: str,
    name: str,
    server_uri: str,
    make_gateway: Callable[[str], Any],
    caplog: pytest.LogCaptureFixture,
    mode: str,
) -> None:
    decide(root, decision(1), decision(2), name=name)
    gateway = make_gateway(server_uri)
    gateway.mode = mode
    with caplog.at_level(logging.WARNING, "ratchet"):
        assert registry.sync(root, name, tracking_uri=gateway.uri.replace("http://", "http://ann:secret@")) is False
    (record,) = [record for record in caplog.records if record.name == "ratchet.tracking.registry"]
    message = record.getMessage()
    assert f"ratchet champions {name} --root {root} --sync brings it there" in message
    assert gateway.uri.removeprefix("http://") in message
    assert "secret" not in message
    gateway.mode = "ok"
    assert registry.sync(root, name, tracking_uri=gateway.uri) is True
    assert mirrored(server_uri, name) == (["1", "2"], {"challenger": "2", "champion": "2"})


def test_an_error_of_any_class_is_a_warning_since_the_decision_stands(
    root: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    decide(root, decision(1), name=name)
    assert registry.sync(root, name, tracking_uri="http://[bad") is False
    assert "Invalid IPv6 URL" in caplog.text


def test_an_outage_in_the_middle_leaves_nothing_that_is_not_repaired(
    root: str, name: str, server_uri: str, make_gateway: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    decide(root, *(decision(number) for number in (1, 2, 3)), name=name)
    gateway = make_gateway(server_uri)
    create = registry._create_version

    def cut(*arguments: Any) -> bool:
        created = create(*arguments)
        gateway.mode = "drop"
        return created

    monkeypatch.setattr(registry, "_create_version", cut)
    assert registry.sync(root, name, tracking_uri=gateway.uri) is False
    assert mirrored(server_uri, name) == (["1"], {})
    monkeypatch.undo()
    assert registry.sync(root, name, tracking_uri=server_uri) is True
    assert mirrored(server_uri, name) == (["1", "2", "3"], {"challenger": "3", "champion": "3"})


def test_a_version_that_is_deleted_while_it_is_mirrored_is_a_warning(
    root: str, name: str, server_uri: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    decide(root, decision(1), name=name)

    def meddled(client: Any, asked: str) -> dict[int, str]:
        for version in client.search_model_versions(f"name = '{asked}'"):
            client.delete_model_version(asked, version.version)
        return versions(client, asked)

    versions = registry._versions
    with monkeypatch.context() as patched:
        patched.setattr(registry, "_versions", meddled)
        assert registry.sync(root, name, tracking_uri=server_uri) is False
    assert "was deleted while it was mirrored; the decision stands" in caplog.text
    assert registry.sync(root, name, tracking_uri=server_uri) is True
    assert mirrored(server_uri, name) == (["1"], {"challenger": "1", "champion": "1"})


def test_a_registered_model_of_another_root_is_left_alone(
    tmp_path: Path, name: str, server_uri: str, caplog: pytest.LogCaptureFixture
) -> None:
    for folder in ("one", "two"):
        decide(str(tmp_path / folder), decision(1), name=name)
    assert registry.sync(str(tmp_path / "one"), name, tracking_uri=server_uri) is True
    assert registry.sync(str(tmp_path / "two"), name, tracking_uri=server_uri) is False
    assert f"mirrors {tmp_path}/one/champions/{name}, so it is left alone" in caplog.text
    assert mirrored(server_uri, name) == (["1"], {"challenger": "1", "champion": "1"})


def test_a_folder_as_source_is_taken_by_a_database_and_refused_by_a_server(
    root: str, name: str, server_uri: str, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    local = dataclasses.replace(decision(1), export=champions.Export(uri=f"{root}/night-1/export", digest="1" * 64))
    decide(root, local, name=name)
    assert registry.sync(root, name, tracking_uri=server_uri) is False
    assert "takes no folder of a machine as a model's source" in caplog.text
    # The same database without the server in front of it.
    assert registry.sync(root, name, tracking_uri=database) is True
    assert client_of(database).get_model_version_by_alias(name, "champion").source == local.export.uri
    assert registry.sync(root, name, tracking_uri=server_uri) is True


def test_a_promotion_stands_while_mlflow_is_down_and_is_there_after_the_next_one(
    root: str, server_uri: str, make_gateway: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ratchet.grains import promotion
    from tests.promotion import promotion_config

    gateway = make_gateway(server_uri)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", gateway.uri)
    gateway.mode = "drop"
    config = promotion_config(**{"promotion.name": "outage"})
    # Exports as they are on a cluster, in object storage; the server looks at no more than their place.
    monkeypatch.setattr(
        "ratchet.stages.gate.Export", lambda **of: champions.Export(uri="s3://b/e", digest=of["digest"])
    )
    first = promotion.promote(*finished_run(root, "first", [1.0, 0.0], config=config))
    assert first is not None
    assert first.verdict == "promoted"
    assert champions.champion(root, "outage") == first
    gateway.mode = "ok"
    second = promotion.promote(*finished_run(root, "second", [1.0, 1.0], config=config))
    assert second is not None
    assert mirrored(server_uri, "outage") == (["1", "2"], {"challenger": "2", "champion": "2"})
    promotion.rollback(root, "outage")
    assert mirrored(server_uri, "outage") == (["1", "2"], {"challenger": "2", "champion": "1"})


def test_a_version_names_the_manifest_that_proves_its_export(root: str, name: str, database: str) -> None:
    run, _ = finished_run(root, "night-1", [1.0])
    manifest = run.require("checkpoint_export", 1)
    export = manifest.output("export")
    mine = decision(1, step=1, run=run.uri, export=champions.Export(uri=f"{run.uri}/export", digest=export.digest))
    # Of another export than the one that is there, nothing is known but what the decision says.
    other = dataclasses.replace(mine, number=2, targets=2, export=dataclasses.replace(mine.export, digest="0" * 64))
    decide(root, mine, other, name=name)
    assert registry.sync(root, name, tracking_uri=database) is True
    found = client_of(database).search_model_versions(f"name = '{name}'")
    digests = {version.tags["ratchet.decision"]: version.tags.get("ratchet.manifest") for version in found}
    stored = run.store.get(layout.manifest("checkpoint_export", 1))
    assert digests == {"1": hashlib.sha256(stored).hexdigest(), "2": None}


def test_a_damaged_manifest_costs_a_version_its_digest_alone(
    root: str, name: str, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    run, _ = finished_run(root, "night-1", [1.0])
    run.store.put(layout.manifest("checkpoint_export", 1), b"{}")
    decide(root, decision(1, step=1, run=run.uri), name=name)
    assert registry.sync(root, name, tracking_uri=database) is True
    assert "goes without its digest" in caplog.text
    assert mirrored(database, name) == (["1"], {"challenger": "1", "champion": "1"})


def test_storage_that_cannot_be_read_is_no_outage_of_mlflow(root: str, name: str, server_uri: str) -> None:
    open_store(root).put(layout.champion(name, 1), b"{}")
    with pytest.raises(OSError, match="is not a decision"):
        registry.sync(root, name, tracking_uri=server_uri)
