"""A real Airflow, as processes: API server, scheduler, dag processor, triggerer, on SQLite.

Used by the demo and by the tests. Everything lies below one folder; every
process that is started here is ended by its pid.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

START_LIMIT = 180.0
ENDED = ("success", "failed", "skipped", "upstream_failed", "removed")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class AirflowBed:
    """One Airflow below ``home``. ``dags`` are copied nowhere: the folder is used as it is.

    Example::

        with AirflowBed(tmp, dags) as bed:
            run = bed.trigger("my_dag")
            assert bed.wait(run)["state"] == "success"
    """

    def __init__(self, home: Path, dags: Path, env: Mapping[str, str] | None = None) -> None:
        self.home = home
        self.port = free_port()
        self.password = secrets.token_urlsafe(12)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        home.mkdir(parents=True, exist_ok=True)
        (home / "passwords.json").write_text(json.dumps({"admin": self.password}))
        self.url = f"http://127.0.0.1:{self.port}"
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
        self._client: httpx.Client | None = None

    # -- processes -------------------------------------------------------------------------------

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
        subprocess.run(
            [sys.executable, "-m", "airflow", "db", "migrate"],
            env=self.env,
            check=True,
            stdout=self._log("migrate"),
            stderr=subprocess.STDOUT,
        )
        self.start("api-server", "api-server")
        self.start("scheduler", "scheduler", "--skip-serve-logs")
        self.start("dag-processor", "dag-processor")
        self.start("triggerer", "triggerer", "--skip-serve-logs")
        self._until(self._healthy, "a healthy Airflow")

    def start(self, name: str, *command: str) -> None:
        self.processes[name] = subprocess.Popen(
            [sys.executable, "-m", "airflow", *command],
            env=self.env,
            stdout=self._log(name),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def stop(self, name: str, sig: int = signal.SIGTERM, limit: float = 8.0) -> None:
        """End one component with everything it started."""
        process = self.processes.pop(name, None)
        if process is None:
            return
        for wanted in (sig, signal.SIGKILL):
            try:
                os.killpg(process.pid, wanted)
            except ProcessLookupError:
                break
            try:
                process.wait(limit)
                break
            except subprocess.TimeoutExpired:
                continue
        # Children of the component (workers of the scheduler) are in its group.
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait(limit)

    def down(self) -> None:
        for name in list(self.processes):
            self.stop(name)
        if self._client is not None:
            self._client.close()

    def _log(self, name: str) -> int:
        (self.home / "out").mkdir(exist_ok=True)
        return os.open(self.home / "out" / f"{name}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)

    def tail(self, name: str, lines: int = 40) -> str:
        path = self.home / "out" / f"{name}.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""

    def _until(self, done: Callable[[], Any], what: str, limit: float = START_LIMIT) -> Any:
        end = time.monotonic() + limit
        while True:
            answer = done()
            if answer:
                return answer
            for name, process in self.processes.items():
                if process.poll() is not None:
                    raise RuntimeError(f"{name} ended with {process.returncode}:\n{self.tail(name)}")
            if time.monotonic() > end:
                raise TimeoutError(f"no {what} after {limit:.0f} s")
            time.sleep(0.3)

    def _healthy(self) -> bool:
        try:
            health = httpx.get(f"{self.url}/api/v2/monitor/health", trust_env=False, timeout=5).json()
        except (httpx.HTTPError, ValueError):
            return False
        parts = ("metadatabase", "scheduler", "triggerer", "dag_processor")
        return all((health.get(part) or {}).get("status") == "healthy" for part in parts)

    # -- the API ---------------------------------------------------------------------------------

    @property
    def client(self) -> httpx.Client:
        if self._client is None:
            answer = httpx.post(
                f"{self.url}/auth/token",
                json={"username": "admin", "password": self.password},
                trust_env=False,
                timeout=30,
            )
            answer.raise_for_status()
            token = answer.json()["access_token"]
            self._client = httpx.Client(
                base_url=self.url, headers={"Authorization": f"Bearer {token}"}, trust_env=False, timeout=30
            )
        return self._client

    def get(self, path: str, **params: Any) -> Any:
        answer = self.client.get(f"/api/v2{path}", params=params)
        answer.raise_for_status()
        return answer.json()

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        answer = self.client.post(f"/api/v2{path}", json=body)
        if answer.is_error:
            raise RuntimeError(f"{path}: {answer.status_code} {answer.text}")
        return answer.json()

    def patch(self, path: str, body: Mapping[str, Any]) -> Any:
        answer = self.client.patch(f"/api/v2{path}", json=body)
        if answer.is_error:
            raise RuntimeError(f"{path}: {answer.status_code} {answer.text}")
        return answer.json()

    def wait_dag(self, dag_id: str, limit: float = 90.0) -> None:
        """Until the dag processor has read it; then it is not paused."""

        def there() -> bool:
            return bool(self.client.get(f"/api/v2/dags/{dag_id}").status_code == 200)

        self._until(there, f"DAG {dag_id}", limit)
        self.patch(f"/dags/{dag_id}", {"is_paused": False})

    def import_errors(self) -> dict[str, str]:
        return {e["filename"]: e["stack_trace"] for e in self.get("/importErrors")["import_errors"]}

    def trigger(self, dag_id: str, conf: Mapping[str, Any] | None = None) -> str:
        self.wait_dag(dag_id)
        return str(
            self.post(f"/dags/{dag_id}/dagRuns", {"conf": dict(conf or {}), "logical_date": None})[
                "dag_run_id"
            ]
        )

    def run_state(self, dag_id: str, run_id: str) -> str:
        return str(self.get(f"/dags/{dag_id}/dagRuns/{run_id}")["state"])

    def tasks(self, dag_id: str, run_id: str) -> dict[tuple[str, int], dict[str, Any]]:
        found = self.get(f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances", limit=100)["task_instances"]
        return {(ti["task_id"], ti["map_index"]): ti for ti in found}

    def task(self, dag_id: str, run_id: str, task_id: str, map_index: int = -1) -> dict[str, Any]:
        return self.tasks(dag_id, run_id)[(task_id, map_index)]

    def wait(self, dag_id: str, run_id: str, limit: float = 180.0) -> str:
        """Until the run has ended; its state."""

        def ended() -> str | None:
            state = self.run_state(dag_id, run_id)
            return state if state in ("success", "failed") else None

        return str(self._until(ended, f"end of {dag_id}/{run_id}", limit))

    def wait_task(
        self, dag_id: str, run_id: str, task_id: str, *states: str, map_index: int = -1, limit: float = 90.0
    ) -> dict[str, Any]:
        """Until the task instance is in one of the states."""

        def there() -> dict[str, Any] | None:
            ti = self.tasks(dag_id, run_id).get((task_id, map_index))
            return ti if ti and ti["state"] in states else None

        found: dict[str, Any] = self._until(there, f"{task_id} in {states}", limit)
        return found

    def log(self, dag_id: str, run_id: str, task_id: str, try_number: int = 1, map_index: int = -1) -> str:
        """The task's log as the UI shows it."""
        body = self.client.get(
            f"/api/v2/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}/logs/{try_number}",
            params={"map_index": map_index, "full_content": True},
            headers={"Accept": "application/json"},
        ).json()
        lines = []
        for item in body.get("content") or []:
            lines.append(item.get("event", "") if isinstance(item, dict) else str(item))
            for detail in (item.get("error_detail") or []) if isinstance(item, dict) else []:
                lines.append(f"{detail.get('exc_type')}: {detail.get('exc_value')}")
        return "\n".join(lines)

    def xcom(
        self, dag_id: str, run_id: str, task_id: str, key: str = "return_value", map_index: int = -1
    ) -> Any:
        answer = self.client.get(
            f"/api/v2/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}/xcomEntries/{key}",
            params={"map_index": map_index, "deserialize": True},
        )
        if answer.status_code == 404:
            return None
        answer.raise_for_status()
        return answer.json()["value"]

    def clear(self, dag_id: str, run_id: str, *task_ids: str) -> None:
        self.post(
            f"/dags/{dag_id}/clearTaskInstances",
            {
                "dry_run": False,
                "dag_run_id": run_id,
                "task_ids": list(task_ids),
                "only_failed": False,
                "reset_dag_runs": True,
            },
        )

    def mark(self, dag_id: str, run_id: str, task_id: str, state: str) -> None:
        self.patch(f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}", {"new_state": state})
