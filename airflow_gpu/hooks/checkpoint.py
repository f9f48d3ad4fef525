"""The newest checkpoint of a gang, as other tasks and DAGs hear of it.

Purpose: one look, shared by the sensor, its trigger and the asset's events.
What is told of a checkpoint is one small object:

``uri``
    its folder; ``life``, ``step``: which it is.
``dag_id``, ``run_id``, ``task_id``, ``map_index``; ``run``
    whose it is; ``run`` is ``dag/run/task[map]``.

What it does not do: hash (``airflow-gpu checkpoints verify`` does), or list
files: a look costs the new end of a journal and the names of one life's
checkpoints, so it may be made in a triggerer.

Limits: a checkpoint counts while a next life of its run would start from it or
from a later one. What a run took over from another (``continue_previous``) is
not its own, and does not count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from airflow_gpu.compat import task_states
from airflow_gpu.gang.identity import RunKey, run_path, segment
from airflow_gpu.gang.run import Seed
from airflow_gpu.hooks.world import channel_store, state_store
from airflow_gpu.rundir.channel import Channel
from airflow_gpu.rundir.journal import Journal
from airflow_gpu.rundir.slot import newest
from airflow_gpu.rundir.store import Store, StoreError
from airflow_gpu.runtime.checkpoint import life_folder, save_name, step_in
from airflow_gpu.settings import Settings

FINAL = frozenset({"success", "failed", "skipped", "upstream_failed", "removed"})
"""States from which a task goes on only when a person clears it."""


@dataclass(frozen=True)
class Wanted:
    """A checkpoint of at least ``step`` of one task instance, named by its run or by its logical date (ISO 8601)."""

    dag_id: str
    task_id: str
    step: int
    map_index: int = -1
    run_id: str = ""
    logical_date: str = ""


@dataclass(frozen=True)
class Seen:
    """One look: the newest checkpoint, if it is ``reached``; ``state`` of the task, empty while it is not there."""

    newest: Mapping[str, Any] | None
    reached: bool
    state: str
    words: str

    @property
    def over(self) -> bool:
        """It is not reached, and the task will not get there by itself."""
        return not self.reached and self.state in FINAL


async def look(given: Settings, wanted: Wanted) -> Seen:
    """Ask Airflow which run it is and how its task stands, then look at its checkpoints, in this order.

    So a gang that ends in between is seen with all that it saved.

    :raises StoreError: a store did not answer.
    """
    states = await asyncio.to_thread(
        task_states,
        wanted.dag_id,
        wanted.task_id,
        wanted.map_index,
        run_id=wanted.run_id,
        logical_date=wanted.logical_date,
    )
    if not states:
        when = wanted.run_id or f"logical date {wanted.logical_date}"
        return Seen(None, False, "", f"{wanted.dag_id} has no {wanted.task_id} for {when} yet")
    run_id, state = sorted(states.items())[-1]
    key = RunKey(given.installation, wanted.dag_id, run_id, wanted.task_id, wanted.map_index)
    found = await newest_of(await state_store(given), key)
    reached = found is not None and found["step"] >= wanted.step
    at = f"its newest checkpoint is of step {found['step']}" if found else "it has no checkpoint yet"
    return Seen(found, reached, state or "none", f"{key} is {state or 'not scheduled'}; {at}")


async def newest_of(store: Store, key: RunKey) -> dict[str, Any] | None:
    """The newest checkpoint of a task instance's gang; None while it has none of its own.

    :raises StoreError: a store did not answer.
    """
    last = await newest(store, key)
    if last is None:
        return None
    path = run_path(key, last[1])
    journal = Journal(store, path)
    run = await journal.refresh()
    if not run.attempts:
        return None
    attempt = run.attempts[-1]
    where = await _channel(attempt.channel, path).locate(attempt)
    if where is None or where.run:
        return None
    return {
        "uri": await _uri(_channel(where.channel, path), where),
        "life": where.life,
        "step": where.step,
        "run": str(key),
        "dag_id": key.dag_id,
        "run_id": key.run_id,
        "task_id": key.task_id,
        "map_index": key.map_index,
    }


def _channel(uri: str, path: str) -> Channel:
    return Channel(channel_store(uri.removesuffix(f"/{path}")), path)


async def _uri(channel: Channel, where: Seed) -> str:
    """Its folder. Of a program's, whose names are its own, the one that ends with the step; else that of the life."""
    folder = life_folder(where.life)
    names = await channel.store.names(f"{channel.path}/{folder}")
    fitting = [name for name in names if not name.startswith(".") and step_in(name) == where.step]
    name = save_name(where.step) if save_name(where.step) in fitting else next(iter(fitting), "")
    return f"{channel.uri}/{folder}" + (f"/{name}" if name else "")


