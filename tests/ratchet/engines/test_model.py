import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing

from ratchet.engines.model import (
    WeightLayout,
    chat_prompt_ids,
    check_model_folder,
    check_weights,
    context_length,
    decode,
    end_token_ids,
    load_causal_lm,
    load_config,
    load_tokenizer,
    resolve_model_folder,
    resolve_tokenizer_folder,
    tokenizer_digest,
    torch_dtype,
    weight_files,
)
from ratchet.errors import DataError, EngineError
from tests.tiny_models import ARCHITECTURES, MAX_CONTEXT, make_tiny_model

QUESTION = [{"role": "user", "content": "How many apples does she have now?"}]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model's folder that a test may spoil."""
    return shutil.copytree(tiny, tmp_path / "model")


def _edit_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def test_a_model_folder_is_used_where_it_is(tiny: Path) -> None:
    assert resolve_model_folder(str(tiny)) == tiny
    assert resolve_model_folder(f"file://{tiny}") == tiny
    assert resolve_tokenizer_folder(str(tiny)) == tiny


@pytest.mark.parametrize("path", ["/no/such/model", "./model", "../model", "a/b/c", "file:///no/such/model"])
def test_a_folder_that_is_missing_is_named(path: str) -> None:
    with pytest.raises(EngineError, match="does not exist") as caught:
        resolve_model_folder(path)
    assert path in str(caught.value)


def test_a_hub_model_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(EngineError, match="'ratchet-tests/no-such-model' is neither a local folder nor a hub model"):
        resolve_model_folder("ratchet-tests/no-such-model")


