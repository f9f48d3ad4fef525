"""One Airflow, as processes, for all tests of this folder; and a look at the run directories."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_gpu.gang.identity import RunKey, run_path
from airflow_gpu.rundir.channel import Channel
from airflow_gpu.rundir.journal import Journal
from airflow_gpu.rundir.slot import newest
from airflow_gpu.rundir.store import Store
from airflow_gpu.targets.local.admin import Admin
from tests.beds.airflow import AirflowBed

HERE = Path(__file__).parent


class Gangs:
    """An Airflow with a local cluster of 2 nodes x 2 pretended GPUs."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.cluster = home / "cluster"
        self.admin = Admin(self.cluster)
        connection = {
            "conn_type": "gpu_local",
            "extra": {
                "path": str(self.cluster),
                "nodes": 2,
                "gpus_per_node": 2,
                "grace": 15,
                "accelerator": "pretend",
            },
        }
        self.airflow = AirflowBed(
            home / "airflow",
            HERE / "dags",
            {
                "AIRFLOW__GPU__INSTALLATION": "tests",
                "AIRFLOW__GPU__STATE_URI": f"file://{home}/state",
                "AIRFLOW__GPU__POLL_INTERVAL": "0.3",
                "AIRFLOW_CONN_GPU_DEFAULT": json.dumps(connection),
            },
        )

    def look(
        self, dag_id: str, run_id: str, task_id: str, map_index: int = -1
    ) -> tuple[Journal, Channel] | None:
        """Journal (read) and channel of the newest run of a task instance."""

        async def read() -> tuple[Journal, Channel] | None:
            store = Store(f"file://{self.home}/state")
            key = RunKey("tests", dag_id, run_id, task_id, map_index)
            found = await newest(store, key)
            if found is None:
                return None
            path = run_path(key, found[1])
            journal = Journal(store, path)
            await journal.refresh()
            return journal, Channel(Store(f"file://{self.cluster}/runs"), path)

        return asyncio.run(read())

    def lives(self, *task: Any) -> list[Any]:
        found = self.look(*task)
        assert found is not None
        return [life for life in asyncio.run(found[1].lives()) if not life.fence]

    def until_step(
        self, dag_id: str, run_id: str, task_id: str, step: int, life: int = 1, limit: float = 120
    ) -> str:
        """Until that life has reported that many steps; the name of its job."""
        end = time.monotonic() + limit
        while time.monotonic() < end:
            found = self.look(dag_id, run_id, task_id)
            if found is not None and found[0].run.current is not None:
                current = found[0].run.current
                evidence = asyncio.run(found[1].evidence(current.number, ended=False))
                if evidence.life and evidence.life.number >= life and (evidence.step or 0) >= step:
                    return current.name
            time.sleep(0.2)
        raise AssertionError(f"{dag_id}/{run_id}/{task_id} did not come to step {step} of life {life}")

    def alive(self) -> list[str]:
        """Jobs of the cluster that are not over."""
        over = (
            "DONE",
            "FAILED",
            "PREEMPTED",
            "NODE_LOST",
            "TIMEOUT",
            "OUT_OF_MEMORY",
            "CANCELLED",
            "REJECTED",
        )
        return [name for name, row in self.admin.status()["jobs"].items() if row["native"] not in over]


@pytest.fixture(scope="session")
def gangs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gangs]:
    gangs = Gangs(tmp_path_factory.mktemp("gangs"))
    try:
        with gangs.airflow:
            yield gangs
    finally:
        if gangs.cluster.exists():
            gangs.admin.stop(gangs=True, grace=0)
