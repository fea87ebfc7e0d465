"""SFT, DPO and reward models from a file of examples to an export, by `loop.train`; and what such runs refuse."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from ratchet.config import RunConfig
from ratchet.data import schemas
from ratchet.engines.model import load_tokenizer
from ratchet.engines.reward_model import RewardModel
from ratchet.errors import ConfigError, DataError, EngineError, NotCommittedError
from ratchet.grains.checks.finding import PipelineFacts
from ratchet.grains.checks.sources import named_sources
from ratchet.grains.replay import replay
from ratchet.grains.status.reading import collect
from ratchet.grains.status.screen import screen_lines
from ratchet.stages.evaluate_offline import held_out_metrics
from ratchet.stages.gate import candidate
from ratchet.stages.graph import step_stage
from ratchet.store.run import Run
from ratchet.tracking.show import completion_lines
from tests.runs import Stopped, content_digests, manifests, stop_at, table_rows, tiny_config, train_tiny

STEPS = 6
OBJECTIVES = ("sft", "dpo", "reward_model")


def write_pairs(path: Path, numbers: range, **more: Any) -> Path:
    """Preferences that a small model learns: chosen completions are of one form, rejected ones of another."""
    lines = [
        {
            "prompt": f"Mia has {number} apples. How many apples does she have?",
            "chosen": f"She has {number} apples.",
            "rejected": f"The answer is {number + 1} pencils each.",
            "data_source": "apples",
            **more,
        }
        for number in numbers
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Training and held-out examples; no prompt is in both."""
    folder = tmp_path_factory.mktemp("examples")
    return write_pairs(folder / "train.jsonl", range(12)), write_pairs(folder / "val.jsonl", range(12, 16))


def offline_config(model: Path, sources: tuple[Path, Path], objective: str, **overrides: Any) -> RunConfig:
    values: dict[str, Any] = {
        "algorithm.objective": objective,
        "data.val_files": str(sources[1]),
        "data.train_batch_size": 4,
        "data.max_response_length": 32,
        "actor_rollout_ref.actor.entropy_coeff": 0.0,
        "trainer.total_training_steps": STEPS,
        "trainer.steps_per_segment": STEPS,
        "trainer.trainer_state_freq": 3,
        "trainer.test_freq": 3,
    }
    return tiny_config(model, sources[0], **{**values, **overrides})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, sources: tuple[Path, Path]) -> dict[str, Run]:
    root = tmp_path_factory.mktemp("offline")
    return {name: train_tiny(root, name, offline_config(tiny_model, sources, name)) for name in OBJECTIVES}


def _metric(run: Run, stage: str, step: int, name: str) -> float:
    return run.require(stage, step).provenance.metrics[name]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_loss_falls_and_what_is_held_out_improves(runs: dict[str, Run], objective: str) -> None:
    run = runs[objective]
    losses = [_metric(run, "policy_update", step, "actor/loss") for step in range(1, STEPS + 1)]
    held_out = [_metric(run, "evaluate", step, "val-core/apples/loss") for step in (0, 3, STEPS)]
    assert losses[-1] < losses[0] / 2
    assert held_out[2] < held_out[1] < held_out[0]
    if objective == "sft":
        assert _metric(run, "evaluate", STEPS, "val-core/apples/perplexity") == pytest.approx(math.exp(held_out[2]))
        return
    margins, accuracies = (
        [_metric(run, "evaluate", step, f"val-core/apples/{name}") for step in (0, STEPS)]
        for name in ("margin", "accuracy")
    )
    assert margins[0] < margins[1] > 0
    assert accuracies == [0.0, 1.0]


def test_the_graph_has_a_reference_for_dpo_alone_and_no_rollouts(runs: dict[str, Run]) -> None:
    stages = {name: {item.content.stage for item in run.step_manifests(1)} for name, run in runs.items()}
    assert stages == {
        "sft": {"policy_update"},
        "dpo": {"reference_scores", "policy_update"},
        "reward_model": {"policy_update"},
    }


def test_dpo_begins_at_log_2_whatever_the_model(runs: dict[str, Run]) -> None:
    run = runs["dpo"]
    assert _metric(run, "policy_update", 1, "actor/loss") == pytest.approx(math.log(2), abs=1e-6)
    assert _metric(run, "policy_update", 1, "rewards/margins") == pytest.approx(0.0, abs=1e-5)
    assert _metric(run, "evaluate", 0, "val-core/apples/loss") == pytest.approx(math.log(2), abs=1e-6)


