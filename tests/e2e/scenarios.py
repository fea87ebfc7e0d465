"""The runs of the suite, by name: what each is given, and the same training on this machine to compare with."""

import os
from typing import TYPE_CHECKING, Any

from tests.e2e.chain import SMALL_POD, STEPS_OF_REFERENCE, tiny_config
from tests.e2e.live import Live, LiveRun

if TYPE_CHECKING:
    from ratchet.store.run import Run

MAIN_STEPS = 3
LABEL_OF_NO_NODE = "ratchet.e2e/nobody"


def describe(live: Live, name: str) -> LiveRun:
    """Return the run of that name as it will be submitted."""
    run, model = live.run(name), live.model
    if run.config is not None:
        return run
    config = tiny_config(model)
    match name:
        case "main":
            return run.describe("grpo", config, total_steps=MAIN_STEPS, steps_per_segment=1)
        case "loss":
            # Long enough that its pod is still at work when it is deleted.
            return run.describe("grpo", config, total_steps=STEPS_OF_REFERENCE, steps_per_segment=STEPS_OF_REFERENCE)
        case "together":
            return run.describe("grpo", config, total_steps=4, steps_per_segment=1)
        case "ended":
            return run.describe("grpo", config, total_steps=4, steps_per_segment=2)
        case "refused":
            return run.describe("grpo", tiny_config(f"{live.root}/no-such-model"), total_steps=1)
        case "waits":
            asked: dict[str, Any] = {**SMALL_POD, "accelerator_count": 1, "node_selector": {LABEL_OF_NO_NODE: "here"}}
            return run.describe("grpo", config, total_steps=1, device_map={"segment": asked})
        case "nightly" | "nightly-again":
            config = tiny_config(model, trainer={**config["trainer"], "logger": ["console", *_trackers(live)]})
            values = {"champion": f"e2e-{live.token}", "total_steps": 1, "steps_per_segment": 1}
            return run.describe("nightly", config, **values)
        case _:
            return run.describe("grpo", config, total_steps=MAIN_STEPS, steps_per_segment=MAIN_STEPS)


def begin(live: Live, name: str) -> LiveRun:
    """Submit the run of that name unless that was done before."""
    run = describe(live, name)
    if not run.pipeline_runs:
        answer = run.submit()
        assert answer["what"] == "started", answer
    return run


def train_here(live: Live) -> "Run":
    """Train the suite's config in a process of this machine, on one thread, and return that run."""
    import yaml

    from tests.runs import train_in_a_process

    config = yaml.safe_dump(tiny_config(live.model))
    overrides = [f"trainer.total_training_steps={STEPS_OF_REFERENCE}", "trainer.logger=[]"]
    root = str(live.folder / "here")
    os.makedirs(root, exist_ok=True)
    return train_in_a_process(root, "here", config, overrides, live.folder)


def _trackers(live: Live) -> list[str]:
    return ["mlflow"] if (live.settings or {}).get("MLFLOW_TRACKING_URI") else []
