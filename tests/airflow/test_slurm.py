"""The example DAG on a real Slurm, in a real Airflow: preempted twice, cleared, backfilled; nothing is left in the queue."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_gpu.gang.identity import RunKey, run_path
from airflow_gpu.gang.run import Cause, Run
from airflow_gpu.rundir.journal import Journal
from airflow_gpu.rundir.slot import newest
from airflow_gpu.rundir.store import Store
from tests.airflow.conftest import QUICK, ROOT
from tests.beds.airflow import AirflowBed
from tests.beds.postgres import Postgres
from tests.beds.slurm.cluster import Cluster, cluster
from tests.beds.slurm.image import missing

pytestmark = [
    pytest.mark.airflow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(missing("24.11")), reason=f"SLURM 24.11 IS NOT PROVED HERE: {missing('24.11')}"),
]

DAG, TASK, CONN = "gang_slurm", "train", "slurm_h100"


class Slurm:
    """An Airflow whose only target is a cluster that it reaches through slurmrestd and SFTP."""

    def __init__(self, home: Path, server: Postgres, made: Cluster) -> None:
        self.cluster = made
        self.state = f"file://{home / 'state'}"
        dags = home / "dags"
        dags.mkdir(parents=True)
        shutil.copy(ROOT / "dags" / "gang_slurm.py", dags)
        login = f"alice@{made.ssh.host}"
        connection = {
            "conn_type": "slurm",
            "host": made.rest,
            "login": "alice",
            "extra": {
                "token_ssh": f"ssh://{login}",
                "channel": f"sftp://{login}/shared/gangs",
                "key_file": str(made.ssh.key_file),
                "known_hosts": str(made.ssh.known_hosts),
                "partition": "train",
                "account": "research",
                "exclusive": True,
                "login_shell": False,
            },
        }
        ssh = {
            "conn_type": "ssh",
            "login": "alice",
            "extra": {
                "key_file": str(made.ssh.key_file),
                "host_key": made.ssh.known_hosts.read_text().split()[2],
            },
        }
        self.airflow = AirflowBed(
            home / "airflow",
            dags,
            {
                **QUICK,
                "AIRFLOW__GPU__INSTALLATION": "tests",
                "AIRFLOW__GPU__STATE_URI": self.state,
                "AIRFLOW__GPU__POLL_INTERVAL": "1",
                "AIRFLOW__GPU__STORE_CONN_IDS": json.dumps({f"sftp://{login}": "login_node"}),
                "AIRFLOW_CONN_SLURM_H100": json.dumps(connection),
                "AIRFLOW_CONN_LOGIN_NODE": json.dumps(ssh),
            },
            database=server,
        )

    def run(self, run_id: str) -> Run | None:
        """The newest run of the task instance, as it is journalled."""

        async def read() -> Run | None:
            store = Store(self.state)
            key = RunKey("tests", DAG, run_id, TASK, -1)
            found = await newest(store, key)
            if found is None:
                return None
            return await Journal(store, run_path(key, found[1])).refresh()

        return asyncio.run(read())

    def squeue(self, form: str = "%A %j %T") -> list[str]:
        return self.cluster.run("squeue", "-h", "-a", "-u", "alice", "-o", form).splitlines()

    def until_attempt(self, run_id: str, number: int) -> str:
        """Until the ranks of that attempt compute; the number of its job."""

        def runs() -> str | None:
            run = self.run(run_id)
            if run is None or len(run.attempts) < number or run.attempts[number - 1].platform_id is None:
                return None
            job = run.attempts[number - 1].platform_id
            folder = f"{run.attempts[number - 1].channel.partition('/shared/')[2]}"
            begun = list((self.cluster.shared / folder / "lives").glob("*/progress.json"))
            mine = [path for path in begun if path.stat().st_size]
            return job if len(mine) >= number else None

        return str(self.airflow.until(runs, f"attempt {number} of {run_id}", 180))


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory, server: Postgres) -> Iterator[Slurm]:
    with cluster("24.11", grace=20, nodes=4) as made:
        bed = Slurm(tmp_path_factory.mktemp("slurm"), server, made)
        with bed.airflow:
            bed.airflow.wait_dag(DAG)
            yield bed


def test_preempted_twice_then_cleared(slurm: Slurm) -> None:
    bed = slurm.airflow
    run_id = bed.trigger(DAG, conf={"steps": 300}, logical_date="2026-03-01T00:00:00Z")
    for number in (1, 2):
        job = slurm.until_attempt(run_id, number)
        slurm.cluster.preempt(job)
        bed.until(lambda n=number: _over(slurm.run(run_id), n), f"the preemption of attempt {number}", 120)
    assert bed.wait(DAG, run_id, limit=300) == "success"
    run = slurm.run(run_id)
    assert run is not None
    assert [attempt.outcome.cause for attempt in run.attempts if attempt.outcome] == [
        Cause.PREEMPTED,
        Cause.PREEMPTED,
        Cause.SUCCEEDED,
    ]
    steps = [
        attempt.outcome.checkpoint.step
        for attempt in run.attempts[:2]
        if attempt.outcome and attempt.outcome.checkpoint
    ]
    assert len(steps) == 2
    assert 0 < steps[0] < steps[1]
    assert bed.task(DAG, run_id, TASK)["try_number"] == 1  # no retry was spent
    log = bed.log(DAG, run_id, TASK)
    assert f"from step {steps[1]}" in log
    assert bed.xcom(DAG, run_id, TASK)["steps"] == 300

    # A Clear of what has succeeded begins anew: another incarnation, which owes nothing to the first.
    bed.clear(DAG, run_id, TASK)
    bed.until(lambda: (slurm.run(run_id) or run).owners[0].at > run.owners[-1].at, "the new run", 120)
    assert bed.wait(DAG, run_id, limit=300) == "success"
    again = slurm.run(run_id)
    assert again is not None
    assert [attempt.outcome.cause for attempt in again.attempts if attempt.outcome] == [Cause.SUCCEEDED]


def test_cleared_while_it_runs(slurm: Slurm) -> None:
    """The old job is ended with a notice, saves, and the next try goes on from there."""
    bed = slurm.airflow
    run_id = bed.trigger(DAG, conf={"steps": 150}, logical_date="2026-03-02T00:00:00Z")
    job = slurm.until_attempt(run_id, 1)
    bed.clear(DAG, run_id, TASK)
    bed.until(lambda: len((slurm.run(run_id) or Run()).attempts) == 2, "the second attempt", 120)
    assert bed.wait(DAG, run_id, limit=300) == "success"
    run = slurm.run(run_id)
    assert run is not None
    first, second = run.attempts
    assert first.platform_id == job
    assert first.outcome is not None
    assert first.outcome.cause is Cause.STOPPED
    assert first.outcome.checkpoint is not None
    assert first.outcome.checkpoint.step > 0
    assert second.outcome is not None
    assert second.outcome.cause is Cause.SUCCEEDED


def test_backfill(slurm: Slurm) -> None:
    """Each date has its own jobs; they stand behind with ``--nice``."""
    bed = slurm.airflow
    bed.backfill(DAG, "2026-02-01T00:00:00Z", "2026-02-03T00:00:00Z", max_active_runs=3)
    runs = bed.until(lambda: _three(bed.runs(DAG)), "three runs of the backfill")
    seen: dict[str, str] = {}

    def all_over() -> bool:
        for row in slurm.squeue("%A %y"):
            job, nice = row.split()
            seen[job] = nice
        return all(bed.run_state(DAG, run_id) in ("success", "failed") for run_id in runs)

    bed.until(all_over, "the end of the backfill", 400, pause=0.5)
    assert [bed.run_state(DAG, run_id) for run_id in runs] == ["success"] * 3
    assert sorted(seen.values())[-3:] == ["1000"] * 3
    assert [nice for nice in seen.values() if nice != "1000"] in (
        [],
        ["0"],
    )  # today's run, which the schedule makes
    for run in bed.runs(DAG):
        assert bed.wait(DAG, run["dag_run_id"], limit=300) == "success"
    assert slurm.squeue() == []


def _over(run: Run | None, number: int) -> Any:
    return run is not None and run.attempts[number - 1].outcome is not None


def _three(runs: list[dict[str, Any]]) -> list[str]:
    mine = [run["dag_run_id"] for run in runs if run["run_type"] == "backfill"]
    return mine if len(mine) == 3 else []
