"""What a person does with Airflow, through its REST API.

Purpose: trigger, wait, clear, mark, delete, backfill; for tests and the demo.

What it does not do: start Airflow; that is :mod:`tests.beds.airflow`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx

PATIENCE = 3
"""Times the limits on waiting, which are those of a quiet machine."""

TaskId = str | tuple[str, int]
"""A task, or one mapped index of it."""


class AirflowApi:
    """Calls of one Airflow at ``url`` as its admin."""

    url: str
    password: str

    def __init__(self) -> None:
        self._client: httpx.Client | None = None

    def check(self) -> None:
        """Raise if waiting makes no sense any more."""

    def until(self, done: Callable[[], Any], what: str, limit: float = 90.0, pause: float = 1.0) -> Any:
        """The first answer of ``done`` that is true. An API that does not answer is asked again."""
        end = time.monotonic() + PATIENCE * limit
        while True:
            try:
                answer = done()
            except httpx.TransportError:
                answer = None
            if answer:
                return answer
            self.check()
            if time.monotonic() > end:
                raise TimeoutError(f"no {what} after {PATIENCE * limit:.0f} s")
            time.sleep(pause)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

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
                base_url=self.url, headers={"Authorization": f"Bearer {token}"}, trust_env=False, timeout=120
            )
        return self._client

    def call(self, method: str, path: str, body: Any = None, **params: Any) -> Any:
        """The answer of ``/api/v2`` + path; None when there is no body.

        :raises RuntimeError: with what Airflow said.
        """
        answer = self.client.request(method, f"/api/v2{path}", json=body, params=params or None)
        if answer.is_error:
            raise RuntimeError(f"{method} {path}: {answer.status_code} {answer.text}")
        return answer.json() if answer.content else None

    def get(self, path: str, **params: Any) -> Any:
        return self.call("GET", path, **params)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        return self.call("POST", path, dict(body))

    def patch(self, path: str, body: Mapping[str, Any]) -> Any:
        return self.call("PATCH", path, dict(body))

    # -- DAGs --------------------------------------------------------------------------------------

    def has_dag(self, dag_id: str) -> bool:
        return bool(self.client.get(f"/api/v2/dags/{dag_id}").status_code == 200)

    def wait_dag(self, dag_id: str, limit: float = 90.0) -> None:
        """Until the dag processor has read it; then it is not paused."""
        self.until(lambda: self.has_dag(dag_id), f"DAG {dag_id}", limit)
        self.patch(f"/dags/{dag_id}", {"is_paused": False})

    def pause_dag(self, dag_id: str) -> None:
        self.patch(f"/dags/{dag_id}", {"is_paused": True})

    def delete_dag(self, dag_id: str) -> None:
        """With all that Airflow knows of its runs; its file brings it back."""
        self.call("DELETE", f"/dags/{dag_id}")

    def import_errors(self) -> dict[str, str]:
        return {e["filename"]: e["stack_trace"] for e in self.get("/importErrors")["import_errors"]}

    def backfill(self, dag_id: str, first: str, last: str, **more: Any) -> int:
        """Runs for the dates from ``first`` to ``last``; the id of the backfill."""
        body = {"dag_id": dag_id, "from_date": first, "to_date": last, **more}
        return int(self.post("/backfills", body)["id"])

    # -- DAG runs ----------------------------------------------------------------------------------

    def trigger(
        self, dag_id: str, conf: Mapping[str, Any] | None = None, run_id: str | None = None, **body: Any
    ) -> str:
        self.wait_dag(dag_id)
        body = {"conf": dict(conf or {}), "logical_date": None, **body}
        if run_id is not None:
            body["dag_run_id"] = run_id
        return str(self.post(f"/dags/{dag_id}/dagRuns", body)["dag_run_id"])

    def runs(self, dag_id: str) -> list[dict[str, Any]]:
        return list(self.get(f"/dags/{dag_id}/dagRuns", limit=100)["dag_runs"])

    def run_state(self, dag_id: str, run_id: str) -> str:
        return str(self.get(f"/dags/{dag_id}/dagRuns/{run_id}")["state"])

    def mark_run(self, dag_id: str, run_id: str, state: str) -> None:
        self.patch(f"/dags/{dag_id}/dagRuns/{run_id}", {"state": state})

    def delete_run(self, dag_id: str, run_id: str) -> None:
        """Airflow deletes only what is not running: it is marked failed first."""
        if self.run_state(dag_id, run_id) not in ("success", "failed"):
            self.mark_run(dag_id, run_id, "failed")
        self.call("DELETE", f"/dags/{dag_id}/dagRuns/{run_id}")

    def wait(self, dag_id: str, run_id: str, limit: float = 180.0) -> str:
        """Until the run has ended; its state."""

        def ended() -> str | None:
            state = self.run_state(dag_id, run_id)
            return state if state in ("success", "failed") else None

        return str(self.until(ended, f"end of {dag_id}/{run_id}", limit))

    # -- task instances ----------------------------------------------------------------------------

    def tasks(self, dag_id: str, run_id: str) -> dict[tuple[str, int], dict[str, Any]]:
        found = self.get(f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances", limit=100)["task_instances"]
        return {(ti["task_id"], ti["map_index"]): ti for ti in found}

    def task(self, dag_id: str, run_id: str, task_id: str, map_index: int = -1) -> dict[str, Any]:
        return self.tasks(dag_id, run_id)[(task_id, map_index)]

    def wait_task(
        self,
        dag_id: str,
        run_id: str,
        task_id: str,
        *states: str,
        map_index: int = -1,
        try_number: int = 0,
        limit: float = 90.0,
    ) -> dict[str, Any]:
        """Until the task instance is in one of the states, in this try or a later one."""

        def there() -> dict[str, Any] | None:
            ti = self.tasks(dag_id, run_id).get((task_id, map_index))
            return ti if ti and ti["state"] in states and ti["try_number"] >= try_number else None

        found: dict[str, Any] = self.until(there, f"{task_id} in {states}", limit)
        return found

    def clear(self, dag_id: str, run_id: str, *tasks: TaskId, **body: Any) -> None:
        """Clear tasks, or single mapped indices of them."""
        self.post(
            f"/dags/{dag_id}/clearTaskInstances",
            {
                "dry_run": False,
                "dag_run_id": run_id,
                "task_ids": [list(task) if isinstance(task, tuple) else task for task in tasks],
                "only_failed": False,
                "reset_dag_runs": True,
                **body,
            },
        )

    def mark(self, dag_id: str, run_id: str, task_id: str, state: str, map_index: int = -1) -> None:
        index = f"/{map_index}" if map_index >= 0 else ""
        self.patch(f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}{index}", {"new_state": state})

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