def test_the_held_out_loss_is_the_cross_entropy_of_what_the_assistant_wrote(
    runs: dict[str, Run], tiny_model: Path
) -> None:
    run, tokenizer = runs["sft"], load_tokenizer(tiny_model)
    example = table_rows(run, "preprocess/val", "examples", schemas.EXAMPLES, None)[0]  # type: ignore[arg-type]
    prompt, completion = example["prompt_token_ids"], example["chosen_token_ids"]
    assert tokenizer.decode(completion).startswith("She has 12 apples.<|im_end|>")
    assert all(example["chosen_loss_mask"])
    assert tokenizer.decode(prompt).endswith("<|im_start|>assistant\n")
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    labels = torch.tensor([[-100] * len(prompt) + completion])
    with torch.no_grad():
        expected = float(model(input_ids=torch.tensor([prompt + completion]), labels=labels).loss)
    row = table_rows(run, "evaluate", "evaluations_offline", schemas.EVALUATIONS_OFFLINE, 0)[0]
    assert row["loss"] == pytest.approx(expected, abs=1e-5)
    assert (row["example_id"], row["num_tokens"]) == ("val-0000000", len(completion))
    assert (row["margin"], row["accuracy"]) == (None, None)


def test_held_out_metrics_are_means_over_tokens_or_pairs() -> None:
    sft = [
        {"data_source": "a", "loss": 1.0, "num_tokens": 3, "margin": None, "accuracy": None},
        {"data_source": "a", "loss": 2.0, "num_tokens": 1, "margin": None, "accuracy": None},
    ]
    assert held_out_metrics(sft) == {"val-core/a/loss": 1.25, "val-core/a/perplexity": pytest.approx(math.exp(1.25))}
    pairs = [
        {"data_source": name, "loss": loss, "num_tokens": 9, "margin": margin, "accuracy": float(margin > 0)}
        for name, loss, margin in (("a", 0.5, 1.0), ("b", 0.25, 2.0), ("a", 1.0, -0.5))
    ]
    assert held_out_metrics(pairs) == {
        **{"val-core/a/loss": 0.75, "val-core/a/margin": 0.25, "val-core/a/accuracy": 0.5},
        **{"val-core/b/loss": 0.25, "val-core/b/margin": 2.0, "val-core/b/accuracy": 1.0},
    }


@pytest.mark.parametrize(
    ("objective", "place", "is_committed"),
    [
        ("dpo", "step-000002/reference_scores", True),
        ("dpo", "data/val", False),
        ("sft", "step-000005/policy_update", False),
        ("reward_model", "step-000003/evaluate", False),
        ("reward_model", "step-000006/checkpoint_export", False),
    ],
)
def test_a_run_stopped_anywhere_resumes_to_the_same_content(
    tmp_path: Path, tiny_model: Path, sources: tuple[Path, Path], runs: dict[str, Run], objective: str, place: str,
    is_committed: bool,
) -> None:  # fmt: skip
    config = offline_config(tiny_model, sources, objective)
    with pytest.raises(Stopped):
        train_tiny(tmp_path, "stopped", config, stop_at(place, is_committed=is_committed))
    assert content_digests(train_tiny(tmp_path, "stopped", config)) == content_digests(runs[objective])


@pytest.mark.parametrize("objective", ["dpo", "reward_model"])
def test_the_stage_grain_publishes_the_same_content(
    tmp_path: Path, tiny_model: Path, sources: tuple[Path, Path], runs: dict[str, Run], objective: str
) -> None:
    config = offline_config(tiny_model, sources, objective, **{"trainer.grain": "stage"})
    assert content_digests(train_tiny(tmp_path, "stages", config)) == content_digests(runs[objective])


@pytest.mark.parametrize(("objective", "name"), [("dpo", "reference_scores"), ("dpo", "policy_update")])
def test_a_replay_computes_what_was_committed(
    runs: dict[str, Run], tiny_model: Path, sources: tuple[Path, Path], objective: str, name: str
) -> None:
    config = offline_config(tiny_model, sources, objective)
    stage = step_stage(name, config)
    assert stage is not None
    assert [one.is_equal for one in replay(stage, Run(runs[objective].root, objective), config, 2)] == [True]


