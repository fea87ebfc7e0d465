"""`python -m tests.chaos --out FOLDER`: every case of fault injection, on several workers, and the table of them.

Each case's result is a JSON line in FOLDER/results.jsonl as soon as it is known. What survived is not run again, so
that a matrix that was cut off goes on where it was.
"""

import argparse
import importlib
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType

# Before torch is imported: forks of one thread, and models from folders alone.
os.environ.update({"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"})

from ratchet.store.manifest import digest_of
from tests.chaos import report
from tests.chaos.bench import Workbench
from tests.chaos.case import Case, Outcome

MODULES = {
    "process": "process_faults",
    "storage": "storage_faults",
    "mlflow": "mlflow_faults",
    "rivals": "rival_faults",
    "resume": "resume_faults",
}
RESULTS = "results.jsonl"


def main() -> int:
    """Run what is asked for; 1 where a case was not survived, 3 where time ran out before the last one."""
    arguments = _arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    results = arguments.out / RESULTS
    kinds = arguments.kind or list(MODULES)
    with tempfile.TemporaryDirectory(prefix="ratchet-chaos-", dir=_fast_disk()) as scratch:
        every = _cases(kinds, Path(scratch) / "cases")
        cases = [case for case in every if arguments.only is None or fnmatchcase(case.name, arguments.only)]
        if arguments.sample is not None:
            cases = sampled(cases, arguments.sample)
        survived = {row["name"] for row in report.read(results) if row["survived"]}
        left = [case for case in cases if case.name not in survived]
        _say(f"{len(cases)} cases, {len(left)} of them to run")
        deadline = time.monotonic() + arguments.within if arguments.within else None
        _run_all(left, Path(scratch), results, arguments.workers, deadline)
    names = {case.name for case in every}
    # What is known of other kinds stays in the table; what is no case any more does not.
    rows = [row for row in report.read(results) if row["name"] in names or row["kind"] not in kinds]
    _say(report.table(rows))
    for row in rows:
        if not row["survived"]:
            _say(f"not survived: {row['name']}: {row['detail']}")
    if arguments.write is not None:
        report.write(arguments.write, rows)
    missing = {case.name for case in cases} - {row["name"] for row in rows}
    if missing:
        _say(f"{len(missing)} cases are left; the same command goes on with them")
        return 3
    return int(not all(row["survived"] for row in rows))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def sampled(cases: list[Case], number: int) -> list[Case]:
    """Return about `number` of the cases: the same ones every time, and of each fault at least one."""
    chosen = sorted(cases, key=lambda case: digest_of(case.name))
    first = {(case.kind, case.fault): case for case in reversed(chosen)}
    wanted = {case.name for case in [*first.values(), *chosen[: max(0, number - len(first))]]}
    return [case for case in cases if case.name in wanted]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", allow_abbrev=False, description=__doc__)
    parser.add_argument("--kind", action="append", choices=list(MODULES), help="only this kind; may be repeated")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes (default: one a core)")
    parser.add_argument("--only", metavar="PATTERN", help="only cases whose name matches, as in 'process-SIGKILL-*'")
    parser.add_argument("--sample", type=int, metavar="N", help="about N cases, of each fault at least one")
    parser.add_argument("--within", type=float, metavar="SECONDS", help="begin no case later than this")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where results go")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="put the table between this page's markers")
    return parser.parse_args()


def _fast_disk() -> str | None:
    """Memory, where there is some: a process that is killed loses nothing of what the system has taken from it."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _module(kind: str) -> ModuleType:
    return importlib.import_module(f"tests.chaos.{MODULES[kind]}")


def _cases(kinds: list[str], scratch: Path) -> list[Case]:
    """Return all cases in no order that means anything, so that some of them say something of all."""
    bench = Workbench(scratch)
    try:
        cases = [case for kind in kinds for case in _module(kind).cases(bench)]
    finally:
        bench.close()
    return sorted(cases, key=lambda case: digest_of(case.name))


def _run_all(cases: list[Case], scratch: Path, results: Path, workers: int, deadline: float | None) -> None:
    """Let the workers, forks of this process, take one case after the other."""
    context = multiprocessing.get_context("fork")
    taken = context.Value("i", 0)

    def take() -> Iterator[Case]:
        while deadline is None or time.monotonic() < deadline:
            with taken.get_lock():
                number, taken.value = taken.value, taken.value + 1
            if number >= len(cases):
                return
            yield cases[number]

    def work(number: int) -> None:
        bench = Workbench(scratch / f"worker-{number}")
        try:
            for case in take():
                report.append(results, report.row(case, *_timed(case, bench)))
        finally:
            bench.close()

    # Not daemons: a worker has forks of its own.
    processes = [context.Process(target=work, args=(number,)) for number in range(workers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def _timed(case: Case, bench: Workbench) -> tuple[Outcome, float]:
    started = time.monotonic()
    try:
        outcome = _module(case.kind).run(case, bench)
    except Exception:
        outcome = Outcome(survived=False, redone_seconds=0.0, redone_stages=0, detail=traceback.format_exc()[-2000:])
    return outcome, time.monotonic() - started


if __name__ == "__main__":
    sys.exit(main())
