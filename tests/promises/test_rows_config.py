"""Rows 24, 25 and 26 of the promises: keys as verl and its tutorials spell them, and what batches mean."""

import json
import shlex
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from examples.reward_server import RewardHandler, RewardServer
from ratchet import FSDPPolicyUpdate, GRPOAdvantage, HFRollout, PPOTrainer, RLDataFlow, cli
from ratchet.config import load_config
from ratchet.data.frames import to_training_set
from ratchet.errors import ConfigError
from ratchet.store.run import Run
from ratchet.trainer import main_ppo
from tests.promises.results import prompts, rollouts
from tests.runs import content_digests, manifests

SMALL = [
    *("rollout.name=hf", "rollout.n=2", "rollout.dtype=float32", "actor.fsdp_config.dtype=float32"),
    *("data.max_prompt_length=256", "data.max_response_length=4", "trainer.device=cpu"),
]
"""What a machine without a GPU, and a test without patience, say on top."""

Command = Callable[..., list[str]]


@pytest.fixture
def main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """A command line typed in an empty folder, to its end: the lines that it printed."""
    monkeypatch.chdir(tmp_path)

    def typed(line: str, *more: str, code: int = 0) -> list[str]:
        program, *arguments = shlex.split(line)
        entry = {"ratchet": cli.main, "main_ppo": main_ppo.main}[program]
        monkeypatch.setattr("sys.argv", [program, *arguments, *more])
        with pytest.raises(SystemExit) as ended:
            entry()
        printed = capsys.readouterr()
        assert (ended.value.code or 0) == code, printed.err
        return (printed.err if code else printed.out).splitlines()

    return typed


def _frame(rows: int) -> list[dict[str, str]]:
    return [{"question": f"{number} + 1?", "answer": f"#### {number + 1}"} for number in range(rows)]


def test_row_24_main_ppo_does_what_ratchet_train_does(main: Command, tiny_model: Path, problems: Path) -> None:
    Path("grpo.yaml").write_text(
        f"actor_rollout_ref: {{model: {{path: {tiny_model}}}}}\ndata: {{train_batch_size: 8}}\n"
    )
    line = "train --config grpo.yaml data.train_batch_size=4 trainer.total_epochs=2"
    rest = [*SMALL, f"data.train_files={problems}", "trainer.default_local_dir=runs"]
    printed = main(f"ratchet {line}", *rest, "trainer.experiment_name=by-ratchet")
    assert [line.split(" | ")[0] for line in printed if "actor/pg_loss" in line] == [f"step: {n}" for n in (1, 2, 3, 4)]
    line = line.removeprefix("train ")
    main(f"main_ppo --num_gpus 1 {line}", *rest, "trainer.experiment_name=by-main-ppo")
    one, other = (content_digests(Run("runs", name)) for name in ("by-ratchet", "by-main-ppo"))
    assert one == other
    assert "4/policy_update" in one, "five prompts in batches of four, twice"
    # Keys alone, as verl's examples are run.
    keys = f"main_ppo actor_rollout_ref.model.path={tiny_model} data.train_batch_size=4 trainer.total_epochs=2"
    main(keys, *rest, "trainer.experiment_name=by-keys")
    assert content_digests(Run("runs", "by-keys")) == one


