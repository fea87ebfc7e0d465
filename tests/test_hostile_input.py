"""Files, texts and models that somebody made to do harm: each is refused with its name, in little time and memory.

Beside what the modules' own tests refuse: keys (store/test_objects.py), run ids (store/test_layout.py), endpoints of
rewards (rewards/test_http.py), the index of a trainer state (engines/test_trainer.py), links and pickles in model
folders (engines/test_model.py).
"""

import hashlib
import io
import json
import os
import pickle
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo

from ratchet.config import parse_text
from ratchet.config.text import MAX_CHARACTERS, MAX_DEPTH, read_value
from ratchet.data import files
from ratchet.data.sources import load_rows
from ratchet.engines import chat_template
from ratchet.engines.model import chat_prompt_ids, end_token_ids, load_causal_lm, load_tokenizer
from ratchet.engines.model import load_config as load_config_of_model
from ratchet.engines.model_folder import check_model_folder
from ratchet.engines.trainer import Trainer
from ratchet.errors import ConfigError, DataError, EngineError, StoreError
from ratchet.grains.session import submit
from ratchet.rewards.gsm8k import grade, ground_truth_value
from ratchet.store.layout import check_champion_name, check_run_id
from ratchet.store.manifest import Artifact, FileEntry, Manifest
from ratchet.store.objects import ObjectNotFoundError, open_store
from tests.ratchet.engines.trainer_cases import POLICY
from tests.ratchet.store.records import make_manifest
from tests.runs import tiny_config, write_problems
from tests.tiny_models import tiny_tokenizer

SECONDS = 5.0
"""In which everything here is refused; the usual time is milliseconds, on a machine with other work."""


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    started = time.process_time()
    yield
    assert time.process_time() - started < SECONDS


# -- configs ----------------------------------------------------------------------------------------------------------


