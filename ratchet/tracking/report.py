"""A run, or a segment of it, as one HTML page that needs no network: curves, completions, what happened.

Everything in it comes from the chain and from what tasks said of themselves. Trap: prompts, completions, names of
rewards and messages of errors are other people's text; the template escapes all of it, and the page's own policy
forbids to load anything.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from ratchet.errors import NotCommittedError
from ratchet.redaction import hidden
from ratchet.store.manifest import Manifest
from ratchet.store.run import Run
from ratchet.store.status import TaskStatus, read_statuses
from ratchet.tracking.cost import Cost, Prices, before_steps, cost, prices_of
from ratchet.tracking.metrics import span
from ratchet.tracking.report_charts import Chart, charts, evaluated
from ratchet.tracking.report_completions import Examples, read_examples
from ratchet.tracking.report_data import Numbers, StepFacts, numbers, read_steps
from ratchet.tracking.report_events import Event, read_events
from ratchet.tracking.report_figures import figures, smooth_width
from ratchet.tracking.show_cost import HEADER, cost_rows, cost_sentences, money_text
from ratchet.tracking.work import Work

MAX_TEXT = 3000
"""Characters of a prompt or a completion that are shown."""
_MARKED = ("resume", "recovery", "failure")
"""Kinds of events that get a line in every chart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a page says."""

    run_id: str
    uri: str
    title: str
    """Of the part of the run that it is about."""
    steps: list[StepFacts]
    numbers: Numbers
    events: list[Event]
    examples: Examples
    cost: Cost
    headline: list[tuple[str, str]]
    """Label -> what has become of it."""
    facts: list[tuple[str, str]]
    """Label -> what the run was made of, and with."""
    config: str
    """Of the newest submission, as YAML."""


def read_report(run: Run, first: int = 1, last: int | None = None, prices: Prices | None = None) -> Report:
    """Read a run from its chain, or its steps from `first` to `last`; NotCommittedError where none is committed.

    `prices` go before those of the run's newest submission.
    """
    steps = read_steps(run, first, last)
    trained = [one.step for one in steps if one.step >= first and one.step > 0]
    if not trained:
        wanted = f"step {first} or later" if last is None else f"steps {first} to {last}"
        raise NotCommittedError(f"run {run.uri} has committed nothing of {wanted}")
    submissions = {int(one["epoch"]): one for one in run.submissions()}
    newest = submissions[max(submissions)] if submissions else {}
    graded = [one.step for one in steps if {"rollout", "reward"} <= one.stages and one.step >= first]
    # Evaluations of a run that learns from examples hold losses, and no completions.
    evaluated_steps = [one.step for one in steps if "evaluate" in one.stages] if graded else []
    is_whole = first == 1 and last is None
    tasks = read_statuses(run.store)
    found = _cost(run, steps, first, prices_of(newest.get("config") or {}, prices), tasks if is_whole else ())
    values = numbers(steps, found.by_step)
    return Report(
        run_id=run.run_id,
        uri=hidden(run.uri),
        title=f"{run.run_id}" if is_whole else f"{run.run_id}, steps {trained[0]} to {trained[-1]}",
        steps=steps,
        numbers=values,
        events=read_events(run, steps, submissions, tasks),
        examples=read_examples(run, graded, evaluated_steps),
        cost=found,
        headline=_headline(steps, values, found),
        facts=_facts(run, steps, newest),
        config=_yaml(newest.get("config") or {}),
    )


def html(report: Report) -> str:
    """Return the page."""
    from bokeh.resources import Resources
    from markupsafe import Markup

    marked = sorted({event.step for event in report.events if event.step and event.kind in _MARKED})
    # A document for each section: the first is drawn at once, and the reader reads while the others are.
    drawn = {title: _drawn(made, report.numbers, marked) for title, made in charts(report.numbers).items()}
    scripts = Resources(mode="inline", components=["bokeh"], minified=True).js_raw
    page: str = _template().render(
        report=report,
        sections={title: placed for title, (placed, _) in drawn.items()},
        when=when,
        cut=cut,
        cost_header=HEADER,
        cost_rows=cost_rows(report.cost),
        cost_said=cost_sentences(report.cost),
        smooth_width=smooth_width(report.numbers),
        scripts=[Markup(script.replace("</script", "<\\/script")) for script in scripts],
        charts=Markup(_as_script([document for _, document in drawn.values()])),
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
    return page


def _drawn(
    made: Sequence[Chart], values: Numbers, marked: Sequence[int]
) -> tuple[list[tuple[Chart, str]], dict[str, Any]]:
    """Return the charts of a section, each with the id of its element, and what BokehJS draws them from."""
    from bokeh.document import Document
    from bokeh.embed.util import standalone_docs_json_and_render_items

    document, models = Document(), figures(made, values, marked)
    for model in models:
        document.add_root(model)
    documents, places = standalone_docs_json_and_render_items(models)
    elements = {model: element for place in places for model, element in place.to_json()["roots"].items()}
    placed = [(chart, elements[model.id]) for chart, model in zip(made, models, strict=True)]
    return placed, {"documents": documents, "places": [place.to_json() for place in places]}


def markdown(report: Report) -> list[str]:
    """Return the headline and what happened as lines of Markdown, for the pipeline's UI."""
    rows = [f"| {label} | {_cell(value)} |" for label, value in [*report.headline, *report.facts]]
    told = [f"- {_cell(f'{when(event.time)} {event.text}'.strip())}" for event in report.events]
    cells = [HEADER, ("---", *("---:" for _ in HEADER[1:])), *cost_rows(report.cost)]
    used = [f"| {' | '.join(_cell(cell) for cell in row)} |" for row in cells]
    said = [f"- {_cell(sentence)}" for sentence in cost_sentences(report.cost)]
    happened = ["What happened:", "", *(told or ["- nothing"])]
    return [f"### {report.title}", "", "| | |", "|---|---|", *rows, "", *used, "", *said, "", *happened]


