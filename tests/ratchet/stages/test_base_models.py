"""Version 0 from wherever the model lies."""

from pathlib import Path

import pytest

from ratchet.engines import model_source
from ratchet.errors import StoreError, StoreUnavailableError
from ratchet.stages.base_models import model_digest
from ratchet.store import ObjectStore
from ratchet.store.artifacts import write_folder
from ratchet.store.objects import open_store
from ratchet.store.run import Run
from ratchet.store.s3 import S3Store
from tests.ratchet.stages.preparing import prepare
from tests.runs import content_digests, tiny_config, train_tiny, write_problems


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    return write_problems(tmp_path / "problems.jsonl", 4)


def test_a_model_without_a_digest_is_told_from_storage_that_does_not_answer(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert model_digest(str(tmp_path / "gone")) is None
    for error, is_passing in ((StoreError("no such bucket"), False), (StoreUnavailableError("no answer"), True)):

        def fail(uri: str, error: StoreError = error) -> ObjectStore:
            raise error

        monkeypatch.setattr(model_source, "open_store", fail)
        if is_passing:
            with pytest.raises(StoreUnavailableError, match="model folder 's3://bucket/model' cannot be read: no answ"):
                model_digest("s3://bucket/model")
        else:
            assert model_digest("s3://bucket/model") is None


def test_a_run_from_a_model_in_object_storage_is_the_run_from_the_same_model_here(
    s3_root: str, tmp_path: Path, tiny_model: Path, problems: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[str] = []
    original = S3Store.download_file

    def note(store: S3Store, key: str, path: Path) -> None:
        copied.append(f"{store.uri}/{key}")
        original(store, key, path)

    monkeypatch.setattr(S3Store, "download_file", note)
    write_folder(open_store(s3_root), "models/tiny", tiny_model)
    values = {"trainer.total_training_steps": 1}
    here = train_tiny(tmp_path / "runs", "here", tiny_config(tiny_model, problems, **values))
    uri = f"{s3_root}/models/tiny"
    there = train_tiny(s3_root, "there", tiny_config(uri, problems, **values))
    assert content_digests(there) == content_digests(here)
    assert copied.count(f"{uri}/model.safetensors") == 1, "not once for each of those who ask"
    stored = [place for place in copied if "/there/step-000000/" in place and place.endswith("model.safetensors")]
    assert not stored, "what this process has just stored is not read back"
    # What that run exported is a model by its place.
    exported = there.require("checkpoint_export", 1)
    export = f"{there.uri}/{exported.output('export').folder}"
    assert model_digest(export) == exported.content.outputs["export"]
    prepare(s3_root, "next", tiny_config(export, problems, **values))
    assert Run(s3_root, "next").require("policy_update", 0).content.outputs["policy"] == model_digest(export)
