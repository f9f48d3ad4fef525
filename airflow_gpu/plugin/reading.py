"""Reading run directories from the API server: bounded, and never a file that lies elsewhere.

Purpose: the pages read folders in which users' programs write. A rank could
put a link to ``airflow.cfg``, a pipe, or an endless file where its log is
expected. :class:`PageStore` is a store that follows no links below its root,
reads regular files only, and never more than it was told to.

What it does not do: write.

Limits: local folders need Linux (``openat`` with ``O_NOFOLLOW``). Folders that
are themselves links below the root are refused, not followed. On object
stores, which have no links, only the sizes are bounded.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from airflow_gpu.rundir.store import Missing, Store, StoreError

T = TypeVar("T")

FILE_LIMIT = 4 * 1024 * 1024
"""Bytes of a record (a journal entry, a manifest). A larger one is not shown."""

HIDDEN = ".tmp-"
"""How names of files begin that are still being written, by every writer of a run directory."""

NAMES_LIMIT = 20_000
"""Names read of one folder."""

STATE_AGE = 60.0
"""Seconds after which the connection of the state store is read again."""

# Threads of its own: a file system that hangs takes these, and not those of the API server.
_THREADS = ThreadPoolExecutor(max_workers=8, thread_name_prefix="gang-pages")


class NotSet(Exception):
    """This Airflow is not set up for gangs; the message says what is missing."""


class PageStore(Store):
    """A store as the pages read it.

    :raises StoreError: from every method, with words for people.
    """

    def __init__(
        self,
        uri: str,
        options: Mapping[str, Any] | Callable[[], Awaitable[Mapping[str, Any]]] | None = None,
    ) -> None:
        super().__init__(uri, options)
        parts = urlsplit(self.uri)
        self._local = Path(unquote(parts.path)) if parts.scheme == "file" else None

    async def get(self, path: str, start: int = 0, limit: int | None = None) -> bytes:
        """A file, or a part of it. Without ``limit``, a file of more than FILE_LIMIT bytes is refused."""
        most = FILE_LIMIT + 1 if limit is None else limit
        if self._local is None:
            data = await super().get(path, start, most)
        else:
            folder = self._local
            data = await self._thread(path, lambda: _read(folder, path, start, most))
        if limit is None and len(data) > FILE_LIMIT:
            raise StoreError(f"{self.uri}: {path} has more than {FILE_LIMIT} bytes")
        return data

    async def names(self, prefix: str = "") -> list[str]:
        """Names directly below a folder, sorted; none if it is not there."""
        if self._local is None:
            return (await super().names(prefix))[:NAMES_LIMIT]
        folder = self._local
        return sorted(await self._thread(prefix, lambda: _names(folder, prefix)))

    async def sizes(self, prefix: str) -> dict[str, int]:
        """Sizes of the regular files directly below a folder, by name."""
        if self._local is None:
            found = [
                (entry.path.removeprefix(f"{prefix}/"), entry.size) for entry in await super().list(prefix)
            ]
            return dict([item for item in found if "/" not in item[0]][:NAMES_LIMIT])
        folder = self._local
        return await self._thread(prefix, lambda: _sizes(folder, prefix))

    async def size(self, path: str) -> int:
        """Size of one file.

        :raises Missing: there is none.
        """
        if self._local is not None:
            folder = self._local
            return await self._thread(path, lambda: _size(folder, path))
        parent, _, name = path.rpartition("/")
        found = await self.sizes(parent)
        if name not in found:
            raise Missing(f"{self.uri}: there is no {path}")
        return found[name]

    async def _thread(self, path: str, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(_THREADS, work)
        except FileNotFoundError:
            raise Missing(f"{self.uri}: there is no {path}") from None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise StoreError(
                    f"{self.uri}: {path} is not read: a part of it is a link, or no folder"
                ) from None
            raise StoreError(f"{self.uri}: {path} cannot be read: {error.strerror}") from None


# -- local folders, each component opened below the one before it -------------------------------------


def _open(folder: Path, path: str, flags: int) -> int:
    """Open ``path`` below ``folder``; no component of it may be a link."""
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        *parents, last = path.split("/")
        if any(name in ("", ".", "..") for name in (*parents, last)):
            raise FileNotFoundError(path)
        for name in parents:
            below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            os.close(at)
            at = below
        # Not blocking: a pipe is refused below, instead of waited for.
        return os.open(last, flags | os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
    finally:
        os.close(at)


def _regular(descriptor: int) -> int:
    """The size of the file; anything but a regular file is refused."""
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    return found.st_size


def _read(folder: Path, path: str, start: int, most: int) -> bytes:
    descriptor = _open(folder, path, 0)
    try:
        _regular(descriptor)
        parts = []
        while most > 0 and (part := os.pread(descriptor, min(most, 1 << 20), start)):
            parts.append(part)
            start, most = start + len(part), most - len(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)


def _size(folder: Path, path: str) -> int:
    descriptor = _open(folder, path, 0)
    try:
        return _regular(descriptor)
    finally:
        os.close(descriptor)


def _names(folder: Path, prefix: str) -> list[str]:
    try:
        descriptor = _open(folder, prefix, os.O_DIRECTORY)
    except FileNotFoundError:
        return []
    names: list[str] = []
    try:
        with os.scandir(descriptor) as found:
            for entry in found:
                if len(names) >= NAMES_LIMIT:
                    break
                if not entry.name.startswith(HIDDEN):
                    names.append(entry.name)
        return names
    finally:
        os.close(descriptor)


def _sizes(folder: Path, prefix: str) -> dict[str, int]:
    try:
        descriptor = _open(folder, prefix, os.O_DIRECTORY)
    except FileNotFoundError:
        return {}
    sizes: dict[str, int] = {}
    try:
        with os.scandir(descriptor) as found:
            for entry in found:
                if len(sizes) >= NAMES_LIMIT:
                    break
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and not entry.name.startswith(HIDDEN):
                    sizes[entry.name] = status.st_size
        return sizes
    finally:
        os.close(descriptor)


# -- which store ---------------------------------------------------------------------------------------

_states: dict[tuple[str, str], tuple[float, PageStore]] = {}


async def state_store() -> tuple[str, PageStore]:
    """The name of this installation, and the store of its journals.

    :raises NotSet: a setting or the connection of ``[gpu] state_conn_id`` is missing or wrong.
    """
    from airflow_gpu.compat import AirflowException
    from airflow_gpu.hooks.world import credentials
    from airflow_gpu.settings import settings

    try:
        given = settings()
    except AirflowException as error:
        raise NotSet(str(error)) from None
    key = (given.state_uri, repr((given.state_conn_id, given.store_conn_ids)))
    known = _states.get(key)
    if known is not None and time.monotonic() - known[0] < STATE_AGE:
        return given.installation, known[1]
    # The API server is a "server" process to the SDK: it reads connections from the secrets
    # backends and the database itself, without a supervisor (sdk/execution_time/supervisor.py).
    known_by = credentials(given)
    try:
        store = known_by.open(given.state_uri, PageStore)
        await store.ready()
    except StoreError as error:
        raise NotSet(f"[gpu] state_uri cannot be used by the API server: {error}") from None
    _states.clear()  # one deployment has one; an older one would be stale
    _states[key] = (time.monotonic(), store)
    return given.installation, store


def channel_store(uri: str, path: str, state: PageStore) -> PageStore:
    """The store of a channel, from the URI in the journal: ``<root of the channel>/<path of the run>``.

    It is opened with the credentials with which the driver opens it, see :mod:`airflow_gpu.hooks.stores`.

    :raises StoreError: it is not this run's channel, or of a scheme that is not known.
    """
    from airflow_gpu.compat import AirflowException
    from airflow_gpu.hooks.world import credentials

    root = uri.removesuffix(f"/{path}")
    if root == uri:
        raise StoreError(f"the journal names a channel that is not this run's: {uri}")
    if root == state.uri:
        return state
    try:
        return credentials().open(root, PageStore)
    except AirflowException as error:  # a setting is wrong
        raise StoreError(str(error)) from None
