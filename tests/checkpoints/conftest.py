"""Runs with real checkpoints, on a folder and on a real S3 server."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from airflow_gpu.gang.entries import attempt_entry
from airflow_gpu.gang.identity import RunKey, attempt_name
from airflow_gpu.gang.run import Seed
from airflow_gpu.rundir.channel import Channel
from airflow_gpu.rundir.checkpoints import Checkpoint, Checkpoints, Survey
from airflow_gpu.rundir.contents import Contents
from airflow_gpu.rundir.store import Store
from airflow_gpu.runtime.checkpoint import save_name
from airflow_gpu.runtime.manifest import Entry, Manifest
from tests.beds.stores.servers import Server
from tests.beds.stores.started import Servers, started
from tests.plugin.rundirs import DECISION, Made

FILES = {"rank-0.bin": b"zero" * 1000, "deep/er/rank 1, ü.bin": b"one" * 999, "empty": b""}


class Run(Made):
    """One run, written step by step; its channel may be on any store, and change."""

    def __init__(self, root: Path, store: Store | None = None, task: str = "fit") -> None:
        super().__init__(root, RunKey("prod", "dag", "r1", task))
        self.stores: dict[str, Store] = {}
        self.on(store or self.channel.store)

    def on(self, store: Store) -> None:
        """From now on the channel is there."""
        self.channel = Channel(store, self.path)
        self.stores[store.uri] = store

    async def goes_on(self, seed: Seed | None = None, *, resume: bool = True, since: int = 0) -> None:
        """Another attempt, on the channel of now."""
        self.attempt += 1
        entry = attempt_entry(
            attempt=self.attempt,
            name=attempt_name(self.key, self.incarnation, self.attempt),
            target="slurm_a",
            channel=self.channel.uri,
            offer=DECISION,
            resume=resume,
            first_life=self.lives + 1,
            digest="d" * 64,
            seed=seed,
            since=since,
        )
        await self._append(entry, 10.0 * self.attempt)

    async def seeded_life(self, origin: tuple[int, int]) -> int:
        self.lives += 1
        start = {"life": origin[0], "step": origin[1], "seed": True}
        await self.put(
            f"lives/{self.lives:04d}.json",
            {"v": 1, "kind": "life", "life": self.lives, "attempt": self.attempt, "nodes": 2, "from": start},
        )
        return self.lives

    async def write(
        self,
        step: int,
        *,
        life: int | None = None,
        name: str = "",
        files: Mapping[str, bytes] = FILES,
        writer: str = "api",
        manifest: bytes | None = None,
        claims: tuple[int, int] | None = None,
    ) -> str:
        """A checkpoint as the runtime leaves it; ``manifest`` other bytes (b"": none), ``claims`` another life and step."""
        life = life or self.lives
        folder = f"{life:04d}/{name or save_name(step)}"
        contents = Contents(self.channel.store, f"{self.path}/checkpoints")
        entries = []
        for path, data in files.items():
            await contents.create(f"{folder}/{path}", data)
            entries.append(Entry(path, len(data), hashlib.sha256(data).hexdigest()))
        if manifest is None:
            told, at = claims or (life, step)
            manifest = json.dumps(Manifest(told, at, 2, tuple(entries), writer).to_dict()).encode()
        if manifest:
            await contents.create(f"{folder}/manifest.json", manifest)
        return folder

    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.journal, self.path, lambda uri: self.stores[uri])

    async def survey(self) -> Survey:
        return await self.checkpoints().survey()


def steps(found: tuple[Checkpoint, ...] | list[Checkpoint]) -> list[tuple[int, int | None]]:
    return [(one.life, one.step) for one in found]


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    with started() as servers:
        yield servers


@pytest.fixture(scope="session")
def s3(servers: Servers) -> Server:
    return servers["s3"]


@pytest.fixture
def bucket(s3: Server) -> Store:
    return Store(f"{s3.uri}/{secrets.token_hex(6)}", s3.options)


@pytest.fixture(scope="session")
def ssh(servers: Servers) -> Server:
    return servers["sftp"]


@pytest.fixture(params=["folder", "s3", "sftp"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "folder":
        return Store(str(tmp_path / "channel"))
    if request.param == "sftp":
        server = request.getfixturevalue("ssh")
        return Store(f"{server.uri}/{secrets.token_hex(6)}", server.options)
    made: Store = request.getfixturevalue("bucket")
    return made


@pytest.fixture
async def run(tmp_path: Path, store: Store) -> Run:
    """One attempt and one life, on each kind of store."""
    return await one_life(Run(tmp_path, store))


async def one_life(made: Run) -> Run:
    await made.begin()
    await made.owner(0)
    await made.goes_on()
    await made.life(1, ranks=2)
    return made
