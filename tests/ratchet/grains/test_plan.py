"""A plan against what tiny runs then really used: steps, tokens, bytes of every kind, pods, seconds.

Trap: `ignore_eos` makes every completion as long as it may be; only so is the number of tokens known before a run.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from ratchet.config import RunConfig
from ratchet.errors import ConfigError
from ratchet.grains.plan import Plan, Wishes, make_plan
from ratchet.grains.plan.accelerators import memory_of
from ratchet.grains.plan.measured import Measured, measured_by
from ratchet.grains.plan.work import count_tasks, evaluations
from ratchet.store.chain import Chain
from ratchet.store.run import POLICY_UPDATE, Run
from ratchet.store.usage import usage
from ratchet.store.verification import read_chain
from tests.command_line import Ratchet, in_this_process
from tests.runs import tiny_config, train_tiny, write_problems

CONFIG = Path(__file__).resolve().parents[3] / "configs/tiny.yaml"
PIPELINES = Path(__file__).resolve().parents[3] / "pipelines"
SEGMENTS = {
    "trainer.grain": "segment",
    "trainer.total_training_steps": 6,
    "trainer.steps_per_segment": 4,
    "trainer.full_weights_freq": 3,
    "trainer.trainer_state_freq": 2,
    "trainer.save_freq": 4,
    "trainer.keep_policies": 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "grpo in segments with deltas": SEGMENTS,
    "ppo at step grain": {"algorithm.adv_estimator": "gae", "trainer.grain": "step", "trainer.total_training_steps": 3},
    "lora at stage grain": {
        "trainer.grain": "stage",
        "actor_rollout_ref.model.lora_rank": 2,
        "actor_rollout_ref.actor.use_kl_loss": True,
        "algorithm.rollout_correction.bypass_mode": False,
    },
}


@pytest.fixture
def ratchet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ratchet:
    return in_this_process(monkeypatch, capsys)


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_problems(tmp_path_factory.mktemp("data") / "train.jsonl", 5)


def small(model: Path, problems: Path, **overrides: Any) -> RunConfig:
    known = {
        "data.val_files": str(problems),
        "data.max_response_length": 12,
        "actor_rollout_ref.rollout.ignore_eos": True,
        "trainer.test_freq": 2,
    }
    return tiny_config(model, problems, **{**known, **overrides})


def sums(run: Run, name: str) -> float:
    return sum(run.require(POLICY_UPDATE, step).metrics[name] for step in run.steps() if step)


def role_bytes(chain: Chain, step: int) -> dict[str, int]:
    """Table -> bytes of a step."""
    found = {}
    for manifest in chain.manifests.values():
        if manifest.step == step and manifest.stage not in ("evaluate", "checkpoint_export"):
            for role, artifact in manifest.provenance.artifacts.items():
                if role not in ("policy", "critic"):
                    found[role] = sum(entry.bytes for entry in artifact.files)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_a_plan_is_what_a_run_then_uses(name: str, tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    config = small(tiny_model, problems, **CONFIGS[name])
    before = make_plan(config, Wishes())
    run = train_tiny(tmp_path, "run", config)
    chain = read_chain(run)
    plan = make_plan(config, Wishes(measured=measured_by(run))) if "deltas" in name else before

    assert plan.steps == run.last_step()
    assert plan.tokens.trained_expected == before.tokens.trained_bound == sums(run, "perf/total_num_tokens")
    assert [step for step in run.steps() if run.manifest("evaluate", step)] == evaluations(config, plan.steps)
    assert plan.storage.per_step == pytest.approx(role_bytes(chain, 1), rel=0.25)
    used = usage(chain)
    assert plan.storage.by_kind == pytest.approx({kind: used[kind] for kind in plan.storage.by_kind}, rel=0.25)
    assert plan.storage.final == pytest.approx(sum(used.values()), rel=0.25)
    assert plan.storage.peak >= plan.storage.final
    if "deltas" in name:
        assert not before.storage.deltas_are_known
        assert before.storage.final >= plan.storage.final
        timed = [run.require(POLICY_UPDATE, step).metrics["timing_s/step"] for step in range(2, plan.steps + 1)]
        assert plan.cost.steps_seconds == pytest.approx(sum(timed) * plan.steps / len(timed), rel=0.25)


@pytest.mark.parametrize(
    ("grain", "folder", "file"), [("segment", "grpo", "pipeline"), ("stage", "ppo", "pipeline_stages")]
)
def test_tasks_and_pods_are_those_of_the_compiled_pipeline(
    grain: str, folder: str, file: str, tiny_model: Path, problems: Path
) -> None:
    critic = {"algorithm.adv_estimator": "gae"} if folder == "ppo" else {}
    config = small(tiny_model, problems, **{"trainer.grain": grain, "trainer.steps_per_segment": 2, **critic})
    (path,) = (PIPELINES / folder).glob(f"{file}.yaml")
    spec = next(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    for steps in (2, 6):
        tasks = count_tasks(config, steps)
        iterations = steps // 2 if grain == "segment" else steps
        assert tasks.iterations == iterations
        executed, drivers = _count(spec, spec["root"]["dag"], iterations)
        assert tasks.total == executed
        # The root has a driver, too, and each executed task has one beside its own pod.
        assert tasks.pods == 2 * executed + drivers + 1


def _count(spec: dict[str, Any], dag: dict[str, Any], iterations: int) -> tuple[int, int]:
    """Return the tasks with an executor, and the drivers of dags, of a dag that loops `iterations` times."""
    executed = drivers = 0
    for task in dag["tasks"].values():
        component = spec["components"][task["componentRef"]["name"]]
        if "executorLabel" in component:
            executed += 1
            continue
        is_loop = "parameterIterator" in task
        inner = _count(spec, component["dag"], iterations)
        times = iterations if is_loop else 1
        executed += times * inner[0]
        drivers += 1 + times * (inner[1] + is_loop)
    return executed, drivers


def test_what_nobody_said_is_not_known(tiny_model: Path, problems: Path) -> None:
    config = small(tiny_model, problems, **{**SEGMENTS, "actor_rollout_ref.rollout.ignore_eos": False})
    plan = make_plan(config, Wishes())
    assert plan.tokens.trained_expected is None
    assert (plan.cost.work_seconds, plan.cost.money, plan.storage.deltas_are_known) == (None, None, False)
    assert sum(word in " ".join(plan.notes) for word in ("--completion-tokens", "--throughput", "--like")) == 3


def test_money_is_hours_times_accelerators_times_the_price(tiny_model: Path, problems: Path) -> None:
    config = small(tiny_model, problems, **{"trainer.device": "cuda", "data.val_files": None})
    measured = Measured(source="a test", throughput=10.0, export_seconds=40.0, start_seconds=30.0)
    wishes = Wishes(accelerator="NVIDIA H200", memory=memory_of("NVIDIA H200"), measured=measured)
    assert _priced(config, wishes).cost.money is None
    plan = _priced(config, Wishes(**{**_fields(wishes), "prices": {"NVIDIA H200": 3.6}}))
    seconds = plan.tokens.trained_bound / 10 + 30 + 40
    assert plan.cost.accelerator_seconds == pytest.approx(seconds)
    assert plan.cost.money == pytest.approx(seconds * 3.6 / 3600)


def _priced(config: RunConfig, wishes: Wishes) -> Plan:
    return make_plan(config, wishes)


def _fields(wishes: Wishes) -> dict[str, Any]:
    return {name: getattr(wishes, name) for name in ("accelerator", "memory", "prices", "measured")}


def test_what_does_not_fit_is_said_with_what_would_help(tiny_model: Path, problems: Path) -> None:
    config = small(tiny_model, problems, **{"trainer.device": "cuda", "trainer.storage_budget_gib": 0.001, **SEGMENTS})
    plan = make_plan(config, Wishes(memory=2**30))
    of_memory, of_storage = plan.faults
    assert "enable_gradient_checkpointing" in of_memory
    assert "trainer.storage_budget_gib is 0.001" in of_storage


def test_the_verb_prints_a_plan_and_ends_with_1_where_it_does_not_fit(
    ratchet: Ratchet, tiny_model: Path, problems: Path
) -> None:
    given = ["plan", "--config", CONFIG, f"data.train_files={problems}", f"actor_rollout_ref.model.path={tiny_model}"]
    told = ratchet(*given, "--throughput", "100", "--price", "cpu=1")
    assert told.code == 0, told.err
    assert "DOES NOT FIT" not in told.out
    assert any(line.startswith("money") and "not known" not in line for line in told.lines)
    too_small = ratchet(*given, "trainer.device=cuda", "--accelerator-memory", "0.5", "--json")
    assert too_small.code == 1
    assert json.loads(too_small.out)["faults"][0].startswith("memory: segment takes")


def test_an_accelerator_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match="--accelerator-memory GIB"):
        memory_of("NVIDIA H2000")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--throughput", "0"], "--throughput: expected a number above 0, got 0"),
        (["--accelerator-memory", "inf"], "--accelerator-memory: expected a number above 0, got inf"),
        (["--completion-tokens", "13"], "--completion-tokens: expected at most data.max_response_length, 12, got 13"),
    ],
)
def test_a_number_that_none_can_be_is_refused(ratchet: Ratchet, options: list[str], told: str) -> None:
    refused = ratchet("plan", "--config", str(CONFIG), "data.max_response_length=12", *options)
    assert (refused.code, refused.out) == (2, "")
    assert told in refused.err


def test_an_accelerator_has_no_say_on_a_cpu_nor_have_lengths_beyond_the_longest(
    tiny_model: Path, problems: Path
) -> None:
    config = small(tiny_model, problems, **{"actor_rollout_ref.rollout.ignore_eos": False})
    plan = make_plan(config, Wishes(memory=1, measured=Measured(source="a run", completion_tokens=99.0)))
    assert (plan.device, plan.accelerator, plan.accelerator_memory, plan.faults) == ("cpu", "cpu", None, ())
    assert plan.tokens.trained_expected == plan.tokens.trained_bound
    assert {
        "trainer.device is cpu: the accelerator that was given is not used",
        "completions are counted at data.max_response_length: those that were measured were longer",
    } <= set(plan.notes)
