"""What a run is made from: model, critic, reward model and prompts, each checked before anything is taken for it.

A new run reads them where its config says; one that has committed them reads them from the run, since what lay outside
may be gone by then. No weights are loaded.
"""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ratchet.config import RunConfig
from ratchet.data import schemas
from ratchet.data.parquet import read_table
from ratchet.data.prompt_rows import PromptRow
from ratchet.data.sources import load_rows
from ratchet.errors import ConfigError, EngineError, RatchetError, StoreUnavailableError
from ratchet.grains.checks.finding import Finding, PipelineFacts
from ratchet.grains.checks.rewards import spread
from ratchet.rewards.graders import Grader, open_grader
from ratchet.stages.data_stage import DataStage, check_batch_size
from ratchet.stages.examples import Examples, longest_example
from ratchet.stages.graph import data_stages
from ratchet.store.artifacts import scratch
from ratchet.store.run import POLICY_UPDATE, Run

_DATA = "preprocess/train"


@dataclass
class Sources:
    """What was found of a run's model and prompts; None where it could not be."""

    model_config: Any = None
    context: int | None = None
    num_parameters: int | None = None
    num_critic: int | None = None
    tokenizer: Any = None
    rows: Sequence[PromptRow] | None = None
    """Training prompts, or enough of them to grade their reference answers; None where their reward is refused."""
    num_prompts: int | None = None
    """Or training examples, where these are learnt from."""
    longest: int | None = None
    """Tokens of the longest training prompt, where somebody has to know, or of the longest example."""
    findings: list[Finding] = field(default_factory=list)
    refusals: list[RatchetError] = field(default_factory=list)
    """The errors behind findings, for who raises the first of them."""

    @contextmanager
    def noted(self, check: str, facts: PipelineFacts) -> Iterator[None]:
        """Note what Ratchet refuses; in a pod, storage that does not answer is asked again by beginning again."""
        try:
            yield
        except StoreUnavailableError as error:
            if facts.in_pod:
                raise
            self.refuse(check, error)
        except RatchetError as error:
            self.refuse(check, error)

    def refuse(self, check: str, error: RatchetError) -> None:
        """Note an error."""
        self.findings.append(Finding(check, "error", str(error)))
        self.refusals.append(error)


def named_sources(
    config: RunConfig, root: str, facts: PipelineFacts, *, reward: Any = None, with_weights: bool = False
) -> Sources:
    """Read and check what the config names; `reward` is one that exists already, as in `open_grader`.

    `with_weights` fetches a reward model that lies elsewhere, since only its weights show whether it has a head.
    """
    found = Sources()
    for key in ("actor_rollout_ref.model.path", "data.train_files"):
        if not config.value(key):
            data = "examples" if config.is_offline else "prompts"
            said = f"{key} is not set: a run needs a model and training {data}"
            found.refuse("model" if "model" in key else "prompts", ConfigError(said))
    path = config.actor_rollout_ref.model.path
    if path:
        with found.noted("model", facts):
            from ratchet.engines.model import resolve_tokenizer_folder

            _read_model(found, resolve_tokenizer_folder(path), path, facts)
    with found.noted("critic", facts):
        _check_critic(found, config)
    grader = Grader({})
    if not config.is_offline:
        with found.noted("reward", facts):
            _check_reward_model(config, with_weights=with_weights)
        with found.noted("reward", facts):
            grader = open_grader(config, custom=reward)
    try:
        for stage in data_stages(config):
            if isinstance(stage, Examples):
                _read_examples(found, stage, config, root, facts)
            elif stage.split == "val" or config.data.train_files:
                _read_prompts(found, stage, config, root, grader, facts)
    finally:
        grader.close()
    return found


def committed_sources(run: Run, config: RunConfig, facts: PipelineFacts) -> Sources:
    """Read what the run has committed."""
    found = Sources()
    found.findings.append(Finding("model", "ok", f"run {run.uri} has its own copy"))
    with found.noted("model", facts), scratch() as folder:
        artifact = run.require(POLICY_UPDATE, 0).output("policy")
        for entry in artifact.files:
            if not entry.path.endswith(".safetensors"):
                run.store.download_file(f"{artifact.folder}/{entry.path}", folder / entry.path)
        _read_model(found, folder, f"{run.uri}/{artifact.folder}", facts, is_told=False)
    if config.is_offline:
        found.num_prompts = run.require(_DATA, None).output("examples").rows
        found.findings.append(Finding("examples", "ok", f"run {run.uri} has {found.num_prompts} training examples"))
        return found
    with found.noted("prompts", facts):
        table = read_table(run.store, run.require(_DATA, None).output("prompts"), schemas.PROMPTS)
        found.num_prompts = table.num_rows
        found.findings.append(Finding("prompts", "ok", f"run {run.uri} has {table.num_rows} training prompts"))
        chosen = table.take(spread(table.column("data_source").to_pylist()))
        found.rows = [_row(values, run) for values in chosen.to_pylist()]
    with found.noted("reward", facts):
        open_grader(config).close()
    return found


def is_committed(run: Run) -> bool:
    """Whether the run has its model and its training data."""
    return run.manifest(POLICY_UPDATE, 0) is not None and run.manifest(_DATA, None) is not None


