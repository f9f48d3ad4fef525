"""What an attempt is given where the channel is on an object store, and a whole gang with its channel there."""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from airflow_gpu.acting import World
from airflow_gpu.cli.main import commands
from airflow_gpu.driver import Driver
from airflow_gpu.gang.function import FunctionSource
from airflow_gpu.gang.identity import RunKey, run_path
from airflow_gpu.gang.ownership import Try
from airflow_gpu.gang.run import Attempt, Seed
from airflow_gpu.gang.spec import Gang
from airflow_gpu.hooks.stores import Credentials, NoSuchConnection, tell_jobs
from airflow_gpu.rundir.channel import Channel
from airflow_gpu.rundir.slot import take
from airflow_gpu.rundir.store import Store
from airflow_gpu.staging import job_for, stage
from airflow_gpu.targets.base import PAYLOAD, NotConfigured, Rejected, TargetError
from airflow_gpu.targets.local import Admin, LocalConfig, LocalTarget
from airflow_gpu.targets.watch import Watcher
from tests.beds.stores.servers import Server
from tests.stores.test_options import as_connection

KEY = RunKey("tests", "dag", "run", "task", -1)
INCARNATION = "abcdefgh23"
PATH = run_path(KEY, INCARNATION)


def train(gang=None):  # type: ignore[no-untyped-def]
    return 1


GANG = Gang(function=FunctionSource.of(train, (), {}), nodes=1, gpus_per_node=0, targets="here")
ATTEMPT = Attempt(1, "task-abcdefgh23-1", "here", 0.0, 1, digest="d1")


def credentials(server: Server) -> Credentials:
    async def find(conn_id: str) -> Any:
        if conn_id != "mine":
            raise NoSuchConnection(conn_id)
        return as_connection(server)

    return Credentials({server.uri: "mine"}, find)


async def target_at(channel: str, server: Server, path: Path) -> LocalTarget:
    """As the hooks make one."""
    target = LocalTarget("here", LocalConfig(path=path, channel=channel))
    await tell_jobs(target, credentials(server))
    return target


async def staged(
    target: LocalTarget, channel: Channel, attempt: Attempt = ATTEMPT, **more: Any
) -> Mapping[str, bytes]:
    return await stage(channel, target, KEY, INCARNATION, GANG, attempt, **more)


async def test_the_target_carries_what_is_staged(server: Server, tmp_path: Path) -> None:
    root = f"{server.uri}/{secrets.token_hex(6)}"
    target = await target_at(root, server, tmp_path)
    channel = Channel(credentials(server).open(root), PATH)
    files = await staged(target, channel)
    assert set(files) == {"runtime.pyz", "function.py", "function.json", "job.json"}
    for name, data in files.items():
        assert await channel.store.get(f"{PATH}/payload/0001/{name}") == data
    told = json.loads(files["job.json"])
    assert told["channel"] == f"{root}/{PATH}"
    assert told["seed"] is None
    assert told["store"] == target.job_store
    assert told["store"]["allow_http"] is True
    job = job_for(channel, target, KEY, INCARNATION, GANG, ATTEMPT, {}, (), files)
    assert job.files == files
    assert job.payload == PAYLOAD
    assert job.channel == told["channel"]
    assert job.argv == (target.python, f"{PAYLOAD}/runtime.pyz", "agent", f"{PAYLOAD}/job.json")
    placed = job.placed("/where/it/is")
    assert placed.argv[1:] == ("/where/it/is/runtime.pyz", "agent", "/where/it/is/job.json")
    assert placed.payload == "/where/it/is"
    hidden = [str(value) for name, value in server.options.items() if name not in told["store"]]
    for value in hidden:
        if len(value) > 6 and not value.startswith("http"):
            assert value.encode() not in b"".join(files.values())
            assert value not in repr(job)


async def test_every_driver_submits_what_was_staged_first(server: Server, tmp_path: Path) -> None:
    """The second is of another version: other options, another program. Half of the first was written when it died."""
    root = f"{server.uri}/{secrets.token_hex(6)}"
    target = await target_at(root, server, tmp_path)
    channel = Channel(credentials(server).open(root), PATH)
    await channel.store.create(f"{PATH}/payload/0001/runtime.pyz", b"the runtime of an older version")
    first = await staged(target, channel)
    assert first["runtime.pyz"] == b"the runtime of an older version"
    target.job_store = {"region": "other"}
    assert await staged(target, channel) == first
    second = replace(ATTEMPT, number=2)
    assert json.loads((await staged(target, channel, second))["job.json"])["store"] == {"region": "other"}


