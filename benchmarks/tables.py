"""From the JSON files of measurements to tables and a chart; numbers are never typed by hand.

Trap: only equal work may be compared. Systems of one workload must have trained on as many tokens in every step; where
they have not, there is no table.
"""

import dataclasses
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.jobs import SYSTEMS, Job

GIB = 2**30
LEAK_FROM = 5
"""The step whose memory the last one's is compared with."""
LEAK_STEPS = 20
"""Fewer steps say nothing about a leak."""


def write_json(path: Path, value: Any) -> None:
    """Write a result so that two of them can be compared line by line."""
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def job_facts(job: Job) -> dict[str, Any]:
    """What a measurement's file says of its job; places on the machine are left out."""
    facts = dataclasses.asdict(job) | {"workload": job.workload, "model": Path(job.model).name}
    return {name: value for name, value in facts.items() if name not in ("folder", "prompts")}


def one_line(result: dict[str, Any]) -> str:
    """What to print when a measurement has ended."""
    if "error" in result:
        return f"failed: {result['error'].splitlines()[0][:200]}"
    seconds = [step["seconds"] for step in result["steps"] if step["seconds"] is not None]
    return f"median {statistics.median(seconds):.2f} s a step, first step after {result['start_to_first_step']:.1f} s"


def read(folders: Iterable[Path]) -> list[dict[str, Any]]:
    """Read every measurement of the folders, oldest repeat first."""
    paths = [path for folder in folders for path in sorted(folder.glob("*-r[0-9]*.json"))]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def summarise(results: Sequence[dict[str, Any]], warmup: int) -> list[dict[str, Any]]:
    """One row for each workload, system and micro-batch, the fastest micro-batch first; repeats are put together."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for result in results:
        job = result["job"]
        found.setdefault((job["workload"], job["system"], job["micro_batch"], job["steps"]), []).append(result)
    _check_tokens([result for result in results if "error" not in result])
    rows = [_row(group, warmup) for group in found.values()]
    rows.sort(key=lambda row: (row["workload"], SYSTEMS.index(row["system"]), row.get("median", float("inf"))))
    for row in rows:
        for peer in ("trl", "trl-durable", "ratchet-off"):
            base = [
                other["median"]
                for other in rows
                if "median" in other and other["workload"] == row["workload"] and other["system"] == peer
            ]
            if base and "median" in row:
                row[f"ratio_to_{peer}"] = row["median"] / min(base)
    return rows


def _check_tokens(results: Sequence[dict[str, Any]]) -> None:
    expected: dict[tuple[str, int], tuple[str, int]] = {}
    for result in results:
        job = result["job"]
        for step in result["steps"]:
            system, tokens = expected.setdefault((job["workload"], step["step"]), (job["system"], step["tokens"]))
            if tokens != step["tokens"]:
                raise SystemExit(
                    f"{job['workload']}, step {step['step']}: {system} trained on {tokens} tokens and "
                    f"{job['system']} on {step['tokens']}; they are not the same work"
                )


def _row(group: Sequence[dict[str, Any]], warmup: int) -> dict[str, Any]:
    job = group[0]["job"]
    row = {name: job[name] for name in ("workload", "system", "micro_batch", "steps")}
    done = [result for result in group if "error" not in result]
    if not done:
        return row | {"error": group[0]["error"].splitlines()[0][:200]}
    steps = [step for result in done for step in result["steps"] if step["step"] > warmup]
    seconds = [step["seconds"] for step in steps]
    low, median, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
    peaks = [result["peak"] for result in done if result["peak"]]
    row |= {
        "repeats": len(done),
        "median": median,
        "quartiles": [low, high],
        "mean": statistics.fmean(seconds),
        "tokens_per_second": statistics.fmean(step["tokens"] for step in steps) / median,
        "split": {name: statistics.median(step["split"][name] for step in steps) for name in steps[0]["split"]},
        "rest": statistics.median(step["seconds"] - sum(step["split"].values()) for step in steps),
        "first_step_cold": done[0]["start_to_first_step"],
        "first_step_warm": min(result["start_to_first_step"] for result in done),
        "peak": max((peak["allocated"] for peak in peaks), default=None),
        # 0 is a cache that was not found.
        "peak_without_kv_cache": max(
            (peak["allocated"] - peak["kv_cache"] for peak in peaks if peak.get("kv_cache")), default=None
        ),
        "device_peak": max((result["device_peak"] for result in done if "device_peak" in result), default=None),
        "environment": done[0]["environment"],
    }
    if "commit_lag" in steps[0]:
        row["commit_lag"] = statistics.median(step["commit_lag"] for step in steps)
    if job["steps"] >= LEAK_STEPS and "memory" in done[0]["steps"][-1]:
        row["growth"] = {
            name: max(
                result["steps"][-1]["memory"][name] / result["steps"][LEAK_FROM - 1]["memory"][name] - 1
                for result in done
            )
            for name in done[0]["steps"][-1]["memory"]
        }
    return row


_HEAD = (
    "system",
    "seconds a step: median (quartiles), mean",
    "tokens/s",
    "generate + update + rest",
    "committed after",
    "peak GiB: all, without KV cache, whole GPU",
    "start to first step: cold, warm",
    "durable",
    "x TRL",
    "x TRL durable",
    "x off",
)
_WHERE = {
    "ratchet": "every step, local disk",
    "ratchet-off": "nothing",
    "ratchet-overlap": "every step, local disk",
    "ratchet-s3": "every step, S3 on the same machine",
    "trl": "nothing",
    "trl-durable": "every step, local disk",
    "verl": "nothing",
}


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The tables: one for each workload, then what was asked beside the step's time."""
    parts = []
    for workload in dict.fromkeys(row["workload"] for row in rows):
        own = [row for row in rows if row["workload"] == workload]
        best = [row for row in own if not _is_slower(row, own)]
        parts.append(f"**{workload}** (prompts x samples x new tokens){_machine(own)}\n\n{_table(best)}")
    ratios, growths = _linearity(rows), [row for row in rows if "growth" in row]
    if len(ratios) > 1:
        lines = [f"| {name} | {seconds:.2f} | {per_token:.2f} |" for name, seconds, per_token in ratios]
        head = "| workload, system | seconds a step | seconds a token, times those of the smallest |\n|---|---|---|"
        parts.append("\n".join([head, *lines]))
    if growths:
        head = f"| system, steps | memory at the end against step {LEAK_FROM}: host | GPU |\n|---|---|---|"
        lines = []
        for row in growths:
            host, device = (_or_dash(row["growth"].get(name), "+.2%") for name in ("host", "device"))
            lines.append(f"| {row['system']}, {row['steps']} | {host} | {device} |")
        parts.append("\n".join([head, *lines]))
    return "\n\n".join(parts) + "\n"


