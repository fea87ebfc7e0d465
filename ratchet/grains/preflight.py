"""The first task of every pipeline: what cannot work is refused in seconds, all of it at once, before a GPU is taken.

Trap: "unknown" is an answer, too. What this account may not read, or nobody can see from here, neither stops a run nor
is passed off as fine.
"""

from collections.abc import Iterator, Sequence

from ratchet.config import RunConfig, semantic
from ratchet.data.order import steps_per_epoch
from ratchet.errors import ConfigError, StoreError, StoreUnavailableError
from ratchet.grains.checks.finding import Finding, Level, PipelineFacts
from ratchet.grains.checks.images import image_findings
from ratchet.grains.checks.places import bucket_findings, scratch_findings, tracking_findings
from ratchet.grains.checks.pods import Pods
from ratchet.grains.checks.promotion import promotion_findings
from ratchet.grains.checks.rewards import reward_findings
from ratchet.grains.checks.shapes import (
    config_findings,
    head_findings,
    length_findings,
    memory_findings,
    process_findings,
    step_findings,
)
from ratchet.grains.checks.sources import Sources, committed_sources, is_committed, named_sources
from ratchet.grains.session import check_resumes
from ratchet.store import layout
from ratchet.store.run import Run

__all__ = ["Finding", "Level", "PipelineFacts", "check", "refuse", "report_markdown"]

_ORDER: tuple[Level, ...] = ("error", "warning", "unknown", "ok")


def check(config: RunConfig, *, root: str, run_id: str, facts: PipelineFacts) -> list[Finding]:
    """Return what was found, in the order of the checks; nothing is raised for what is wrong with a run.

    Only in a pod, object storage that does not answer is a StoreUnavailableError: nothing is wrong with the run.
    """
    # Two checks may need the same thing, and say the same of it.
    return list(dict.fromkeys(_findings(config, root, run_id, facts)))


def refuse(findings: Sequence[Finding]) -> None:
    """Raise ConfigError with every error among the findings, if there is one."""
    errors = [finding for finding in findings if finding.level == "error"]
    if errors:
        count = "one thing" if len(errors) == 1 else f"{len(errors)} things"
        listed = "\n".join(f"  {finding.check}: {finding.message}" for finding in errors)
        raise ConfigError(f"nothing was started: {count} would keep this run from working\n{listed}")


def report_markdown(findings: Sequence[Finding]) -> str:
    """Return a table of the findings for people, the worst first."""
    counts = {level: sum(finding.level == level for finding in findings) for level in _ORDER}
    summary = ", ".join(f"{count} {level}" for level, count in counts.items() if count)
    rows = [
        f"| {finding.level} | {finding.check} | {_cell(finding.message)} |"
        for level in _ORDER
        for finding in findings
        if finding.level == level
    ]
    return "\n".join(
        [f"### Preflight: {summary or 'nothing was checked'}", "", "| | check | |", "|---|---|---|", *rows]
    )


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("<", "&lt;").replace("\n", "<br>")


def _findings(config: RunConfig, root: str, run_id: str, facts: PipelineFacts) -> Iterator[Finding]:
    yield from config_findings(config, facts)
    yield from process_findings(config, facts)
    yield from image_findings(config, facts)
    pods = Pods(config, root, facts)
    yield from pods.findings()
    run, is_old = Run(root, run_id), False
    bucket = list(bucket_findings(run.store, facts))
    yield from bucket
    if all(finding.level != "error" for finding in bucket):
        is_old = run.store.size(layout.RUN) is not None
        yield from _resumed(run, config, facts, is_old)
    yield from promotion_findings(config, root, facts)
    yield from tracking_findings(config, facts, pods.settings)
    is_prepared = is_old and is_committed(run)
    found = committed_sources(run, config, facts) if is_prepared else named_sources(config, root, facts)
    yield from found.findings
    yield from _fitting(config, facts, found, last=run.last_step() if is_old else 0)
    if found.rows:
        yield from reward_findings(config, found.rows, found.tokenizer)


def _resumed(run: Run, config: RunConfig, facts: PipelineFacts, is_old: bool) -> Iterator[Finding]:
    """Whether a run of this name may be gone on with, or begun."""
    is_own = is_old and facts.submission_id != "" and run.epoch_of(facts.submission_id) is not None
    try:
        if not is_own:
            check_resumes(run, config, is_old)
        if is_old:
            run.check(semantic(config))
    except StoreUnavailableError:
        raise
    except (ConfigError, StoreError) as error:
        yield Finding("run", "error", str(error))
    else:
        yield Finding("run", "ok", f"{run.uri} {'is gone on with' if is_old else 'is new'}")


def _fitting(config: RunConfig, facts: PipelineFacts, found: Sources, *, last: int) -> Iterator[Finding]:
    """The config against its model and its prompts."""
    if found.model_config is not None:
        yield from head_findings(config, found.model_config)
        yield from length_findings(config, found.context, found.longest)
    total = config.trainer.total_training_steps
    if total is None and found.num_prompts is not None:
        total = config.trainer.total_epochs * steps_per_epoch(found.num_prompts, config.data.train_batch_size)
    if total is not None:
        yield from step_findings(config, facts, total=total, last=last)
    yield from memory_findings(config, facts, found.num_parameters)
    yield from scratch_findings(config, found.num_parameters, found.num_critic)
