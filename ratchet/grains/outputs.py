"""What a task shows in the UI beside its log: numbers, a page of Markdown, a pointer to a model.

They are KFP's artifacts, of which this module knows no more than their path and metadata. Trap: a number that is not
finite fails the task after its work is done, with every other output; and a URI outside the pipeline's root does, too,
so that the place of weights goes into the metadata.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from ratchet.store.manifest import Artifact, Manifest, finite_metrics
from ratchet.store.run import POLICY_UPDATE, Run
from ratchet.tracking.metrics import mlflow_names

_COLUMNS = {
    "reward": ("critic/score/mean",),
    "length": ("response_length/mean",),
    "loss": ("actor/pg_loss", "actor/loss"),
    "accuracy": ("rewards/accuracies",),
    "KL": ("actor/ppo_kl",),
    "entropy": ("actor/entropy",),
    "gradient": ("actor/grad_norm",),
    "seconds": ("timing_s/step",),
}
"""Column of a report -> metrics, of which the first that a step has is shown."""


class Output(Protocol):
    """One of KFP's output artifacts."""

    path: str
    metadata: dict[str, Any]


def write_metrics(output: Output | None, metrics: Mapping[str, float]) -> None:
    """Show numbers by name; those that are not finite are counted instead.

    Names are MLflow's: KFP's plugin hands them to it, and its own store takes neither long ones nor two that differ in
    case alone.
    """
    if output is not None:
        finite = finite_metrics(metrics)
        names = mlflow_names(finite)
        seen: set[str] = set()
        for name, value in finite.items():
            shown = names[name]
            if shown.casefold() not in seen:
                output.metadata[shown] = value
            seen.add(shown.casefold())


def write_report(output: Output | None, lines: Iterable[str]) -> None:
    """Show a page of Markdown."""
    if output is not None:
        path = Path(output.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_model(output: Output | None, *, uri: str, artifact: Artifact, manifest: Manifest, **more: str) -> None:
    """Point to weights that stay where they are."""
    if output is not None:
        output.metadata.update(
            {
                "external_uri": uri,
                "digest": artifact.digest,
                "policy_version": float(manifest.content.policy_version or 0),
                "manifest_sha256": manifest.sha256,
                "run_id": manifest.provenance.run_id,
                **more,
            }
        )


def step_metrics(run: Run, step: int) -> dict[str, float]:
    """Return the metrics of every stage of a step."""
    found: dict[str, float] = {}
    for manifest in run.step_manifests(step):
        found |= manifest.provenance.metrics
    return found


def evaluation_report(run: Run, manifest: Manifest) -> list[str]:
    """Return the numbers of an evaluation as Markdown."""
    rows = [
        f"| {name} | {value:.4f} |" for name, value in sorted(manifest.provenance.metrics.items()) if "val-" in name
    ]
    title = f"### {run.run_id}: policy of step {manifest.content.step}"
    return [title, "", "| metric | value |", "|---|--:|", *rows, "", f"Run: `{run.uri}`"]


def steps_report(run: Run, steps: Iterable[int]) -> list[str]:
    """Return a table of steps with the numbers that tell how training goes, as Markdown."""
    lines = [
        f"### {run.run_id}",
        "",
        "| step | " + " | ".join(_COLUMNS) + " | policy |",
        "|--:|" + "--:|" * len(_COLUMNS) + "---|",
    ]
    for step in steps:
        metrics = step_metrics(run, step)
        found = [next((metrics[name] for name in names if name in metrics), None) for names in _COLUMNS.values()]
        cells = ["" if value is None else f"{value:.4g}" for value in found]
        update = run.manifest(POLICY_UPDATE, step)
        digest = update.content.outputs["policy"][:12] if update is not None else "not committed"
        lines.append(f"| {step} | {' | '.join(cells)} | `{digest}` |")
    return [*lines, "", f"Run: `{run.uri}`"]
