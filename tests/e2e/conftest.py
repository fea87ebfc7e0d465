"""The live server for the tests of this folder: checked first, tidied up afterwards, and one run that says it works."""

import contextlib
import functools
import logging
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.environment import (
    OBJECT_STORE,
    SETTINGS,
    THREADS,
    TOKENS,
    Environment,
    is_this_machine,
    object_store_keys,
    pod_settings,
    tokens,
)

if TYPE_CHECKING:
    from ratchet.store.run import Run
    from tests.e2e.cluster_access import ClusterAccess
    from tests.e2e.live import Live, LiveRun

logger = logging.getLogger(__name__)

_LIVE: pytest.StashKey[Any] = pytest.StashKey()


@dataclass
class Works:
    """That the first run has committed a step: the image, the keys and the endpoint are right."""

    live: "Live"
    is_exact_here: bool
    """Whether this machine computes the same bits as the pods."""
    is_exact_there: bool
    """Whether all pods do among themselves."""

    @functools.cached_property
    def local(self) -> "Run | None":
        """The same config trained on this machine, on one thread; None where it cannot read the model."""
        from tests.e2e.scenarios import train_here

        model = self.live.model
        return train_here(self.live) if model.startswith("s3://") or Path(model).is_dir() else None

    @property
    def main(self) -> "LiveRun":
        """The first run."""
        return self.live.run("main")

    def check(self, run: "LiveRun", steps: int) -> None:
        """Fail unless a run is whole, and has the same content as one that nothing happened to."""
        from tests.e2e.chain import check_chain, check_same_content
        from tests.e2e.scenarios import MAIN_STEPS

        check_chain(run.store, steps)
        if self.local is not None:
            check_same_content(run.store, self.local, steps, is_exact=self.is_exact_here)
        first = self.live.begun["main"].store
        if first.last_step() >= MAIN_STEPS:
            check_same_content(run.store, first, min(steps, MAIN_STEPS), is_exact=self.is_exact_there)


@pytest.fixture(scope="session")
def environment() -> Environment:
    """The variables of `make e2e`; without them everything is skipped."""
    try:
        return Environment.read(os.environ)
    except ValueError as error:
        if "no live server" in str(error):
            pytest.skip(str(error))
        pytest.fail(str(error))


