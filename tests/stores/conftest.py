"""The object stores of tests/beds/stores, each started once, when it is first asked for."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from airflow_gpu.rundir.store import Store
from tests.beds.stores.servers import SERVERS, Server
from tests.beds.stores.started import Servers, started


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    with started() as servers:
        yield servers


@pytest.fixture(params=list(SERVERS))
def server(request: pytest.FixtureRequest, servers: Servers) -> Server:
    return servers[request.param]


@pytest.fixture
def s3(servers: Servers) -> Server:
    return servers["s3"]


@pytest.fixture
def bucket(server: Server) -> Store:
    """A folder of its own on each kind of store."""
    return Store(f"{server.uri}/{secrets.token_hex(6)}", server.options)
