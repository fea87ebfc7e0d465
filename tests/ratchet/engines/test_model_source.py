"""Models that lie in object storage: copied once, whole, and refused before anything large travels."""

import hashlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from ratchet.engines import model_source
from ratchet.engines.model_source import resolve_model_folder, resolve_tokenizer_folder
from ratchet.errors import EngineError, StoreError, StoreUnavailableError
from ratchet.store import ObjectNotFoundError, open_store
from ratchet.store.artifacts import write_folder
from ratchet.store.local import LocalStore
from ratchet.store.s3 import S3Store

URI = "s3://bucket/models/tiny"
INDEX = '{"weight_map": {"model.norm.weight": "model-1.safetensors"}}'


class Bucket(LocalStore):
    """A folder that answers as the place URI and notes what is copied from it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.uri = URI
        self.copied: list[str] = []
        self.before_copy: Callable[[str], None] = lambda name: None

    def download_file(self, key: str, path: Path) -> None:
        self.before_copy(key)
        super().download_file(key, path)
        self.copied.append(key)


@pytest.fixture
def bucket(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    found = Bucket(shutil.copytree(tiny_model, tmp_path / "bucket"))
    monkeypatch.setattr(model_source, "open_store", lambda uri: found)
    monkeypatch.setattr(model_source, "_copies", [])
    monkeypatch.setattr(model_source, "_scratch", None)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("RATCHET_SCRATCH", str(scratch))
    return found


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _left_behind(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "scratch").rglob("*") if path.is_file()]


def test_a_stored_model_is_copied_once_into_the_scratch_folder(bucket: Bucket, tmp_path: Path) -> None:
    folder = resolve_model_folder(URI)
    assert folder.is_relative_to(tmp_path / "scratch")
    assert "bucket_models_tiny" in folder.name, "messages about the copy tell where it came from"
    assert _contents(folder) == _contents(bucket.root)
    assert resolve_model_folder(URI) == resolve_model_folder(f"{URI}/") == resolve_tokenizer_folder(URI) == folder
    assert sorted(bucket.copied) == sorted(path.name for path in bucket.root.iterdir())


def test_files_that_no_model_reads_stay_where_they_are(bucket: Bucket) -> None:
    for name in ("README.md", "optimizer.pt", "pytorch_model.bin", "run.py"):
        bucket.put(name, b"no part of the model")
    bucket.put("onnx/model.json", b"{}")
    (bucket.root / "model.safetensors").rename(bucket.root / "model-1.safetensors")
    bucket.put("model.safetensors.index.json", INDEX.encode())
    bucket.put("consolidated.safetensors", b"a second copy of the weights")
    names = {path.name for path in resolve_model_folder(URI).iterdir()}
    assert {"model-1.safetensors", "tokenizer.json", "config.json"} <= names
    assert not names & {"README.md", "optimizer.pt", "pytorch_model.bin", "run.py", "onnx", "consolidated.safetensors"}


def test_for_a_tokenizer_no_weights_are_copied(bucket: Bucket) -> None:
    folder = resolve_tokenizer_folder(URI)
    assert (folder / "tokenizer.json").is_file()
    assert (folder / "config.json").is_file()
    assert "model.safetensors" not in bucket.copied
    whole = resolve_model_folder(URI)
    assert whole != folder
    assert (whole / "model.safetensors").is_file()


def test_other_files_at_the_place_are_another_model(bucket: Bucket) -> None:
    first = resolve_model_folder(URI)
    weights = bucket.root / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    os.utime(weights, (1, 1))
    second = resolve_model_folder(URI)
    assert (second / "model.safetensors").read_bytes() == bytes(changed), "as many bytes as before, yet others"
    assert (first / "model.safetensors").read_bytes() != bytes(changed), "whoever has the first copy open keeps it"


def test_a_copy_that_was_tidied_away_is_made_again(bucket: Bucket) -> None:
    folder = resolve_model_folder(URI)
    (folder / "model.safetensors").unlink()
    again = resolve_model_folder(URI)
    assert again != folder
    assert _contents(again) == _contents(bucket.root)


@pytest.mark.parametrize("error", [StoreUnavailableError("no answer"), OSError(28, "No space left on device")])
def test_a_copy_that_breaks_off_is_never_used(bucket: Bucket, tmp_path: Path, error: OSError) -> None:
    def fail(name: str) -> None:
        if name == "model.safetensors":
            raise error

    bucket.before_copy = fail
    with pytest.raises(type(error)):
        resolve_model_folder(URI)
    assert _left_behind(tmp_path) == []
    bucket.before_copy = lambda name: None
    assert _contents(resolve_model_folder(URI)) == _contents(bucket.root)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_files_that_change_while_they_are_copied_are_never_used(bucket: Bucket, tmp_path: Path, name: str) -> None:
    def replace(copied: str) -> None:
        if copied == "tokenizer.json":
            bucket.put(name, bucket.get(name) + b" ")

    bucket.before_copy = replace
    with pytest.raises(StoreError, match=rf"'{URI}' cannot be read: its files changed while they were copied"):
        resolve_model_folder(URI)
    assert _left_behind(tmp_path) == []


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", r"has no config\.json"),
        ("model.safetensors", r"has only pickled weights \(pytorch_model\.bin\), which are not loaded"),
        ("tokenizer.json", "has no tokenizer"),
    ],
)
def test_what_is_no_model_is_refused_before_anything_is_copied(bucket: Bucket, missing: str, message: str) -> None:
    bucket.put("pytorch_model.bin", b"pickle")
    bucket.delete(missing)
    for resolve in (resolve_model_folder, resolve_tokenizer_folder):
        with pytest.raises(EngineError, match=f"model folder '{URI}' {message}"):
            resolve(URI)
    assert bucket.copied == []


def test_an_index_that_names_weights_that_are_not_there_is_refused_before_weights_travel(bucket: Bucket) -> None:
    bucket.put("model.safetensors.index.json", INDEX.encode())
    with pytest.raises(EngineError, match=rf"'{URI}/model\.safetensors\.index\.json' names 'model-1\.safetensors'"):
        resolve_model_folder(URI)
    assert "model.safetensors" not in bucket.copied


def test_a_place_without_objects_is_named(bucket: Bucket) -> None:
    shutil.rmtree(bucket.root)
    with pytest.raises(EngineError, match=f"model folder '{URI}' does not exist"):
        resolve_model_folder(URI)


def test_of_a_run_the_export_is_pointed_out(bucket: Bucket, tmp_path: Path) -> None:
    model = shutil.move(bucket.root, tmp_path / "model")
    bucket.root.mkdir()
    for folder in ("step-000000/policy_update/0001-a/policy", "step-000002/checkpoint_export/0001-b/export"):
        write_folder(bucket, folder, Path(model))
    write_folder(bucket, "step-000002/policy_update/0001-a/policy", Path(model))
    with pytest.raises(EngineError, match=rf"no config.json; there is one in {URI}/step-000002/checkpoint_export/.*t$"):
        resolve_model_folder(URI)


def test_a_disk_that_is_too_small_is_named_before_it_is_full(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10))
    with pytest.raises(EngineError, match=r"GB of weights, and .*scratch.* 0\.0 GB free; RATCHET_SCRATCH names"):
        resolve_model_folder(URI)
    assert "model.safetensors" not in bucket.copied


def test_the_copy_ends_with_its_process_and_not_with_a_fork_of_it(tiny_model: Path, tmp_path: Path) -> None:
    program = f"""