def _laughs(first: str, each: Callable[[int], str]) -> str:
    return "\n".join([f"a0: &a0 {first}", *(f"a{level}: &a{level} {each(level - 1)}" for level in range(1, 10))])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(_laughs("[x, x]", lambda at: f"[{', '.join([f'*a{at}'] * 9)}]"), "more than 20000", id="lists"),
        pytest.param(
            _laughs("{x: 1}", lambda at: "{" + ", ".join(f"k{n}: *a{at}" for n in range(9)) + "}"),
            "more than 20000",
            id="mappings",
        ),
        pytest.param(
            _laughs("{x: 1}", lambda at: f"{{<<: [{', '.join([f'*a{at}'] * 9)}]}}"), "more than 20000", id="merges"
        ),
        pytest.param("data: &d {x: *d}", "an alias of what it is in", id="circle"),
        pytest.param("custom_reward_function: {reward_kwargs: &d [1, *d]}", "an alias of what it is in", id="ring"),
        pytest.param("data: " + "[" * 100_000, f"more than {MAX_DEPTH} lists", id="open lists"),
        pytest.param("data: " + "{a: " * 5000 + "1" + "}" * 5000, f"more than {MAX_DEPTH} lists", id="mappings deep"),
        pytest.param(
            "".join(" " * depth + "a:\n" for depth in range(500)), f"more than {MAX_DEPTH} lists", id="blocks"
        ),
        pytest.param("data: {train_files: a}\ndata: {val_files: b}", "the key 'data' for the second time", id="twice"),
        pytest.param("data: {a: 1, a: 2}", "the key 'a' for the second time", id="twice in a mapping"),
        pytest.param("data: !!python/object/apply:os.system [id]", "could not determine a constructor", id="call"),
        pytest.param("data: !!python/name:os.system", "could not determine a constructor", id="name"),
        pytest.param("trainer: {seed: " + "9" * 10**6 + "}", "an integer of 1000000 digits", id="digits"),
        pytest.param("trainer: {seed: " + "9" * 4000 + "}", r"\.\.\. \(4000 characters\)", id="many digits"),
        pytest.param("data: {train_files: 2001-13-01}", "month must be in 1..12", id="date"),
        pytest.param('data: {train_files: "a\\0b"}', "a character that no text can hold", id="NUL"),
        pytest.param('data: {train_files: "\\ud800"}', "a character that no text can hold", id="half a pair"),
        pytest.param("k" * 10**6 + ": 1", "not YAML", id="key"),
        pytest.param("? " + "k" * 10**5 + "\n: 1", "k{200}...: no such key", id="long key"),
        pytest.param("#" * (MAX_CHARACTERS + 1), f"expected at most {MAX_CHARACTERS} characters", id="long"),
        pytest.param("".join(f"k{n}: 1\n" for n in range(320)), "and 300 more keys that do not exist", id="keys"),
    ],
)
def test_yaml_that_explodes_is_refused_before_it_does(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_text(text)
    assert len(str(caught.value)) < 5000


def test_aliases_and_merges_mean_what_they_mean_within_the_limits() -> None:
    assert read_value("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: [*a, *a]", "it") == {
        "a": {"x": 1, "y": 2},
        "b": {"x": 1, "y": 3},
        "c": [{"x": 1, "y": 2}] * 2,
    }
    # As `json.dumps` writes it: two escapes for one character.
    assert read_value(json.dumps({"face": "\U0001f600"}), "it") == {"face": "\U0001f600"}


@pytest.mark.parametrize(
    "name", ["..", "../x", "a/b", "/etc", "a\0", ".ratchet", "", "a" * 129, "a\nb", "\u202ea", "-a"]
)
def test_a_name_that_leads_elsewhere_is_no_run_and_no_champion(name: str) -> None:
    for check in (check_run_id, check_champion_name):
        with pytest.raises(ConfigError):
            check(name)


@pytest.mark.parametrize("path", ["/", "a/..", "..", ".tmp-x", "a\\b.py"])
def test_a_python_file_under_an_odd_name_is_stored_nowhere(path: str, tiny_model: Path, tmp_path: Path) -> None:
    config = tiny_config(tiny_model, write_problems(tmp_path / "p.jsonl"), code=[{"path": path, "source": "x = 1"}])
    with pytest.raises(StoreError, match="not a key of object storage"):
        submit(str(tmp_path / "root"), "run", config)
    assert not list(tmp_path.rglob("*.py"))


# -- data -------------------------------------------------------------------------------------------------------------


def _rows(path: Path) -> int:
    return len(load_rows(str(path), split="train"))


def _line(**values: str) -> bytes:
    return ("{" + ", ".join(f'"{key}": {value}' for key, value in {"prompt": '"q"', **values}.items()) + "}\n").encode()


DEEP = "[" * 100_000
NESTED = "[" * 400 + "]" * 400


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        pytest.param("a.jsonl", _line(answer=DEEP), "line 1: expected a JSON object", id="deep"),
        pytest.param(
            "a.jsonl", _line(answer='"1"', extra_info='{"a": ' + NESTED + "}"), "at most 100 lists", id="extra"
        ),
        pytest.param("a.jsonl", _line(answer=NESTED), "line 1, answer: expected at most 100 lists", id="truth"),
        pytest.param("a.jsonl", _line(answer="9" * 10**6), "line 1: expected a JSON object, got", id="digits"),
        pytest.param("a.jsonl", _line(answer='"\\ud800"'), "line 1: .*surrogates not allowed", id="half a pair"),
        pytest.param("a.csv", b'prompt,answer\n"' + b"a" * 10**6 + b'",1\n', "field larger than", id="cell"),
        pytest.param("a.jsonl", b"\x1f\x8b\x08" + b"\0" * 100, "expected UTF-8, got byte 0x8b", id="gzip"),
        pytest.param("a.jsonl.gz", b"\x1f\x8b\x08", "expected a file that ends in", id="gz"),
        pytest.param("a.arrow", b"ARROW1\0\0", "expected a file that ends in", id="Arrow IPC"),
        pytest.param("a.parquet", b"ARROW1\0\0" * 9, "expected a Parquet file", id="Arrow as Parquet"),
        pytest.param("a.parquet", b"PAR1" + b"\xff" * 100 + struct.pack("<I", 100) + b"PAR1", "Parquet", id="footer"),
        pytest.param("a.parquet", b"PAR1" + struct.pack("<I", 2**31 - 1) + b"PAR1", "Parquet", id="length of footer"),
    ],
)
def test_rows_that_are_made_to_break_the_reader_are_named(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        _rows(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_messages_of_csv_may_nest_without_end(tmp_path: Path) -> None:
    deep = '[{""a"":' * 15_000
    (tmp_path / "a.csv").write_text(f'prompt,answer\n"{deep}",1\n')
    assert _rows(tmp_path / "a.csv") == 1


def test_a_line_and_a_file_have_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ratchet.data import json_lines

    monkeypatch.setattr(json_lines, "MAX_ROW_BYTES", 1000)
    (tmp_path / "a.jsonl").write_bytes(_line(answer='"1"') + _line(answer='"' + "1" * 1000 + '"'))
    with pytest.raises(DataError, match="line 2: expected at most 1000 bytes in a line, got 1001"):
        _rows(tmp_path / "a.jsonl")
    with (tmp_path / "b.jsonl").open("wb") as file:
        file.truncate(files.MAX_BYTES + 1)  # of holes
    for place in (tmp_path / "b.jsonl", tmp_path):
        (tmp_path / "train.jsonl").unlink(missing_ok=True)
        (tmp_path / "b.jsonl").exists() and os.link(tmp_path / "b.jsonl", tmp_path / "train.jsonl")
        with pytest.raises(DataError, match=f"expected at most {files.MAX_BYTES} bytes, got {files.MAX_BYTES + 1}"):
            _rows(place)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_file_is_not_waited_for(kind: str, tmp_path: Path) -> None:
    place = tmp_path / "train.jsonl"
    {
        "pipe": lambda: os.mkfifo(place),
        "device": lambda: place.symlink_to("/dev/zero"),
        "folder": lambda: (place / "x").mkdir(parents=True),
    }[kind]()
    with pytest.raises(DataError, match=f"expected (a regular file, got a {kind}|train.parquet or train.jsonl)"):
        _rows(place)
    if kind != "folder":
        with pytest.raises(DataError, match="got an empty folder"):
            _rows(tmp_path)
        store = open_store(str(tmp_path))
        for read in (store.get, lambda key: store.get_range(key, 0, 9), lambda key: store.download_file(key, place)):
            with pytest.raises(ObjectNotFoundError):
                read("train.jsonl")


def test_a_link_in_a_data_folder_stays_in_it(tmp_path: Path) -> None:
    (tmp_path / "secret.jsonl").write_bytes(_line(answer='"1"'))
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train.jsonl").symlink_to("../secret.jsonl")
    with pytest.raises(DataError, match=r"links to .*secret\.jsonl, outside the folder; name that file itself"):
        _rows(folder)
    assert _rows(folder / "train.jsonl") == 1  # by its own name
    (folder / "train.jsonl").unlink()
    (folder / "v1.jsonl").write_bytes(_line(answer='"1"'))
    (folder / "train.jsonl").symlink_to("v1.jsonl")
    assert _rows(folder) == 1


def _parquet(path: Path, table: pa.Table, **options: Any) -> Path:
    pq.write_table(table, path, compression="zstd", **options)
    return path


def test_a_parquet_file_says_how_much_it_unpacks_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = pa.table({"prompt": ["a" * 10**7], "answer": ["1"]})
    place = _parquet(tmp_path / "a.parquet", large, use_dictionary=False)
    assert place.stat().st_size < 10_000
    monkeypatch.setattr(files.check_size, "__defaults__", (10**6, "bytes"))
    with pytest.raises(DataError, match="expected at most 1000000 unpacked bytes, got 1000"):
        _rows(place)


def test_a_dictionary_counts_as_what_it_stands_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = pa.DictionaryArray.from_arrays(pa.array([0] * 2000, pa.int32()), ["a" * 10**5])
    place = _parquet(tmp_path / "a.parquet", pa.table({"prompt": words, "answer": words}))
    assert pq.read_metadata(place).row_group(0).total_byte_size < 10**6
    monkeypatch.setattr(files.check_size, "__defaults__", (10**8, "bytes"))
    with pytest.raises(DataError, match="expected at most 100000000 unpacked bytes"):
        _rows(place)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        pytest.param(pa.table({f"c{n}": [1] for n in range(1001)}), "at most 1000 columns, got 1001", id="columns"),
        pytest.param(
            pa.table({"prompt": pa.array([[None] * 300_000], pa.list_(pa.null()))}), "at most 100000 values", id="nulls"
        ),
        pytest.param(pa.table({"prompt": ["a" * 200_000]}), "at most 100000 bytes in a row", id="row"),
    ],
)
def test_a_parquet_file_has_limits(
    table: pa.Table, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ratchet.data import verl_parquet

    monkeypatch.setattr(verl_parquet, "MAX_VALUES", 100_000)
    monkeypatch.setattr(verl_parquet, "MAX_ROW_BYTES", 100_000)
    with pytest.raises(DataError, match=message):
        _rows(_parquet(tmp_path / "a.parquet", table))


# -- graders ----------------------------------------------------------------------------------------------------------

PIECES = [
    *"19#$\\{}()[<-=/*_' \t\n\u2009\u00bd\u00b2\0\u0663",
    *(
        "####",
        "#### ",
        "\\boxed{",
        "\\frac{",
        "answer is ",
        "<answer>",
        "1 or ",
        "maybe ",
        "because 1 ",
        "1,",
        "1\u2009",
    ),
    *("* ", "- ", "in 2 days ", "wait ", "==>", "1e", "1 + ", "{,}", "</a", "^ {", "it is 1 ", "Q: ", "\r\n"),
]


@pytest.mark.parametrize("before", ["", "#### 1 ", "\\boxed{1} "])
def test_grading_takes_linear_time_whatever_the_completion(before: str) -> None:
    for piece in PIECES:
        text = before + piece * (100_000 // len(piece)) + " 1"
        for mode in ("default", "strict", "flexible") if not before else ("default",):
            started = time.thread_time()
            grade(text, "1", mode)  # type: ignore[arg-type]
            # 100 kB take some milliseconds, and a second where Python collects all garbage of the process meanwhile;
            # what is quadratic takes minutes.
            assert time.thread_time() - started < 5.0, (before, piece, mode)


@pytest.mark.parametrize(
    "number",
    ["9" * 10**6, "1e999999999", "10^999999999", "9^9^9^9", "2 * 10^{10^10}", "1/0", "NaN", "Infinity", "[" * 10**5],
)
def test_a_number_of_absurd_size_is_a_wrong_answer_and_no_ground_truth(number: str) -> None:
    assert grade(f"#### {number}", "1").reward == 0.0
    with pytest.raises(DataError, match="expected a single number") as caught:
        ground_truth_value(number)
    assert len(str(caught.value)) < 300


# -- models -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny_model, tmp_path / "model")
    return tmp_path / "model"


def _header(value: Any, more: bytes = b"") -> bytes:
    text = json.dumps(value).encode()
    return struct.pack("<Q", len(text)) + text + more


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(struct.pack("<Q", 2**63) + b"{}", id="header of exabytes"),
        pytest.param(struct.pack("<Q", 99 * 2**20) + b"{}", id="header beyond the end"),
        pytest.param(struct.pack("<Q", 90_000) + b"[" * 90_000, id="nested header"),
        pytest.param(
            _header({"a": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}}),
            id="tensor of terabytes",
        ),
        pytest.param(
            _header({"a": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 4]}}, b"1234"), id="overflow"
        ),
        pytest.param(pickle.dumps(print), id="pickle by another name"),
    ],
)
def test_weights_that_are_none_are_refused_unread(content: bytes, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(EngineError, match=r"cannot be loaded: Error while deserializing header"):
        load_causal_lm(folder, "float32")


def _load(folder: Path) -> None:
    check_model_folder(folder)
    end_token_ids(folder, load_tokenizer(folder))
    load_config_of_model(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.safetensors.index.json", DEEP, "is not JSON: maximum recursion"),
        ("model.safetensors.index.json", '{"weight_map": [1]}', "expected the names of files by weight"),
        ("model.safetensors.index.json", '{"weight_map": {"a": [1]}}', "expected the names of files by weight"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "../b"}}', r"names '\.\./b', which is no file of"),
        ("generation_config.json", DEEP, "is not JSON: maximum recursion"),
        ("generation_config.json", '{"eos_token_id": {"a": 1}}', "expected token ids as eos_token_id"),
        ("config.json", DEEP, "cannot be loaded: maximum recursion"),
        ("config.json", '{"a": ' + "9" * 10**4 + "}", "cannot be loaded: Exceeds the limit"),
        ("config.json", '{"model_type": "evil", "auto_map": {"AutoConfig": "evil.C"}}', "custom code"),
        (
            "tokenizer_config.json",
            '{"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.T", null]}}',
            "code",
        ),
    ],
)
def test_files_of_a_model_that_are_made_to_break_or_run_are_refused(
    name: str, content: str, message: str, folder: Path
) -> None:
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    (folder / name).write_text(content)
    with pytest.raises(EngineError, match=message):
        _load(folder)
    assert not (folder / "ran").exists()


