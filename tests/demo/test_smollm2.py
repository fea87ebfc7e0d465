import importlib.util
import json
import shutil
import threading
from pathlib import Path

import pytest

from demo import smollm2
from ratchet.errors import DataError

MODEL_SHA256 = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"
TOKENIZER_SHA256 = "e9f1b9eb29e5f4fc508736f874cc7d1321834fb5610e169fb1acae231472321b"


def fake_conversion(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """Replaces the conversion by writing two small files; returns the list of the folders that it was called for."""
    source = tmp_path / "model.gguf"
    source.write_bytes(b"GGUF")
    calls: list[Path] = []

    def convert(source: Path, target: Path) -> None:
        calls.append(target)
        (target / "model.safetensors").write_bytes(b"weights")
        (target / "tokenizer.json").write_text("{}")

    monkeypatch.setattr(smollm2, "gguf_file", lambda: source)
    monkeypatch.setattr(smollm2, "_package_version", lambda: "1.0")
    monkeypatch.setattr(smollm2, "_convert", convert)
    monkeypatch.setattr(smollm2.importlib.metadata, "version", lambda name: "1.0")
    return calls


def test_the_conversion_runs_once_and_leaves_nothing_else(monkeypatch, tmp_path):
    calls = fake_conversion(monkeypatch, tmp_path)
    first = smollm2.smollm2_folder(tmp_path / "cache")
    assert smollm2.smollm2_folder(tmp_path / "cache") == first
    assert len(calls) == 1
    assert sorted(path.name for path in first.iterdir()) == ["conversion.json", "model.safetensors", "tokenizer.json"]
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [".smollm2-lock", first.name]


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "model.safetensors").write_bytes(b"weight"),
        lambda folder: (folder / "model.safetensors").write_bytes(b"Weights"),
        lambda folder: (folder / "tokenizer.json").unlink(),
        lambda folder: (folder / "conversion.json").unlink(),
        lambda folder: (folder / "conversion.json").write_text('{"files": {'),
        shutil.rmtree,
    ],
    ids=["shorter", "same length", "file missing", "no manifest", "half a manifest", "folder missing"],
)
def test_a_damaged_folder_is_made_again(monkeypatch, tmp_path, damage):
    calls = fake_conversion(monkeypatch, tmp_path)
    folder = smollm2.smollm2_folder(tmp_path)
    damage(folder)
    assert smollm2.smollm2_folder(tmp_path) == folder
    assert len(calls) == 2
    assert (folder / "model.safetensors").read_bytes() == b"weights"


def test_what_a_killed_conversion_left_is_removed_and_never_used(monkeypatch, tmp_path):
    fake_conversion(monkeypatch, tmp_path)
    left = tmp_path / ".smollm2-killed" / "made"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    folder = smollm2.smollm2_folder(tmp_path)
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert not left.parent.exists()


def test_a_conversion_that_fails_leaves_no_folder(monkeypatch, tmp_path):
    fake_conversion(monkeypatch, tmp_path)

    def fail(source: Path, target: Path) -> None:
        (target / "model.safetensors").write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(smollm2, "_convert", fail)
    with pytest.raises(OSError, match="no space left"):
        smollm2.smollm2_folder(tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".smollm2-lock"]


def test_several_callers_convert_once(monkeypatch, tmp_path):
    calls = fake_conversion(monkeypatch, tmp_path)
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(smollm2.smollm2_folder(tmp_path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 8
    assert len(set(folders)) == 1
    assert len(calls) == 1


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package_of_weights")
    with pytest.raises(DataError, match="no_such_package_of_weights is not installed; `make setup`"):
        smollm2.smollm2_folder(tmp_path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec(smollm2.PACKAGE) is None:
        pytest.skip("the package with the weights is not installed")
    return smollm2.smollm2_folder(tmp_path_factory.mktemp("model"))


@pytest.mark.slow
def test_the_real_weights_and_tokenizer_are_the_known_ones(folder):
    files = json.loads((folder / "conversion.json").read_text())["files"]
    assert files["model.safetensors"] == MODEL_SHA256
    assert files["tokenizer.json"] == TOKENIZER_SHA256
    assert "chat_template.jinja" in files


@pytest.mark.slow
def test_the_real_tokenizer_splits_digits_and_speaks_chatml(folder):
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(folder)
    pieces = [tokenizer.decode([token]) for token in tokenizer("cost 1275")["input_ids"]]
    assert pieces == ["cost", " ", "1", "2", "7", "5"]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 2+2?"}], add_generation_prompt=True, tokenize=False
    )
    assert chat.endswith("<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.model_max_length == 8192
    assert GenerationConfig.from_pretrained(folder).eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>") == 2


@pytest.mark.slow
def test_the_real_model_knows_the_capital_of_france(folder):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    tokens = model.generate(prompt, max_new_tokens=20, do_sample=False)[0, prompt.shape[1] :]
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "The capital of France is Paris."
