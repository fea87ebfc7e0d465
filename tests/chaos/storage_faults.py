"""Object storage that fails: each kind of request of a run is harmed, over the proxy, in each way that it can be.

The requests of an undisturbed run are written down first; the cases are made from them. Time is scaled down about a
hundredfold: six attempts at a request for ten, a second of silence for sixty, and `OUTAGE_SECONDS` of the writer's
patience for its fifteen minutes. A victim is a fork with a proxy of its own, so that no connection is shared.
"""

import os
import re
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import boto3
from botocore.loaders import JSONFileLoader

from ratchet.errors import RatchetError
from ratchet.grains import loop
from ratchet.grains.session import open_session, submit
from ratchet.store import s3_client, writer
from ratchet.store.run import Run
from ratchet.store.writer import BackgroundWriter
from tests.chaos.bench import BUCKET, Workbench
from tests.chaos.case import Bench, Case, Outcome
from tests.chaos.forks import Died
from tests.chaos.holds import Broken, committed, expect
from tests.chaos.s3_proxy import Proxy, proxy_to
from tests.chaos.s3_requests import FOREVER, KINDS, Request, Rule

KIND = "storage"
RUN_ID = "run"
GRAINS = ("segment", "step", "stage")
ATTEMPTS = 6
SILENCE_SECONDS = 1.0
OUTAGE_SECONDS = 4.0
STEPS = 3
OVERRIDES: dict[str, Any] = {"trainer.total_training_steps": STEPS, "trainer.steps_per_segment": STEPS}
WIDE = {"trainer.total_training_steps": 1, "trainer.steps_per_segment": 1}
"""A run of a model whose files travel in parts, each of which may take a while."""

_ONCE: tuple[tuple[str, bool, str], ...] = (
    ("500", False, "any"),
    ("500", True, "write"),
    ("503 SlowDown", False, "any"),
    ("timeout", False, "any"),
    ("timeout", True, "write"),
    ("latency", False, "any"),
    ("reset", False, "any"),
    ("reset", True, "write"),
    ("reset mid-request", False, "body"),
    ("request truncated", False, "body"),
    ("request flipped", False, "body"),
    ("answer truncated", False, "answer"),
    ("answer headless", False, "read"),
    ("answer flipped", False, "object"),
)
"""Fault, whether the server does the work first, and of which requests."""
_LOAD_FILE = JSONFileLoader.load_file
_LASTING = tuple(item for item in _ONCE if item[0] != "latency")
_OUTAGES = {"shorter than a request's attempts": 0.1, "shorter than the writer's patience": 1.0, "longer": 3600.0}
_OUTAGES_BEGIN = (0.1, 0.3, 0.5, 0.7, 0.9)
"""At which part of a run's requests."""


@dataclass(kw_only=True)
class Seen:
    """What a victim did; it goes from one process to another."""

    error: str = ""
    """The one that ended it, if one did."""
    struck: int = 0
    told: list[str] = field(default_factory=list)
    """Places of which the session said that they are committed."""
    lines: list[str] = field(default_factory=list)
    """Of the console."""
    lag: int = 0
    """The most steps that were begun and not said to be committed."""
    committed: list[str] = field(default_factory=list)
    """Places, as storage has them afterwards."""
    requests: list[Request] = field(default_factory=list)