def _read_model(found: Sources, folder: Path, place: str, facts: PipelineFacts, *, is_told: bool = True) -> None:
    from ratchet.engines.model import context_length, load_config, load_tokenizer

    found.model_config = load_config(folder)
    found.context = context_length(found.model_config)
    with found.noted("model", facts):
        found.num_parameters = _num_parameters(folder, place)
    found.tokenizer = load_tokenizer(folder)
    if is_told and found.num_parameters is not None:
        size = f"{found.num_parameters / 1e6:.4g} million parameters"
        found.findings.append(Finding("model", "ok", f"{place}: {size}, with a chat template"))


def _num_parameters(folder: Path, place: str) -> int:
    from ratchet.engines.model import WeightLayout

    try:
        layout = WeightLayout.of_folder(folder)
    except ValueError as error:
        raise EngineError(f"{place}: expected a causal language model that transformers knows: {error}") from error
    return sum(math.prod(shape) for name, shape in layout.shapes.items() if name not in layout.tied)


def _check_critic(found: Sources, config: RunConfig) -> None:
    if not config.critic_is_needed or not config.critic.model.path or found.tokenizer is None:
        return
    from ratchet.engines.model import resolve_tokenizer_folder
    from ratchet.engines.value_model import check_same_tokens

    path = config.critic.model.path
    folder = resolve_tokenizer_folder(path)
    check_same_tokens(found.tokenizer, folder)
    found.num_critic = _num_parameters(folder, path)
    found.findings.append(Finding("critic", "ok", f"{path} reads the policy's tokens"))


def _check_reward_model(config: RunConfig, *, with_weights: bool) -> None:
    if "model" not in config.reward_weights:
        return
    from ratchet.engines.model import load_tokenizer, resolve_model_folder, resolve_tokenizer_folder
    from ratchet.engines.reward_model import check_reward_model

    path = config.reward_model.path
    # Whether weights that lie elsewhere have a head shows once they are here, which takes longer than a check should.
    if with_weights or Path(path).expanduser().is_dir():
        check_reward_model(resolve_model_folder(path))
    else:
        load_tokenizer(resolve_tokenizer_folder(path))


def _read_prompts(
    found: Sources, stage: DataStage, config: RunConfig, root: str, grader: Grader, facts: PipelineFacts
) -> None:
    before = len(found.findings)
    rows: Sequence[PromptRow] | None = None
    if found.tokenizer is not None:
        with found.noted("prompts", facts):
            usable = stage.usable(config, found.tokenizer, grader, root=root)
            rows = [row for _, row in usable.rows]
            left_out = f"; {usable.num_overlong} are longer than the limit" if usable.num_overlong else ""
            said = f"{len(rows)} {stage.split} prompts{left_out}"
            found.findings.append(Finding("prompts", "ok", said))
    if stage.split == "val":
        return
    if rows is not None:
        found.rows, found.num_prompts = rows, len(rows)
        found.longest = _longest(found, config, rows)
        return
    # What else is wrong with them is said as well, as far as it can be told.
    data, failed = config.data, found.findings[before:]
    is_repeated = False
    try:
        rows = load_rows(
            data.train_files,
            split="train",
            data_source=data.data_source,
            prompt_key=data.prompt_key,
            needs_ground_truth=False,
        )
        grader.check_prompts(rows)
        if not failed:
            check_batch_size(config, len(rows), stage.role)
        found.rows = rows
    except RatchetError as error:
        is_repeated = any(finding.message == str(error) for finding in failed)
        if not is_repeated:
            found.refuse("prompts", error)


def _read_examples(found: Sources, stage: Examples, config: RunConfig, root: str, facts: PipelineFacts) -> None:
    if found.tokenizer is None or (stage.split == "train" and not config.data.train_files):
        return
    with found.noted("examples", facts):
        usable = stage.usable(config, found.tokenizer, None, root=root)
        left_out = f"; {usable.num_overlong} are over the limits on length" if usable.num_overlong else ""
        found.findings.append(Finding("examples", "ok", f"{len(usable.rows)} {stage.split} examples{left_out}"))
        if stage.split == "train":
            found.num_prompts = len(usable.rows)
            found.longest = longest_example(usable.made.table())


def _longest(found: Sources, config: RunConfig, rows: Sequence[PromptRow]) -> int | None:
    """The longest prompt, where the sampler takes each as it is and the limits together are too long for the model."""
    data = config.data
    limits = data.max_prompt_length + data.max_response_length
    if config.actor_rollout_ref.rollout.name != "hf" or found.context is None or limits <= found.context:
        return None
    from ratchet.engines.model import chat_prompts_ids

    return max(map(len, chat_prompts_ids(found.tokenizer, [row.prompt for row in rows])))


def _row(values: dict[str, Any], run: Run) -> PromptRow:
    return PromptRow(
        data_source=values["data_source"],
        prompt=values["prompt"],
        ability=values["ability"],
        reward_model={key: value for key, value in values["reward_model"].items() if value is not None},
        extra_info=json.loads(values["extra_info"]),
        where=f"run {run.run_id}, prompt {values['prompt_id']}",
    )