def _is_slower(row: dict[str, Any], own: Sequence[dict[str, Any]]) -> bool:
    """Whether the same system was faster with another micro-batch, or in a shorter run that the table shows."""
    same = [other for other in own if other["system"] == row["system"]]
    ranked = sorted(same, key=lambda other: ("error" in other, other["steps"], other.get("median", 0.0)))
    return row is not ranked[0]


def _machine(rows: Sequence[dict[str, Any]]) -> str:
    known = next((row["environment"] for row in rows if "environment" in row), None)
    if known is None:
        return ""
    packages = ", ".join(f"{name} {number}" for name, number in known["packages"].items())
    return f"; {known['gpu'] or 'CPU'}, {known['cpus']} CPUs, Python {known['python']}, {packages}"


def _table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [f"| {' | '.join(_HEAD)} |", "|" + "---|" * len(_HEAD)]
    for row in rows:
        system = row["system"] + (f", micro-batch {row['micro_batch']}" if row["micro_batch"] else "")
        if "error" in row:
            lines.append(f"| {system} | {row['error'].replace('|', '/')} |" + " |" * (len(_HEAD) - 2))
            continue
        low, high = row["quartiles"]
        split, rest = row["split"], row["rest"]
        parts = " + ".join(f"{split.get(name, 0.0):.2f}" for name in ("generate", "update"))
        peaks = [row["peak"], row["peak_without_kv_cache"], row["device_peak"]]
        cells = [
            system,
            f"{row['median']:.2f} ({low:.2f} to {high:.2f}), {row['mean']:.2f}",
            f"{row['tokens_per_second']:,.0f}",
            "overlapped" if rest < 0 else f"{parts} + {rest:.2f}",
            f"{row['commit_lag']:.2f} s" if "commit_lag" in row else "-",
            ", ".join(_or_dash(None if value is None else value / GIB, ".1f") for value in peaks),
            f"{row['first_step_cold']:.0f} s, {row['first_step_warm']:.0f} s",
            _WHERE[row["system"]],
            _or_dash(row.get("ratio_to_trl"), ".2f"),
            _or_dash(row.get("ratio_to_trl-durable"), ".2f"),
            _or_dash(row.get("ratio_to_ratchet-off"), ".2f") if row["system"].startswith("ratchet") else "-",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _linearity(rows: Sequence[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """Each row that has one of another size beside it, with its seconds a token against the smallest one's."""
    found = []
    done = [row for row in rows if "median" in row]
    for system in SYSTEMS:
        sizes: dict[str, list[dict[str, Any]]] = {}
        for row in done:
            if row["system"] == system:
                sizes.setdefault(row["workload"].split()[0], []).append(row)
        for group in sizes.values():
            best = {row["workload"]: row for row in group if not _is_slower(row, group_of(group, row))}
            ordered = sorted(best.values(), key=lambda row: int(row["workload"].split()[1]))
            if len(ordered) > 1:
                base = ordered[0]["tokens_per_second"]
                found += [
                    (f"{row['workload']}, {system}", row["median"], base / row["tokens_per_second"]) for row in ordered
                ]
    return found


def group_of(rows: Sequence[dict[str, Any]], row: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of the same workload."""
    return [other for other in rows if other["workload"] == row["workload"]]


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def write_between_markers(page: Path, text: str, begin: str, end: str) -> None:
    """Replace what stands between the markers of a page."""
    before, found_begin, rest = page.read_text(encoding="utf-8").partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise SystemExit(f"{page}: expected the lines {begin} and {end}")
    page.write_text(f"{before}{begin}\n\n{text}\n{end}{after}", encoding="utf-8")


def draw(rows: Sequence[dict[str, Any]], chart: Path) -> None:
    """Draw the median step of each system with its parts, one panel for each workload."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    mpl.rcParams |= {"svg.hashsalt": "ratchet", "svg.fonttype": "none"}
    workloads = list(dict.fromkeys(row["workload"] for row in rows if "median" in row))
    figure, panels = pyplot.subplots(len(workloads), 1, figsize=(8, 0.8 + 1.8 * len(workloads)), squeeze=False)
    for axes, workload in zip(panels[:, 0], workloads, strict=True):
        own = [row for row in rows if row["workload"] == workload and "median" in row]
        shown = [row for row in own if not _is_slower(row, own)][::-1]
        left = [0.0] * len(shown)
        for name in ("generate", "update", "rest"):
            widths = [_part(row, name) for row in shown]
            axes.barh([row["system"] for row in shown], widths, left=left, label=name)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axes.set(title=workload, xlabel="seconds a step, median" if axes is panels[-1, 0] else "")
        axes.grid(axis="x", alpha=0.3)
    panels[0, 0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(chart, metadata={"Date": None})


def _part(row: dict[str, Any], name: str) -> float:
    """A part of the bar; parts that overlap are scaled to the step."""
    split, median = row["split"], row["median"]
    scale = min(1.0, median / sum(split.values())) if sum(split.values()) else 1.0
    return float(median - sum(split.values()) * scale if name == "rest" else split.get(name, 0.0) * scale)
