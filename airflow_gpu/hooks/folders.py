"""A folder of a cluster as Airflow reaches it: mounted here, or by SFTP through a login node.

Purpose: what a target needs of its cluster's files beside the channel's records: the output of
jobs that did not come so far as to write any, and files with secrets, which only their owner
may read.

Limits: secrets are the files of whoever writes them. Over SFTP that is the user who logs in; in a mounted folder it is the
user of Airflow's process: the jobs must run as the same one, or cannot read them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import posixpath
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from airflow_gpu.rundir.store import Missing, Store, StoreError
from airflow_gpu.ssh import Where, shared
from airflow_gpu.targets.base import TargetError

if TYPE_CHECKING:
    from airflow_gpu.hooks.stores import Credentials

PRIVATE = 0o600


class Folder:
    """A folder at ``uri`` (``file://`` or ``sftp://``).

    :param options: of SSH, where no connection is named for the URI in ``[gpu] store_conn_ids``.
    """

    def __init__(self, uri: str, options: Mapping[str, Any]) -> None:
        self._uri = uri
        self._options = dict(options)
        self._credentials: Credentials | None = None
        self._store: Store | None = None

    def use(self, credentials: Credentials) -> None:
        """Take the log-in from where the settings say."""
        self._credentials = credentials

    async def read(self, path: str, start: int, size: int) -> bytes:
        try:
            return await self._opened().get(path, start, size)
        except Missing:
            return b""
        except StoreError as error:
            raise TargetError(str(error)) from None

    async def put_private(self, path: str, data: bytes) -> None:
        try:
            if self._uri.startswith("sftp:"):
                await self._put_remote(path, data)
            else:
                await asyncio.to_thread(self._put_here, path, data)
        except (OSError, ValueError) as error:
            words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise TargetError(f"{self._uri}: a file with secrets could not be written: {words}") from None

    async def remove(self, path: str) -> None:
        try:
            await self._opened().delete(path)
        except Missing:
            pass
        except StoreError as error:
            raise TargetError(str(error)) from None

    def _opened(self) -> Store:
        if self._store is None:
            self._store = Store(self._uri, self._given) if self._uri.startswith("sftp:") else Store(self._uri)
        return self._store

    async def _given(self) -> dict[str, Any]:
        if self._credentials is not None and self._credentials.conn_id(self._uri):
            return await self._credentials.options(self._uri)
        return dict(self._options)

    def _put_here(self, path: str, data: bytes) -> None:
        goal = Path(unquote(urlsplit(self._uri).path)) / path
        goal.parent.mkdir(parents=True, exist_ok=True)
        half = goal.with_name(f".{goal.name}.{secrets.token_hex(6)}")
        try:
            descriptor = os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(half, goal)
        except BaseException:
            with contextlib.suppress(OSError):
                half.unlink()
            raise

    async def _put_remote(self, path: str, data: bytes) -> None:
        parts = urlsplit(self._uri)
        user = unquote(parts.username) if parts.username else None
        session = shared(Where(str(parts.hostname), parts.port, user), await self._given())
        goal = posixpath.join(unquote(parts.path), path)
        half = posixpath.join(posixpath.dirname(goal), f".tmp-{secrets.token_hex(8)}")

        async def put(client: Any) -> None:
            from asyncssh import SFTPAttrs

            await client.makedirs(posixpath.dirname(goal), exist_ok=True)
            async with client.open(half, "wb", attrs=SFTPAttrs(permissions=PRIVATE)) as file:
                await file.write(data)
            await client.posix_rename(half, goal)

        await asyncio.to_thread(session.run, put)