def test_another_run_takes_the_examples_over(
    tmp_path: Path, tiny_model: Path, sources: tuple[Path, Path], runs: dict[str, Run]
) -> None:
    one_step = {"trainer.total_training_steps": 1, "trainer.steps_per_segment": 1}
    more = {"algorithm.dpo.loss_type": "ipo", "algorithm.dpo.reference_free": True, **one_step}
    config = offline_config(tiny_model, sources, "dpo", **more)
    run = train_tiny(runs["dpo"].root, "ipo", config)
    assert run.require("preprocess/train", None).provenance.metrics["data/train/is_reused"] == 1.0
    assert {item.content.stage for item in run.step_manifests(1)} >= {"policy_update"}
    assert run.manifest("reference_scores", 1) is None


def test_the_exported_reward_model_is_a_classifier_that_grades_at_once(runs: dict[str, Run]) -> None:
    run = runs["reward_model"]
    folder = Path(run.root) / run.run_id / run.require("checkpoint_export", STEPS).output("export").folder
    assert AutoModelForSequenceClassification.from_pretrained(folder).config.num_labels == 1
    model = RewardModel.from_folder(folder, compute_dtype="float32", max_tokens_per_micro_batch=512, device="cpu")
    prompt = {"role": "user", "content": "Mia has 20 apples. How many apples does she have?"}
    good, bad = model.chat_scores(
        [
            [prompt, {"role": "assistant", "content": text}]
            for text in ("She has 20 apples.", "The answer is 3 pencils.")
        ]
    )
    assert good > bad
    evaluated = table_rows(run, "evaluate", "evaluations_offline", schemas.EVALUATIONS_OFFLINE, STEPS)[0]
    first = {"role": "user", "content": "Mia has 12 apples. How many apples does she have?"}
    texts = ("She has 12 apples.", "The answer is 13 pencils each.")
    chosen, rejected = model.chat_scores([[first, {"role": "assistant", "content": text}] for text in texts])
    assert chosen - rejected == pytest.approx(evaluated["margin"], abs=1e-4)


def test_a_head_is_exported_as_it_was_trained_whatever_the_dtype_of_the_rest(
    tmp_path: Path, tiny_model: Path, sources: tuple[Path, Path]
) -> None:
    one_step = {"trainer.total_training_steps": 1, "trainer.steps_per_segment": 1, "data.val_files": ""}
    config = offline_config(
        tiny_model, sources, "reward_model", **one_step, **{"actor_rollout_ref.rollout.dtype": "bfloat16"}
    )
    run = train_tiny(tmp_path, "narrow", config)
    folders = [run.require("policy_update", 1).output("policy").folder]
    folders.append(run.require("checkpoint_export", 1).output("export").folder)
    published, exported = (load_file(tmp_path / "narrow" / folder / "model.safetensors") for folder in folders)
    assert exported["score.weight"].dtype == torch.float32
    assert torch.equal(exported["score.weight"], published["score.weight"])
    assert {tensor.dtype for name, tensor in exported.items() if name != "score.weight"} == {torch.bfloat16}


def test_the_head_of_version_0_comes_from_the_seed(
    tmp_path: Path, tiny_model: Path, sources: tuple[Path, Path], runs: dict[str, Run]
) -> None:
    more = {"trainer.total_training_steps": 1, "trainer.steps_per_segment": 1, "data.val_files": ""}
    for seed, is_equal in ((0, True), (1, False)):
        config = offline_config(tiny_model, sources, "reward_model", **{**more, "trainer.seed": seed})
        run = train_tiny(tmp_path, f"seed-{seed}", config)
        digests = [one.require("policy_update", 0).output("policy").digest for one in (run, runs["reward_model"])]
        assert (digests[0] == digests[1]) is is_equal
    assert (
        manifests(run)["0/policy_update"].content.inputs
        == manifests(runs["reward_model"])["0/policy_update"].content.inputs
    ), "both were made from the same causal model"


def test_a_row_that_lacks_its_completion_is_named_and_takes_no_run_id(tmp_path: Path, tiny_model: Path) -> None:
    whole = write_pairs(tmp_path / "whole.jsonl", range(4))
    lacking = write_pairs(tmp_path / "lacking.jsonl", range(4), rejected=None)
    with pytest.raises(DataError, match=r"lacking\.jsonl, line 1: algorithm\.objective=dpo compares .* rejected"):
        train_tiny(tmp_path / "runs", "pairs", offline_config(tiny_model, (lacking, whole), "dpo"))
    train_tiny(tmp_path / "runs", "pairs", offline_config(tiny_model, (lacking, whole), "sft"))
    empty = write_pairs(tmp_path / "empty.jsonl", range(4), chosen=None)
    with pytest.raises(DataError, match=r"empty\.jsonl, line 1: expected a column chosen"):
        train_tiny(tmp_path / "runs", "empty", offline_config(tiny_model, (empty, whole), "sft"))


