"""Asking Airflow for states of task instances, from each place a sweep runs in.

Purpose: the implementations of :class:`airflow_gpu.sweeping.airflow.AsksAirflow`:

==================  ====================================  =======================================
class               where                                 with whose rights
==================  ====================================  =======================================
SupervisorAirflow   a task or a trigger                   the task's or triggerer's own token
DatabaseAirflow     a shell on a host of Airflow          ``[database] sql_alchemy_conn``
RestAirflow         anywhere                              a token, or user and password
==================  ====================================  =======================================

What they do not do: guess. Whatever goes wrong is ``CannotAsk``.

Limits: Airflow 3.3. The supervisor does not filter by "not mapped", and names
the instances of a mapped task ``<task>_<index>`` as a task of that name would
be; so unmapped tasks are asked for one at a time, and mapped ones by index.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from airflow_gpu.gang.identity import UNMAPPED, RunKey
from airflow_gpu.sweeping.airflow import CannotAsk

RUNS_AT_ONCE = 40
"""DAG runs in one question: their ids travel in an address, and those may have 8000 characters."""

ANSWER_LIMIT = 60.0
"""Seconds that Airflow may take for one answer."""

TOKEN, USER, PASSWORD = "AIRFLOW_GPU_TOKEN", "AIRFLOW_GPU_USER", "AIRFLOW_GPU_PASSWORD"


class SupervisorAirflow:
    """Through the supervisor of the task or triggerer that this process is."""

    who = "through the supervisor"
    own = True

    async def states(self, keys: Collection[RunKey]) -> Mapping[RunKey, str | None]:
        """
        :raises CannotAsk: the supervisor or the API server did not answer.
        """
        found: dict[RunKey, str | None] = {}
        groups: dict[tuple[str, str, int], list[RunKey]] = defaultdict(list)
        for key in keys:
            groups[(key.dag_id, key.task_id, key.map_index)].append(key)
        for (dag_id, task_id, index), members in groups.items():
            for some in _chunks(members):
                try:
                    # Synchronous calls of the SDK work in a thread everywhere, in child tasks of a trigger too.
                    told = await asyncio.wait_for(
                        asyncio.to_thread(_supervisor, dag_id, task_id, index, [key.run_id for key in some]),
                        ANSWER_LIMIT,
                    )
                except Exception as error:
                    raise CannotAsk(f"{type(error).__name__}: {error}") from error
                name = task_id if index == UNMAPPED else f"{task_id}_{index}"
                for key in some:
                    states = told.get(key.run_id)
                    if states is not None and name in states:
                        found[key] = _word(states[name])
        return found


def _supervisor(dag_id: str, task_id: str, index: int, run_ids: list[str]) -> Mapping[str, Any]:
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    states: Mapping[str, Any] = RuntimeTaskInstance.get_task_states(
        dag_id=dag_id, task_ids=[task_id], run_ids=run_ids, map_index=index
    )
    return states


class DatabaseAirflow:
    """From Airflow's metadata database, as Airflow's own commands on a server host read it."""

    who = "in its database"
    own = False  # it is the one that this shell is configured for

    async def states(self, keys: Collection[RunKey]) -> Mapping[RunKey, str | None]:
        """
        :raises CannotAsk: there is no such database, or it has no tables of Airflow.
        """
        try:
            return await asyncio.wait_for(asyncio.to_thread(_database, list(keys)), ANSWER_LIMIT)
        except Exception as error:
            # Nothing of the address, which may have a password in it.
            text = "no answer in time" if isinstance(error, TimeoutError) else str(getattr(error, "orig", ""))
            raise CannotAsk(f"the database: {type(error).__name__} {text}".strip()) from None


def _database(keys: list[RunKey]) -> dict[RunKey, str | None]:
    from airflow.models.taskinstance import TaskInstance
    from airflow.utils.session import create_session
    from sqlalchemy import select

    wanted = {(key.dag_id, key.run_id, key.task_id, key.map_index): key for key in keys}
    found: dict[RunKey, str | None] = {}
    columns = (TaskInstance.run_id, TaskInstance.task_id, TaskInstance.map_index, TaskInstance.state)
    with create_session() as session:
        for dag_id in sorted({key.dag_id for key in keys}):
            runs = sorted({key.run_id for key in keys if key.dag_id == dag_id})
            for some in _chunks(runs, 500):
                rows = session.execute(
                    select(*columns).where(TaskInstance.dag_id == dag_id, TaskInstance.run_id.in_(some))
                )
                for run_id, task_id, index, state in rows:
                    key = wanted.get((dag_id, run_id, task_id, index))
                    if key is not None:
                        found[key] = _word(state)
    return found


class RestAirflow:
    """Through Airflow's REST API.

    :param url: of the API server, as ``https://airflow.example.com``.
    :param env: where token, or user and password, are looked for.
    """

    own = False

    def __init__(self, url: str, env: Mapping[str, str] | None = None) -> None:
        self.url = url.rstrip("/")
        self.who = f"at {self.url}"
        self._env = os.environ if env is None else env
        self._token = self._env.get(TOKEN, "")

    async def states(self, keys: Collection[RunKey]) -> Mapping[RunKey, str | None]:
        """
        :raises CannotAsk: no answer, no such user, or not allowed to see these DAGs.
        """
        import httpx

        found: dict[RunKey, str | None] = {}
        try:
            async with httpx.AsyncClient(timeout=ANSWER_LIMIT) as client:
                headers = {"Authorization": f"Bearer {await self._login(client)}"}
                for key in keys:
                    # One at a time: a list leaves out what the user may not see, and that would look as if
                    # it were not there.
                    answer = await client.get(self._address(key), headers=headers)
                    if answer.status_code == 404 and "task instance" in answer.text.lower():
                        continue  # any other 404 comes from something that is no Airflow
                    if answer.status_code in (401, 403):
                        raise CannotAsk(f"the user may not see task instances of {key.dag_id}")
                    answer.raise_for_status()
                    found[key] = _word(answer.json()["state"])
        except (httpx.HTTPError, ValueError, KeyError) as error:
            raise CannotAsk(f"{self.url}: {type(error).__name__}: {error}") from error
        return found

    def _address(self, key: RunKey) -> str:
        from urllib.parse import quote

        parts = ["api", "v2", "dags", key.dag_id, "dagRuns", key.run_id, "taskInstances", key.task_id]
        if key.map_index != UNMAPPED:
            parts.append(str(key.map_index))
        return "/".join([self.url, *(quote(part, safe="") for part in parts)])

    async def _login(self, client: Any) -> str:
        if not self._token:
            user, password = self._env.get(USER), self._env.get(PASSWORD)
            if not user or not password:
                raise CannotAsk(f"set {TOKEN}, or {USER} and {PASSWORD}")
            answer = await client.post(
                f"{self.url}/auth/token", json={"username": user, "password": password}
            )
            if answer.status_code in (401, 403):
                raise CannotAsk(f"{self.url} does not take this user and password")
            answer.raise_for_status()
            self._token = str(answer.json()["access_token"])
        return self._token


def _word(state: Any) -> str | None:
    """A state as text; the enum of the database has its word as its value."""
    return None if state is None else str(getattr(state, "value", state))


def _chunks(items: Sequence[Any], size: int = RUNS_AT_ONCE) -> Iterable[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))
