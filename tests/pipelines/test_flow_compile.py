"""Flows as compiled pipelines, and as runs of a Kubeflow endpoint that a small server here stands for."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.protobuf import json_format
from kfp.pipeline_spec import pipeline_spec_pb2

from pipelines import runner
from ratchet import (
    CustomReward,
    DPOPolicyUpdate,
    GAEAdvantage,
    GRPOAdvantage,
    HFRollout,
    HybridDataFlow,
    RewardModelUpdate,
    RLDataFlow,
    RLTask,
    SFTPolicyUpdate,
    SFTTask,
    VLLMRollout,
)
from ratchet.config import parse_text
from ratchet.errors import ConfigError
from ratchet.flow.runners import find_runner
from ratchet.grains import entry
from ratchet.grains.tasks import PreflightTask
from ratchet.store.run import Run
from tests.kfp_endpoint import Requests, kfp_endpoint
from tests.runs import write_problems

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
REST = {
    "data": {"train_files": "s3://data/train.parquet"},
    "trainer": {"total_training_steps": 7, "default_local_dir": "s3://bucket/runs", "experiment_name": "qwen"},
}


def _flow(**parts: Any) -> RLDataFlow:
    return RLDataFlow(**{"rollout": VLLMRollout("Qwen/Qwen3-0.6B", n=4), **parts})


def _ir(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = next(iter(yaml.safe_load_all(path.read_text())))
    return found


def _defaults(path: Path) -> dict[str, Any]:
    declared = _ir(path)["root"]["inputDefinitions"]["parameters"]
    return {name: one["defaultValue"] for name, one in declared.items() if "defaultValue" in one}


def test_a_compiled_flow_holds_its_config_as_a_parameters_default(tmp_path: Path) -> None:
    flow = _flow(advantage=GRPOAdvantage(kl_coef=0.01))
    path = flow.compile(tmp_path / "flow.yaml", REST)
    defaults = _defaults(path)
    assert parse_text(defaults.pop("config")) == flow.config(REST)
    said = {"root": "s3://bucket/runs", "run_id": "qwen", "total_steps": 7}
    assert {name: defaults[name] for name in said} == said
    assert defaults["steps_per_segment"] == 0  # what the config says
    assert json_format.ParseDict(_ir(path), pipeline_spec_pb2.PipelineSpec()).schema_version
    assert RLDataFlow.from_config(parse_text(_defaults(path)["config"])) == flow


def test_the_same_flow_compiles_to_the_same_bytes(tmp_path: Path) -> None:
    one, other = (_flow().compile(tmp_path / name, REST).read_bytes() for name in ("a.yaml", "b.yaml"))
    assert one == other
    assert _flow(rollout=VLLMRollout("m")).compile(tmp_path / "c.yaml", REST).read_bytes() != one


@pytest.mark.parametrize(
    ("advantage", "grain", "name"),
    [
        (GRPOAdvantage(), "segment", "ratchet-grpo"),
        (GRPOAdvantage(), "step", "ratchet-grpo-steps"),
        (GRPOAdvantage(), "stage", "ratchet-grpo-stages"),
        (GAEAdvantage(), "segment", "ratchet-ppo"),
        (GAEAdvantage(), "stage", "ratchet-ppo-stages"),
    ],
)
def test_the_graph_and_the_grain_choose_the_pipeline(tmp_path: Path, advantage: Any, grain: str, name: str) -> None:
    path = _flow(advantage=advantage).compile(tmp_path / "flow.yaml", {"trainer": {"grain": grain}})
    assert _ir(path)["pipelineInfo"]["name"] == name


def _hybrid(advantage: Any) -> HybridDataFlow:
    return HybridDataFlow(sft_task=SFTTask("d"), rl_task=RLTask("p", rollout=VLLMRollout("m"), advantage=advantage))


@pytest.mark.parametrize(
    ("flow", "grain", "name"),
    [
        (RLDataFlow(policy_update=SFTPolicyUpdate(model="m")), "segment", "ratchet-sft"),
        (RLDataFlow(policy_update=SFTPolicyUpdate(model="m")), "step", "ratchet-grpo-steps"),
        (RLDataFlow(policy_update=SFTPolicyUpdate(model="m")), "stage", "ratchet-dpo-stages"),
        (RLDataFlow(policy_update=DPOPolicyUpdate(0.2, model="m")), "segment", "ratchet-dpo"),
        (RLDataFlow(policy_update=DPOPolicyUpdate(0.2, model="m")), "stage", "ratchet-dpo-stages"),
        (RLDataFlow(policy_update=RewardModelUpdate(model="m")), "segment", "ratchet-reward-model"),
        (_hybrid(GRPOAdvantage()), "segment", "ratchet-hybrid"),
        (_hybrid(GAEAdvantage()), "segment", "ratchet-hybrid"),
        (_hybrid(GRPOAdvantage()), "stage", "ratchet-grpo-stages"),
        (_hybrid(GAEAdvantage()), "stage", "ratchet-ppo-stages"),
    ],
)
def test_the_objective_chooses_the_pipeline_which_holds_the_whole_flow(
    tmp_path: Path, flow: Any, grain: str, name: str
) -> None:
    path = flow.compile(tmp_path / "flow.yaml", {"trainer": {"grain": grain}})
    assert _ir(path)["pipelineInfo"]["name"] == name
    assert type(flow).from_config(parse_text(_defaults(path)["config"])) == flow


AWKWARD = (
    '"""Quotes \', #, : and {braces}; \\ and \\ud83d.\n\n\ttabs, caf\xe9, \U0001f600, \u2028 and \x7f."""\n'
    "def score(data):\n    return []\n"
)


