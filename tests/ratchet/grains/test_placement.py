"""What a pipeline's parameters change in a run's config, and a config that lies in object storage."""

from pathlib import Path

import pytest

from ratchet.config import parse_config
from ratchet.errors import ConfigError, StoreError
from ratchet.grains.placement import config_overrides, stored_text


def test_parameters_that_say_nothing_change_nothing() -> None:
    assert config_overrides() == []


def test_parameters_become_overrides_of_the_config() -> None:
    overrides = config_overrides(
        total_steps=3,
        steps_per_segment=2,
        grain="stage",
        device_map={"rollout": {"cpu": 4, "node_selector": {"pool": "gpu"}}},
        champion="2026",
        min_accuracy=0.00001,
    )
    config = parse_config({}, overrides)
    trainer, placement, promotion = config.trainer, config.device_map.rollout, config.promotion
    assert (trainer.total_training_steps, trainer.steps_per_segment, trainer.grain) == (3, 2, "stage")
    assert (placement.cpu, placement.node_selector) == ("4", {"pool": "gpu"})
    # Numbers stay numbers, and a name of digits stays a name.
    assert (promotion.name, promotion.min_accuracy) == ("2026", 0.00001)


def test_a_stored_config_that_is_none_is_the_submissions_fault_and_not_the_storages(tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text("trainer: {seed: 5}")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe")
    assert stored_text(f"{tmp_path}/good.yaml") == "trainer: {seed: 5}"
    with pytest.raises(ConfigError, match=r"there is no config at .*/gone\.yaml"):
        stored_text(f"{tmp_path}/gone.yaml")
    with pytest.raises(ConfigError, match=r"cannot read the config .*/bytes\.yaml: it is not UTF-8") as found:
        stored_text(f"{tmp_path}/bytes.yaml")
    assert not isinstance(found.value, StoreError)
