from collections.abc import Iterator

import pytest

from pipelines.api import Api
from pipelines.client import open_api
from tests.kfp_endpoint import KfpServer, kfp_server


@pytest.fixture
def server() -> Iterator[KfpServer]:
    """A Kubeflow Pipelines server in this process."""
    with kfp_server() as served:
        yield served


@pytest.fixture
def api(server: KfpServer) -> Api:
    """Its API, as a client sees it."""
    return open_api(host=server.url)
