"""What the runs of the suite train, and what must hold of what they have committed.

Trap: digests of weights are equal only where the number of threads and the processor are. What does not depend on them
(prompts, their order, the first policy) is compared in any case.
"""

import hashlib
import itertools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ratchet.data import schemas
from ratchet.store import layout
from ratchet.store.objects import open_store
from ratchet.store.run import POLICY_UPDATE, Run
from tests.e2e.environment import REPOSITORY

logger = logging.getLogger(__name__)

STAGES = ("rollout", "reward", "advantage", POLICY_UPDATE)
"""Stages of a step that every such run has."""
STEPS_OF_REFERENCE = 16
SMALL_POD = {"cpu": "250m", "memory": "3Gi"}
"""Two cores hold the control plane, too."""


def tiny_config(model: str, *, pod: Mapping[str, Any] = SMALL_POD, **sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config of a few steps on generated problems; `sections` are merged into its own."""
    config: dict[str, Any] = yaml.safe_load((REPOSITORY / "configs" / "tiny.yaml").read_text(encoding="utf-8"))
    config["data"] |= {
        "train_files": "ratchet/word-problems?level=1&size=64",
        "val_files": "ratchet/word-problems?level=1&size=8",
    }
    config["actor_rollout_ref"]["model"]["path"] = model
    # A random model earns nothing: the entropy bonus moves the weights at every step all the same.
    config["actor_rollout_ref"]["actor"]["entropy_coeff"] = 0.01
    config["trainer"] |= {"logger": ["console"], "val_before_train": False, "project_name": "ratchet-e2e"}
    config["device_map"] = {"segment": dict(pod), "evaluate": dict(pod)}
    for name, section in sections.items():
        config[name] = {**config.get(name, {}), **section}
    return config


def upload_model(root: str, folder: Path) -> str:
    """Make the tiny random model and put it below the root, under its digest; return where it is."""
    from tests.tiny_models import make_tiny_model

    files = sorted(path for path in make_tiny_model(folder).iterdir() if path.is_file())
    digest = hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in files)).hexdigest()[:16]
    place = f"{root}/e2e-models/{digest}"
    store = open_store(place)
    for path in files:
        if store.size(path.name) != path.stat().st_size:
            store.upload_file(path, path.name)
    logger.info("the model is at %s", place)
    return place


def is_complete(run: Run, steps: int) -> bool:
    """Whether every step up to that one, its evaluation and its export are committed."""
    stages = [(POLICY_UPDATE, step) for step in range(steps + 1)] + [("evaluate", steps), ("checkpoint_export", steps)]
    return all(run.manifest(stage, step) is not None for stage, step in stages)


def check_chain(run: Run, steps: int) -> None:
    """Fail unless every stage up to `steps` is committed once, in order, and each names what it was made from."""
    found = {}
    for step in range(steps + 1):
        for manifest in run.step_manifests(step):
            found[layout.stage_folder(manifest.content.stage, step)] = manifest
    for step in range(1, steps + 1):
        names = [layout.stage_folder(stage, step) for stage in STAGES]
        assert [name for name in names if name not in found] == [], f"{run.uri}: not committed"
        began, ended = (
            getattr(found[name].provenance, what) for name, what in ((names[0], "started"), (names[-1], "ended"))
        )
        assert began <= ended
    updates = [run.require(POLICY_UPDATE, step) for step in range(steps + 1)]
    assert [update.content.policy_version for update in updates] == list(range(steps + 1))
    times = [update.provenance.ended for update in updates]
    assert times == sorted(times), f"{run.uri}: steps were committed out of order: {times}"
    epochs = [update.provenance.epoch for update in updates]
    assert epochs == sorted(epochs), f"{run.uri}: an older owner committed after a newer one: {epochs}"
    assert max(epochs) <= run.newest_epoch()
    for earlier, later in itertools.pairwise(updates[1:]):
        assert later.content.outputs["policy"] != earlier.content.outputs["policy"], "a step that changed no weight"
    for place, manifest in found.items():
        for name, sha256 in manifest.provenance.previous.items():
            assert sha256 == _manifest_of(run, name).sha256, f"{run.uri}/{place}: {name} is not what it was made from"
    for stage in ("evaluate", "checkpoint_export"):
        assert run.manifest(stage, steps) is not None, f"{run.uri}: {stage} of step {steps} is not committed"


def check_same_content(run: Run, other: Run, steps: int, *, is_exact: bool) -> None:
    """Fail unless the first `steps` steps of two runs are the same: bit by bit, or as far as threads do not decide."""
    for split in ("train", "val"):
        mine, theirs = (one.require(f"preprocess/{split}", None).content_digest for one in (run, other))
        assert mine == theirs, f"the {split} prompts of {run.uri} and {other.uri} differ"
    assert run.require(POLICY_UPDATE, 0).content_digest == other.require(POLICY_UPDATE, 0).content_digest
    for step in range(1, steps + 1):
        assert _prompts_of(run, step) == _prompts_of(other, step), f"step {step}: other prompts, or in another order"
    if not is_exact:
        logger.warning(
            "%s and %s: only prompts and their order are compared; threads or processors may differ", run.uri, other.uri
        )
        return
    for step in range(1, steps + 1):
        for stage in STAGES:
            mine, theirs = (one.require(stage, step).content_digest for one in (run, other))
            assert mine == theirs, (
                f"{layout.stage_folder(stage, step)} of {run.uri} and {other.uri} differ: the same config gives "
                "the same content on one kind of processor with one number of threads (RATCHET_E2E_EXACT=0 elsewhere)"
            )


def check_export(folder: Path) -> None:
    """Fail unless the folder is a model that answers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    with torch.no_grad():
        logits = model(**tokenizer("12 + 30 =", return_tensors="pt")).logits
    assert torch.isfinite(logits).all()


def _prompts_of(run: Run, step: int) -> list[Any]:
    from tests.runs import table_rows

    return [row["prompt_id"] for row in table_rows(run, "rollout", "rollouts", schemas.ROLLOUTS, step)]


def _manifest_of(run: Run, place: str) -> Any:
    folder, _, stage = place.rpartition("/")
    step = layout.parse_step_folder(folder)
    return run.require(stage if step is not None else f"preprocess/{stage}", step)
