from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ratchet.engines.export import prove_export, write_export
from ratchet.engines.scorer import Scorer
from ratchet.errors import EngineError
from tests.tiny_models import make_tiny_model

SEQUENCES = [[1, 100, 101, 102, 7], [1, 9]]


def expected(folder: Path) -> list[list[float]]:
    settings: dict[str, Any] = {"compute_dtype": "float32", "temperature": 1.0, "max_tokens_per_micro_batch": 64}
    scorer = Scorer.from_folder(folder, **settings, device="cpu")
    try:
        return scorer.log_probs([ids[:1] for ids in SEQUENCES], [ids[1:] for ids in SEQUENCES])
    finally:
        scorer.close()


@pytest.mark.parametrize(
    ("architecture", "tied"), [("llama", True), ("llama", False), ("qwen3", True), ("gemma2", True)]
)
def test_an_export_reloads_to_the_model_it_was_made_from(architecture: str, tied: bool, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", architecture=architecture, tied=tied)
    write_export(folder, tmp_path / "export", dtype="float32")
    assert prove_export(tmp_path / "export", SEQUENCES, expected(folder), tolerance=1e-4) < 1e-4
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "export").num_parameters() > 0
    assert (tmp_path / "export" / "chat_template.jinja").is_file()


def test_an_export_with_one_other_weight_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    write_export(folder, tmp_path / "export", dtype="float32")
    path = tmp_path / "export" / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"] = weights["model.norm.weight"] * 1.5
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(EngineError, match="gives other log-probs"):
        prove_export(tmp_path / "export", SEQUENCES, expected(folder), tolerance=1e-3)


def test_large_exports_are_split_and_still_reload(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    write_export(folder, tmp_path / "export", dtype="float32", max_shard_size="200KB")
    assert len(list((tmp_path / "export").glob("*.safetensors"))) > 1
    prove_export(tmp_path / "export", SEQUENCES, expected(folder), tolerance=1e-4)