@pytest.fixture
def reward_server() -> Iterator[str]:
    """The server of examples/, on a free port."""
    with RewardServer(("127.0.0.1", 0), RewardHandler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/score"
        server.shutdown()


def test_row_24_the_nested_config_loads_as_it_stands_and_trains(main: Command, shared: Path, tiny_model: Path) -> None:
    fixture = shared / "fixtures" / "configs" / "grpo_nested.yaml"
    assert load_config(fixture).actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 32
    to_training_set(_frame(2), "train.parquet")
    to_training_set(_frame(1), "val.parquet", split="test")
    smaller = ["data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=1"]
    main(f"ratchet train --config {fixture}", *SMALL, *smaller, f"actor_rollout_ref.model.path={tiny_model}")
    run = Run("checkpoints", "qwen2-7b")
    assert run.last_step() == 3, "its three epochs"
    assert run.manifest("evaluate", 3) is not None


def test_row_24_the_short_spellings_load_as_they_stand_and_train(
    main: Command, shared: Path, tiny_model: Path, reward_server: str
) -> None:
    fixture = shared / "fixtures" / "configs" / "grpo_short.yaml"
    short = load_config(fixture)
    assert (short.reward_model.type, short.reward_model.url) == ("api", "http://localhost:8000/score")
    assert (short.data.max_prompt_length, short.data.max_response_length) == (512, 512)
    lines = [{"prompt": f"{number} + 1?", "response": str(number + 1)} for number in range(8)]
    Path("sample.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    models = [f"{name}.model_name_or_path={tiny_model}" for name in ("actor", "rollout", "ref", "critic")]
    main(f"ratchet train --config {fixture}", *SMALL, "rollout.type=hf", *models, f"reward_model.url={reward_server}")
    run = Run("output", load_config(fixture).trainer.experiment_name)
    assert run.last_step() == 1, "eight prompts in a batch of eight, one epoch"
    assert "critic_update" not in {place.split("/")[1] for place in manifests(run)}, "algorithm: grpo has no critic"


def test_row_24_the_overrides_of_ppo_load_as_they_stand_and_train(
    main: Command, shared: Path, tiny_model: Path
) -> None:
    overrides = (shared / "fixtures" / "configs" / "ppo_overrides.txt").read_text().splitlines()
    ppo = load_config(overrides=overrides)
    assert (ppo.algorithm.adv_estimator, ppo.data.train_batch_size, ppo.trainer.total_epochs) == ("gae", 256, 15)
    Path("data/processed/gsm8k").mkdir(parents=True)
    to_training_set(_frame(2), "data/processed/gsm8k/train.parquet")
    to_training_set(_frame(1), "data/processed/gsm8k/test.parquet", split="test")
    models = [f"{name}.model.path={tiny_model}" for name in ("actor_rollout_ref", "critic")]
    smaller = ["data.train_batch_size=2", "trainer.total_epochs=2", "trainer.default_local_dir=runs"]
    found = main("main_ppo", *overrides, *SMALL, *models, *smaller)
    assert "critic/vf_loss" in next(line for line in found if line.startswith("step: 2"))
    assert found[-1].startswith("run: ")


SPELLINGS = {
    "actor.model_name_or_path": ("actor_rollout_ref.model.path", "m"),
    "rollout.type": ("actor_rollout_ref.rollout.name", "hf"),
    "trainer.algorithm": ("algorithm.adv_estimator", "rloo"),
    "trainer.num_epochs": ("trainer.total_epochs", 7),
    "trainer.save_dir": ("trainer.default_local_dir", "somewhere"),
    "data.train_dataset": ("data.train_files", "t.jsonl"),
    "data.batch_size": ("data.train_batch_size", 3),
    "data.seq_length": ("data.max_response_length", 50),
}


def test_row_24_every_short_spelling_of_the_page_works_in_yaml_and_as_an_override(tmp_path: Path) -> None:
    typed = {name: 100 if name == "data.seq_length" else value for name, (_, value) in SPELLINGS.items()}
    nested: dict[str, dict[str, Any]] = {}
    for name, value in typed.items():
        section, _, key = name.partition(".")
        nested.setdefault(section, {})[key] = value
    (tmp_path / "short.yaml").write_text(json.dumps(nested))
    by_file = load_config(tmp_path / "short.yaml")
    by_override = load_config(overrides=[f"{name}={value}" for name, value in typed.items()])
    assert by_file == by_override
    assert {name: by_file.value(key) for name, (key, _) in SPELLINGS.items()} == {
        name: value for name, (_, value) in SPELLINGS.items()
    }
    assert load_config(overrides=["trainer.algorithm=ppo"]).algorithm.adv_estimator == "gae"


@pytest.mark.parametrize(
    ("typed", "nearest"),
    [
        ("data.train_batchsize", "data.train_batch_size"),
        ("actor_rollout_ref.actor.optim.lr_warmup_step", "actor_rollout_ref.actor.optim.lr_warmup_steps"),
        ("trainer.total_epoch", "trainer.total_epochs"),
        ("algoritm.gamma", "algorithm"),
    ],
)
def test_row_25_a_misspelt_key_is_an_error_with_the_nearest_key(typed: str, nearest: str, main: Command) -> None:
    lines = main("ratchet train", f"{typed}=4", code=2)
    assert any(line.endswith(f"no such key; the nearest is {nearest}") for line in lines), lines
    tree: dict[str, Any] = {}
    section = tree
    for name in typed.split(".")[:-1]:
        section = section.setdefault(name, {})
    section[typed.split(".")[-1]] = 4
    flow = RLDataFlow(rollout=HFRollout("m"))
    with pytest.raises(ConfigError, match=f"the nearest is {nearest}"):
        PPOTrainer(data_flow=flow, config=tree)


@pytest.mark.parametrize(
    "typed", ["actor_rollout_ref.rollout.multi_turn.enable=true", "actor_rollout_ref.actor.megatron.param_offload=true"]
)
def test_row_25_a_key_that_verl_has_and_ratchet_has_not_is_refused_by_name(typed: str, main: Command) -> None:
    lines = main("main_ppo", typed, code=2)
    assert any(f"{typed.partition('=')[0]}: verl has it, Ratchet has not: " in line for line in lines), lines


class OnlyTheLast:
    """0 for every completion but the last, which is in the batch's last group."""

    def __call__(self, data: Any) -> list[float]:
        return [*[0.0] * (len(data) - 1), 1.0]


def _fit(model: Path, config: dict[str, Any], run_id: str, **update: Any) -> Any:
    flow = RLDataFlow(
        rollout=HFRollout(str(model), n=2, max_tokens=6, dtype="float32"),
        reward=OnlyTheLast(),
        advantage=GRPOAdvantage(),
        policy_update=FSDPPolicyUpdate(lr=1e-3, weight_decay=0.0, dtype="float32", **update),
    )
    return PPOTrainer(data_flow=flow, config=config).fit(run_id=run_id)


def _weights(result: Any) -> torch.Tensor:
    weights = load_file(Path(result.export.removeprefix("file://")) / "model.safetensors")
    return torch.cat([weights[name].flatten() for name in sorted(weights)])


def test_row_26_batches_that_do_not_divide_are_trained_whole(tiny_model: Path, problems: Path, rest: Any) -> None:
    config = rest(problems, data={"train_batch_size": 3})
    # Three prompts in mini-batches of two: only the second, smaller one has something to learn.
    whole = _fit(tiny_model, config, "mini", mini_batch_size=2)
    base = torch.cat([value.flatten() for _, value in sorted(load_file(tiny_model / "model.safetensors").items())])
    assert (_weights(whole) - base).abs().max() > 5e-4, "Adam's first step with a gradient is about the learning rate"
    # Micro-batches are derived, and may be given: 4 and then 2 sequences in ones of 1, 3 or 64 give the same policy.
    for size in (1, 3, 64):
        given = _fit(tiny_model, config, f"micro-{size}", mini_batch_size=2, micro_batch_size=size)
        assert given.metrics["actor/grad_norm"] == pytest.approx(whole.metrics["actor/grad_norm"], rel=1e-3)
        assert given.metrics["actor/pg_loss"] == pytest.approx(whole.metrics["actor/pg_loss"], abs=1e-5)


def test_row_26_the_last_batch_of_an_epoch_is_smaller_and_no_prompt_is_dropped(
    tiny_model: Path, problems: Path, rest: Any
) -> None:
    config = rest(problems, trainer={"total_training_steps": None, "total_epochs": 2})
    result = _fit(tiny_model, config, "epochs", mini_batch_size=2)
    assert result.steps == 6
    sampled = [[row["prompt_id"] for row in rollouts(result, step)] for step in range(1, 7)]
    assert [len(rows) for rows in sampled] == [4, 4, 2, 4, 4, 2]
    for epoch in (sampled[:3], sampled[3:]):
        assert {prompt for rows in epoch for prompt in rows} == set(prompts(result))
