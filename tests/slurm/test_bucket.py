"""Nodes that share nothing with Airflow but a bucket: the payload travels in the script, credentials in a private file."""

from __future__ import annotations

import asyncio
import importlib.util
import secrets
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from airflow_gpu.gang.run import Cause
from airflow_gpu.rundir.store import Store
from airflow_gpu.targets.slurm.target import SlurmTarget
from tests.beds.slurm.cluster import Cluster, cluster
from tests.beds.slurm.image import missing
from tests.beds.stores.servers import Server, s3
from tests.conformance import programs
from tests.conformance.bed import play
from tests.conformance.slurm_bed import SlurmBed
from tests.conformance.suite import Scenarios

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(missing("24.11")), reason=f"SLURM 24.11 IS NOT PROVED HERE: {missing('24.11')}"),
]

SECRET = {"access_key_id": "AWS_ACCESS_KEY_ID", "secret_access_key": "AWS_SECRET_ACCESS_KEY"}
LIBRARIES = ("obstore", "typing_extensions")


class BucketBed(SlurmBed):
    """The cluster's file system is there for the private file alone."""

    def __init__(self, made: Cluster, server: Server) -> None:
        self.server = server
        self.bucket = f"{server.uri}/{secrets.token_hex(6)}"
        super().__init__(made)

    def make(self, **more: Any) -> SlurmTarget:
        login = f"sftp://alice@{self.cluster.ssh.host}/shared/gangs/private"
        fields = {
            "channel": self.bucket,
            "secrets_folder": login,
            "job_secrets_folder": "/shared/gangs/private",
            "prologue": "export PYTHONPATH=/shared/python",
        }
        target = super().make(**fields, **more)
        target.job_store = {name: value for name, value in self.server.options.items() if name not in SECRET}
        return target

    def channel_store(self, uri: str) -> Store:
        return Store(uri, self.server.options)


@pytest.fixture(scope="module")
def two() -> Iterator[Cluster]:
    with cluster("24.11", grace=15, nodes=2) as made:
        for name in LIBRARIES:
            found = importlib.util.find_spec(name)
            assert found is not None
            assert found.origin is not None
            source = Path(found.origin)
            goal = made.shared / "python"
            goal.mkdir(exist_ok=True)
            if source.name == "__init__.py":
                shutil.copytree(source.parent, goal / name)
            else:
                shutil.copy(source, goal)
        yield made


@pytest_asyncio.fixture
async def bed(two: Cluster) -> AsyncIterator[BucketBed]:
    with s3(two.host_address) as server:
        bed = BucketBed(two, server)
        yield bed
        await bed.end()


async def test_a_gang_with_a_bucket_only(bed: BucketBed, tmp_path: Path) -> None:
    keys = {name: f"var:{option}" for option, name in SECRET.items()}
    values = {name: bed.server.options[option] for option, name in SECRET.items()}
    gang = Scenarios().gang(bed, programs.count, 60, secrets=keys)
    played = (await play(bed, tmp_path, gang, secret_values=values)).start()
    await played.until_step(5)
    told = await asyncio.to_thread(bed.cluster.run, "scontrol", "show", "job", "-dd")
    script = await asyncio.to_thread(
        bed.cluster.run, "scontrol", "write", "batch_script", played.run.attempts[-1].platform_id, "-"
    )
    for value in values.values():
        assert value not in told + script
    private = list((bed.cluster.shared / "gangs/private").glob(".secrets-*"))
    assert [oct(path.stat().st_mode & 0o777) for path in private] == ["0o600"]
    await bed.preempt(played.job, notice=True)
    verdict = await played.verdict()
    assert verdict.success, verdict
    assert [a.outcome.cause for a in played.run.attempts] == [Cause.PREEMPTED, Cause.SUCCEEDED]
    assert verdict.record["result"]["start"] >= 5
    assert list((bed.cluster.shared / "gangs/private").glob(".secrets-*")) == []
    for node in bed.cluster.names:  # nor is the payload left on a node
        left = await asyncio.to_thread(
            bed.cluster.run, "srun", "-w", node, "-N1", "--qos=normal", "ls", "/tmp", user="alice"
        )
        assert "airflow-gpu" not in left
