"""Where a command works: which installation, which state store, which targets. Without importing Airflow.

Purpose: reads ``[gpu]`` from options, environment and ``airflow.cfg`` as
:mod:`airflow_gpu.settings` does in a running Airflow, and makes targets and a
:class:`~airflow_gpu.driver.World` of it.
"""

from __future__ import annotations

import asyncio
import configparser
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from airflow_gpu.cli.connections import BadFile, Connections, target_of
from airflow_gpu.targets.base import NotConfigured, Target

if TYPE_CHECKING:
    from airflow_gpu.driver import World
    from airflow_gpu.hooks.stores import Credentials
    from airflow_gpu.rundir.channel import Channel
    from airflow_gpu.rundir.store import Store
    from airflow_gpu.targets.watch import Watcher

POLL = 1.0
"""Seconds between two looks at a target while a command waits."""

_NAME = re.compile(r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$")


@dataclass(frozen=True)
class Given:
    """Options that every command has; None: not given."""

    installation: str | None = None
    state_uri: str | None = None
    connections: Path | None = None
    targets: str | None = None


class Place:
    """One installation with its state store and its targets.

    :raises click.ClickException: a setting is missing or wrong; the message says what would be right.
    """

    def __init__(self, given: Given, env: Mapping[str, str] | None = None) -> None:
        self._env = os.environ if env is None else env
        self._config = _airflow_cfg(self._env)
        installation = given.installation or self.option("installation")
        if not installation:
            raise click.ClickException(
                "which installation? Set AIRFLOW__GPU__INSTALLATION (or [gpu] installation in airflow.cfg), or give "
                "--installation"
            )
        if not _NAME.match(installation):
            raise click.ClickException(
                f"installation is {installation!r}; it must be 1 to 32 of a-z, 0-9 and '-', and start and end with "
                "a letter or digit"
            )
        self.installation = installation
        self.state_uri = given.state_uri or self.option("state_uri") or f"file://{_home(self._env)}/gangs"
        self.state_conn_id = None if given.state_uri else self.option("state_conn_id")
        from airflow_gpu.hooks.stores import conn_ids

        try:
            self.store_conn_ids = conn_ids(self.option("store_conn_ids"))
        except ValueError as error:
            raise click.ClickException(str(error)) from None
        self._names = f"{self.option('targets') or ''},{given.targets or ''}"
        try:
            self.connections = Connections(given.connections, self._env)
        except BadFile as error:
            raise click.ClickException(str(error)) from None
        self._targets: dict[str, Target] = {}
        self._watchers: dict[int, Watcher] = {}
        self._stores: dict[str, Store] = {}

    def option(self, name: str) -> str | None:
        """An option of ``[gpu]``: from the environment, else from ``airflow.cfg``."""
        value = self._env.get(f"AIRFLOW__GPU__{name.upper()}")
        if not value and self._config is not None:
            value = self._config.get("gpu", name, fallback="").replace("%%", "%")
        return value or None

    def names(self) -> list[str]:
        """Targets that are asked whatever the journals say: of options, ``[gpu] targets``, file and environment."""
        listed = self._names.replace(",", " ").split()
        return list(dict.fromkeys([*listed, *self.connections.targets()]))

    def credentials(self) -> Credentials:
        """Who opens stores: with the connections that the settings name, as workers do."""
        from airflow_gpu.hooks.stores import Credentials, with_state

        return Credentials(
            with_state(self.store_conn_ids, self.state_uri, self.state_conn_id), self._connection
        )

    async def _connection(self, conn_id: str) -> Any:
        from airflow_gpu.hooks.stores import NoSuchConnection

        try:
            return (await asyncio.to_thread(self.connections.find, conn_id))[0]
        except NotConfigured:
            raise NoSuchConnection(conn_id) from None

    def store(self) -> Store:
        """The state store."""
        from airflow_gpu.rundir.store import StoreError

        try:
            return self.open(self.state_uri)
        except StoreError as error:
            raise click.ClickException(f"the state store: {error}") from None

    def open(self, uri: str) -> Store:
        """The store at a URI. Its connection is read when it is first used.

        :raises StoreError: it is no URI of a store.
        """
        if uri not in self._stores:
            self._stores[uri] = self.credentials().open(uri)
        return self._stores[uri]

    def channel(self, uri: str, path: str) -> Channel:
        """The channel half of a run, from its URI as journalled and the path of the run.

        :raises StoreError: it is no URI of a store.
        """
        from airflow_gpu.rundir.channel import Channel

        return Channel(self.open(uri.removesuffix(f"/{path}")), path)

    async def target(self, name: str) -> Target:
        """
        :raises TargetError: there is no such connection, or it is no target.
        """
        from airflow_gpu.hooks.stores import tell_jobs

        if name not in self._targets:
            found = target_of(await asyncio.to_thread(lambda: self.connections.find(name)[0]))
            found.name = name
            await tell_jobs(found, self.credentials())
            self._targets[name] = found
        return self._targets[name]

    async def secrets(self, references: Mapping[str, str]) -> Mapping[str, str]:
        """Values of references as in ``Gang.secrets``, from where connections come from; variables from
        ``AIRFLOW_VAR_<NAME>`` or Airflow.

        :raises TargetError: one is not there, or cannot be read. The message has no value.
        """
        from airflow_gpu.hooks.references import resolve

        async def variable(name: str) -> str | None:
            return await asyncio.to_thread(self.connections.variable, name)

        return await resolve(references, self._connection, variable)

    def world(self, say: Callable[[str], None]) -> World:
        """For ending gangs, and for the doctor's, the only one that a command submits."""
        from airflow_gpu.driver import World
        from airflow_gpu.targets.watch import Watcher

        def watcher(of: Target) -> Watcher:
            return self._watchers.setdefault(id(of), Watcher(of, POLL))

        return World(
            clock=time.time,
            sleep=asyncio.sleep,
            target=self.target,
            channel_store=self.open,
            public=self.credentials().public,
            watcher=watcher,
            secrets=self.secrets,
            say=say,
            rank_log=lambda _: None,
            poll=POLL,
        )


def _home(env: Mapping[str, str]) -> str:
    return os.path.abspath(env.get("AIRFLOW_HOME") or os.path.expanduser("~/airflow"))


def _airflow_cfg(env: Mapping[str, str]) -> configparser.RawConfigParser | None:
    path = Path(env.get("AIRFLOW_CONFIG") or f"{_home(env)}/airflow.cfg")
    parser = configparser.RawConfigParser(strict=False)
    try:
        if not parser.read(path):
            return None
    except (configparser.Error, OSError, UnicodeDecodeError):
        raise click.ClickException(f"{path} cannot be read as a configuration file") from None
    return parser
