"""One Airflow on PostgreSQL, as processes, for all tests of this folder; and a look at what its gangs did."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_gpu.gang.identity import RunKey, run_path
from airflow_gpu.gang.run import Run
from airflow_gpu.rundir.channel import Channel
from airflow_gpu.rundir.journal import Journal
from airflow_gpu.rundir.slot import newest
from airflow_gpu.rundir.store import Store
from airflow_gpu.targets.local.admin import Admin
from tests.airflow.evidence import History, history, ledger_name
from tests.beds.airflow import AirflowBed
from tests.beds.api import PATIENCE
from tests.beds.postgres import NoPostgres, Postgres, programs

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SWEEP = "gang_sweep.py"
"""The example that sweeps: it is on in all tests, and may end nothing that somebody wants."""

MARGIN = 30
"""Steps between "stop there" and the step at which a gang is: its ranks hear of it in time."""

QUICK = {
    # Short enough to be waited for in a test, long enough for a busy machine.
    "AIRFLOW__TRIGGERER__JOB_HEARTBEAT_SEC": "1",
    "AIRFLOW__TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": "8",
    "AIRFLOW__SCHEDULER__SCHEDULER_HEALTH_CHECK_THRESHOLD": "10",
    "AIRFLOW__SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "5",
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "30",
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "3",
    "AIRFLOW__SCHEDULER__TRIGGER_TIMEOUT_CHECK_INTERVAL": "2",
    "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "5",
    "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "10",
    "AIRFLOW__CORE__PARALLELISM": "16",
    "AIRFLOW__CORE__MAX_ACTIVE_TASKS_PER_DAG": "32",
}

Task = tuple[str, str, str, int]


class Gangs:
    """An Airflow with a local cluster of nodes with 2 pretended GPUs each."""

    def __init__(
        self, home: Path, server: Postgres, installation: str = "tests", cluster: Path | None = None,
        state: Path | None = None,
    ) -> None:  # fmt: skip
        self.home = home
        self.installation = installation
        self.cluster = cluster or home / "cluster"
        self.state = f"file://{state or home / 'state'}"
        self.admin = Admin(self.cluster)
        self.ledger = home / "ledger"
        self.ledger.mkdir(parents=True)
        dags = home / "dags"
        shutil.copytree(HERE / "dags", dags, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "dags" / SWEEP, dags)
        connection = {
            "conn_type": "gpu_local",
            "extra": {
                "path": str(self.cluster),
                "nodes": 60,
                "gpus_per_node": 2,
                "grace": 15,
                "accelerator": "pretend",
            },
        }
        self.airflow = AirflowBed(
            home / "airflow",
            dags,
            {
                **QUICK,
                "AIRFLOW__GPU__INSTALLATION": installation,
                "AIRFLOW__GPU__STATE_URI": self.state,
                "AIRFLOW__GPU__POLL_INTERVAL": "0.5",
                "AIRFLOW_CONN_GPU_DEFAULT": json.dumps(connection),
                "LEDGER": str(self.ledger),
            },
            database=server,
        )

    # -- what is written of a task instance --------------------------------------------------------

    def key(self, dag_id: str, run_id: str, task_id: str = "count", map_index: int = -1) -> RunKey:
        return RunKey(self.installation, dag_id, run_id, task_id, map_index)

    def look(
        self, dag_id: str, run_id: str, task_id: str = "count", map_index: int = -1
    ) -> tuple[Journal, Channel] | None:
        """Journal (read) and channel of the newest run of a task instance."""

        async def read() -> tuple[Journal, Channel] | None:
            store = Store(self.state)
            key = self.key(dag_id, run_id, task_id, map_index)
            found = await newest(store, key)
            if found is None:
                return None
            path = run_path(key, found[1])
            journal = Journal(store, path)
            await journal.refresh()
            return journal, Channel(Store(f"file://{self.cluster}/runs"), path)

        return asyncio.run(read())

    def run(self, *task: Any, **more: Any) -> Run:
        """The newest run of a task instance, as it is journalled."""
        found = self.look(*task, **more)
        assert found is not None, f"{task} has no run"
        return found[0].run

    def history(self, dag_id: str, run_id: str, task_id: str = "count", map_index: int = -1) -> History:
        """What really ran for a task instance."""
        return history(self.cluster, self.ledger, self.key(dag_id, run_id, task_id, map_index))

    def settled(self, *task: Any, limit: float = 90) -> History:
        """The same once nothing of it is alive any more, checked."""
        self.airflow.until(lambda: self.history(*task).over, f"end of the jobs of {task}", limit)
        return self.history(*task).check()

    def lives(self, *task: Any) -> list[Any]:
        found = self.look(*task)
        assert found is not None
        return [life for life in asyncio.run(found[1].lives()) if not life.fence]

    # -- how far it is, and where it is to stop ----------------------------------------------------

    def step(self, *task: Any) -> tuple[str, int, int] | None:
        """Job, life and last reported step of what runs now."""
        told = self.history(*task)
        if not told.jobs or told.jobs[-1].over or not told.lives:
            return None
        job, life = told.jobs[-1], told.lives[-1]
        if (job.incarnation, job.attempt) != (life.incarnation, life.attempt) or life.step is None:
            return None
        return job.name, life.number, life.step

    def until_step(
        self, dag_id: str, run_id: str, task_id: str = "count", step: int = 5, life: int = 1, map_index: int = -1,
        limit: float = 120,
    ) -> str:  # fmt: skip
        """Until that life, or a later one, has reported that many steps; the name of its job."""

        def there() -> str | None:
            at = self.step(dag_id, run_id, task_id, map_index)
            return at[0] if at is not None and at[1] >= life and at[2] >= step else None

        what = f"step {step} of life {life} of {dag_id}/{run_id}/{task_id}[{map_index}]"
        return str(self.airflow.until(there, what, limit))

    def until_goes_on(self, *task: Any, steps: int = 10, limit: float = 120) -> None:
        """Until what runs now has come further."""
        at = self.step(*task)
        since, life = (at[2], at[1]) if at is not None else (0, 0)

        def further() -> bool:
            now = self.step(*task)
            return now is not None and (now[1] > life or now[2] >= since + steps)

        self.airflow.until(further, f"progress of {task}", limit)

    def _tell(self, kind: str, text: str, task: tuple[Any, ...]) -> None:
        staged = self.ledger / f".{ledger_name(self.key(*task))}.{kind}"
        staged.write_text(text)
        staged.rename(self.ledger / f"{ledger_name(self.key(*task))}.{kind}")

    def untell(self, kind: str, *task: Any) -> None:
        """Take back what a gang was told."""
        (self.ledger / f"{ledger_name(self.key(*task))}.{kind}").unlink()

    def total(self, *task: Any) -> int:
        """Tell a gang of ``dags/steady.py`` where to stop: where it was told before, else soon. The step."""
        told = self.ledger / f"{ledger_name(self.key(*task))}.total"
        if told.exists():
            return int(told.read_text())
        at = self.step(*task)
        steps = MARGIN + (at[2] if at is not None else 0)
        self._tell("total", str(steps), task)
        return steps

    def preempt(self, *task: Any, notice: bool = True) -> None:
        """Take its nodes away, as the operator of the cluster."""
        at = self.step(*task)
        assert at is not None, f"{task} does not run"
        self.admin.preempt(at[0], notice)

    def crash(self, *task: Any, step: int) -> None:
        """Let rank 1 fail at the step, once."""
        self._tell("crash", str(step), task)

    def die(self, *task: Any, point: str) -> None:
        """Let the worker be killed once, see ``DyingOperator``."""
        self._tell("die", point, task)

    def succeed(self, dag_id: str, run_id: str, task_id: str = "count", map_index: int = -1) -> History:
        """Let it come to its end, and check the result: each step was counted once, by somebody."""
        task = (dag_id, run_id, task_id, map_index)
        steps = self.total(*task)
        self.airflow.wait_task(dag_id, run_id, task_id, "success", map_index=map_index, limit=180)
        told = self.settled(*task)
        result = self.airflow.xcom(dag_id, run_id, task_id, map_index=map_index)["result"]
        assert result == {"start": told.starts[-1], "steps": steps, "sum": steps * (steps - 1) // 2}
        return told

    def alive(self, *names: str) -> list[str]:
        """Jobs of the cluster that are not over; of these, if names of jobs are given."""
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
        rows = self.admin.status()["jobs"]
        return [
            name for name, row in rows.items() if row["native"] not in over and (not names or name in names)
        ]

    def stop(self) -> None:
        """End the cluster with what runs on it."""
        if self.cluster.exists():
            self.admin.stop(gangs=True, grace=0)


def pytest_configure(config: pytest.Config) -> None:
    """A test run that is told to end takes what it has started with it."""

    def ended(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, ended)


@pytest.fixture(scope="session")
def server() -> Iterator[Postgres]:
    """The database server of all Airflows of this folder."""
    try:
        programs()
    except NoPostgres as error:
        pytest.skip(f"no tests on a real Airflow: {error}")
    with Postgres() as running:
        yield running


@pytest.fixture(scope="session")
def gangs(tmp_path_factory: pytest.TempPathFactory, server: Postgres) -> Iterator[Gangs]:
    made = Gangs(tmp_path_factory.mktemp("gangs"), server)
    try:
        with made.airflow:
            made.airflow.wait_dag(SWEEP.removesuffix(".py"))
            yield made
    finally:
        made.stop()


def eventually(done: Callable[[], Any], what: str, limit: float = 60) -> Any:
    """The first answer that is true."""
    end = time.monotonic() + PATIENCE * limit
    while not (answer := done()):
        assert time.monotonic() < end, f"no {what} after {PATIENCE * limit:.0f} s"
        time.sleep(0.5)
    return answer
