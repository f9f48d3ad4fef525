"""What the driver needs of Airflow and of this process: targets, watchers, secrets, stores.

Purpose: builds the :class:`airflow_gpu.driver.World` for a worker or a
triggerer. Targets, their watchers, stores and the budget of reads are shared by
all gangs of a process, so that watching costs O(targets).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from airflow_gpu.compat import AirflowFailException, BaseHook
from airflow_gpu.driver import World
from airflow_gpu.hooks.references import resolve
from airflow_gpu.hooks.store_options import store_options
from airflow_gpu.hooks.stores import Credentials, NoConnection, NoSuchConnection, tell_jobs, with_state
from airflow_gpu.hooks.target import build_target
from airflow_gpu.pacing import Pace
from airflow_gpu.rundir.store import Store
from airflow_gpu.settings import Settings, settings
from airflow_gpu.targets.base import NotConfigured, Target, TargetError
from airflow_gpu.targets.watch import Watcher

__all__ = [
    "airflow_world",
    "channel_store",
    "credentials",
    "resolve_secrets",
    "state_store",
    "store_options",
    "target",
]

CONNECTION_AGE = 300.0
"""Seconds after which a connection is read again, so that a changed one takes effect without a restart."""


ERROR_AGE = 5.0
"""Seconds for which a connection that could not be read is not asked for again: thousands of gangs may want it."""


class _Shared:
    """What all gangs of one event loop share."""

    def __init__(self) -> None:
        self.targets: dict[str, tuple[float, str, Target]] = {}
        self.failures: dict[str, tuple[float, TargetError]] = {}
        self.reading: dict[str, asyncio.Lock] = {}
        self.watchers: dict[int, Watcher] = {}
        self.stores: dict[str, Store] = {}
        self.pace = Pace()


_SHARED: WeakKeyDictionary[asyncio.AbstractEventLoop, _Shared] = WeakKeyDictionary()


def _shared() -> _Shared:
    return _SHARED.setdefault(asyncio.get_running_loop(), _Shared())


async def target(conn_id: str) -> Target:
    """The target of a connection id; one object per connection and event loop."""
    shared = _shared()
    # One at a time: a triggerer that starts has thousands of gangs that ask for the same connection.
    turn = shared.reading.setdefault(conn_id, asyncio.Lock())
    if turn.locked() and conn_id in shared.targets:
        return shared.targets[conn_id][2]  # somebody is reading it again, and that may take a while
    async with turn:
        cached = shared.targets.get(conn_id)
        if cached is not None and time.monotonic() - cached[0] < CONNECTION_AGE:
            return cached[2]
        failed = shared.failures.get(conn_id)
        if failed is not None and time.monotonic() - failed[0] < ERROR_AGE:
            raise type(failed[1])(str(failed[1]))
        try:
            found = await _read_target(conn_id, cached)
        except TargetError as error:
            shared.failures[conn_id] = time.monotonic(), error
            raise
        shared.failures.pop(conn_id, None)
        return found


async def _read_target(conn_id: str, cached: tuple[float, str, Target] | None) -> Target:
    shared = _shared()
    try:
        conn = await BaseHook.aget_connection(conn_id)
    except Exception as error:
        if cached is not None:
            # A metadata database that is away says nothing about the target.
            shared.targets[conn_id] = time.monotonic() - CONNECTION_AGE + ERROR_AGE, cached[1], cached[2]
            return cached[2]
        if not _not_there(error):
            raise TargetError(f"connection {conn_id!r} cannot be read now: {error}") from error
        raise NotConfigured(
            f"there is no connection {conn_id!r}. Create it in Airflow with a type such as 'gpu_local', "
            f"or set AIRFLOW_CONN_{conn_id.upper()}"
        ) from error
    print_ = repr((conn.conn_type, conn.host, conn.port, conn.login, conn.password, conn.schema, conn.extra))
    if cached is not None and cached[1] == print_:
        found = cached[2]
    else:
        found = build_target(conn)
    found.name = conn_id
    try:
        await tell_jobs(found, credentials())
    except NotConfigured:
        raise
    except TargetError:
        if cached is None or found is not cached[2]:
            raise  # else what its jobs were told the last time still holds
    shared.targets[conn_id] = (time.monotonic(), print_, found)
    return found


def _watcher(poll: float) -> Callable[[Target], Watcher]:
    def watcher(of: Target) -> Watcher:
        shared = _shared()
        if id(of) not in shared.watchers:
            # Those of connections that have changed since, once the last gang has left them.
            current = [known for _, _, known in shared.targets.values()]
            for key, old in list(shared.watchers.items()):
                if old.idle and old.target not in current:
                    del shared.watchers[key]
            shared.watchers[id(of)] = Watcher(of, poll)
        return shared.watchers[id(of)]

    return watcher


def credentials(given: Settings | None = None) -> Credentials:
    """Who opens stores in this process: with the connections that the settings name."""
    given = given or settings(named=False)
    return Credentials(with_state(given.store_conn_ids, given.state_uri, given.state_conn_id), _connection)


async def _connection(conn_id: str) -> Any:
    try:
        return await BaseHook.aget_connection(conn_id)
    except Exception as error:
        if _not_there(error):
            raise NoSuchConnection(conn_id) from None
        raise


def channel_store(uri: str, given: Settings | None = None) -> Store:
    """One store per channel: on an object store each has connections of its own."""
    stores = _shared().stores
    known = credentials(given)
    name = f"{known.conn_id(uri)} {uri}"
    if name not in stores:
        stores[name] = known.open(uri)
    return stores[name]


def _not_there(error: Exception) -> bool:
    """Airflow answered that there is no such thing, which is something else than no answer."""
    return type(error).__name__ == "AirflowNotFoundException" or "NOT_FOUND" in str(error)


async def state_store(given: Settings) -> Store:
    """The store of the journals, with the credentials of ``[gpu] state_conn_id`` if that is set.

    :raises AirflowFailException: there is no such connection.
    :raises StoreError: it cannot be read now, or not be used.
    """
    store = channel_store(given.state_uri, given)
    try:
        await store.ready()
    except NoConnection as error:
        raise AirflowFailException(str(error)) from None
    return store


async def resolve_secrets(references: Mapping[str, str]) -> dict[str, str]:
    """Values of ``Gang.secrets``: ``conn:<id>#<field>`` and ``var:<name>``."""
    return await resolve(references, _connection, _variable)


async def _variable(name: str) -> str | None:
    from airflow.sdk import Variable

    try:
        return str(await asyncio.to_thread(Variable.get, name))
    except Exception as error:
        if _not_there(error):
            return None
        raise


def airflow_world(given: Settings, say: Callable[[str], None], rank_log: Callable[[str], None]) -> World:
    """The world of a worker or a triggerer."""
    return World(
        clock=time.time,
        sleep=asyncio.sleep,
        target=target,
        channel_store=lambda uri: channel_store(uri, given),
        watcher=_watcher(given.poll),
        secrets=resolve_secrets,
        public=credentials(given).public,
        say=say,
        rank_log=rank_log,
        poll=given.poll,
        pace=_shared().pace,
    )
