"""`python -m pipelines.compile`: write every pipeline's golden YAML; `--check` fails where one is out of date."""

import sys
import tempfile
from pathlib import Path

from kfp import compiler, dsl

from pipelines.dpo.pipeline import dpo, dpo_stages
from pipelines.grpo.pipeline import grpo, grpo_stages, grpo_steps
from pipelines.hybrid.pipeline import hybrid
from pipelines.nightly.pipeline import nightly
from pipelines.ppo.pipeline import ppo, ppo_stages
from pipelines.reward_model.pipeline import reward_model
from pipelines.sft.pipeline import sft

FOLDER = Path(__file__).parent
GOLDEN: dict[Path, dsl.base_component.BaseComponent] = {
    FOLDER / "dpo" / "pipeline.yaml": dpo,
    FOLDER / "dpo" / "pipeline_stages.yaml": dpo_stages,
    FOLDER / "grpo" / "pipeline.yaml": grpo,
    FOLDER / "grpo" / "pipeline_stages.yaml": grpo_stages,
    FOLDER / "grpo" / "pipeline_steps.yaml": grpo_steps,
    FOLDER / "hybrid" / "pipeline.yaml": hybrid,
    FOLDER / "nightly" / "pipeline.yaml": nightly,
    FOLDER / "ppo" / "pipeline.yaml": ppo,
    FOLDER / "ppo" / "pipeline_stages.yaml": ppo_stages,
    FOLDER / "reward_model" / "pipeline.yaml": reward_model,
    FOLDER / "sft" / "pipeline.yaml": sft,
}


def compiled(pipeline: dsl.base_component.BaseComponent) -> str:
    """Return the pipeline's YAML."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pipeline.yaml"
        compiler.Compiler().compile(pipeline, str(path))
        return path.read_text(encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Write the files, or with `--check` compare them. Returns the exit code."""
    stale = 0
    for path, pipeline in GOLDEN.items():
        text = compiled(pipeline)
        if arguments == ["--check"]:
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                sys.stderr.write(f"{path} is out of date; run: make compile\n")
                stale += 1
        else:
            path.write_text(text, encoding="utf-8")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