import os, pathlib, sys
from ratchet.engines import model_source
from ratchet.store.local import LocalStore
model_source.open_store = lambda uri: LocalStore(pathlib.Path({str(tiny_model)!r}))
folder = model_source.resolve_model_folder("s3://bucket/model")
child = os.fork()
if child == 0:
    sys.exit(0)
os.waitpid(child, 0)
assert (folder / "model.safetensors").is_file()
print(folder)
"""
    environment = {**os.environ, "RATCHET_SCRATCH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, cwd=os.getcwd()
    )
    assert done.stdout.startswith(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


# -- the hub ---------------------------------------------------------------------------------------------------------


class Hub(http.server.ThreadingHTTPServer):
    """As much of the hub as it takes to find and download the files of the model org/tiny."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), HubRequest)
        self.folder = folder
        self.sent: list[str] = []


class HubRequest(http.server.BaseHTTPRequestHandler):
    """One request."""

    def do_GET(self) -> None:
        """Answer a listing, the revision, or a file."""
        hub = cast(Hub, self.server)
        names = sorted(path.name for path in hub.folder.iterdir())
        _, _, place = self.path.partition("?")[0].partition("org/tiny/")
        commit, name = "a" * 40, place.rpartition("/")[2]
        if place in ("tree/main", f"tree/{commit}"):
            sizes = {name: (hub.folder / name).stat().st_size for name in names}
            self._send([{"type": "file", "path": name, "size": sizes[name], "oid": name} for name in names])
        elif place == "revision/main":
            self._send({"id": "org/tiny", "sha": commit, "siblings": [{"rfilename": name} for name in names]})
        elif place == f"resolve/{commit}/{name}" and name in names:
            body = (hub.folder / name).read_bytes()
            self._send(body, {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X-Repo-Commit": commit})
            if self.command == "GET":
                hub.sent.append(name)
        else:
            self.send_error(404)

    do_HEAD = do_GET

    def _send(self, value: Any, headers: Mapping[str, str] | None = None) -> None:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(200)
        for name, text in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""


@pytest.fixture
def hub(tiny_model: Path, tmp_path: Path) -> Iterator[Hub]:
    with Hub(shutil.copytree(tiny_model, tmp_path / "hub")) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def _on_hub(hub: Hub, home: Path, *calls: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Make the calls in a process that knows no other hub; their results are a line each."""
    program = "from ratchet.engines.model_source import *\n" + "\n".join(f"print({call})" for call in calls)
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "NO_PROXY": "*", **environment}
    return subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **settings}, capture_output=True, text=True, check=False
    )


def test_of_the_hub_no_weights_are_downloaded_for_a_tokenizer(hub: Hub, tmp_path: Path) -> None:
    tokenizer, model = "resolve_tokenizer_folder('org/tiny')", "resolve_model_folder('org/tiny')"
    done = _on_hub(hub, tmp_path / "home", tokenizer)
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert (folder / "tokenizer.json").is_file()
    assert "model.safetensors" not in hub.sent
    # What is there for a tokenizer is not taken for the model where the hub cannot be asked.
    offline = _on_hub(hub, tmp_path / "home", model, HF_HUB_OFFLINE="1")
    assert offline.stdout == ""
    assert "EngineError: model" in offline.stderr
    done = _on_hub(hub, tmp_path / "home", model)
    assert done.stdout.strip() == str(folder)
    assert hub.sent.count("model.safetensors") == 1
    offline = _on_hub(hub, tmp_path / "home", model, tokenizer, HF_HUB_OFFLINE="1")
    assert offline.stdout.split() == [str(folder)] * 2


def test_a_model_of_the_hub_without_safetensors_is_refused_by_its_names(hub: Hub, tmp_path: Path) -> None:
    (hub.folder / "model.safetensors").rename(hub.folder / "pytorch_model.bin")
    done = _on_hub(hub, tmp_path / "home", "resolve_tokenizer_folder('org/tiny')")
    assert "EngineError: model folder 'org/tiny' has only pickled weights (pytorch_model.bin)" in done.stderr
    assert hub.sent == []


# -- the real thing --------------------------------------------------------------------------------------------------


def test_a_model_on_a_real_server_is_the_model(s3_root: str, tiny_model: Path) -> None:
    uri = f"{s3_root}/models/tiny"
    write_folder(open_store(s3_root), "models/tiny", tiny_model)
    # A folder whose name begins the same way is another one.
    open_store(s3_root).put("models/tiny-2/other.json", b"{}")
    folder = resolve_model_folder(uri)
    assert _contents(folder) == _contents(tiny_model)
    assert resolve_model_folder(uri) == folder
    time.sleep(1.1)  # the server's clock counts seconds
    changed = (tiny_model / "model.safetensors").read_bytes()[:-1] + b"!"
    open_store(uri).put("model.safetensors", changed)
    assert (resolve_model_folder(uri) / "model.safetensors").read_bytes() == changed


def test_what_the_server_refuses_is_named_with_the_way_out(
    s3_root: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StoreError, match=r"'s3://no-such-bucket/model' cannot be read: .*NoSuchBucket"):
        resolve_model_folder("s3://no-such-bucket/model")
    with pytest.raises(EngineError, match=f"'{s3_root}/model' does not exist: no object lies there"):
        resolve_model_folder(f"{s3_root}/model")
    write_folder(open_store(s3_root), "model", tiny_model)

    def vanished(store: S3Store, key: str, path: Path) -> None:
        raise ObjectNotFoundError(f"no object {key!r} in {store.uri}")

    with monkeypatch.context() as patch:
        patch.setattr(S3Store, "download_file", vanished)
        with pytest.raises(ObjectNotFoundError, match=f"'{s3_root}/model' cannot be read: no object"):
            resolve_model_folder(f"{s3_root}/model")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(StoreError, match=r"cannot be read: .*set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        resolve_model_folder(f"{s3_root}/model")
