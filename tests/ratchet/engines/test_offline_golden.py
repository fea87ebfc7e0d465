"""Losses, metrics and gradients of SFT, DPO and reward models against TRL 1.16's own loss methods, in float32.

The numbers in trl_offline.json were written by trl_offline.py, which says how; where TRL can be imported, what it says
now is compared with, too. Weights are a formula's, so that no random generator stands between the two.
"""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.ratchet.engines.offline_cases import (
    DPO,
    REWARD,
    SFT,
    causal_folder,
    classifier_folder,
    gradient,
    pair_rows,
    projections,
    sft_rows,
)
from tests.ratchet.engines.trl_offline import CASES, FILE, trl_numbers

GOLDEN: dict[str, Any] = json.loads(FILE.read_text())["cases"]


def test_every_case_has_its_numbers() -> None:
    assert GOLDEN.keys() == CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_an_update_has_trls_loss_metrics_and_gradient(name: str, tmp_path: Path) -> None:
    expected = [GOLDEN[name]]
    if find_spec("trl"):
        expected.append(trl_numbers(name, tmp_path / "trl"))
    gradients, metrics = _update(name, tmp_path / "ours")
    ours = projections(gradients)
    for theirs in expected:
        assert metrics["actor/loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert ours == pytest.approx(theirs["gradients"], abs=1e-5, rel=1e-5)
        for metric, value in theirs["metrics"].items():
            # Of losses of means TRL logs the sums all the same; here a reward is what the loss compares.
            if metric.startswith("logps/") or name not in ("dpo_ipo", "dpo_sigmoid_norm"):
                assert metrics[metric] == pytest.approx(value, abs=1e-5, rel=1e-6), metric
    assert max(abs(value) for value in ours.values()) > 1e-3


def _update(name: str, folder: Path) -> tuple[Any, dict[str, float]]:
    if name == "sft":
        return gradient(causal_folder(folder), SFT, sft_rows())
    if name == "reward":
        return gradient(classifier_folder(folder), REWARD, pair_rows())
    options = dict(CASES[name])
    if options["loss_type"] == "sigmoid_norm":
        options |= {"loss_type": "sigmoid", "length_normalized": True}
    return gradient(causal_folder(folder), replace(DPO, **options), pair_rows())
