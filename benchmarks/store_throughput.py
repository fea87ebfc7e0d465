"""How fast files go through the store, beside plain boto3 with the same settings, on a SeaweedFS started here.

    python -m benchmarks.store_throughput --megabytes 256 --rounds 6

Three ways of one file: boto3's transfers; the store's, which add the mapping of errors and a rename; and an artifact's,
which add the sha256 that manifests hold. Trap: on a shared machine one figure says nothing, so the ways take turns,
in an order that turns too; speeds are compared within a round, and CPU time beside them.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import boto3
from botocore.config import Config

from demo.servers import seaweedfs
from ratchet.store import artifacts
from ratchet.store.manifest import Artifact
from ratchet.store.s3 import TRANSFER, S3Store

BUCKET = "throughput"
MEGABYTE = 1024 * 1024

Way = tuple[Callable[[], object], Callable[[], object]]


def ways(folder: Path) -> dict[str, Way]:
    """Return name -> (upload, download) of `folder`/source/file."""
    config = Config(s3={"addressing_style": "path"}, max_pool_connections=32)
    client = boto3.session.Session().client("s3", config=config)
    store = S3Store(f"s3://{BUCKET}/store")
    source, target = folder / "source" / "file", folder / "target"
    target.mkdir()
    written: list[Artifact] = []

    def write() -> None:
        written[:] = [artifacts.write_folder(store, "artifact", source.parent)]

    return {
        "boto3": (
            lambda: client.upload_file(str(source), BUCKET, "boto3", Config=TRANSFER),
            lambda: client.download_file(BUCKET, "boto3", str(target / "boto3"), Config=TRANSFER),
        ),
        "store": (
            lambda: store.upload_file(source, "file"),
            lambda: store.download_file("file", target / "store"),
        ),
        "artifact": (write, lambda: artifacts.read_folder(store, written[0], target)),
    }


def measure(action: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds that `action` takes, and those of this process's CPU time."""
    os.sync()  # else the disk still works for the one before
    started, worked = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - started, time.process_time() - worked


def main() -> None:
    parser = argparse.ArgumentParser(description="store throughput beside plain boto3", allow_abbrev=False)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=6)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="throughput-") as name, seaweedfs(Path(name) / "server") as server:
        folder = Path(name)
        os.environ.update(server.env())
        server.create_bucket(BUCKET)
        (folder / "source").mkdir()
        with (folder / "source" / "file").open("wb") as file:
            for _ in range(arguments.megabytes):
                file.write(os.urandom(MEGABYTE))
        actions = ways(folder)
        taken: dict[tuple[str, str], list[tuple[float, float]]] = {
            (verb, way): [] for verb in ("up", "down") for way in actions
        }
        names = list(actions)
        for number in range(arguments.rounds):
            for way in names[number % len(names) :] + names[: number % len(names)]:
                for verb, action in zip(("up", "down"), actions[way], strict=True):
                    taken[verb, way].append(measure(action))
        sys.stdout.write("        way        MB/s  of boto3, same round  CPU s/GB  MB/s of every round\n")
        for (verb, way), times in taken.items():
            speeds = [arguments.megabytes / wall for wall, _ in times]
            ratio = statistics.median(
                plain / wall for (plain, _), (wall, _) in zip(taken[verb, "boto3"], times, strict=True)
            )
            cpu = statistics.median(worked for _, worked in times) * 1024 / arguments.megabytes
            each = " ".join(f"{speed:.0f}" for speed in speeds)
            sys.stdout.write(f"{verb:7} {way:8} {statistics.median(speeds):6.0f} {ratio:21.0%} {cpu:9.1f}  {each}\n")


if __name__ == "__main__":
    main()