def test_a_file_is_no_model_folder(tiny: Path) -> None:
    with pytest.raises(EngineError, match="which is no folder"):
        resolve_model_folder(str(tiny / "config.json"))


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", r"has no config\.json"),
        ("model.safetensors", "has no weights"),
        ("tokenizer.json", "has no tokenizer"),
    ],
)
def test_an_incomplete_folder_is_refused(folder: Path, missing: str, message: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(EngineError, match=message):
        check_model_folder(folder)


def test_pickled_weights_are_refused_by_name(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(EngineError, match=r"only pickled weights \(pytorch_model\.bin\)"):
        check_model_folder(folder)


def test_a_link_out_of_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    (folder / "notes.txt").symlink_to(secret)
    with pytest.raises(EngineError, match="outside the model folder"):
        check_model_folder(folder)


def test_a_hub_snapshot_may_link_to_its_own_blobs_only(tiny: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "0123abc"
    blobs = shutil.copytree(tiny, repository / "blobs")
    snapshot.mkdir(parents=True)
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(Path("../../blobs") / blob.name)
    assert check_model_folder(snapshot) == snapshot
    (tmp_path / "other.json").write_text("{}")
    (snapshot / "other.json").symlink_to(tmp_path / "other.json")
    with pytest.raises(EngineError, match="outside the model folder"):
        check_model_folder(snapshot)


def test_the_index_decides_which_weight_files_there_are(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    shards = {"model-1.safetensors": names[:5], "model-2.safetensors": names[5:]}
    for shard, held in shards.items():
        save_file({name: weights[name] for name in held}, folder / shard, metadata={"format": "pt"})
    (folder / "model.safetensors").rename(folder / "older.safetensors")
    index = folder / "model.safetensors.index.json"
    places = {name: shard for shard, held in shards.items() for name in held}
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    assert [path.name for path in weight_files(folder)] == ["model-1.safetensors", "model-2.safetensors"]
    loaded = load_causal_lm(folder, "float32").state_dict()
    assert torch.equal(loaded["model.norm.weight"], weights["model.norm.weight"])

    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../model/older.safetensors"}}))
    with pytest.raises(EngineError, match="which is no file of the model folder"):
        check_model_folder(folder)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [True, False])
def test_every_architecture_loads_as_it_was_saved(tmp_path: Path, architecture: str, tied: bool) -> None:
    folder = make_tiny_model(tmp_path / "model", architecture=architecture, tied=tied)
    model = load_causal_lm(folder, "bfloat16")
    layout = WeightLayout.of_folder(folder)
    assert not model.training
    assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    assert layout == WeightLayout.of_model(model)
    assert layout.tied == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})
    saved = load_file(folder / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in saved.items()} == {
        name: shape for name, shape in layout.shapes.items() if name not in layout.tied
    }
    assert context_length(load_config(folder)) == MAX_CONTEXT


def test_capped_attention_logits_are_not_left_to_sdpa(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", architecture="gemma2")
    assert load_config(folder).attn_logit_softcapping is not None
    assert load_causal_lm(folder, "float32").config._attn_implementation == "eager"


def test_a_missing_weight_is_an_error_and_not_a_random_number(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EngineError, match=r"lacks weights.*model\.norm\.weight"):
        load_causal_lm(folder, "float32")


def test_an_architecture_that_needs_the_folders_code_is_refused(folder: Path) -> None:
    _edit_json(folder / "config.json", model_type="home-made", auto_map={"AutoConfig": "modeling.Config"})
    (folder / "modeling.py").write_text("raise SystemExit('code of the model folder ran')")
    with pytest.raises(EngineError, match="cannot be loaded"):
        load_causal_lm(folder, "float32")


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(EngineError, match="got 'int8'"):
        torch_dtype("int8")


def test_a_tokenizer_without_chat_template_is_refused(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(EngineError, match="no chat template"):
        load_tokenizer(folder)


@pytest.mark.parametrize("content", ["{", "{}", '{"model": {"type": "no-such-model"}}', "\0"])
def test_a_damaged_tokenizer_is_refused_with_its_folder(folder: Path, content: str) -> None:
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(EngineError, match=f"tokenizer in '{folder}' cannot be loaded"):
        load_tokenizer(folder)


def test_prompt_ids_do_not_depend_on_the_day(tiny: Path) -> None:
    tokenizer = load_tokenizer(tiny)
    tokenizer.chat_template = (
        "{% macro day() %}{{ strftime_now('%d %b %Y %H:%M') }}{% endmacro %}"
        "Today is {{ strftime_now('%Y-%m-%d') }}, {{ day() }}. {{ messages[0]['content'] }}"
    )
    text = tokenizer.decode(chat_prompt_ids(tokenizer, QUESTION))
    assert text == f"Today is 2024-07-26, 26 Jul 2024 00:00. {QUESTION[0]['content']}"


def test_prompt_ids_are_the_templates_text_up_to_the_assistants_turn(tiny: Path) -> None:
    tokenizer = load_tokenizer(tiny)
    token_ids = chat_prompt_ids(tokenizer, QUESTION)
    assert type(token_ids) is list
    assert all(type(token_id) is int for token_id in token_ids)
    text = "<|im_start|>user\nHow many apples does she have now?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(token_ids) == text
    assert token_ids.count(1) == 2


def test_there_is_one_bos_though_template_and_tokenizer_both_add_one(tiny: Path) -> None:
    tokenizer: Any = load_tokenizer(tiny)
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    assert tokenizer("twelve")["input_ids"][0] == 0
    token_ids = chat_prompt_ids(tokenizer, QUESTION)
    assert token_ids[:2] == [0, 1]
    assert token_ids.count(0) == 1


def test_messages_that_the_template_refuses_are_a_data_error(tiny: Path) -> None:
    tokenizer = load_tokenizer(tiny)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match="roles must alternate"):
        chat_prompt_ids(tokenizer, QUESTION)


def test_a_tokenizer_s_digest_is_what_it_does_and_not_how_it_is_written(tiny: Path, folder: Path) -> None:
    first: Any = load_tokenizer(tiny)
    digest = tokenizer_digest(first)
    first(["twelve", "a baker"], truncation=True, max_length=1, padding=True)
    assert tokenizer_digest(first) == digest, "the last call is no property of the tokenizer"
    _edit_json(folder / "config.json", torch_dtype="bfloat16", transformers_version="1.0")
    for path in (folder / "tokenizer.json", folder / "tokenizer_config.json"):
        path.write_text(json.dumps(json.loads(path.read_text()), indent=7))
    assert tokenizer_digest(load_tokenizer(folder)) == digest


def test_a_tokenizer_s_digest_tells_templates_and_tokens_apart(tiny: Path, folder: Path) -> None:
    digests = [tokenizer_digest(load_tokenizer(tiny))]
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    digests.append(tokenizer_digest(load_tokenizer(folder)))
    _edit_json(folder / "tokenizer_config.json", eos_token="<|pad|>")
    digests.append(tokenizer_digest(load_tokenizer(folder)))
    added: Any = load_tokenizer(folder)
    added.add_tokens(["loaves"])
    digests.append(tokenizer_digest(added))
    assert len(set(digests)) == 4


def test_end_tokens_come_from_every_file_that_names_one(folder: Path) -> None:
    assert end_token_ids(folder) == {0, 2}
    _edit_json(folder / "generation_config.json", eos_token_id=7)
    _edit_json(folder / "config.json", eos_token_id=[8, 9])
    assert end_token_ids(folder) == {2, 7, 8, 9}
    (folder / "generation_config.json").unlink()
    assert end_token_ids(folder) == {2, 8, 9}


def test_a_model_without_end_token_is_refused(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    _edit_json(folder / "config.json", eos_token_id=None)
    _edit_json(folder / "tokenizer_config.json", eos_token=None)
    with pytest.raises(EngineError, match="names no end token"):
        end_token_ids(folder)


def test_decoding_drops_special_tokens_and_keeps_spaces(tiny: Path) -> None:
    tokenizer = load_tokenizer(tiny)
    text = " 12 + 30 = 42 , so  don't .\n"
    assert decode(tokenizer, [1, *tokenizer.encode(text, add_special_tokens=False), 2, 3]) == text


SHAPES = {"a": (2, 3), "b": (3,), "head": (2, 3)}
TIED = {"head": "a"}


def _weights(**changes: torch.Tensor | None) -> list[tuple[str, torch.Tensor]]:
    weights: dict[str, torch.Tensor | None] = {"a": torch.ones(2, 3), "b": torch.ones(3)} | changes
    return [(name, tensor) for name, tensor in weights.items() if tensor is not None]


def test_a_tied_copy_may_be_missing_or_equal() -> None:
    assert set(check_weights(_weights(), SHAPES, TIED)) == {"a", "b"}
    assert set(check_weights(_weights(head=torch.ones(2, 3)), SHAPES, TIED)) == {"a", "b"}


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (_weights(c=torch.ones(1)), "unknown weight 'c'"),
        (_weights(b=torch.ones(4)), r"'b' has shape \(4,\), expected \(3,\)"),
        (_weights(a=None), "1 of 3 weights are missing: a"),
        (_weights(head=torch.zeros(2, 3)), "'head' is tied to 'a'"),
        (_weights() + _weights(), "'a' came twice"),
    ],
)
def test_weights_that_do_not_fit_are_refused(weights: list[tuple[str, torch.Tensor]], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        check_weights(weights, SHAPES, TIED)
