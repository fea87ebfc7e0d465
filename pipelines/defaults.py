"""What pipelines run where a form is left as it is: a small model on generated problems."""

import json
from pathlib import Path
from typing import Any

import yaml

ROOT = "s3://ratchet/runs"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"

_CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def config_text(name: str) -> str:
    """Return a config of configs/ as YAML of one line, with a model to start from."""
    tree = yaml.safe_load((_CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))
    tree["actor_rollout_ref"]["model"]["path"] = MODEL
    return one_line(tree)


def one_line(tree: dict[str, Any]) -> str:
    """Return nested mappings as YAML of one line of ASCII: the compiler writes defaults into comments, too."""
    # JSON would write characters beyond U+FFFF as two surrogates, which YAML does not put together.
    text = json.dumps(tree, sort_keys=True, ensure_ascii=False)
    return "".join(one if " " <= one <= "~" else _escape(ord(one)) for one in text)


def _escape(code: int) -> str:
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
