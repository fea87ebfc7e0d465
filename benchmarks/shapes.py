"""`python -m benchmarks.shapes NAME --tokenizer MODEL --out FOLDER`: a model of a known shape with random weights.

For speed alone, where no weights of that size are at hand. Trap: an id that the tokenizer does not know would decode to
nothing, so the tokenizer's vocabulary is filled up to the shape's with entries that no text is split into.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

QWEN2_5 = {
    "vocab_size": 151936,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": QWEN2_5
    | {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "qwen2.5-1.5b": QWEN2_5
    | {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
}


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--tokenizer", required=True, type=Path, help="Hugging Face folder whose tokenizer is taken")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make(SHAPES[arguments.shape], arguments.tokenizer, arguments.out, arguments.seed)


def make(shape: dict[str, Any], tokenizer: Path, out: Path, seed: int) -> None:
    """Write a Qwen2 model of `shape` in bfloat16 to `out`; the same seed and device give the same weights."""
    out.mkdir(parents=True, exist_ok=True)
    known = AutoTokenizer.from_pretrained(tokenizer)
    ids = {name: getattr(known, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = AutoConfig.for_model("qwen2", dtype="bfloat16", **shape, **ids)
    torch.manual_seed(seed)
    auto: Any = AutoModelForCausalLM
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = auto.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(out)
    for path in tokenizer.iterdir():
        if path.name.startswith(("tokenizer", "special_tokens", "chat_template", "vocab", "merges")):
            shutil.copyfile(path, out / path.name)
    _fill_up(out / "tokenizer.json", len(known), shape["vocab_size"])


def _fill_up(path: Path, num_known: int, num_wanted: int) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    content["model"]["vocab"] |= {f"unused{index}": index for index in range(num_known, num_wanted)}
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    main()
