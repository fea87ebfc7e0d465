"""Seconds of a training step, side by side: `run` measures each system in a process of its own, `table` compares.

The systems run one after another on the same machine, in turns when there are repeats. Each measurement is a JSON file
of its own, and one that is there is not made again, so that a command that was cut off goes on where it stopped.
"""

import argparse
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.jobs import SYSTEMS, Job

ROOT = Path(__file__).resolve().parents[1]
SCRATCH = Path(tempfile.gettempdir()) / "ratchet-benchmarks"
MAX_CHARACTERS = 600
"""Of a question, so that every prompt is within the limit of tokens."""
LOG = "log.txt"
LEVEL = 5
"""Of the generated problems: prompts of about 100 tokens."""
BY_MICRO_BATCH = ("trl", "trl-durable")


def main() -> None:
    """Measure, or compare what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="measure; one JSON file each")
    run.add_argument("--model", required=True, help="Hugging Face folder, bfloat16")
    run.add_argument("--out", type=Path, required=True, help="folder of the JSON files")
    run.add_argument("--only", type=lambda text: text.split(","), default=["ratchet", "ratchet-off", *BY_MICRO_BATCH])
    run.add_argument("--steps", type=int, default=13)
    run.add_argument("--shape", type=int, nargs=3, default=[32, 8, 256], metavar=("P", "G", "T"))
    run.add_argument("--times", type=int, nargs="+", default=[1], help="multiples of the prompts of a step")
    run.add_argument("--micro-batch", type=int, nargs="+", default=[64], help="TRL's, each a measurement of its own")
    run.add_argument("--repeats", type=int, default=1)
    run.add_argument("--prompts", help="JSON Lines in GSM8K's format; generated problems where it is not given")
    run.add_argument("--sampler", choices=("vllm", "hf"), default="vllm")
    run.add_argument("--memory-share", type=float, default=0.3, help="vLLM's, in TRL and verl")
    run.add_argument("--scratch", type=Path, default=SCRATCH, help="runs, checkpoints, compiled kernels")
    run.add_argument("--timeout", type=float, default=300, help="most seconds of one measurement")
    run.add_argument(
        "--within", type=float, default=540, help="begin nothing that would probably end later, in seconds"
    )
    run.add_argument("--again", action="store_true", help="repeat what failed")
    run.add_argument("--trl", type=json.loads, default={}, help="fields of GRPOConfig, as JSON")
    run.add_argument("overrides", nargs="*", help="key=value, of Ratchet's config")
    run.set_defaults(action=_run)
    one = commands.add_parser("one", help="one measurement in this process; `run` calls it")
    one.add_argument("job", type=Path)
    one.add_argument("result", type=Path)
    one.set_defaults(action=_one)
    table = commands.add_parser("table", help="compare what is in these folders")
    table.add_argument("folders", type=Path, nargs="+")
    table.add_argument("--warmup", type=int, default=3, help="first steps that do not count")
    table.add_argument("--json", type=Path, help="write the numbers of the table")
    table.add_argument("--write", type=Path, help="put the tables between the markers of this page")
    table.add_argument("--block", default="steps", help="the name in those markers")
    table.add_argument("--chart", type=Path, help="draw them (.svg)")
    table.set_defaults(action=_table)
    arguments = parser.parse_args()
    arguments.action(arguments)


def jobs_of(arguments: argparse.Namespace) -> Iterator[Job]:
    """The measurements in turns: all systems once, then all again."""
    prompts, group, tokens = arguments.shape
    for repeat in range(arguments.repeats):
        for times in arguments.times:
            for system in arguments.only:
                for micro_batch in sorted(arguments.micro_batch) if system in BY_MICRO_BATCH else [None]:
                    yield Job(
                        system=system,
                        model=str(Path(arguments.model).resolve()),
                        prompts=str((arguments.scratch / "prompts.jsonl").resolve()),
                        num_prompts=prompts * times,
                        group_size=group,
                        num_tokens=tokens,
                        steps=arguments.steps,
                        micro_batch=micro_batch,
                        sampler=arguments.sampler,
                        memory_share=arguments.memory_share,
                        folder=str((arguments.scratch / "runs").resolve()),
                        repeat=repeat,
                        overrides=tuple(arguments.overrides),
                        trl_settings=arguments.trl,
                    )


def _run(arguments: argparse.Namespace) -> None:
    started, longest = time.monotonic(), 0.0
    unknown = sorted(set(arguments.only) - set(SYSTEMS))
    if unknown:
        raise SystemExit(f"expected some of {', '.join(SYSTEMS)}, got {', '.join(unknown)}")
    for folder in (arguments.out, arguments.scratch):
        folder.mkdir(parents=True, exist_ok=True)
    jobs = list(jobs_of(arguments))
    _write_prompts(Path(jobs[0].prompts), arguments.prompts, max(job.num_prompts * job.steps for job in jobs))
    for job in jobs:
        path = arguments.out / f"{job.name}.json"
        if path.exists() and not (arguments.again and "error" in json.loads(path.read_text(encoding="utf-8"))):
            continue
        if time.monotonic() - started + longest > arguments.within:
            sys.stdout.write("out of time; the same command goes on from here\n")
            return
        begun = time.monotonic()
        result = _measured(job, arguments)
        longest = max(longest, time.monotonic() - begun)
        tables.write_json(path, {"job": tables.job_facts(job), **result})
        sys.stdout.write(f"{job.name}: {tables.one_line(result)}, {time.monotonic() - begun:.0f} s in all\n")
        if "error" in result:
            sys.stdout.write((arguments.scratch / "measurement" / LOG).read_text(errors="replace")[-4000:] + "\n")
        sys.stdout.flush()


def _write_prompts(path: Path, source: str | None, count: int) -> None:
    """Write the questions that every system is given, in order."""
    from ratchet.data.word_problems import generate

    if source is None:
        rows = generate(level=LEVEL, size=count, seed=0, split="train")
    else:
        lines = Path(source).read_text(encoding="utf-8").splitlines()
        rows = [row for row in map(json.loads, lines) if len(row["question"]) <= MAX_CHARACTERS][:count]
    if len(rows) < count:
        raise SystemExit(f"{source}: expected {count} short questions, got {len(rows)}; measure fewer steps or prompts")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _measured(job: Job, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one measurement in a new process; what goes wrong is a result, too."""
    folder = arguments.scratch / "measurement"
    folder.mkdir(parents=True, exist_ok=True)
    place, result, log = folder / "job.json", folder / "result.json", folder / LOG
    result.unlink(missing_ok=True)
    # A measurement that was cut off left its run, which would be taken for this one.
    shutil.rmtree(job.folder, ignore_errors=True)
    job.write(place)
    # Kernels are compiled once for each kind of system: the first measurement of each is its cold start.
    caches = arguments.scratch / "cache" / job.system.partition("-")[0]
    names = {"VLLM_CACHE_ROOT": "vllm", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    own = {name: str((caches / part).resolve()) for name, part in names.items()}
    command = [sys.executable, "-m", "benchmarks.steps", "one", str(place.resolve()), str(result.resolve())]
    with ExitStack() as stack:
        device = stack.enter_context(_device_memory(folder / "device.txt"))
        output = stack.enter_context(log.open("w"))
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **own}, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code: int | None = process.wait(arguments.timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            # Whatever it has started ends with it: an engine, Ray.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    shutil.rmtree(job.folder, ignore_errors=True)
    if result.exists():
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    else:
        how = f"ended with {code}" if code is not None else f"took more than {arguments.timeout:.0f} s"
        found = {"error": f"the process {how}: {log.read_text(errors='replace')[-2000:]}"}
    return found | ({"device_peak": device[0]} if device else {})


@contextmanager
def _device_memory(path: Path) -> Iterator[list[int]]:
    """Yield a list that holds the GPU's most bytes in use afterwards, as nvidia-smi sees them twice a second."""
    found: list[int] = []
    if shutil.which("nvidia-smi") is None:
        yield found
        return
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--loop-ms=500", "--id=0"]
    with path.open("w") as output:
        process = subprocess.Popen(query, stdout=output, stderr=subprocess.DEVNULL)
        try:
            yield found
        finally:
            process.terminate()
            process.wait()
    values = [int(line) for line in path.read_text().split() if line.isdigit()]
    found.extend([max(values) * 2**20] if values else [])


def _one(arguments: argparse.Namespace) -> None:
    job = Job.read(arguments.job)
    try:
        result = importlib.import_module(f"benchmarks.run_{job.system.partition('-')[0]}").measure(job)
    except (Exception, SystemExit) as error:  # whatever a system raises is what its row says
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"[:1000]}
    tables.write_json(arguments.result, _without_places(result))


def _without_places(value: Any) -> Any:
    """The value with every absolute path cut to its last part."""
    if isinstance(value, dict):
        return {name: _without_places(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_places(each) for each in value]
    return Path(value).name if isinstance(value, str) and value.startswith("/") else value


def _table(arguments: argparse.Namespace) -> None:
    rows = tables.summarise(tables.read(arguments.folders), arguments.warmup)
    text = tables.markdown(rows)
    sys.stdout.write(text)
    if arguments.json:
        tables.write_json(arguments.json, rows)
    if arguments.write:
        begin, end = (f"<!-- {arguments.block}: {place} -->" for place in ("begin", "end"))
        tables.write_between_markers(arguments.write, text, begin, end)
    if arguments.chart:
        tables.draw(rows, arguments.chart)


if __name__ == "__main__":
    main()
