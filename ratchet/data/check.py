"""Checks training data before anything is trained on it: `check_data(["train.jsonl"], ["test.jsonl"])`.

The trap: what is wrong with data seldom stops a run. It trains on what it should be judged by, learns from empty texts,
or is graded by ground truths that no completion can match.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ratchet.data.check_repeats import check_leakage, check_repeats
from ratchet.data.check_rows import (
    CheckedRow,
    Columns,
    Finding,
    Findings,
    Judge,
    Objective,
    Split,
    check_objective,
    objective_of,
    read_row,
)
from ratchet.data.conversations import Completion, Message
from ratchet.data.sources import read_records
from ratchet.errors import DataError

Measure = Callable[[Sequence[Message], Sequence[Completion]], tuple[int, list[int]]]
"""(tokens of the prompt, tokens of each completion behind it); DataError where the chat template refuses them."""

_BAR = 40


@dataclass(frozen=True, slots=True)
class Histogram:
    """How long texts are. Example: 3, 5 and 6 tokens are the bins (2, 4): 1 and (4, 8): 2."""

    what: str
    unit: str
    minimum: int
    median: int
    p95: int
    """95% of the texts are no longer."""
    maximum: int
    bins: tuple[tuple[int, int, int], ...]
    """(from, up to and without, texts), by powers of two."""


@dataclass(frozen=True, slots=True)
class SplitReport:
    """What was read of one split."""

    split: Split
    sources: tuple[str, ...]
    num_rows: int
    """Rows that could be read."""
    num_refused: int
    columns: tuple[str, ...]
    data_sources: Mapping[str, int]
    """Rows of each."""
    histograms: tuple[Histogram, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """What there is, and what is wrong with it."""

    objective: Objective
    splits: tuple[SplitReport, ...]
    findings: tuple[Finding, ...]

    @property
    def has_errors(self) -> bool:
        return any(finding.level == "error" for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON can say it."""
        return asdict(self)

    def lines(self) -> Iterator[str]:
        """Yield the report for people."""
        for split in self.splits:
            refused = f", {split.num_refused} refused" if split.num_refused else ""
            yield f"{split.split}: {split.num_rows} rows{refused}, for the objective {self.objective}"
            yield f"  columns: {', '.join(split.columns) or 'none'}"
            yield f"  data_source: {', '.join(f'{name} ({count})' for name, count in split.data_sources.items())}"
            for each in split.histograms:
                yield (
                    f"  {each.what}, {each.unit}: {each.minimum} to {each.maximum}, "
                    f"median {each.median}, 95% up to {each.p95}"
                )
                most = max(count for _, _, count in each.bins)
                for low, high, count in each.bins:
                    yield f"    {low:>7} to {high - 1:<7} {'#' * -(-count * _BAR // most):{_BAR}} {count}"
        for finding in self.findings:
            rows = f" ({finding.num_rows} row{'s' * (finding.num_rows != 1)})" if finding.num_rows else ""
            yield f"{finding.level:8}{finding.check}: {finding.message}{rows}"
            yield from (f"          {place}" for place in finding.places)
            if finding.num_rows > len(finding.places):
                yield "          ..."
        counts = {level: sum(each.level == level for each in self.findings) for level in ("error", "warning", "note")}
        yield ", ".join(f"{count} {level}{'s' * (count != 1)}" for level, count in counts.items())


