"""What an audit says of a trained, evaluated and promoted run, whichever way it is asked for."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ratchet.config import RunConfig
from ratchet.errors import ConfigError, NotCommittedError
from ratchet.grains import loop, promotion
from ratchet.grains.audit import Audit, audit, find_subject
from ratchet.grains.audit.screen import tree_lines
from ratchet.grains.session import open_session, submit
from ratchet.store import champions, layout
from ratchet.store.artifacts import read_folder
from ratchet.store.manifest import digest_of
from ratchet.store.run import POLICY_UPDATE, Run
from tests.ratchet.store.chains import commit
from tests.runs import manifests, tiny_config, train_tiny, write_problems

STEPS = 2
GPUS = {"accelerator_type": "nvidia.com/gpu", "accelerator_count": 1, "node_selector": {"gpu": "h200"}}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> RunConfig:
    problems = write_problems(tmp_path_factory.mktemp("problems") / "problems.jsonl", 5)
    return tiny_config(
        tiny_model,
        problems,
        **{
            "data.val_files": str(problems),
            "data.val_max_samples": 2,
            "trainer.total_training_steps": STEPS,
            "trainer.seed": 11,
            "promotion.name": "math",
            "promotion.significant": False,
            "device_map.segment": GPUS,
        },
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, config: RunConfig) -> Run:
    """Two steps, promoted as `math`; read it, never write to it."""
    run = train_tiny(tmp_path_factory.mktemp("runs"), "night", config)
    assert promotion.promote(run, config, submission_id="6f0c", by="pod-1") is not None
    return run


@pytest.fixture
def run(trained: Run, tmp_path: Path) -> Run:
    """A copy of it for a test of its own."""
    shutil.copytree(trained.root, tmp_path / "runs")
    return Run(str(tmp_path / "runs"), "night")


def _audited(asked: str, root: str | None = None) -> Audit:
    return audit(find_subject(asked, root=root))


def test_a_run_is_traced_to_the_rows_that_it_was_trained_on(trained: Run, config: RunConfig) -> None:
    found = _audited(trained.uri)
    committed = manifests(trained)
    assert found.faults == ()
    assert (found.run, found.step, found.seed) == (trained.uri, STEPS, 11)
    assert found.config_digest == digest_of(trained.semantic())
    # Every committed manifest is in it, once.
    records = [*found.base, *(one for stages in found.steps for one in stages), *found.evaluations, *found.exports]
    records += [data.prompts for data in found.data]
    assert sorted(one.manifest_sha256 for one in records) == sorted(one.sha256 for one in committed.values())
    assert {one.content_digest for one in records} == {one.content_digest for one in committed.values()}
    assert [[one.stage for one in stages] for stages in found.steps] == [
        ["rollout", "reward", "advantage", POLICY_UPDATE]
    ] * STEPS
    assert [(one.step, one.stage) for one in found.evaluations] == [(0, "evaluate"), (STEPS, "evaluate")]
    assert found.rollouts == STEPS * 2 * 2
    train, val = found.data
    assert (train.split, train.source, val.split) == ("train", str(config.data.train_files), "val")
    assert train.source_digest == trained.require("preprocess/train", None).content.inputs["source"]
    assert found.base_model == config.actor_rollout_ref.model.path
    [submission] = found.submissions
    assert (submission.epoch, submission.grain, submission.stages) == (1, "segment", len(committed))
    assert submission.accelerators == {"segment": "1 nvidia.com/gpu gpu=h200"}
    [decision] = found.decisions
    assert found.serving == (decision,)
    assert (decision.by, decision.submission_id) == ("pod-1", "6f0c")


@pytest.mark.parametrize(
    "asked",
    [
        lambda run: (f"{run.root}/champions/math", None),
        lambda run: (f"{run.root}/champions/math/1", None),
        lambda run: ("math", run.root),
        lambda run: ("math/1", run.root),
        lambda run: (f"{run.uri}/{run.require('checkpoint_export', STEPS).output('export').folder}", None),
        lambda run: (f"{run.uri}/step-000002/checkpoint_export/", None),
    ],
)
def test_a_champion_and_an_export_lead_to_the_same_lineage(
    trained: Run, asked: Callable[[Run], tuple[str, str | None]]
) -> None:
    of_run = _audited(trained.uri)
    place, root = asked(trained)
    assert dataclasses.replace(_audited(place, root), asked=of_run.asked) == of_run


def test_a_copy_of_an_export_is_known_by_its_bytes(run: Run, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    read_folder(run.store, run.require("checkpoint_export", STEPS).output("export"), copy)
    with pytest.raises(ConfigError, match="say by --root"):
        find_subject(str(copy))
    found = _audited(str(copy), run.root)
    assert (found.run, found.step, found.faults) == (run.uri, STEPS, ())
    shutil.rmtree(Path(run.root, layout.CHAMPIONS))
    assert _audited(str(copy), run.root).decisions == ()
    (copy / "config.json").write_text("{}")
    with pytest.raises(NotCommittedError, match=r"no run below .* has exported the files"):
        find_subject(str(copy), root=run.root)


def test_a_rollback_and_a_refusal_are_part_of_a_models_history(run: Run, config: RunConfig) -> None:
    first = champions.decisions(run.root, "math")[0]

    def second(history: object) -> champions.Decision:
        return dataclasses.replace(first, number=2, run=f"{run.root}/other", step=9, targets=2)

    champions.append(run.root, "math", second)
    assert _audited("math/1", run.root).serving == ()
    with pytest.raises(NotCommittedError, match="other"):
        _audited("math", run.root)
    champions.rollback(run.root, "math", reason="bad units", by="ann")
    found = _audited("math", run.root)
    assert [(one.number, one.verdict) for one in found.decisions] == [(1, "promoted"), (3, "rolled_back")]
    assert [one.number for one in found.serving] == [3]
    assert _audited("math/3", run.root).decisions == found.decisions
    with pytest.raises(NotCommittedError, match="has 3 decisions, and no decision 4"):
        find_subject("math/4", root=run.root)
    with pytest.raises(NotCommittedError, match="nothing serves as chess"):
        find_subject("chess", root=run.root)


def test_a_decision_on_another_export_is_a_fault(run: Run) -> None:
    first = champions.decisions(run.root, "math")[0]
    path = Path(run.root, layout.champion("math", 1))
    path.chmod(0o644)
    other = dataclasses.replace(first, export=dataclasses.replace(first.export, digest="0" * 64))
    path.write_bytes(other.to_json())
    [fault] = _audited("math", run.root).faults
    assert fault.place == "step-000002/checkpoint_export"
    assert fault.expected == f"the export {'0' * 64}, says the decision or the folder"


def test_a_recovery_and_a_later_submission_are_told(run: Run, config: RunConfig) -> None:
    longer = config.model_copy(update={"trainer": config.trainer.model_copy(update={"total_training_steps": 3})})
    resumed = submit(run.root, run.run_id, longer)
    with open_session(resumed, longer) as session:
        loop.train(session)
    update = resumed.require(POLICY_UPDATE, 3)
    commit(resumed, "recovery", 3, {"r": b"1"}, [update], device="NVIDIA H200", gpu_seconds=7.5)
    found = _audited(run.uri)
    assert found.faults == ()
    assert [one.stages for one in found.submissions] == [14, 7]
    assert [one.step for one in found.recoveries] == [3]
    assert found.cost.by_stage["recovery"].gpu_seconds == 7.5
    assert [one.step for one in found.exports] == [2, 3]
    assert (len(found.steps), len(_audited("math", run.root).steps)) == (3, 2)
    lines = tree_lines(found)
    assert "|  |  |- steps 1 to 2: 8 rollouts, mean reward 0 to 0" in lines
    assert any("step 3, recovery: submission 2, code r, NVIDIA H200" in line for line in lines)
    assert any(line.endswith("8 GPU-seconds") for line in lines)


def test_the_tree_answers_who_what_from_and_with_what(trained: Run, config: RunConfig) -> None:
    found = _audited("math", trained.root)
    lines = tree_lines(found)
    assert lines[0] == "math"
    text = "\n".join(lines)
    decision = found.decisions[0]
    for said in (
        "math decision 1: promoted | night step 2 | accuracy 0.0000",
        ", and serves now",
        "by pod-1, 20",
        ", submission 6f0c",
        f"export of step {STEPS}",
        f"writes export {decision.export.digest[:12]}: ",
        f"config {found.config_digest[:12]}, seed 11",
        "segment: 1 nvidia.com/gpu gpu=h200",
        "2 steps, 8 rollouts",
        "steps 1 to 2: 8 rollouts",
        f"made from the rows of {config.data.train_files}, digest {found.data[0].source_digest[:12]}",
        f"version 0 from {config.actor_rollout_ref.model.path}",
        "every manifest is the one that was read",
    ):
        assert said in text, said
    assert json.loads(json.dumps(dataclasses.asdict(found)))["rollouts"] == 8


def test_a_run_that_has_just_begun_has_a_lineage_too(config: RunConfig, tmp_path: Path) -> None:
    run = submit(str(tmp_path), "new", config)
    with pytest.raises(NotCommittedError, match="step-000000/policy_update is not committed"):
        _audited(run.uri)
    with open_session(run, config) as session:
        loop.prepare(session)
    found = _audited(run.uri)
    assert (found.step, found.steps, found.rollouts, found.exports) == (0, (), 0, ())
    assert [one.stage for one in found.base] == [POLICY_UPDATE]
    assert tree_lines(found)[-1].startswith("`- every manifest")
    with pytest.raises(NotCommittedError, match="nobody has claimed it"):
        find_subject(f"{tmp_path}/none")


def test_a_hybrid_run_names_the_examples_that_it_imitated(tmp_path: Path, tiny_model: Path) -> None:
    examples = tmp_path / "sft.jsonl"
    examples.write_text('{"prompt": "Say 1.", "response": "It is 1."}\n' * 3, encoding="utf-8")
    config = tiny_config(
        tiny_model,
        write_problems(tmp_path / "problems.jsonl", 2),
        **{
            "algorithm.objective": "hybrid",
            "algorithm.hybrid.sft_files": str(examples),
            "data.max_response_length": 12,
            "trainer.total_training_steps": 1,
        },
    )
    found = _audited(train_tiny(tmp_path, "run", config).uri)
    assert [(data.split, data.source) for data in found.data] == [
        ("train", config.data.train_files),
        ("sft", str(examples)),
    ]
    assert any("sft examples" in line for line in tree_lines(found))