async def found_or_recorded(given: Settings, key: RunKey, record: Mapping[str, Any]) -> dict[str, Any]:
    """The newest checkpoint for the event of a task that succeeded: as found, else as its record says.

    ``uri``, ``life`` and ``step`` are None for a gang that saved nothing. A store that is away is no error: the gang
    has succeeded.
    """
    try:
        found = await newest_of(await state_store(given), key)
    except Exception:
        found = None
    if found is not None:
        return found
    told = record.get("checkpoint") or {}
    names = ("dag_id", "run_id", "task_id", "map_index")
    return {
        **{name: told.get(name) for name in ("uri", "life", "step")},
        "run": str(key),
        **{name: getattr(key, name) for name in names},
    }


class Watch:
    """News of all gangs of one task: each new checkpoint once, the newest of each run.

    For a triggerer that looks again and again. Nobody knows what was told
    before the first look, so that tells of what gangs have that are not over, and of
    no other.
    """

    def __init__(self, store: Store, installation: str, dag_id: str, task_id: str) -> None:
        self._store = store
        self._of = installation, dag_id, task_id
        self._told: dict[tuple[str, int], tuple[int, int]] = {}
        self._over: set[tuple[str, int, str]] = set()
        self._looked = False

    async def news(self, every: int = 1) -> list[dict[str, Any]]:
        """Checkpoints that are new, and at least ``every`` steps beyond the last one that was told of their run.

        The last one of a run that ends is told in any case.

        :raises StoreError: the state store did not answer; a single run that cannot be read is left for the next look.
        """
        installation, dag_id, task_id = self._of
        root = f"v1/{segment(installation)}/{segment(dag_id)}"
        found = []
        for run in await self._store.names(root):
            for mapped in await self._store.names(f"{root}/{run}/{segment(task_id)}"):
                one = await self._of_slot(f"{root}/{run}/{segment(task_id)}/{mapped}")
                if one is None:
                    continue
                newest, last = one
                if self._is_new(newest, 1 if last else every) and (self._looked or not last):
                    found.append(newest)
        self._looked = True
        return found

    async def _of_slot(self, slot: str) -> tuple[dict[str, Any], bool] | None:
        """Its newest checkpoint, and whether the run is over; None, too, once one that succeeded was looked at."""
        from airflow_gpu.gang.entries import JournalError
        from airflow_gpu.rundir.slot import read_run

        try:
            names = [
                name for name in await self._store.names(f"{slot}/incarnations") if name.endswith(".json")
            ]
            if not names or (slot, len(names), names[-1]) in self._over:
                return None
            body = await self._store.get(f"{slot}/incarnations/{names[-1]}")
            incarnation = str(_object(body).get("incarnation"))
            key, _ = await read_run(self._store, f"{slot}/{incarnation}")
            run = await Journal(self._store, f"{slot}/{incarnation}").refresh()
            found = await newest_of(self._store, key)
            if run.verdict is not None and run.verdict.success:
                self._over.add((slot, len(names), names[-1]))  # a success is for ever
            return None if found is None else (found, run.verdict is not None)
        except (StoreError, JournalError, KeyError, TypeError, ValueError):
            return None

    def _is_new(self, one: Mapping[str, Any], every: int) -> bool:
        of, now = (one["run"], one["map_index"]), (one["life"], one["step"])
        last = self._told.get(of)
        if last is not None and (now <= last or 0 <= now[1] - last[1] < every):
            return False
        self._told[of] = now
        return True


def _object(data: bytes) -> dict[str, Any]:
    import json

    body = json.loads(data)
    return body if isinstance(body, dict) else {}