async def test_two_drivers_at_once_submit_the_same(server: Server, tmp_path: Path) -> None:
    root = f"{server.uri}/{secrets.token_hex(6)}"
    mine, theirs = [await target_at(root, server, tmp_path) for _ in range(2)]
    theirs.job_store = {"region": "other"}
    made = await asyncio.gather(
        *(
            staged(target, Channel(credentials(server).open(root), PATH))
            for target in (mine, theirs, mine, theirs)
        )
    )
    assert all(files == made[0] for files in made)


async def test_a_folder_is_as_it_was(tmp_path: Path) -> None:
    target = LocalTarget("here", LocalConfig(path=tmp_path / "cluster", channel=str(tmp_path / "runs")))
    channel = Channel(Store(str(tmp_path / "runs")), PATH)
    assert await staged(target, channel) == {}
    told = json.loads((tmp_path / "runs" / PATH / "payload/0001/job.json").read_bytes())
    assert told["store"] == {}
    assert told["channel"] == f"{tmp_path}/runs/{PATH}"
    job = job_for(channel, target, KEY, INCARNATION, GANG, ATTEMPT, {})
    assert job.files == {}
    assert job.payload == f"{tmp_path}/runs/{PATH}/payload/0001"


@pytest.mark.parametrize(
    ("where", "seen", "store"),
    [
        ("s3://gangs/new/v1/other", "s3://gangs/new/v1/other", {"region": "here"}),
        ("s3://elsewhere/v1/other", "s3://elsewhere/v1/other", {"region": "there"}),
        ("file:///shared/my%20runs/v1/other", "/shared/my runs/v1/other", {}),
    ],
)
async def test_a_seed_is_told_with_its_store(tmp_path: Path, where: str, seen: str, store: Any) -> None:
    target = LocalTarget("here", LocalConfig(path=tmp_path, channel="s3://gangs/new"))
    target.job_store = {"region": "here"}
    channel = Channel(Store(f"memory://{secrets.token_hex(6)}"), PATH)
    attempt = replace(ATTEMPT, seed=Seed(where, 3, 40, "dag/before/task"))
    files = await staged(target, channel, attempt, seed_store={"region": "there"})
    assert json.loads(files["job.json"])["seed"] == {
        "channel": seen, "store": store, "life": 3, "step": 40, "run": "dag/before/task",
    }  # fmt: skip


async def test_a_seed_that_no_job_can_read(tmp_path: Path) -> None:
    target = LocalTarget("here", LocalConfig(path=tmp_path, channel="s3://gangs/new"))
    attempt = replace(ATTEMPT, seed=Seed("memory://x/run", 3, 40))
    with pytest.raises(Rejected, match="jobs of this target cannot read"):
        await staged(target, Channel(Store("memory://"), PATH), attempt)


async def test_a_channel_whose_connection_is_not_there(server: Server, tmp_path: Path) -> None:
    async def find(conn_id: str) -> Any:
        raise NoSuchConnection(conn_id)

    target = LocalTarget("here", LocalConfig(path=tmp_path, channel=f"{server.uri}/x"))
    with pytest.raises(
        NotConfigured, match=r"the channel of here: .*no connection 'gone'.*\[gpu\] store_conn_ids"
    ):
        await tell_jobs(target, Credentials({server.uri: "gone"}, find))

    async def away(conn_id: str) -> Any:
        raise OSError("the database is away")

    with pytest.raises(TargetError, match="cannot be read now: OSError") as failed:
        await tell_jobs(target, Credentials({server.uri: "gone"}, away))
    assert not isinstance(failed.value, NotConfigured), "waiting may help"

    async def role(conn_id: str) -> Any:
        return SimpleNamespace(
            conn_id=conn_id, conn_type="aws", login="", password="", extra_dejson={"role_arn": "x"}
        )

    # Elsewhere than on S3 it is the wrong connection altogether, whatever its fields say.
    with pytest.raises(TargetError, match="role_arn" if server.name == "s3" else "has the type 'aws'"):
        await tell_jobs(target, Credentials({server.uri: "gone"}, role))
    await tell_jobs(target, Credentials({}, find))
    assert target.job_store == {}


