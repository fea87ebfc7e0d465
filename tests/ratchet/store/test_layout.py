"""Names of everything in a run."""

import pytest

from ratchet.errors import ConfigError
from ratchet.store import layout


def test_names_sort_as_their_numbers() -> None:
    assert layout.manifest("reward", 12) == "step-000012/reward/manifest.json"
    assert layout.manifest("preprocess/train", None) == "data/train/manifest.json"
    assert layout.attempt_folder("reward", 12, "0003-ab") == "step-000012/reward/0003-ab"
    assert sorted([layout.step_folder(10), layout.step_folder(9)]) == ["step-000009", "step-000010"]
    assert (layout.owner(7), layout.submission(12345)) == ("owner/0007.json", "submissions/12345.json")


@pytest.mark.parametrize("step", [0, 7, 999_999, 1_000_000, 12_345_678])
def test_a_step_is_read_back_from_its_folder(step: int) -> None:
    assert layout.parse_step_folder(layout.step_folder(step)) == step


@pytest.mark.parametrize("name", ["step-12", "step-000012x", "data", "step-", "xstep-000012", "step--00012"])
def test_other_folders_are_no_steps(name: str) -> None:
    assert layout.parse_step_folder(name) is None


@pytest.mark.parametrize("epoch", [1, 9999, 10_000])
def test_an_epoch_is_read_back_from_its_claim(epoch: int) -> None:
    assert layout.parse_owner(layout.owner(epoch)) == epoch


@pytest.mark.parametrize("key", ["owner/notes.txt", "owner/7.json", "owner/old/0009.json", "owner/0009.json.bak", "x"])
def test_other_objects_claim_nothing(key: str) -> None:
    assert layout.parse_owner(key) is None


@pytest.mark.parametrize("run_id", ["", "a/b", "..", ".hidden", "-x", "a b", "x" * 129, "r\u00fcn", "a\n"])
def test_what_cannot_be_a_folders_name_is_no_run_id(run_id: str) -> None:
    with pytest.raises(ConfigError, match="run id"):
        layout.check_run_id(run_id)


def test_usual_run_ids_are_taken() -> None:
    for run_id in ("grpo-2026.11.30_a", "7", "x" * 128):
        assert layout.check_run_id(run_id) == run_id


def test_every_object_of_a_run_is_read_back_for_what_it_is() -> None:
    assert layout.parse_manifest(layout.manifest("reward", 12)) == "step-000012/reward"
    assert layout.parse_manifest(layout.manifest("preprocess/val", None)) == "data/val"
    assert layout.parse_attempt("step-000012/reward/0003-ab/rewards/part-0") == ("step-000012/reward/0003-ab", 3)
    assert layout.parse_attempt("data/val/12345-ab/prompts/part-0") == ("data/val/12345-ab", 12345)
    assert layout.parse_code(layout.code("a" * 64, "reward.py")) == "a" * 64
    beside = [layout.RUN, layout.owner(1), layout.submission(1), layout.status("id", "segment", 3), "preflight/probe"]
    beside.append(layout.index(50))
    assert all(map(layout.is_beside_the_chain, beside))


@pytest.mark.parametrize(
    "key",
    [
        "notes.txt",
        "step-000012/manifest.json",
        "step-000012/reward/notes",
        "step-000012/reward/0003-ab",
        "step-000012/reward/old/part-0",
        "step-12/reward/manifest.json",
        "code/reward.py",
        "owner/notes.txt",
    ],
)
def test_what_is_in_no_place_of_a_run_is_nothing_of_it(key: str) -> None:
    found = (layout.parse_manifest(key), layout.parse_attempt(key), layout.parse_code(key))
    assert found == (None, None, None)
    assert not layout.is_beside_the_chain(key)