def when(moment: float | None) -> str:
    """Return a moment as text in UTC; empty for None."""
    return "" if moment is None else datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M:%S")


def cut(text: str) -> str:
    """Return what is shown of a long text."""
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} ... ({len(text) - MAX_TEXT} characters more)"


def _cost(run: Run, steps: Sequence[StepFacts], first: int, prices: Prices, tasks: Sequence[TaskStatus]) -> Cost:
    """Of the step before a segment nothing is counted; before the first one come the data and version 0."""
    works = [work for one in steps if one.step >= first for work in one.works]
    if first == 1:
        works += [Work.of(one) for one in (*before_steps(run), *run.step_manifests(0))]
    return cost(works, prices, tasks)


def _headline(steps: Sequence[StepFacts], values: Numbers, spent: Cost) -> list[tuple[str, str]]:
    trained = [one for one in steps if one.step > 0 and one.policy]
    found = [("Steps", f"{len(trained)}")]
    names = {"critic/score/mean": "Reward", **{name: f"Held-out, {label}" for name, label in evaluated(values).items()}}
    names |= {"response_length/mean": "Completion length", "actor/entropy": "Entropy", "actor/ppo_kl": "KL"}
    for name, label in names.items():
        both = values.first_and_last(name)
        if both is not None:
            found.append((label, f"{both[0]:.4g} → {both[1]:.4g}"))
    busy = sum(one.metrics.get("timing_s/step", 0.0) for one in steps)
    ended = max(one.ended for one in steps)
    began = min((one.started for one in steps if one.step > 0), default=ended)
    found.append(("From first to last", span(ended - began)))
    found.append(("Of it in stages", span(busy)))
    if spent.total.gpu_seconds:
        found.append(("GPU-hours", f"{spent.total.gpu_seconds / 3600:.4g}"))
    return [*found, ("Cost", money_text(spent.total.money))] if spent.prices else found


def _facts(run: Run, steps: Sequence[StepFacts], submission: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the run was made of, and with."""
    config = submission.get("config") or {}
    devices, revisions, images = (
        sorted({made[place] for one in steps for made in one.made_by} - {""}) for place in range(3)
    )
    last = next((one for one in reversed(steps) if one.policy), None)
    data = run.manifest("preprocess/train", None)
    export = run.manifest("checkpoint_export", steps[-1].step)
    found = {
        "Run": run.uri,
        "Base model": str(config.get("actor_rollout_ref", {}).get("model", {}).get("path", "")),
        **({} if data is None else _data(data)),
        "Seed": str(config.get("trainer", {}).get("seed", "")),
        "Estimator": str(config.get("algorithm", {}).get("adv_estimator", "")),
        "Last policy": "" if last is None else f"{last.policy[:12]} of step {last.step}",
        "Export": "" if export is None else _digest(export, "export"),
        "Hardware": ", ".join(devices),
        "Code": ", ".join(revision[:12] for revision in revisions),
        "Images": ", ".join(images),
    }
    return [(label, hidden(value)) for label, value in found.items() if value]


def _data(manifest: Manifest) -> dict[str, str]:
    """Return what was trained on, prompts or examples: how many, and their digest."""
    return {
        f"Training {role}": f"{artifact.rows}, {_digest(manifest, role)}"
        for role, artifact in manifest.provenance.artifacts.items()
    }


def _digest(manifest: Manifest, role: str) -> str:
    return str(manifest.content.outputs[role][:12])


def _yaml(config: Mapping[str, Any]) -> str:
    import yaml

    return hidden(yaml.safe_dump(json.loads(json.dumps(config, default=str)), sort_keys=False)) if config else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def _as_script(value: Any) -> str:
    """Return JSON that cannot end the script element that it stands in."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False).replace("<", "\\u003c")


@cache
def _template() -> Any:
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))
