"""Rows 5, 15 and 16 of the promises: arguments down to vLLM's engine, the user's device mesh, and where neither is."""

import ast
import re
import sys
from dataclasses import make_dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from ratchet import FSDPPolicyUpdate, FSPPolicyUpdate, GRPOAdvantage, HFRollout, PPOTrainer, RLDataFlow, VLLMRollout
from ratchet.engines import sharded
from ratchet.errors import ConfigError
from tests.promises.results import rollouts, run_of, stages
from tests.runs import content_digests

ROOT = Path(__file__).resolve().parents[2]
PARALLEL = re.compile(
    r"mesh|fsdp|shard|world_size|local_rank|all_reduce|torchrun|nnodes|n_gpus|process_group|parallel|distributed", re.I
)


class Engine:
    """Stands where vLLM's engine does: writes down what it is told, and answers with tokens of its own."""

    calls: dict[str, Any]

    def __init__(self, **arguments: Any) -> None:
        self.calls = self.seen = {"engine": arguments, "requests": [], "weights": 0}
        Engine.last = self
        self.model_config = SimpleNamespace(max_model_len=arguments["max_model_len"])
        parallel = SimpleNamespace(world_size=arguments["tensor_parallel_size"])
        core = SimpleNamespace(shutdown=lambda: None)
        self.llm_engine = SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=parallel), engine_core=core)

    last: "Engine"

    def generate(self, prompts: list[Any], params: list[Any], use_tqdm: bool) -> list[Any]:
        self.calls["requests"] += list(zip(prompts, params, strict=True))
        token_ids = [60, 61]
        log_probs = [{token_id: SimpleNamespace(logprob=-0.5)} for token_id in token_ids]
        one = SimpleNamespace(token_ids=token_ids, finish_reason="length", logprobs=log_probs)
        found = []
        for prompt in prompts:
            ids = prompt["prompt_token_ids"]
            known = [None, *({token_id: SimpleNamespace(logprob=-1.0)} for token_id in ids[1:])]
            found.append(SimpleNamespace(outputs=[one], kv_transfer_params=None, prompt_logprobs=known))
        return found

    def collective_rpc(self, name: str, kwargs: dict[str, Any]) -> None:
        self.calls["weights"] += 1

    def reset_prefix_cache(self) -> bool:
        return True


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module `vllm` with the names that the sampler uses."""
    names = ("max_num_batched_tokens", "max_num_seqs", "enable_chunked_prefill")
    module, platforms = ModuleType("vllm"), ModuleType("vllm.platforms")
    module.__spec__, platforms.__spec__ = ModuleSpec("vllm", None), ModuleSpec("vllm.platforms", None)
    parts: dict[str, Any] = {"__version__": "0", "LLM": Engine, "SamplingParams": SimpleNamespace, "TokensPrompt": dict}
    for name, value in {**parts, "EngineArgs": make_dataclass("EngineArgs", names)}.items():
        setattr(module, name, value)
    platforms.current_platform = SimpleNamespace(is_cpu=lambda: True)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)


@pytest.mark.usefixtures("vllm")
def test_row_05_every_argument_reaches_vllms_engine_and_its_sampling(
    tiny_model: Path, problems: Path, rest: Any
) -> None:
    flow = RLDataFlow(
        rollout=VLLMRollout(
            model=str(tiny_model),
            temperature=0.7,
            top_p=0.9,
            top_k=50,
            max_tokens=7,
            n=3,
            tensor_parallel_size=2,
            gpu_memory_utilization=0.35,
            max_num_batched_tokens=4096,
            max_num_seqs=33,
            enable_chunked_prefill=False,
            enforce_eager=True,
            dtype="float32",
            max_prompt_length=200,
        ),
        reward=lambda data: [0.0] * len(data),
        advantage=GRPOAdvantage(),
        policy_update=FSDPPolicyUpdate(dtype="float32", entropy_coeff=0.01, lr=1e-3),
    )
    # What is made up here answers like no trainer.
    drift = {"rollout": {"max_log_prob_drift": 1e9}}
    config = rest(
        problems, data={"max_prompt_length": 200}, trainer={"total_training_steps": 2}, actor_rollout_ref=drift
    )
    result = PPOTrainer(data_flow=flow, config=config).fit(run_id="vllm")
    engine = Engine.last.calls["engine"]
    told = {
        "tensor_parallel_size": 2,
        "gpu_memory_utilization": 0.35,
        "max_num_batched_tokens": 4096,
        "max_num_seqs": 33,
        "enable_chunked_prefill": False,
        "enforce_eager": True,
        "dtype": "float32",
        "max_model_len": 207,
    }
    assert {name: engine[name] for name in told} == told
    assert Path(engine["model"]).name.startswith("policy-"), "the run's own copy of what was named"
    # One more asks for a prompt's log-probs, after the new weights.
    requests = [(prompt, params) for prompt, params in Engine.last.calls["requests"] if params.max_tokens > 1]
    assert len(requests) == 2 * 2 * 3, "two steps of two prompts, three completions each"
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "max_tokens": 7}
    assert all(vars(params) | sampling == vars(params) for _, params in requests)
    assert len({params.seed for _, params in requests}) == len(requests)
    assert Engine.last.calls["weights"] == 1, "the second step samples from the policy of the first"
    assert {tuple(row["completion_token_ids"]) for row in rollouts(result)} == {(60, 61)}
    # vLLM's log-probs are of the truncated distribution, so that the policy scores what was sampled.
    assert "policy_scores" in stages(result)


def test_row_05_arguments_stand_in_the_order_of_the_page() -> None:
    in_order = VLLMRollout("m", 0.7, 0.9, 50, 7, 3, 2, 0.35, 4096, 33, False)
    by_name = VLLMRollout(
        model="m",
        temperature=0.7,
        top_p=0.9,
        top_k=50,
        max_tokens=7,
        n=3,
        tensor_parallel_size=2,
        gpu_memory_utilization=0.35,
        max_num_batched_tokens=4096,
        max_num_seqs=33,
        enable_chunked_prefill=False,
    )
    assert in_order == by_name


@pytest.mark.parametrize(
    ("typed", "nearest"),
    [
        ("temprature", "temperature"),
        ("gpu_memory_utilisation", "gpu_memory_utilization"),
        ("max_token", "max_tokens"),
        ("tensor_model_parallel_size", "tensor_parallel_size"),
    ],
)
def test_row_05_an_unknown_argument_is_an_error_that_names_the_nearest(typed: str, nearest: str) -> None:
    with pytest.raises(TypeError, match=rf"VLLMRollout has no argument '{typed}'; the nearest is {nearest},"):
        VLLMRollout("m", **{typed: 1})


def test_row_15_an_existing_device_mesh_is_trained_on_and_left_alone(
    tmp_path: Path, tiny_model: Path, problems: Path, rest: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = []
    place = sharded.place_model

    def place_and_note(module: Any, mesh: Any, settings: Any) -> Any:
        used.append(mesh)
        return place(module, mesh, settings)

    monkeypatch.setattr(sharded, "place_model", place_and_note)

    def fit(run_id: str, **mesh: Any) -> Any:
        flow = RLDataFlow(
            rollout=HFRollout(str(tiny_model), n=2, max_tokens=6, dtype="float32"),
            reward=lambda data: [float(sum(item.completion_token_ids) % 7) for item in data],
            advantage=GRPOAdvantage(),
            policy_update=FSDPPolicyUpdate(
                lr=1e-3,
                grad_clip=0.5,
                ppo_epochs=2,
                clip_ratio_low=0.2,
                clip_ratio_high=0.28,
                loss_agg_mode="seq-mean-token-mean",
                dtype="float32",
                **mesh,
            ),
        )
        return PPOTrainer(data_flow=flow, config=rest(problems)).fit(run_id=run_id)

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        device_mesh = init_device_mesh("cpu", (1,))
        given = fit("mesh", device_mesh=device_mesh)
        assert [mesh is device_mesh for mesh in used] == [True]
        assert distributed.is_initialized(), "the group is its maker's to end"
        distributed.all_reduce(torch.ones(1), group=device_mesh.get_group())
        with pytest.raises(ConfigError, match="expected a device mesh of one dimension"):
            fit("two-dimensions", device_mesh=init_device_mesh("cpu", (1, 1)))
    finally:
        distributed.destroy_process_group()
    alone = fit("no-mesh")
    assert used[-1] is not device_mesh
    policies = [content_digests(run_of(result))["1/policy_update"] for result in (given, alone)]
    assert policies[0] == policies[1], "the mesh places the work, and changes nothing of it"
    actor = run_of(given).submission(1)["config"]["actor_rollout_ref"]["actor"]
    assert (actor["optim"]["lr"], actor["grad_clip"], actor["ppo_epochs"]) == (1e-3, 0.5, 2)
    assert (actor["clip_ratio_low"], actor["clip_ratio_high"]) == (0.2, 0.28)
    assert actor["loss_agg_mode"] == "seq-mean-token-mean"


def test_row_15_the_other_spelling_is_the_same_class_and_takes_arguments_by_place() -> None:
    assert FSPPolicyUpdate is FSDPPolicyUpdate
    by_place = FSPPolicyUpdate(1e-5, 0.5, 2, 0.2, 0.28, "token-mean")
    assert by_place == FSDPPolicyUpdate(
        lr=1e-5, grad_clip=0.5, ppo_epochs=2, clip_ratio_low=0.2, clip_ratio_high=0.28, loss_agg_mode="token-mean"
    )


REWARD_CODE = [*sorted((ROOT / "ratchet" / "rewards").glob("*.py")), *sorted((ROOT / "examples").glob("*.py"))]
MODEL_CODE = [ROOT / "ratchet" / "engines" / f"{name}.py" for name in ("model", "value_model", "packed", "kv_cache")]


@pytest.mark.parametrize("path", [*REWARD_CODE, *MODEL_CODE], ids=lambda path: path.stem)
def test_row_16_no_reward_and_no_model_code_names_mesh_or_processes(path: Path) -> None:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.name for alias in node.names} | {getattr(node, "module", "") or ""}
        names |= {getattr(node, field) for field in ("id", "attr", "arg", "name") if hasattr(node, field)}
    assert {name for name in names if isinstance(name, str) and PARALLEL.search(name)} == set()


def test_row_16_the_number_of_gpus_is_a_key_and_nothing_else_of_a_flow_changes(problems: Path, rest: Any) -> None:
    flow = RLDataFlow(rollout=VLLMRollout("m"), advantage=GRPOAdvantage(), policy_update=FSDPPolicyUpdate())
    one, eight = (flow.config(rest(problems, trainer={"n_gpus_per_node": count})).model_dump() for count in (1, 8))
    assert (one["trainer"].pop("n_gpus_per_node"), eight["trainer"].pop("n_gpus_per_node")) == (1, 8)
    assert one == eight
