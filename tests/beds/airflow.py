"""A real Airflow, as processes: API server, scheduler, dag processor, triggerer.

Purpose: for the demo (on SQLite) and for the tests (on PostgreSQL, as in
production). Each component can be killed, halted and started again on its own.

What it does not do: hold a database server for several Airflows; give each the
same :class:`~tests.beds.postgres.Postgres` for that. What a person does in the
UI is in :mod:`tests.beds.api`.

Limits: everything but the database server lies below one folder; every process
that is started here is ended by its pid.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

import httpx

from tests.beds.api import AirflowApi
from tests.beds.ports import free_port
from tests.beds.postgres import Postgres

START_LIMIT = 180.0
MIGRATED = "airflow_empty"
"""A database of a server that holds Airflow's tables and nothing else: the next one is a copy of it."""

COMPONENTS: dict[str, tuple[str, ...]] = {
    "api-server": ("api-server",),
    "scheduler": ("scheduler", "--skip-serve-logs"),
    "dag-processor": ("dag-processor",),
    "triggerer": ("triggerer", "--skip-serve-logs"),
    "triggerer-2": ("triggerer", "--skip-serve-logs"),
}
USUAL = ("api-server", "scheduler", "dag-processor", "triggerer")


class AirflowBed(AirflowApi):
    """One Airflow below ``home``. ``dags`` are copied nowhere: the folder is used as it is.

    :param database: ``sqlite``, ``postgresql`` (a server of its own), or a
        server that several share, with a database of its own there.

    Example::

        with AirflowBed(tmp, dags) as bed:
            run = bed.trigger("my_dag")
            assert bed.wait("my_dag", run) == "success"
    """

    def __init__(
        self,
        home: Path,
        dags: Path,
        env: Mapping[str, str] | None = None,
        database: str | Postgres = "sqlite",
    ) -> None:
        super().__init__()
        self.home = home
        self.port = free_port()
        self.password = secrets.token_urlsafe(12)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        home.mkdir(parents=True, exist_ok=True)
        (home / "passwords.json").write_text(json.dumps({"admin": self.password}))
        self.url = f"http://127.0.0.1:{self.port}"
        self.database = f"airflow_{secrets.token_hex(4)}"
        self.server = database if isinstance(database, Postgres) else None
        self._own = Postgres() if database == "postgresql" else None
        if database not in ("sqlite", "postgresql") and self.server is None:
            raise ValueError(f"database is 'sqlite', 'postgresql' or a server, got {database!r}")
        clean = {k: v for k, v in os.environ.items() if not k.startswith("AIRFLOW")}
        self.env = {
            **clean,
            # A machine's proxy is for the registries, not for loopback.
            "NO_PROXY": "*",
            "no_proxy": "*",
            "AIRFLOW_HOME": str(home),
            "AIRFLOW__CORE__DAGS_FOLDER": str(dags),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__FERNET_KEY": "qXc9PnPTkLKYyNTTBLXz0b1ZtOqHyZ2UI7dY2i1Bq0E=",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": "admin:admin",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(home / "passwords.json"),
            "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{self.url}/execution/",
            "AIRFLOW__CORE__PARALLELISM": "8",
            "AIRFLOW__API__PORT": str(self.port),
            "AIRFLOW__API__HOST": "127.0.0.1",
            "AIRFLOW__API__BASE_URL": self.url,
            "AIRFLOW__API__WORKERS": "1",
            "AIRFLOW__API__SECRET_KEY": secrets.token_hex(16),
            "AIRFLOW__API_AUTH__JWT_SECRET": secrets.token_hex(32),
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home}/airflow.db",
            "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "2",
            "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "2",
            "AIRFLOW__SCHEDULER__SCHEDULER_HEARTBEAT_SEC": "1",
            "AIRFLOW__SCHEDULER__SCHEDULER_IDLE_SLEEP_TIME": "0.5",
            "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
            "AIRFLOW__LOGGING__LOGGING_LEVEL": "INFO",
            "PYTHONWARNINGS": "ignore",
            **(env or {}),
        }

    # -- from nothing to healthy, and away ---------------------------------------------------------

    def __enter__(self) -> AirflowBed:
        try:
            self.up()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def up(self) -> None:
        """From an empty folder to a healthy Airflow."""
        if self._own is not None:
            self._own.up()
            self.server = self._own
        if self.server is None:
            self._migrate()
        else:
            self._use(MIGRATED)
            if not self.server.has(MIGRATED):
                self.server.create(MIGRATED)
                self._migrate()
            self.server.create(self.database, template=MIGRATED)
            self._use(self.database)
        for name in USUAL:
            self.start(name)
        self.wait_healthy()

    def _use(self, database: str) -> None:
        assert self.server is not None
        for option, driver in (("", "postgresql+psycopg2"), ("_ASYNC", "postgresql+asyncpg")):
            self.env[f"AIRFLOW__DATABASE__SQL_ALCHEMY_CONN{option}"] = self.server.url(database, driver)

    def _migrate(self) -> None:
        subprocess.run(
            [sys.executable, "-m", "airflow", "db", "migrate"],
            env=self.env,
            check=True,
            stdout=self._log("migrate"),
            stderr=subprocess.STDOUT,
        )

    def down(self) -> None:
        # All are told at once, so that they end in the time of one.
        for process in self.processes.values():
            _signal(process, signal.SIGCONT)
            _signal(process, signal.SIGTERM)
        for name in list(self.processes):
            self.stop(name)
        self.close()
        if self._own is not None:
            self._own.down()

    # -- components --------------------------------------------------------------------------------

    def start(self, name: str, *command: str) -> None:
        """Start a component, see COMPONENTS; with another command than usual where one is given."""
        if name in self.processes:
            raise RuntimeError(f"{name} runs already")
        out = self._log(name)
        try:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "airflow", *(command or COMPONENTS[name])],
                env=self.env,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        finally:
            os.close(out)

    def stop(self, name: str, limit: float = 8.0) -> None:
        """End one component with everything it started."""
        process = self.processes.pop(name, None)
        if process is None:
            return
        for wanted in (signal.SIGTERM, signal.SIGKILL):
            _signal(process, wanted)
            try:
                process.wait(limit)
                break
            except subprocess.TimeoutExpired:
                continue
        # Children of the component (workers of the scheduler) are in its group.
        _end_group(process)

    def kill(self, name: str) -> None:
        """SIGKILL for one component and everything it started, at once: a machine that lost its power."""
        _end_group(self.processes.pop(name))

    def halt(self, name: str) -> None:
        """SIGSTOP for the component's first process: no heartbeats, and what it started goes on."""
        os.kill(self.processes[name].pid, signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """SIGCONT: it goes on where it was, and does not know that time has passed."""
        os.kill(self.processes[name].pid, signal.SIGCONT)

    def _log(self, name: str) -> int:
        (self.home / "out").mkdir(exist_ok=True)
        return os.open(self.home / "out" / f"{name}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)

    def tail(self, name: str, lines: int = 40) -> str:
        path = self.home / "out" / f"{name}.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""

    def check(self) -> None:
        for name, process in self.processes.items():
            if process.poll() is not None:
                raise RuntimeError(f"{name} ended with {process.returncode}:\n{self.tail(name)}")

    # -- health ------------------------------------------------------------------------------------

    def wait_healthy(self, *parts: str, limit: float = START_LIMIT) -> None:
        """Until these parts (all, if none are named) have sent a heartbeat since now."""
        wanted = parts or ("metadatabase", "scheduler", "triggerer", "dag_processor")
        since = time.time()

        def healthy() -> bool:
            health = self.health()
            return all(_fresh(health.get(part) or {}, part, since) for part in wanted)

        self.until(healthy, f"healthy {', '.join(wanted)}", limit)

    def health(self) -> dict[str, dict[str, str]]:
        """What the API server says; nothing when it does not answer."""
        try:
            health = httpx.get(f"{self.url}/api/v2/monitor/health", trust_env=False, timeout=5).json()
        except (httpx.HTTPError, ValueError):
            return {}
        return health if isinstance(health, dict) else {}

    # -- the database ------------------------------------------------------------------------------

    def sql(self, statement: str) -> list[list[str]]:
        """One statement on the metadata database; its rows as text. PostgreSQL only."""
        assert self.server is not None
        return self.server.sql(self.database, statement)

    def backup(self) -> Path:
        """A dump of the metadata database as of now. PostgreSQL only."""
        assert self.server is not None
        return self.server.dump(self.database)

    def restore(self, backup: Path) -> None:
        """Put an older database back, as an operator does: with everything stopped that uses it."""
        assert self.server is not None
        running = list(self.processes)
        for process in self.processes.values():
            _signal(process, signal.SIGTERM)
        for name in running:
            self.stop(name)
        self.close()
        self.server.restore(self.database, backup)
        for name in running:
            self.start(name)
        self.wait_healthy()


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    """To a component and everything it started."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        pass


def _end_group(process: subprocess.Popen[bytes]) -> None:
    _signal(process, signal.SIGKILL)
    process.wait(10)


def _fresh(part: Mapping[str, str], name: str, since: float) -> bool:
    if part.get("status") != "healthy":
        return False
    beat = part.get(f"latest_{name}_heartbeat")
    if name == "metadatabase" or beat is None:
        return name == "metadatabase"
    return datetime.fromisoformat(beat).timestamp() >= since
