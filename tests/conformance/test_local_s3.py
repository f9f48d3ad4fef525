"""The same nodes share nothing but a bucket: claims, logs and checkpoints on S3, the payload carried by the target.

Airflow's side has its credentials from a connection, the ranks theirs from the environment of their node.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from airflow_gpu.rundir.store import Store
from airflow_gpu.targets.local.config import LocalConfig
from airflow_gpu.targets.local.target import LocalTarget
from tests.beds.stores.servers import Server
from tests.beds.stores.started import started
from tests.conformance.suite import Scenarios
from tests.conformance.test_local import LocalBed, closed

SECRET = {"access_key_id": "AWS_ACCESS_KEY_ID", "secret_access_key": "AWS_SECRET_ACCESS_KEY"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with started() as servers:
        yield servers["s3"]


class S3Bed(LocalBed):
    """A cluster folder and a prefix of the bucket for each test."""

    def __init__(self, path: Path, server: Server) -> None:
        self.server = server
        self.root = f"{server.uri}/{secrets.token_hex(6)}"
        super().__init__(path)
        self._tell(self.target)

    def config(self, **more: object) -> LocalConfig:
        return super().config(channel=self.root, pass_env="AWS_*", **more)

    async def requeueing(self) -> LocalTarget:
        return self._tell(await super().requeueing())

    def _tell(self, target: LocalTarget) -> LocalTarget:
        target.job_store = {name: value for name, value in self.server.options.items() if name not in SECRET}
        return target

    def channel_store(self, uri: str) -> Store:
        return Store(uri, self.server.options)


@pytest.fixture
def bed(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Bed]:
    for option, name in SECRET.items():
        monkeypatch.setenv(name, server.options[option])
    bed = S3Bed(tmp_path / "cluster", server)
    yield from closed(bed)


class TestLocalS3(Scenarios):
    """See the suite."""