def check_data(
    train: Sequence[str],
    val: Sequence[str] = (),
    *,
    objective: Objective | None = None,
    prompt_key: str = "prompt",
    data_source: str | None = None,
    judge: Judge | None = None,
    measure: Measure | None = None,
) -> Report:
    """Read whole sources (see `sources.read_records`), training and held out, and say all that is wrong with them.

    `objective` is what they are for, by default what their columns say. `judge` checks ground truths against the rules
    that grade them. Lengths are characters, or what `measure` counts. A source that cannot be read on is an error among
    the findings, except where storage itself fails (StoreError).
    """
    findings, columns = Findings(), Columns()
    sources: dict[Split, Sequence[str]] = {"train": train, "val": val}
    read: dict[Split, tuple[list[CheckedRow], int]] = {}
    for split, specs in sources.items():
        if specs:
            read[split] = _read(specs, split, findings, columns, prompt_key=prompt_key, data_source=data_source)
    columns.report(findings)
    rows = [each for checked, _ in read.values() for each in checked]
    objective = objective or objective_of(rows)
    if rows:
        check_objective(rows, findings, objective=objective, judge=judge)
    for split, (checked, _) in read.items():
        check_repeats(checked, findings, objective=objective, split=split)
    if len(read) == 2:
        check_leakage(read["train"][0], read["val"][0], findings)
    reports = []
    for split, (checked, num_refused) in read.items():
        data_sources: dict[str, int] = {}
        for each in checked:
            data_sources[each.row.data_source] = data_sources.get(each.row.data_source, 0) + 1
        reports.append(
            SplitReport(
                split,
                tuple(sources[split]),
                len(checked),
                num_refused,
                tuple(columns.names(split)),
                data_sources,
                _histograms(checked, objective, measure, findings),
            )
        )
    return Report(objective, tuple(reports), tuple(findings.sorted()))


def _read(
    specs: Sequence[str],
    split: Split,
    findings: Findings,
    columns: Columns,
    *,
    prompt_key: str,
    data_source: str | None,
) -> tuple[list[CheckedRow], int]:
    """The rows of a split that can be read, and how many others there are."""
    checked, num_read = [], 0
    for spec in specs:
        try:
            for record in read_records(spec, split="test" if split == "val" else split):
                num_read += 1
                columns.add(record.values, split)
                row = read_row(record, findings, split=split, prompt_key=prompt_key, data_source=data_source)
                checked += [] if row is None else [row]
        except DataError as error:
            findings.add("error", "source", str(error))
    if not num_read:
        findings.add("error", "source", f"{', '.join(specs)}: expected at least one row, got none")
    return checked, num_read - len(checked)


def _histograms(
    rows: Sequence[CheckedRow], objective: Objective, measure: Measure | None, findings: Findings
) -> tuple[Histogram, ...]:
    lengths: dict[str, list[int]] = {"prompt": [], "chosen": [], "rejected": []}
    for each in rows:
        pair = {"chosen": each.chosen, "rejected": each.rejected} if objective != "rl" else {}
        completions = {name: value for name, value in pair.items() if value is not None}
        try:
            asked, answered = (measure or _characters)(each.row.prompt, [*completions.values()])
        except DataError as error:
            findings.refused("chat_template", error, each.row.where)
            continue
        lengths["prompt"].append(asked)
        for name, length in zip(completions, answered, strict=True):
            lengths[name].append(length)
    unit = "characters" if measure is None else "tokens"
    return tuple(histogram(name, unit, found) for name, found in lengths.items() if found)


def _characters(prompt: Sequence[Message], completions: Sequence[Completion]) -> tuple[int, list[int]]:
    def length(completion: Completion) -> int:
        return len(completion) if isinstance(completion, str) else sum(len(turn["content"]) for turn in completion)

    return length([*prompt]), [length(each) for each in completions]


def histogram(what: str, unit: str, lengths: Sequence[int]) -> Histogram:
    """Summarise at least one length; quantiles are lengths that occur (nearest rank)."""
    ordered = sorted(lengths)
    counts: dict[int, int] = {}
    for length in ordered:
        counts[length.bit_length()] = counts.get(length.bit_length(), 0) + 1
    bins = tuple((1 << bits >> 1, 1 << bits, counts.get(bits, 0)) for bits in range(min(counts), max(counts) + 1))
    ranked = [ordered[-(-len(ordered) * percent // 100) - 1] for percent in (50, 95)]
    return Histogram(what, unit, ordered[0], ranked[0], ranked[1], ordered[-1], bins)
