"""The object stores of tests/beds/stores, each started once, when it is first asked for."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator

import pytest

from airflow_gpu.rundir.store import Store
from tests.beds.stores.servers import SERVERS, Server, Unavailable


class Servers:
    """By name; a test is skipped, and says so, where one cannot be installed."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._started: dict[str, Server] = {}

    def __getitem__(self, name: str) -> Server:
        if name not in self._started:
            try:
                self._started[name] = self._stack.enter_context(SERVERS[name]())
            except Unavailable as reason:
                pytest.skip(f"{name} IS NOT PROVED HERE: {reason}")
        return self._started[name]


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    with contextlib.ExitStack() as stack:
        yield Servers(stack)


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
