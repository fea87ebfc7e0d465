"""A random model of another vocabulary than its tokenizer's."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import shapes


def test_every_id_decodes_and_text_becomes_known_ids_alone(tmp_path: Path, tiny_model: Path) -> None:
    shape = {"vocab_size": 700, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    shapes.make(shape | {"num_attention_heads": 2, "num_key_value_heads": 1}, tiny_model, tmp_path / "made", seed=3)
    before, after = (AutoTokenizer.from_pretrained(folder) for folder in (tiny_model, tmp_path / "made"))
    text = "Mia has 7 apples, and unused600 is a word."
    assert max(after.encode(text)) < len(before)
    assert after.decode(after.encode(text)) == text
    assert after.decode([len(before), 699]) == f"unused{len(before)}unused699"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    assert model.dtype == torch.bfloat16
    assert model.get_input_embeddings().weight.shape == (700, 64)
