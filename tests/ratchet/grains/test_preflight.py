"""What preflight refuses, each with a real case, and what it must not refuse."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from ratchet.cli import app
from ratchet.config import RunConfig, parse_config
from ratchet.config.cluster import PlacementConfig
from ratchet.errors import ConfigError, StoreUnavailableError
from ratchet.grains.checks.finding import Finding, PipelineFacts
from ratchet.grains.checks.images import image_findings
from ratchet.grains.checks.places import bucket_findings, scratch_findings, tracking_findings
from ratchet.grains.checks.rewards import reward_findings, spread
from ratchet.grains.checks.shapes import config_findings, memory_findings, process_findings, step_findings
from ratchet.grains.preflight import check, refuse, report_markdown
from ratchet.grains.session import submit
from ratchet.store.local import LocalStore
from ratchet.store.objects import open_store
from tests.conftest import use_s3_server
from tests.runs import tiny_config, train_tiny, write_problems
from tests.tiny_models import make_tiny_model, tiny_tokenizer

HERE = PipelineFacts()


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_problems(tmp_path_factory.mktemp("problems") / "problems.jsonl")


@pytest.fixture(autouse=True)
def no_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cluster, no pod and no secret of this machine's."""
    monkeypatch.setenv("KUBECONFIG", "/nonexistent")
    for name in (
        "KUBERNETES_SERVICE_HOST",
        "RATCHET_IMAGE",
        "RATCHET_IMAGE_ROLE",
        "RATCHET_SCRATCH",
        "MLFLOW_TRACKING_URI",
    ):
        monkeypatch.delenv(name, raising=False)


def found(findings: Iterator[Finding] | list[Finding], check_name: str | None = None) -> dict[str, str]:
    """Level -> messages, of one check or of all."""
    said: dict[str, str] = {}
    for finding in findings:
        if check_name in (None, finding.check):
            said[finding.level] = f"{said.get(finding.level, '')}\n{finding.message}".strip()
    return said


def checked(config: RunConfig, root: Path | str, facts: PipelineFacts = HERE, run_id: str = "run") -> list[Finding]:
    return check(config, root=str(root), run_id=run_id, facts=facts)


def errors(findings: list[Finding]) -> list[str]:
    return [finding.check for finding in findings if finding.level == "error"]


# -- the whole -------------------------------------------------------------------------------------------------------