def test_examples_over_the_limits_are_refused_by_name_or_left_out_and_counted(
    tmp_path: Path, tiny_model: Path, sources: tuple[Path, Path]
) -> None:
    source = write_pairs(tmp_path / "long.jsonl", range(5))
    lines = source.read_text(encoding="utf-8").splitlines()
    lines[3] = json.dumps(json.loads(lines[3]) | {"chosen": "She has " + "many " * 40 + "apples."})
    source.write_text("\n".join(lines), encoding="utf-8")
    one_step = {"trainer.total_training_steps": 1, "trainer.steps_per_segment": 1}
    strict = offline_config(
        tiny_model, (source, sources[1]), "sft", **{**one_step, "data.filter_overlong_prompts": False}
    )
    with pytest.raises(DataError, match=r"1 of 5 examples .*long\.jsonl, line 4: a completion of \d+ tokens, over"):
        train_tiny(tmp_path / "runs", "strict", strict)
    run = train_tiny(tmp_path / "runs", "loose", offline_config(tiny_model, (source, sources[1]), "sft", **one_step))
    found = run.require("preprocess/train", None).provenance.metrics
    assert (found["data/train/num_examples"], found["data/train/num_overlong_examples"]) == (4.0, 1.0)


def test_preflight_reads_examples_and_no_reward(tmp_path: Path, tiny_model: Path, sources: tuple[Path, Path]) -> None:
    config = offline_config(tiny_model, sources, "reward_model", **{"reward_model.path": "/nowhere"})
    found = named_sources(config, str(tmp_path), PipelineFacts())
    assert found.refusals == []
    assert [one.message for one in found.findings if one.check == "examples"] == [
        "12 train examples",
        "4 val examples",
    ]
    assert found.num_prompts == 12
    assert found.longest is not None
    assert found.longest > 30
    lacking = write_pairs(tmp_path / "lacking.jsonl", range(4), rejected=None)
    refused = named_sources(offline_config(tiny_model, (lacking, sources[1]), "dpo"), str(tmp_path), PipelineFacts())
    assert "column rejected" in str(refused.refusals[0])


def test_pairs_measure_an_accuracy_for_the_gate_and_a_loss_does_not(
    runs: dict[str, Run], tiny_model: Path, sources: tuple[Path, Path]
) -> None:
    found = candidate(runs["dpo"], offline_config(tiny_model, sources, "dpo"))
    assert found.measurement.are_shares
    assert found.measurement.mean == 1.0
    assert len(found.measurement.accuracies) == 4
    assert found.data.train == runs["dpo"].require("preprocess/train", None).output("examples").digest
    with pytest.raises(ConfigError, match=r"objective=sft measures a loss .* no accuracy"):
        candidate(runs["sft"], offline_config(tiny_model, sources, "sft"))


def test_people_are_told_of_losses_and_that_there_are_no_completions(runs: dict[str, Run]) -> None:
    with pytest.raises(NotCommittedError, match="learns from examples and samples nothing"):
        list(completion_lines(runs["sft"], 1))
    screen = "\n".join(screen_lines(collect(runs["sft"])))
    assert "sft, " in screen
    assert "4 examples a step" in screen
    assert f"in step {STEPS}" in screen
    assert "held out  loss " in screen
    assert "1.000 on apples" in "\n".join(screen_lines(collect(runs["dpo"])))


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"chosen": " "}, "expected a chosen completion to learn from, got ' '"), ({"chosen": ""}, "got ''")],
)
def test_an_example_without_anything_to_learn_is_named(
    tmp_path: Path, tiny_model: Path, sources: tuple[Path, Path], changed: dict[str, str], message: str
) -> None:
    bad = write_pairs(tmp_path / "bad.jsonl", range(8), **changed)
    with pytest.raises(DataError, match=f"bad.jsonl, line 1: .*{message}"):
        train_tiny(tmp_path / "runs", "run", offline_config(tiny_model, (bad, sources[1]), "sft"))


def test_a_classifier_is_no_policy(runs: dict[str, Run], tmp_path: Path, sources: tuple[Path, Path]) -> None:
    run = runs["reward_model"]
    folder = Path(run.root) / run.run_id / run.require("checkpoint_export", STEPS).output("export").folder
    with pytest.raises(EngineError, match=r"is a sequence classifier, such as a reward model: expected a causal"):
        train_tiny(tmp_path / "runs", "run", offline_config(folder, sources, "sft"))
