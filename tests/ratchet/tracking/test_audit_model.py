"""From a version or an alias of MLflow's registry to the lineage of the run that it came from, on a real server."""

from pathlib import Path

import pytest

from ratchet.errors import ConfigError, StoreError
from ratchet.grains import promotion
from ratchet.grains.audit import audit, find_subject
from ratchet.grains.audit.screen import tree_lines
from ratchet.tracking import registry
from tests.promotion import finished_run, promotion_config

pytestmark = pytest.mark.slow


def test_a_registered_model_leads_to_its_decision_and_its_run(tmp_path: Path, server_uri: str) -> None:
    from mlflow import MlflowClient

    root, name = tmp_path.as_posix(), "audited"
    for run_id, rewards in (("first", [0.0]), ("second", [1.0])):
        run, config = finished_run(root, run_id, rewards, config=promotion_config(**{"promotion.name": name}))
        promotion.promote(run, config, by="ann")
    client = MlflowClient(tracking_uri=server_uri)
    client.create_registered_model(name, tags={registry.PLACE_TAG: f"{root}/champions/{name}"})
    for number, run_id in ((1, "first"), (2, "second")):
        # As `registry.sync` makes it of runs in object storage; a server takes no folder of a machine.
        tags = {registry.DECISION_TAG: str(number), "ratchet.export_digest": "0" * 64 if number == 1 else ""}
        client.create_model_version(name, f"s3://bucket/{run_id}", tags=tags)
    client.set_registered_model_alias(name, "champion", "2")
    found = audit(find_subject(f"models:/{name}@champion", tracking_uri=server_uri))
    assert found.faults == ()
    assert found.model is not None
    assert (found.model.version, found.model.aliases, found.model.decision) == ("2", ("champion",), 2)
    assert (found.run, found.step) == (f"{root}/second", 1)
    assert [(one.number, one.by) for one in found.decisions] == [(2, "ann")]
    assert tree_lines(found)[0] == f"models:/{name}/2 @champion"
    [fault] = audit(find_subject(f"models:/{name}/1", tracking_uri=server_uri)).faults
    assert fault.expected == f"the export {'0' * 64}, says MLflow"
    with pytest.raises(StoreError, match="has no models:/audited/3"):
        find_subject(f"models:/{name}/3", tracking_uri=server_uri)
    client.create_registered_model("foreign")
    client.create_model_version("foreign", "s3://bucket/x")
    with pytest.raises(StoreError, match="was not registered by Ratchet"):
        find_subject("models:/foreign/1", tracking_uri=server_uri)
    with pytest.raises(ConfigError, match="expected models:/NAME/VERSION"):
        find_subject("models:/foreign", tracking_uri=server_uri)