def test_a_run_that_works_is_not_refused_and_leaves_nothing(tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    findings = checked(tiny_config(tiny_model, problems, **{"data.val_files": str(problems)}), tmp_path / "runs")
    refuse(findings)
    assert {finding.check for finding in findings if finding.level == "ok"} >= {
        "config", "image", "bucket", "run", "model", "prompts", "context", "steps", "scratch", "reward",
    }  # fmt: skip
    assert found(findings, "cluster") == {"unknown": "no cluster is asked: this is no pod, and tasks run here"}
    assert list((tmp_path / "runs").iterdir()) == []


def test_all_errors_come_at_once_in_one_refusal(tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    config = tiny_config(
        tiny_model,
        problems,
        **{
            "data.train_batch_size": 9,
            "data.max_response_length": 600,
            "trainer.n_gpus_per_node": 2,
            "reward_model.auth_env": "NO_SUCH_VARIABLE",
            "reward_model.url": "http://127.0.0.1:1/",
            "reward_model.type": "api",
        },
    )
    with pytest.raises(ConfigError, match="nothing was started: 4 things would keep this run from working") as refused:
        refuse(checked(config, tmp_path))
    for said in (
        "processes: trainer.n_gpus_per_node x trainer.nnodes is 2",
        "reward: reward_model.auth_env: the environment variable NO_SUCH_VARIABLE is not set",
        "prompts: data.train_batch_size is 9, but the run has 5 training prompts",
        "context: data.max_prompt_length (256) and data.max_response_length (600) make 856 tokens",
    ):
        assert said in str(refused.value)


def test_the_report_names_the_worst_first_and_breaks_no_table() -> None:
    findings = [Finding("steps", "ok", "3 steps"), Finding("bucket", "error", "a|b\n<c>")]
    assert report_markdown(findings).splitlines() == [
        "### Preflight: 1 error, 1 ok",
        "",
        "| | check | |",
        "|---|---|---|",
        r"| error | bucket | a\|b<br>&lt;c> |",
        "| ok | steps | 3 steps |",
    ]


def test_what_a_config_says_against_itself_is_refused_before_anything_is_asked() -> None:
    with pytest.raises(ConfigError, match=r"ppo_mini_batch_size is 8, more than data.train_batch_size \(4\)"):
        parse_config({"data": {"train_batch_size": 4}, "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 8}}})


def test_a_group_of_one_is_a_warning(tiny_model: Path, problems: Path) -> None:
    config = tiny_config(tiny_model, problems, **{"actor_rollout_ref.rollout.n": 1})
    assert "nothing is learnt from a group of one" in found(config_findings(config, HERE))["warning"]


# -- shapes ----------------------------------------------------------------------------------------------------------


def placed(**placements: dict[str, Any]) -> PipelineFacts:
    chosen = {stage: PlacementConfig.model_validate(values) for stage, values in placements.items()}
    return PipelineFacts(asks_cluster=True, placements=chosen, grain="stage" if "rollout" in chosen else "segment")


def test_several_trainer_processes_in_a_segment_are_refused(tiny_model: Path, problems: Path) -> None:
    config = tiny_config(tiny_model, problems, **{"trainer.n_gpus_per_node": 4})
    assert "needs trainer.grain=stage" in found(process_findings(config, HERE))["error"]


def test_tensor_parallel_parts_need_an_accelerator_each(tiny_model: Path, problems: Path) -> None:
    values = {"actor_rollout_ref.rollout.name": "vllm", "actor_rollout_ref.rollout.tensor_model_parallel_size": 2}
    config = tiny_config(tiny_model, problems, **values, **{"trainer.device": "auto"})
    said = found(process_findings(config, placed(segment={"accelerator_count": 1})))["error"]
    assert "tensor_model_parallel_size is 2, and device_map.segment.accelerator_count is 1" in said
    assert "ok" in found(process_findings(config, placed(segment={"accelerator_count": 2})))
    assert "stay idle" in found(process_findings(config, placed(segment={"accelerator_count": 8})))["warning"]


def test_vllm_needs_an_accelerator_unless_it_samples_on_a_cpu(tiny_model: Path, problems: Path) -> None:
    values = {"actor_rollout_ref.rollout.name": "vllm", "data.val_files": str(problems)}
    config = tiny_config(tiny_model, problems, **values, **{"trainer.device": "auto"})
    said = found(process_findings(config, placed(segment={}, evaluate={"accelerator_count": 1})))["error"]
    assert said.startswith("actor_rollout_ref.rollout.name is vllm, and device_map.segment.accelerator_count is 0")
    assert "device_map.evaluate" not in said
    assert "device_map.evaluate" in found(process_findings(config, placed(evaluate={})))["error"]
    on_cpu = tiny_config(tiny_model, problems, **values, **{"trainer.device": "cpu"})
    assert "ok" in found(process_findings(on_cpu, placed(segment={}, evaluate={})))
    own, foreign = "localhost/ratchet-segment:0.1.0", "registry.example.com/mine:7"
    assert "error" in found(process_findings(config, placed(segment={"image": own})))
    assert "error" not in found(process_findings(config, placed(segment={"image": foreign})))
    assert "unless the image's vLLM" in found(process_findings(config, placed(segment={"image": foreign})))["warning"]


def test_trainer_processes_need_an_accelerator_each(tiny_model: Path, problems: Path) -> None:
    values = {"trainer.n_gpus_per_node": 4, "trainer.grain": "stage", "trainer.device": "auto"}
    config = tiny_config(tiny_model, problems, **values)
    facts = placed(rollout={}, scores={}, policy_update={"accelerator_count": 2})
    said = found(process_findings(config, facts))["error"]
    assert "trainer.n_gpus_per_node is 4, and device_map.policy_update.accelerator_count is 2" in said
    facts = placed(rollout={}, scores={}, policy_update={"accelerator_count": 4})
    assert "error" not in found(process_findings(config, facts))


def test_a_gpu_that_the_config_wants_has_to_be_asked_for(tiny_model: Path, problems: Path) -> None:
    config = tiny_config(tiny_model, problems, **{"trainer.device": "cuda"})
    said = found(process_findings(config, placed(segment={}, evaluate={})))["error"]
    assert "trainer.device is cuda, and device_map.segment.accelerator_count is 0" in said
    # Without held-out prompts its pod only exports, which needs none.
    assert "device_map.evaluate" not in said


@pytest.mark.parametrize(("size", "is_refused"), [(1, False), (2, False), (3, True), (4, False), (6, True), (8, False)])
def test_tensor_parallel_must_divide_the_heads(
    tmp_path: Path, problems: Path, tiny_model: Path, size: int, is_refused: bool
) -> None:
    # 8 attention heads, 4 key-value heads: 8 parts have a copy of a key-value head each, 6 would tear some apart.
    model = make_tiny_model(tmp_path / "model")
    described = json.loads((model / "config.json").read_text())
    described |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
    (model / "config.json").write_text(json.dumps(described))
    config = tiny_config(
        model,
        problems,
        **{"actor_rollout_ref.rollout.name": "vllm", "actor_rollout_ref.rollout.tensor_model_parallel_size": size},
    )
    said = found(checked(config, tmp_path / "runs"), "tensor parallel")
    assert ("error" in said) == is_refused
    if is_refused:
        assert f"is {size}, and the model has 8 attention and 4 key-value heads" in said["error"]
        assert "take one of 1, 2, 4, 8" in said["error"]


def test_lengths_beyond_the_models_context_are_refused_for_vllm_and_by_the_longest_prompt_for_the_other_sampler(
    tmp_path: Path, tiny_model: Path, problems: Path
) -> None:
    limits = {"data.max_prompt_length": 500, "data.max_response_length": 32}
    vllm = tiny_config(tiny_model, problems, **limits, **{"actor_rollout_ref.rollout.name": "vllm"})
    assert "make 532 tokens, and the model's context has 512" in found(checked(vllm, tmp_path), "context")["error"]
    # No prompt is longer than 100 tokens here.
    assert "ok" in found(checked(tiny_config(tiny_model, problems, **limits), tmp_path), "context")
    long = tiny_config(tiny_model, problems, **limits | {"data.max_response_length": 490})
    assert "the longest prompt" in found(checked(long, tmp_path), "context")["error"]


def test_more_iterations_than_a_pipeline_run_may_have_are_refused(tiny_model: Path, problems: Path) -> None:
    config = tiny_config(tiny_model, problems, **{"trainer.steps_per_segment": 10})
    facts = placed(segment={})
    assert "ok" in found(step_findings(config, facts, total=400, last=0))
    assert "make 41 iterations, and one pipeline run may have 40" in found(
        step_findings(config, facts, total=401, last=0)
    )["error"]  # fmt: skip
    assert "ok" in found(step_findings(config, facts, total=401, last=1))
    # Without a pipeline nothing limits them.
    assert "ok" in found(step_findings(config, HERE, total=9000, last=0))
    stages = placed(rollout={}, scores={}, policy_update={})
    assert "make 21 iterations" in found(step_findings(config, stages, total=21, last=0))["error"]
    assert "may grow, never shrink" in found(step_findings(config, facts, total=3, last=5))["error"]


def test_a_share_of_the_gpu_that_leaves_the_trainer_nothing_is_a_warning(tiny_model: Path, problems: Path) -> None:
    values = {"actor_rollout_ref.rollout.name": "vllm", "actor_rollout_ref.rollout.gpu_memory_utilization": 0.95}
    config = tiny_config(tiny_model, problems, **values)
    assert "the trainer shares the GPU at grain segment" in found(memory_findings(config, HERE, None))["warning"]
    assert not found(memory_findings(config, replace(HERE, grain="stage"), None))


def test_a_pod_that_could_not_hold_the_model_is_a_warning(tiny_model: Path, problems: Path) -> None:
    config = tiny_config(tiny_model, problems)
    facts = placed(segment={"memory": "8Gi"}, evaluate={"memory": "8Gi"})
    # 16 and 4 bytes of half a billion parameters are 7.5 and 1.9 GiB; of a billion, 14.9 and 3.7.
    assert not found(memory_findings(config, facts, 500_000_000))
    said = found(memory_findings(config, facts, 1_000_000_000))["warning"]
    assert said == (
        "device_map.segment.memory is 8Gi, and a model of 1000 million parameters takes 14.9Gi to train it without an "
        "accelerator: the pod would be killed; raise it"
    )
    assert "evaluate.memory is 8Gi, and a model of 7000 million parameters takes 26.1Gi to hold it in float32" in found(
        memory_findings(config, placed(segment={"accelerator_count": 1, "memory": "64Gi"}, evaluate={}), 7_000_000_000)
    )["warning"]  # fmt: skip


def test_a_critic_that_the_pipeline_does_not_train_is_refused(tiny_model: Path, problems: Path) -> None:
    config = tiny_config(tiny_model, problems, **{"algorithm.adv_estimator": "gae"})
    said = found(config_findings(config, replace(HERE, has_critic=False)))["error"]
    assert "use the pipeline ratchet-ppo-stages" in said


# -- images ----------------------------------------------------------------------------------------------------------


def imaged(image: str, **facts: Any) -> PipelineFacts:
    return replace(placed(segment={"image": image}), **facts)


def test_an_image_without_vllm_is_refused_where_vllm_samples(tiny_model: Path, problems: Path) -> None:
    config = tiny_config(tiny_model, problems, **{"actor_rollout_ref.rollout.name": "vllm"})
    said = found(image_findings(config, imaged("registry:5000/team/ratchet-base:0.1.0")))
    assert "device_map.segment.image is registry:5000/team/ratchet-base:0.1.0, which has no vLLM" in said["error"]
    for image in ("localhost/ratchet-segment:0.1.0", f"ghcr.io/x/ratchet-rollout@sha256:{'a' * 64}"):
        assert set(found(image_findings(config, imaged(image)))) == {"ok"}
    by_hf = tiny_config(tiny_model, problems)
    assert set(found(image_findings(by_hf, imaged("localhost/ratchet-base:0.1.0")))) == {"ok"}


def test_what_an_image_of_somebody_elses_holds_is_unknown_unless_it_is_this_pods_own(
    tiny_model: Path, problems: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tiny_model, problems, **{"actor_rollout_ref.rollout.name": "vllm"})
    facts = imaged("registry.example.com/mine:7", in_pod=True)
    assert "has vLLM cannot be seen from here" in found(image_findings(config, facts))["unknown"]
    monkeypatch.setenv("RATCHET_IMAGE", "registry.example.com/mine:7")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "this pod's registry.example.com/mine:7, without vLLM" in found(image_findings(config, facts))["error"]
    assert "this environment has no vLLM" in found(image_findings(config, HERE))["error"]


def test_this_pods_own_image_says_which_it_is_under_whatever_name(
    tiny_model: Path, problems: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, image = tiny_config(tiny_model, problems), "registry.example.com/rl:7"
    facts = placed(segment={"image": image, "accelerator_count": 1})
    assert "warning" not in found(image_findings(config, facts))
    monkeypatch.setenv("RATCHET_IMAGE_ROLE", "base")
    assert "warning" not in found(image_findings(config, facts))
    monkeypatch.setenv("RATCHET_IMAGE", image)
    assert "may be built for a CPU" in found(image_findings(config, facts))["warning"]
    # What is in it is looked at all the same: somebody may have added vLLM.
    vllm = tiny_config(tiny_model, problems, **{"actor_rollout_ref.rollout.name": "vllm"})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert set(found(image_findings(vllm, imaged(image, in_pod=True)))) == {"ok"}


@pytest.mark.parametrize(
    ("image", "level", "said"),
    [
        ("Registry/Upper Case:1", "error", "expected REGISTRY/NAME:TAG"),
        ("ratchet-segment:", "error", "expected REGISTRY/NAME:TAG"),
        ("team/ratchet-segment", "warning", "may be another image tomorrow"),
        ("team/ratchet-segment:latest", "warning", "may be another image tomorrow"),
    ],
)
def test_an_image_is_named_by_tag_or_digest(
    tiny_model: Path, problems: Path, image: str, level: str, said: str
) -> None:
    config = tiny_config(tiny_model, problems)
    assert said in found(image_findings(config, imaged(image)))[level]


def test_accelerators_in_the_base_image_are_a_warning(tiny_model: Path, problems: Path) -> None:
    facts = placed(segment={"image": "localhost/ratchet-base:0.1.0", "accelerator_count": 1})
    assert "may be built for a CPU" in found(image_findings(tiny_config(tiny_model, problems), facts))["warning"]


# -- the bucket ------------------------------------------------------------------------------------------------------


def test_a_bucket_is_probed_and_left_as_it_was(s3_root: str) -> None:
    store = open_store(s3_root).child("run")
    assert found(bucket_findings(store, HERE)) == {
        "ok": f"{s3_root}/run can be written, and creates an object once only"
    }
    assert list(store.list_objects("")) == []


def test_a_bucket_that_cannot_be_written_is_refused(
    s3_server: Any, s3_root: str, s3_reader_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_s3_server(s3_reader_environment, monkeypatch)
    said = found(bucket_findings(open_store(s3_root).child("run"), HERE))["error"]
    assert "AccessDenied" in said
    assert "a run must get, put, list and delete objects below its root" in said


def test_a_bucket_that_does_not_exist_and_one_that_does_not_answer_are_refused(
    s3_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = found(bucket_findings(open_store("s3://no-such-bucket/x").child("run"), HERE))["error"]
    assert "the bucket does not exist" in said
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    silent = open_store(s3_root).child("run")
    assert "check AWS_ENDPOINT_URL" in found(bucket_findings(silent, HERE))["error"]


class _Silent(LocalStore):
    def put_create(self, key: str, data: bytes) -> bool:
        raise StoreUnavailableError("503")


def test_in_a_pod_storage_that_does_not_answer_is_left_to_the_program_to_ask_again(tmp_path: Path) -> None:
    assert found(bucket_findings(_Silent(tmp_path), HERE)) == {"error": "503"}
    with pytest.raises(StoreUnavailableError):
        list(bucket_findings(_Silent(tmp_path), replace(HERE, in_pod=True)))


class _Careless(BaseHTTPRequestHandler):
    """An S3 server that knows no If-None-Match, as old ones do."""

    objects: dict[str, bytes]

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding", "").startswith("aws-chunked"):
            size, _, rest = body.partition(b"\r\n")
            body = rest[: int(size.split(b";")[0], 16)]
        self.objects[urlsplit(self.path).path] = body
        self._answer(200)

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        if "list-type" in parse_qs(parts.query):
            names = [path.removeprefix(f"{parts.path}/") for path in self.objects]
            contents = "".join(f"<Contents><Key>{name}</Key><Size>1</Size></Contents>" for name in names)
            self._answer(200, f"<ListBucketResult>{contents}</ListBucketResult>".encode())
        elif parts.path in self.objects:
            self._answer(200, self.objects[parts.path])
        else:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")

    do_HEAD = do_GET

    def do_DELETE(self) -> None:
        self.objects.pop(urlsplit(self.path).path, None)
        self._answer(204)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def test_a_bucket_that_ignores_create_only_puts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    objects: dict[str, bytes] = {}
    with serving(type("Handler", (_Careless,), {"objects": objects})) as url:
        keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_ENDPOINT_URL": url}
        use_s3_server(keys, monkeypatch)
        said = found(bucket_findings(open_store("s3://bucket/runs").child("run"), HERE))["error"]
    assert "s3://bucket/runs/run: this storage ignores create-only puts" in said
    assert objects == {}


def test_a_folder_that_only_this_pod_sees_is_a_warning(tmp_path: Path) -> None:
    said = found(bucket_findings(open_store(str(tmp_path)).child("run"), replace(HERE, asks_cluster=True)))
    assert "every pod must see the same folder" in said["warning"]


# -- a run that exists -----------------------------------------------------------------------------------------------


def test_a_run_that_has_its_model_and_prompts_needs_them_nowhere_else(tmp_path: Path, tiny_model: Path) -> None:
    model, problems = make_tiny_model(tmp_path / "model"), write_problems(tmp_path / "problems.jsonl")
    config = tiny_config(model, problems, **{"trainer.total_training_steps": 1})
    train_tiny(tmp_path / "runs", "run", config)
    (model / "config.json").unlink()
    problems.unlink()
    longer = tiny_config(model, problems, **{"trainer.total_training_steps": 2})
    findings = checked(longer, tmp_path / "runs")
    refuse(findings)
    assert "has 5 training prompts" in found(findings, "prompts")["ok"]
    assert "2 steps (1 are done)" in found(findings, "steps")["ok"]
    assert "reference answers 1 and wrong ones 0" in found(findings, "reward")["ok"]
    # And what is not the same run is said here already.
    other = tiny_config(model, problems, **{"actor_rollout_ref.rollout.n": 4})
    assert "exists with another configuration" in found(checked(other, tmp_path / "runs"), "run")["error"]


def test_a_run_that_may_not_be_gone_on_with_is_refused_but_not_to_the_submission_that_began_it(
    tmp_path: Path, tiny_model: Path, problems: Path
) -> None:
    config = tiny_config(tiny_model, problems, **{"trainer.resume_mode": "disable"})
    submit(str(tmp_path), "run", config, submission_id="one")
    assert "trainer.resume_mode is disable" in found(checked(config, tmp_path), "run")["error"]
    assert "ok" in found(checked(config, tmp_path, replace(HERE, submission_id="one")), "run")


# -- models ----------------------------------------------------------------------------------------------------------


def test_a_model_that_is_not_there_is_refused_and_the_rest_is_checked_all_the_same(
    tmp_path: Path, problems: Path
) -> None:
    config = tiny_config(tmp_path / "none", problems, **{"data.train_batch_size": 9})
    findings = checked(config, tmp_path / "runs")
    assert "does not exist" in found(findings, "model")["error"]
    assert "data.train_batch_size is 9, but the run has 5" in found(findings, "prompts")["error"]


def test_a_model_without_a_chat_template_is_refused(tmp_path: Path, problems: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    for name in ("chat_template.jinja",):
        (model / name).unlink(missing_ok=True)
    described = json.loads((model / "tokenizer_config.json").read_text())
    described.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(described))
    said = found(checked(tiny_config(model, problems), tmp_path / "runs"), "model")["error"]
    assert "has no chat template; prompts are chat messages" in said


def test_a_model_that_is_no_language_model_is_refused(tmp_path: Path, problems: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    described = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(described | {"model_type": "vit", "architectures": ["ViTModel"]}))
    assert "error" in found(checked(tiny_config(model, problems), tmp_path / "runs"), "model")


def test_a_critic_of_another_vocabulary_is_refused(tmp_path: Path, tiny_model: Path, problems: Path) -> None:
    critic = make_tiny_model(tmp_path / "critic")
    described = json.loads((critic / "tokenizer.json").read_text())
    described["model"]["vocab"]["a word of its own"] = len(described["model"]["vocab"])
    (critic / "tokenizer.json").write_text(json.dumps(described))
    values = {"algorithm.adv_estimator": "gae", "critic.model.path": str(critic)}
    said = found(checked(tiny_config(tiny_model, problems, **values), tmp_path / "runs"), "critic")["error"]
    assert "has another vocabulary than the policy" in said


def test_a_reward_model_without_a_head_is_refused_and_a_large_one_with_a_head_is_not_loaded(
    tmp_path: Path, tiny_model: Path, problems: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ratchet.grains.checks.rewards._SMALL_BYTES", 1000)
    values = {"reward_model.type": "model", "reward_model.path": str(tiny_model)}
    said = found(checked(tiny_config(tiny_model, problems, **values), tmp_path / "runs"), "reward")["error"]
    assert "holds no value or reward head" in said
    judge = tmp_path / "judge"
    tokenizer = tiny_tokenizer()
    shape = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
        num_labels=1, pad_token_id=3,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        LlamaForSequenceClassification(shape).save_pretrained(judge)
    tokenizer.save_pretrained(judge)
    findings = checked(
        tiny_config(tiny_model, problems, **values | {"reward_model.path": str(judge)}), tmp_path / "runs"
    )
    refuse(findings)
    assert "not loaded here" in found(findings, "reward")["unknown"]


# -- rewards ---------------------------------------------------------------------------------------------------------


def rows_file(path: Path, truths: list[str], data_source: str = "openai/gsm8k") -> Path:
    rows = [
        {
            "prompt": [{"role": "user", "content": f"Question {number}?"}],
            "data_source": data_source,
            "reward_model": {"style": "rule", "ground_truth": truth},
        }
        for number, truth in enumerate(truths)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_reward_that_gives_its_own_reference_answers_0_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    # verl's strict mode compares texts, and takes the commas out of the completion alone.
    data = rows_file(tmp_path / "rows.jsonl", ["1,080", "2,400", "7,000"])
    config = tiny_config(tiny_model, data, **{"reward_model.gsm8k_mode": "strict"})
    findings = checked(config, tmp_path / "runs")
    said = found(findings, "reward")["error"]
    assert "gives reference answers 0 and wrong ones 0 on average: nothing can be learnt from it" in said
    assert "the completion '#### 1,080'" in said
    assert "against the ground truth '1,080' earns 0" in said
    assert "reward_model.gsm8k_mode" in said
    assert errors(findings) == ["reward"]
    assert set(found(checked(tiny_config(tiny_model, data), tmp_path / "runs"), "reward")) == {"ok"}


def test_a_reward_that_knows_few_of_its_reference_answers_is_a_warning(tmp_path: Path, tiny_model: Path) -> None:
    data = rows_file(tmp_path / "rows.jsonl", ["1,080", "2,400", "7"])
    config = tiny_config(tiny_model, data, **{"reward_model.gsm8k_mode": "strict"})
    said = found(checked(config, tmp_path / "runs"), "reward")["warning"]
    assert "gives reference answers 0.33" in said
    assert "does not know most of its own reference answers" in said


CUSTOM = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {}
"""


@pytest.mark.parametrize(
    ("body", "level", "said"),
    [
        (
            "float(solution_str == '<answer>' + ground_truth + '</answer>')",
            "ok",
            "reference answers 1 and wrong ones 0",
        ),
        ("1.0", "warning", "does not tell them apart, however they are phrased"),
        ("0.0", "error", "it gave nothing but 0 to 5 phrasings, and nothing can be learnt from that"),
        ("0.1 * (solution_str == 'I do not know.')", "error", "it gave nothing but 0 to 5 phrasings"),
        ("-0.5", "warning", "does not tell them apart"),
        ("float(solution_str == r'\\boxed{' + ground_truth + '}')", "ok", "reference answers 1 and wrong ones 0"),
        ("1.0 if ground_truth in solution_str else -1.0", "ok", "reference answers 1 and wrong ones -1"),
        ("1 / 0", "error", "the reward compute_score raised ZeroDivisionError"),
        ("float('nan')", "error", "the reward is nan"),
    ],
)
def test_a_custom_reward_is_tried_with_several_phrasings(
    tmp_path: Path, tiny_model: Path, problems: Path, body: str, level: str, said: str
) -> None:
    code = tmp_path / "reward.py"
    code.write_text(CUSTOM.format(body))
    values = {"custom_reward_function.path": str(code), "reward_model.type": "custom"}
    config = tiny_config(tiny_model, problems, **values)
    assert said in found(checked(config, tmp_path / "runs"), "reward")[level]


def test_a_rule_of_the_users_own_is_held_to_the_phrase_that_it_names(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ratchet.rewards import registry

    monkeypatch.setattr(registry, "_REGISTERED", {})
    code = tmp_path / "rules.py"
    code.write_text(
        "from ratchet.rewards.registry import register_reward\n"
        "@register_reward('mine/boxed', reference_answer=lambda truth: '[' + truth + ']')\n"
        "def graded(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(solution_str == '(' + ground_truth + ')')\n"
    )
    data = rows_file(tmp_path / "rows.jsonl", ["left", "right"], "mine/boxed")
    config = tiny_config(tiny_model, data, **{"code": [str(code)]})
    assert "the completion '[left]'" in found(checked(config, tmp_path / "runs"), "reward")["error"]


def test_an_endpoint_that_does_not_answer_is_refused_and_one_that_grades_is_asked(
    tmp_path: Path, tiny_model: Path, problems: Path
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{unused.getsockname()[1]}/score"
    values = {"reward_model.type": "api", "reward_model.url": closed}
    said = found(checked(tiny_config(tiny_model, problems, **values), tmp_path / "runs"), "reward")["error"]
    assert closed in said
    assert "refused" in said

    class Judge(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            rows = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["rows"]
            rewards = [float(row["completion"].endswith(row["ground_truth"])) for row in rows]
            body = json.dumps({"rewards": rewards}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    with serving(Judge) as url:
        config = tiny_config(tiny_model, problems, **values | {"reward_model.url": url})
        assert "wrong ones 0" in found(checked(config, tmp_path / "runs"), "reward")["ok"]

    class Indifferent(Judge):
        def do_POST(self) -> None:
            rows = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["rows"]
            body = json.dumps({"rewards": [0.0] * len(rows)}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with serving(Indifferent) as url:
        config = tiny_config(tiny_model, problems, **values | {"reward_model.url": url})
        said = found(checked(config, tmp_path / "runs"), "reward")["error"]
        assert "it gave nothing but 0 to 5 phrasings" in said
        assert "register it as a rule whose reference_answer writes that" in said


def test_an_endpoint_that_is_slow_is_a_warning(tiny_model: Path, problems: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/score"
        values = {"reward_model.type": "api", "reward_model.url": url, "reward_model.timeout": 0.2}
        config = tiny_config(tiny_model, problems, **values)
        from ratchet.data.sources import load_rows

        said = found(reward_findings(config, load_rows(str(problems), split="train"), None))
    assert "no answer within 0.2 s" in said["warning"]


def test_rows_are_spread_evenly_over_each_data_source() -> None:
    sources = ["a"] * 100 + ["b"] * 3
    assert spread(sources, 4) == [0, 25, 50, 75, 100, 101, 102]


# -- tracking and scratch --------------------------------------------------------------------------------------------


def test_mlflow_that_does_not_answer_never_keeps_a_run_from_starting(
    tiny_model: Path, problems: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tiny_model, problems, **{"trainer.logger": ["mlflow"]})
    pod = replace(HERE, in_pod=True)
    assert "MLFLOW_TRACKING_URI is not set for pods" in found(tracking_findings(config, pod, None))["warning"]
    assert "ok" in found(tracking_findings(config, HERE, None))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////tmp/mlflow.db")
    assert "lost with it" in found(tracking_findings(config, pod, None))["warning"]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@127.0.0.1:1")
    said = found(tracking_findings(config, pod, None))["warning"]
    assert "MLflow at http://127.0.0.1:1 does not answer (ConnectionError); training goes on without it" in said
    assert "secret" not in said


def test_mlflow_that_wants_to_know_who_asks_is_a_warning(
    tiny_model: Path, problems: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Guarded(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.headers.get("Authorization") == "Bearer mine" else 401)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    config = tiny_config(tiny_model, problems, **{"trainer.logger": ["mlflow"]})
    with serving(Guarded) as url:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
        assert (
            "answers 401: expected the secret ratchet-tokens" in found(tracking_findings(config, HERE, None))["warning"]
        )
        monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "mine")
        assert "ok" in found(tracking_findings(config, HERE, None))


def test_a_scratch_disk_that_is_too_small_is_a_warning_and_one_that_is_not_there_an_error(
    tmp_path: Path, tiny_model: Path, problems: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tiny_model, problems)
    monkeypatch.setenv("RATCHET_SCRATCH", str(tmp_path))
    # float32: three copies of 4 bytes and 12 for the trainer's state make 24 bytes a parameter.
    assert "take 2.4e" not in found(scratch_findings(config, 10**14, None))["warning"]
    assert "take 2400000.0 GB" in found(scratch_findings(config, 10**14, None))["warning"]
    assert "ok" in found(scratch_findings(config, 1000, None))
    monkeypatch.setenv("RATCHET_SCRATCH", str(tmp_path / "none"))
    assert "which is no folder here" in found(scratch_findings(config, 1000, None))["error"]


# -- the verb --------------------------------------------------------------------------------------------------------


def test_the_verb_prints_a_line_for_each_finding_and_ends_with_2_for_an_error(
    tmp_path: Path, tiny_model: Path, problems: Path
) -> None:
    from typer.testing import CliRunner

    base = [
        "preflight",
        "--config",
        "configs/tiny.yaml",
        "--root",
        str(tmp_path / "runs"),
        "--run-id",
        "run",
        "--local",
    ]
    keys = [f"actor_rollout_ref.model.path={tiny_model}", f"data.train_files={problems}"]
    good = CliRunner().invoke(app, [*base, *keys])
    assert good.exit_code == 0, good.output
    assert "ok      bucket: " in good.output
    bad = CliRunner().invoke(app, [*base, *keys, "data.train_batch_size=6", "--json"])
    assert bad.exit_code == 2
    findings = [json.loads(line) for line in bad.output.splitlines() if line.startswith("{")]
    assert [one["check"] for one in findings if one["level"] == "error"] == ["prompts"]


def test_without_a_kubeconfig_the_verb_says_once_that_no_cluster_was_asked(
    tmp_path: Path, tiny_model: Path, problems: Path
) -> None:
    from typer.testing import CliRunner

    keys = [f"actor_rollout_ref.model.path={tiny_model}", f"data.train_files={problems}"]
    place = ["--config", "configs/tiny.yaml", "--root", str(tmp_path / "runs"), "--run-id", "run"]
    answer = CliRunner().invoke(app, ["preflight", *place, *keys])
    assert answer.exit_code == 0, answer.output
    unknown = [line for line in answer.output.splitlines() if line.startswith("unknown ")]
    assert sum("cluster" in line or "kubeconfig" in line for line in unknown) == 1
    assert "unknown cluster: no Kubernetes API to ask" in answer.output