def test_code_that_a_known_architecture_offers_is_not_run(folder: Path) -> None:
    for name, key in (("config.json", "AutoModelForCausalLM"), ("tokenizer_config.json", "AutoTokenizer")):
        content = json.loads((folder / name).read_text())
        mapped = ["evil.T", "evil.T"] if "tokenizer" in name else "evil.M"
        (folder / name).write_text(json.dumps({**content, "auto_map": {key: mapped}}))
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    load_tokenizer(folder)
    assert type(load_causal_lm(folder, "float32")).__module__.startswith("transformers.")
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("target", ["/etc", "sub", "../../../etc/passwd"])
def test_a_folder_that_links_elsewhere_or_to_itself_is_refused(target: str, folder: Path) -> None:
    (folder / "sub").symlink_to(target)
    with pytest.raises(EngineError, match=r"sub' links to .*, outside the model folder"):
        check_model_folder(folder)


QUESTION = [{"role": "user", "content": "hi"}]
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages.__class__.__mro__ }}", "refused the messages .* is unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "refused the messages .* is unsafe"),
        ("{% include '/etc/passwd' %}", "refused the messages"),
        ("{% import 'os' as os %}", "refused the messages"),
        ("{% for i in range(10**9) %}x{% endfor %}", "refused the messages .*Range too big"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "refused the messages .*recursion"),
        ("{{ 1 // 0 }}", "refused the messages .*division"),
        ("{{ 'a' * 20000000 }}", "made 20000000 characters of the messages .*; expected at most 16777216"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "refused the messages .*recursion"),
    ],
)
def test_a_chat_template_reaches_nothing_and_is_told_for_what_it_fails(template: str, message: str) -> None:
    tokenizer = deepcopy(tiny_tokenizer())
    tokenizer.chat_template = template
    with pytest.raises(DataError, match=message) as caught:
        chat_prompt_ids(tokenizer, [{"role": "user", "content": "hi" * 10_000}])
    assert len(str(caught.value)) < 2000