def test_code_with_any_characters_arrives_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_bytes(AWKWARD.encode())
    path = _flow(reward=CustomReward("mine.py", "score")).compile("flow.yaml", REST)
    text = _defaults(path)["config"]
    assert "\n" not in text
    assert parse_text(text).code[0].source == AWKWARD


def test_a_config_that_no_process_could_be_given_is_refused(tmp_path: Path) -> None:
    big = tmp_path / "big.py"
    big.write_text(f"def score(data):\n    return []\nTABLE = '{'x' * runner.MAX_CONFIG_BYTES}'\n")
    with pytest.raises(
        ConfigError, match=r"has \d+ bytes, and a pipeline's parameter holds 98304: put it as a YAML file"
    ):
        _flow(reward=CustomReward(str(big), "score")).compile(tmp_path / "flow.yaml", REST)


def test_without_a_number_of_steps_the_config_decides_once_the_data_are_read(tmp_path: Path) -> None:
    path = _flow().compile(tmp_path / "flow.yaml", {"trainer": {"total_epochs": 3}})
    ir = next(iter(yaml.safe_load_all(Path(path).read_text())))
    assert ir["root"]["inputDefinitions"]["parameters"]["total_steps"]["defaultValue"] == 0


def test_what_a_pod_reads_from_the_parameter_is_the_flow(tmp_path: Path, tiny_model: Path) -> None:
    """The first task of the pipeline, with the compiled default; the reward's file is gone by then."""
    reward = tmp_path / "reward.py"
    reward.write_text("def score(data_source, solution_str, ground_truth, extra_info=None):\n    return 0.5\n")
    flow = _flow(rollout=HFRollout(str(tiny_model), n=2), reward=CustomReward(str(reward), "score"))
    data = {"train_files": str(write_problems(tmp_path / "p.jsonl")), "train_batch_size": 2, "max_response_length": 8}
    rest = {"data": data}
    text = _defaults(flow.compile(tmp_path / "flow.yaml", rest))["config"]
    expected = flow.config(rest)
    reward.unlink()
    entry.preflight(PreflightTask(root=str(tmp_path), run_id="run", submission_id="job", config=text))
    submitted = Run(str(tmp_path), "run").submission(1)["config"]
    assert submitted == json.loads(expected.model_dump_json())


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[str, Requests]]:
    monkeypatch.delenv(runner.ENDPOINT, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with kfp_endpoint() as served:
        yield served


def test_submit_starts_a_run_of_the_compiled_flow(endpoint: tuple[str, Requests]) -> None:
    host, seen = endpoint
    flow = _flow()
    started = flow.submit(REST, host=host, run_id="qwen-2")
    assert started == runner.Submission(
        pipeline_run_id="r-1", run="s3://bucket/runs/qwen-2", url=f"{host}/#/runs/details/r-1"
    )
    body = next(body for method, path, body in seen if method == "POST" and "/runs" in path)
    assert body["display_name"] == "qwen-2"
    assert body["runtime_config"]["parameters"] == {"root": "s3://bucket/runs", "run_id": "qwen-2"}
    declared = body["pipeline_spec"]["pipeline_spec"]["root"]["inputDefinitions"]["parameters"]
    assert parse_text(declared["config"]["defaultValue"]) == flow.config(REST)


def test_a_flow_that_is_worked_on_is_not_started_again(endpoint: tuple[str, Requests]) -> None:
    host, seen = endpoint
    first, again = (_flow().submit(REST, host=host) for _ in range(2))
    assert (first.what, again.what, again.pipeline_run_id) == ("started", "active", "r-1")
    assert _flow().submit(REST, host=host, force=True).pipeline_run_id == "r-2"
    assert len([path for method, path, _ in seen if method == "POST" and path.endswith("/runs")]) == 2


def test_the_endpoint_may_come_from_the_environment(
    endpoint: tuple[str, Requests], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, seen = endpoint
    monkeypatch.setenv(runner.ENDPOINT, host)
    assert _flow().submit(REST).run == "s3://bucket/runs/qwen"
    assert seen


def test_what_is_missing_for_a_submission_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(runner.ENDPOINT, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(
        ConfigError, match="no Kubeflow endpoint is configured: pass host=, or set KF_PIPELINES_ENDPOINT"
    ):
        _flow().submit(REST)
    with pytest.raises(ConfigError, match=r"pass root=, or set trainer\.default_local_dir"):
        _flow().submit(host="http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"pass run_id=, or set trainer\.experiment_name"):
        _flow().submit(host="http://127.0.0.1:9", root="s3://b/r")
    with pytest.raises(ConfigError, match=r"cannot reach the Kubeflow endpoint http://127\.0\.0\.1:9"):
        _flow().submit(REST, host="http://127.0.0.1:9")


def test_the_runner_is_found_by_its_name() -> None:
    assert isinstance(find_runner("kubeflow"), runner.KubeflowRunner)