# -- a whole gang ----------------------------------------------------------------------------------


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "cluster"
    yield path
    if path.exists():
        Admin(path).stop(gangs=True)


async def commands_read_it(s3: Server, root: str, tmp_path: Path) -> None:
    """With the connection that the settings name, and nothing in the environment."""
    minio = as_connection(s3)
    connection = {
        "conn_type": "aws",
        "login": minio.login,
        "password": minio.password,
        "extra": minio.extra_dejson,
    }
    env = {
        "AIRFLOW_HOME": str(tmp_path),
        "AIRFLOW_CONFIG": None,
        "AIRFLOW__GPU__INSTALLATION": KEY.installation,
        "AIRFLOW__GPU__STATE_URI": str(tmp_path / "state"),
        "AIRFLOW__GPU__STORE_CONN_IDS": json.dumps({root: "minio"}),
        "AIRFLOW_CONN_MINIO": json.dumps(connection),
        "AWS_ACCESS_KEY_ID": None,
        "AWS_SECRET_ACCESS_KEY": None,
    }

    async def told(*arguments: str) -> str:
        result = await asyncio.to_thread(CliRunner(env=env).invoke, commands, list(arguments))
        assert result.exit_code == 0, (result.output, result.exception)
        return result.stdout

    assert await told("logs", "dag/run/task") == "hello from an object store\nand goodbye\n"
    assert json.loads(await told("checkpoints", "list", "dag/run/task", "--json"))["ok"]


async def test_a_gang_from_its_start_to_its_verdict(s3: Server, tmp_path: Path, cluster: Path) -> None:
    """Driver, store and local target are real; the agent is a stand-in that writes what the runtime would."""
    root = f"{s3.uri}/{secrets.token_hex(6)}"
    python = tmp_path / "python"
    agent = Path(__file__).with_name("agent.py")
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {agent} "$@"\n')
    python.chmod(0o755)
    target = LocalTarget("here", LocalConfig(path=cluster, nodes=1, python=str(python), channel=root))
    known = credentials(s3)
    await tell_jobs(target, known)
    gang = Gang(
        function=FunctionSource.of(train, (), {}),
        nodes=1,
        gpus_per_node=0,
        targets="here",
        secrets={"AWS_ACCESS_KEY_ID": "conn:minio#login", "AWS_SECRET_ACCESS_KEY": "conn:minio#password"},
    )
    state = Store(str(tmp_path / "state"))
    held = await take(
        state, KEY, Try("ti-1", 1, 0), on_clear="resume", gang=json.loads(gang.to_json()), digest=gang.digest(),
        deadline=None, now=time.time(),
    )  # fmt: skip
    watcher, log, said = Watcher(target, 0.2), list[str](), list[str]()

    async def the_target(_: str) -> LocalTarget:
        return target

    async def values(references: Mapping[str, str]) -> Mapping[str, str]:
        options = {"login": s3.options["access_key_id"], "password": s3.options["secret_access_key"]}
        return {name: options[reference.partition("#")[2]] for name, reference in references.items()}

    world = World(
        clock=time.time, sleep=asyncio.sleep, target=the_target, channel_store=known.open, watcher=lambda _: watcher,
        secrets=values, say=said.append, rank_log=log.append, public=known.public, poll=0.2,
    )  # fmt: skip
    verdict = await Driver(held.journal, KEY, held.incarnation, gang, epoch=held.epoch, world=world).run()
    assert verdict is not None
    assert verdict.success, (verdict, said)
    assert log == ["[rank 0] hello from an object store", "[rank 0] and goodbye"]
    assert s3.options["secret_access_key"] not in json.dumps([said, verdict.record])
    for file in (tmp_path / "state").rglob("*.json"):
        assert s3.options["secret_access_key"] not in file.read_text()
    await commands_read_it(s3, root, tmp_path)
    everything = Store(root, s3.options)
    for entry in await everything.list():
        assert s3.options["secret_access_key"].encode() not in await everything.get(entry.path)