def cases(bench: Bench) -> Iterator[Case]:
    """Yield each fault that a kind of request can suffer, for each kind that occurs.

    A fault that strikes once strikes the first, the middle or the last request of its kind, and one that lasts strikes
    from there on; where there is a choice of place and grain, they take turns, so that each meets each.
    """
    bench = _workbench(bench)
    recorded = {grain: record(bench, grain, wide=False) for grain in GRAINS}
    recorded["wide"] = record(bench, "segment", wide=True)
    found: dict[str, list[tuple[str, list[Request]]]] = {}
    for name, requests in recorded.items():
        for kind, (method, target) in KINDS.items():
            same = [one for one in requests if one.method == method and re.search(target, one.target)]
            is_in_parts = "part" in kind.partition(" of ")[0]
            if is_in_parts:
                # A request that was repeated, because the server was slow, is not there the next time.
                same = list({one.target: one for one in same}.values())
            is_new = kind not in found or is_in_parts
            if same and (name != "wide" or is_new):
                found.setdefault(kind, []).append((name, same))
    turn = 0
    for kind, places in found.items():
        for fault, is_after, condition in _ONCE:
            suited = [(name, same) for name, same in places if _suits(condition, kind, same)]
            if suited:
                name, same = suited[turn % len(suited)]
                nth, word = _occurrence(len(same), turn)
                yield _case(kind, fault, is_after, name, nth, 1, f"{kind}, {word}")
                turn += 1
        suited_faults = [item for item in _LASTING if any(_suits(item[2], kind, same) for _, same in places)]
        fault, is_after, condition = suited_faults[turn % len(suited_faults)]
        name, same = next((name, same) for name, same in places if _suits(condition, kind, same))
        yield _case(kind, fault, is_after, name, (len(same) + 1) // 2, FOREVER, f"{kind}, from the middle one on")
    for turn, (words, seconds) in enumerate((w, s) for _ in _OUTAGES_BEGIN for w, s in _OUTAGES.items()):
        part = _OUTAGES_BEGIN[turn % len(_OUTAGES_BEGIN)]
        for grain in GRAINS if seconds < 1 else ("segment", GRAINS[1 + turn % 2]):
            nth = int(part * len(recorded[grain]))
            yield _case("", "outage", False, grain, nth, 1, f"after {part:.0%} of the requests, {words}", seconds)
    for grain in GRAINS:
        yield _case("", "create-only ignored", False, grain, 1, FOREVER, "a new run")


def run(case: Case, bench: Bench) -> Outcome:
    """Train over a proxy that does harm, let another submission finish, and say whether everything holds."""
    bench = _workbench(bench)
    _load_botocore()
    params = dict(case.params)
    overrides = _overrides(bench, wide=params["is_wide"])
    root = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    os.environ.update(bench.s3().env())
    try:
        seen = bench.fork(lambda: work(bench, root, case.grain, overrides, [rule_of(case)]))
        expect(seen.struck > 0, f"the fault struck nothing: {seen.error or 'it went on'}")
        expect_honest(seen, bench.config(case.grain, **overrides).trainer.commit_lag)
        _expect_end(case, seen, root)
    except (Broken, Died, RatchetError) as error:
        return Outcome(survived=False, redone_seconds=0.0, redone_stages=0, detail=str(error)[-1500:])
    outcome = bench.check(root, RUN_ID, case.grain, **overrides)
    return replace(outcome, detail="; ".join(filter(None, [seen.error[:300] or "went on", outcome.detail])))


def work(
    bench: Workbench,
    root: str,
    grain: str,
    overrides: dict[str, Any],
    rules: Sequence[Rule],
    *,
    watch: Callable[[Proxy, Seen], None] = lambda proxy, seen: None,
) -> Seen:
    """Train over a proxy with these rules, and report; call it in a fork. `watch` is called at every commit."""
    writer._LONGEST_PAUSE = 0.2
    if rules:
        s3_client.READ_SECONDS = SILENCE_SECONDS * (4 if WIDE.items() <= overrides.items() else 1)
    config = bench.config(grain, **{**overrides, "trainer.logger": ["console"]})
    seen, journal, begun = Seen(), bench.journal(root, RUN_ID).listener(), set[str]()
    with proxy_to(bench.s3()) as proxy:
        # Adaptive, boto3 would take ten seconds to come back to speed after one SlowDown.
        os.environ |= {"AWS_ENDPOINT_URL": proxy.endpoint, "AWS_RETRY_MODE": "standard"}
        os.environ["AWS_MAX_ATTEMPTS"] = str(ATTEMPTS)
        proxy.rules = list(rules)

        def listen(place: str, is_committed: bool) -> None:
            journal(place, is_committed)
            if is_committed:
                seen.told.append(place)
                watch(proxy, seen)
            elif place.endswith("/rollout"):
                begun.add(place.partition("/")[0])
            done = {told.partition("/")[0] for told in seen.told if told.endswith("/policy_update")}
            seen.lag = max(seen.lag, len(begun - done))

        try:
            run = submit(root, RUN_ID, config)
            patient = lambda: BackgroundWriter(outage_seconds=OUTAGE_SECONDS)  # noqa: E731
            with open_session(run, config, listen, echo=seen.lines.append, make_writer=patient) as session:
                loop.train(session)
        except RatchetError as error:
            seen.error = f"{type(error).__name__}: {error}"
        seen.requests, seen.struck = list(proxy.requests), sum(rule.done for rule in rules)
        proxy.rules.clear()
        proxy.outage(0)
        seen.committed = list(committed(Run(root, RUN_ID)))
    return seen


def record(bench: Workbench, grain: str, *, wide: bool) -> list[Request]:
    """Return what an undisturbed run asks for, in order."""
    _load_botocore()
    os.environ.update(bench.s3().env())
    root = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    seen = bench.fork(lambda: work(bench, root, grain, _overrides(bench, wide=wide), []))
    expect(not seen.error, f"undisturbed, it ended with {seen.error}")
    return seen.requests


def rule_of(case: Case) -> Rule:
    """Return the harm that a case does."""
    params = dict(case.params)
    method, target = KINDS.get(params.pop("kind"), ("", ""))
    del params["is_wide"]
    return Rule(method=method, target=target, **params)


def _case(
    kind: str, fault: str, is_after: bool, name: str, nth: int, times: int, boundary: str, seconds: float = 0.5
) -> Case:
    words = f"{fault}, work done" if is_after else fault
    params = {"kind": kind, "fault": fault, "is_after": is_after, "nth": nth, "times": times, "seconds": seconds}
    params["is_wide"] = name == "wide"
    grain = "segment" if name == "wide" else name
    return Case(kind=KIND, fault=words, grain=grain, boundary=boundary, params=tuple(params.items()))


def _occurrence(count: int, turn: int) -> tuple[int, str]:
    """Return which request of several is struck, in turn; one of two or three of them stands for itself."""
    places = {1: "first", (count + 1) // 2: "middle", count: "last"} if count > 1 else {1: "only"}
    return list(places.items())[turn % len(places)]


def _suits(condition: str, kind: str, same: Sequence[Request]) -> bool:
    return {
        "any": True,
        # Whether a read was done, nobody can tell.
        "write": not kind.startswith(("GET", "HEAD", "listing")),
        "body": any(one.length > 1 for one in same),
        "answer": any(one.answered > 1 for one in same) and not kind.startswith("HEAD"),
        "read": kind.startswith(("GET", "HEAD", "listing")),
        # A listing has no checksum: what protects it on the way is TLS.
        "object": kind.startswith("GET") and any(one.answered > 1 for one in same),
    }[condition]


def expect_honest(seen: Seen, commit_lag: int) -> None:
    """Nothing was said to be committed that is not, and the queue kept its bound."""
    told = Counter(seen.told)
    lost = sorted(told.keys() - set(seen.committed))
    expect(not lost, f"said to be committed and lost: {', '.join(lost)}")
    twice = sorted(place for place, count in told.items() if count > 1)
    expect(not twice, f"said twice to be committed: {', '.join(twice)}")
    shown = {int(found[1]) for line in seen.lines if (found := re.match(r"step: (\d+)", line))}
    missing = sorted(step for step in shown if f"step-{step:06d}/policy_update" not in seen.committed and step > 0)
    expect(not missing, f"shown on the console and lost: steps {missing}")
    # The listener learns of a commit a little later than the queue.
    expect(seen.lag <= commit_lag + 1, f"{seen.lag} steps under way, with trainer.commit_lag {commit_lag}")


def _expect_end(case: Case, seen: Seen, root: str) -> None:
    """A passing fault does not end a run, and a lasting one with a message that says where."""
    params = dict(case.params)
    if case.fault == "create-only ignored":
        expect("ignores create-only puts" in seen.error, f"not refused: {seen.error or 'it went on'}")
        expect(not seen.told, f"committed without create-only puts: {seen.told}")
    elif params["times"] == 1 and (case.fault != "outage" or params["seconds"] < 1):
        expect(not seen.error, f"a fault that passed ended the run: {seen.error}")
    elif seen.error:
        expect(root in seen.error, f"the message does not say where: {seen.error}")


def _overrides(bench: Workbench, *, wide: bool) -> dict[str, Any]:
    return {**WIDE, "actor_rollout_ref.model.path": str(_wide_model(bench))} if wide else OVERRIDES


def _wide_model(bench: Workbench) -> Any:
    """A model of 17 MiB: its weights and its trainer's state travel in parts."""
    folder = bench.folder / "wide"
    if not folder.is_dir():

        def make() -> None:
            import torch
            from transformers import AutoConfig, AutoModelForCausalLM

            from tests.tiny_models import make_tiny_model

            make_tiny_model(folder)
            config = AutoConfig.from_pretrained(folder, intermediate_size=11_000)
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)  # type: ignore[no-untyped-call]

        bench.fork(make)
    return folder


@cache
def _load_botocore() -> None:
    """Parse botocore's JSON here, once for the client of every fork: a third of a second."""
    load = cache(partial(_LOAD_FILE, JSONFileLoader()))
    JSONFileLoader.load_file = lambda self, file_path: load(file_path)  # type: ignore[method-assign]
    boto3.session.Session().client("s3", region_name="us-east-1").close()


def _workbench(bench: Bench) -> Workbench:
    assert isinstance(bench, Workbench)
    return bench