def test_a_chat_template_that_does_not_end_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.2)
    tokenizer = deepcopy(tiny_tokenizer())
    # A loop of a few seconds, so that what is left behind does not outlive the tests.
    tokenizer.chat_template = LOOPS.replace("99999", "3000", 1)
    started = time.perf_counter()
    with pytest.raises(DataError, match=r"took more than 0\.2 s for the messages \[\{'role': 'user'"):
        chat_prompt_ids(tokenizer, QUESTION)
    assert time.perf_counter() - started < 3


# -- what lies in a run -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["../../x", "/etc/x", "a//b", "", ".", "a\\b", "a\0", ".tmp-x", "a/../../b"])
def test_a_manifest_that_names_a_place_outside_its_run_is_refused_when_it_is_read(path: str) -> None:
    plain = make_manifest(step=1, stage="reward")
    role, artifact = next(iter(plain.provenance.artifacts.items()))
    entry = FileEntry(path=path, bytes=1, sha256="ab" * 32)
    for bad in (replace(artifact, files=(entry,)), replace(artifact, folder=path)):
        made = replace(plain, provenance=replace(plain.provenance, artifacts={role: bad}))
        with pytest.raises(StoreError, match="not a key of object storage"):
            Manifest.from_json(made.to_json(), key="step-000001/reward/manifest.json")