@pytest.fixture(scope="session")
def live(
    environment: Environment, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator["Live"]:
    """The server, asked once; what was created for the suite is removed at its end, and what still runs is ended."""
    from pipelines.client import open_api
    from ratchet.errors import RatchetError
    from tests.e2e.chain import upload_model
    from tests.e2e.live import Live

    token = uuid.uuid4().hex[:6]
    try:
        api = open_api(host=environment.endpoint, namespace=environment.namespace)
        _check_storage(f"{environment.root}/e2e-{token}")
    except RatchetError as error:
        pytest.fail(f"the suite cannot begin: {error}", pytrace=False)
    cluster, why_not = _open_cluster(environment.namespace)
    folder = tmp_path_factory.mktemp("e2e")
    try:
        settings = _prepare_pods(cluster) if cluster is not None else None
        found = Live(
            environment=environment,
            api=api,
            root=f"{environment.root}/e2e-{token}",
            token=token,
            model=environment.model or upload_model(environment.root, folder / "model"),
            folder=folder,
            cluster=cluster,
            why_no_cluster=why_not,
            settings=settings,
        )
        logger.info("runs of this session are below %s", found.root)
        request.config.stash[_LIVE] = found
        yield found
        _end_everything(found)
    finally:
        if cluster is not None:
            cluster.remove_created()


@pytest.fixture(scope="session")
def works(live: "Live", request: pytest.FixtureRequest) -> Works:
    """A run of three steps in three pods that has committed its first step; without it nothing else is tried."""
    from tests.e2e.scenarios import begin

    exact = os.environ.get("RATCHET_E2E_EXACT", "")
    # The training here has one thread.
    has_one_thread = (live.settings or {}).get(THREADS) == "1"
    cluster = live.cluster
    is_one_node = cluster is None or cluster.is_one_node()
    main = begin(live, "main")
    main.wait_for_step(1)
    selected = {item.name for item in request.session.items}
    # They mostly wait, and so cost little beside the first one.
    early = {"refused": "test_what_cannot_work", "waits": "test_a_pod_that_waits", "nightly": "test_nightly"}
    for name, test in early.items():
        if any(one.startswith(test) for one in selected) and (name != "waits" or cluster is not None):
            begin(live, name)
    is_like_here = has_one_thread and cluster is not None and cluster.is_this_machine()
    return Works(
        live=live,
        is_exact_here=exact == "1" or (exact == "" and is_like_here),
        is_exact_there=exact == "1" or (exact == "" and is_one_node),
    )


@pytest.fixture(autouse=True)
def only_its_own_runs(request: pytest.FixtureRequest) -> None:
    """Forget which runs the test before worked with."""
    found = request.config.stash.get(_LIVE, None)
    if found is not None:
        found.touched.clear()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Add to a failure what can be seen of the runs that the test worked with."""
    outcome = yield
    report, found = outcome.get_result(), item.config.stash.get(_LIVE, None)
    if report.failed and found is not None:
        for run in found.touched:
            # Whatever goes wrong here must not hide the failure.
            with contextlib.suppress(Exception):
                report.sections.append((f"run {run.run_id}", run.report()))


def _check_storage(root: str) -> None:
    from ratchet.errors import StoreError
    from ratchet.store.objects import open_store

    store, key = open_store(root), "probe"
    try:
        if not store.put_create(key, b"1") or store.put_create(key, b"2"):
            raise StoreError(f"{root}: this storage ignores create-only puts (If-None-Match: *)")
        store.delete(key)
    except StoreError as error:
        raise StoreError(
            f"{error} (this machine must reach RATCHET_ROOT: set AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, "
            "AWS_SECRET_ACCESS_KEY; where pods need another address, RATCHET_E2E_POD_AWS_ENDPOINT_URL)"
        ) from error


def _open_cluster(namespace: str) -> "tuple[ClusterAccess | None, str]":
    from ratchet.errors import ClusterError
    from tests.e2e.cluster_access import ClusterAccess

    try:
        return ClusterAccess.open(namespace), ""
    except ClusterError as error:
        logger.warning(
            "no access to Kubernetes, so that %s and %s must be there already, and some tests are skipped: %s",
            OBJECT_STORE,
            SETTINGS,
            error,
        )
        return None, str(error)


def _prepare_pods(cluster: "ClusterAccess") -> dict[str, str] | None:
    """Give pods keys and settings where they have none; return the settings that they have, None if unknown."""
    from ratchet.errors import ClusterError

    settings = pod_settings(os.environ)
    endpoint = settings.get("AWS_ENDPOINT_URL", "")
    try:
        for name, values in ((OBJECT_STORE, object_store_keys()), (TOKENS, tokens(os.environ))):
            if values and cluster.ensure_secret(name, values):
                logger.info("created secret %s from this process's environment", name)
        if cluster.ensure_config_map(SETTINGS, settings):
            logger.info("created config map %s: %s", SETTINGS, settings)
            if is_this_machine(endpoint):
                logger.warning(
                    "pods are told AWS_ENDPOINT_URL=%s, which is the pod itself to most of them; "
                    "RATCHET_E2E_POD_AWS_ENDPOINT_URL names another address",
                    endpoint,
                )
            return settings
    except ClusterError as error:
        logger.warning("pods must have their keys and settings already: %s", error)
    try:
        return cluster.cluster.config_map(SETTINGS)
    except ClusterError as error:
        logger.warning("the settings of pods are not known: %s", error)
        return None


def _end_everything(live: "Live") -> None:
    for run in live.begun.values():
        if run.is_scheduled:
            with contextlib.suppress(Exception):
                live.command("unschedule", run.run_id, may_fail=True)
        for pipeline_run in run.pipeline_runs:
            with contextlib.suppress(Exception):
                if run.on_server(pipeline_run).is_active:
                    live.command("terminate", pipeline_run, may_fail=True)
