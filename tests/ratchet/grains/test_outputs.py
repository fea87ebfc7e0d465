"""What a task shows in the UI."""

import math
from pathlib import Path
from typing import Any

from ratchet.grains import outputs


class Artifact:
    """One of KFP's output artifacts, as far as this project knows them."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "deep" / "report")
        self.metadata: dict[str, Any] = {}


def test_numbers_that_are_not_finite_are_counted_and_names_fit_every_store(tmp_path: Path) -> None:
    shown = Artifact(tmp_path)
    long = f"val-core/{'x' * 300}/acc"
    outputs.write_metrics(
        shown,
        {
            "actor/pg_loss": 0.5,
            "actor/grad_norm": math.nan,
            "val-core/gsm8k/acc/mean@1": 0.25,
            "val-core/GSM8K/acc/mean@1": 0.75,
            long: 1.0,
        },
    )
    assert shown.metadata["actor/pg_loss"] == 0.5
    assert "actor/grad_norm" not in shown.metadata
    assert shown.metadata["nonfinite/actor/grad_norm"] == 1.0
    assert shown.metadata["val-core/gsm8k/acc/mean_at_1"] == 0.25
    assert all(math.isfinite(value) for value in shown.metadata.values())
    # MLMD's columns hold 255 characters and take two names for one that differ in case.
    assert max(map(len, shown.metadata)) <= 250
    assert len({name.casefold() for name in shown.metadata}) == len(shown.metadata)


def test_a_report_makes_its_folder_and_nothing_is_written_where_nobody_asks(tmp_path: Path) -> None:
    shown = Artifact(tmp_path)
    outputs.write_report(shown, ["# one", "two"])
    assert Path(shown.path).read_text() == "# one\ntwo\n"
    outputs.write_report(None, ["three"])
    outputs.write_metrics(None, {"a": 1.0})