def test_a_download_makes_no_folder_outside_its_target(tmp_path: Path) -> None:
    from ratchet.store.artifacts import read_folder

    store = open_store(str(tmp_path / "root"))
    store.put("a/b", b"x")
    entry = FileEntry(path="../../made/x", bytes=1, sha256=hashlib.sha256(b"x").hexdigest())
    with pytest.raises(StoreError, match="not a key"):
        read_folder(store, Artifact(folder="a", files=(entry,)), tmp_path / "deep" / "target")
    assert not (tmp_path / "made").exists()


def test_deep_json_is_no_manifest() -> None:
    with pytest.raises(StoreError, match="is not a manifest") as caught:
        Manifest.from_json(b"[" * 100_000, key="data/train/manifest.json")
    assert len(str(caught.value)) < 700


class _Evil:
    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.place),)


@pytest.mark.parametrize("kind", ["index", "index by an attribute", "tensor"])
def test_a_trainer_state_runs_no_code(kind: str, tiny_model: Path, tmp_path: Path) -> None:
    trainer = Trainer.from_folder(tiny_model, POLICY, device="cpu")
    state, ran = tmp_path / "state", tmp_path / "ran"
    trainer.save_state(state)
    index = pickle.loads((state / ".metadata").read_bytes())
    if kind == "index":
        index = [index, _Evil(ran)]
    elif kind == "index by an attribute":
        index.planner_data = {"x": _Evil(ran)}
    else:
        evil = io.BytesIO()
        torch.save(_Evil(ran), evil)
        (state / "evil").write_bytes(evil.getvalue())
        index.storage_data = {key: _StorageInfo("evil", 0, len(evil.getvalue())) for key in index.storage_data}
    (state / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(EngineError):
        trainer.load_state(state)
    assert not ran.exists()
    trainer.close()
