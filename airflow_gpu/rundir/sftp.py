"""A folder behind an SSH server, spoken to as obstore's stores are: the channel where a file system is mounted on the cluster only.

Purpose: offers those methods of obstore's stores that this package calls, with
obstore's errors, so that :mod:`airflow_gpu.rundir.store` and
:mod:`airflow_gpu.rundir.contents` need not know where they read.

How: ``create`` writes a hidden file beside its target, flushes it
(``fsync@openssh.com``) and links it to its name (``hardlink@openssh.com``),
which fails where the name is taken: the same steps as the runtime in the job,
on the same files. ``put`` replaces by ``posix-rename@openssh.com``.

What it does not do: try again (:class:`~airflow_gpu.rundir.store.Store` does),
or take links for files. A symbolic link below the root is never followed; only
the root may lie behind one.

Limits:

- Whether a path has a link in it is asked right before it is opened. SFTP has no way to do both at once, so
  who can write there can win that race; then a link leads to what the log-in's user may reach. Log in as the
  user of the jobs, and there is nothing to win.
- A server without ``hardlink@openssh.com`` (OpenSSH has had it since 5.7) gets an exclusive open instead. Readers
  may then see an empty or half a file, and wait for ``HALF`` seconds for its rest. A writer that dies in
  between leaves it so for ever, and a person has to remove it.
- A server without ``posix-rename@openssh.com``: a file that is replaced is missing for a moment.
- A write that was cut off may leave a hidden ``.tmp-*`` file behind.
- SFTP says "Failure" for nearly everything, a full disk as well.

Example::

    store = Store("sftp://me@login.cluster:22/shared/gangs", {"key_file": "/home/airflow/.ssh/id_ed25519"})
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import posixpath
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from airflow_gpu.rundir._sftp_place import Linked, Place, client_errors
from airflow_gpu.rundir._sftp_writing import PIECE, Writer, create
from airflow_gpu.ssh import Where, shared

T = TypeVar("T")

_Scanned = list[tuple[str, Any]]  # names in one folder, and what each is

AT_ONCE = 16
"""Folders that are listed, or files that are removed, in one question."""

DEEPEST = 32
"""Levels of folders that are looked into."""

HALF = 2.0
"""Seconds for which a file that does not look whole is read again, where the server cannot link."""


def sftp_options(conn: Any) -> dict[str, Any]:
    """Options of a store from a connection of Airflow's types ``ssh`` and ``sftp``.

    Login and password; of the extra: ``key_file``, ``private_key``, ``private_key_passphrase``, ``host_key``,
    ``no_host_key_check``. The host is the URI's. Other than in Airflow's hook the host key **is** checked unless
    ``no_host_key_check`` is true.
    """
    extra = dict(conn.extra_dejson or {})
    names = ("key_file", "private_key", "private_key_passphrase", "host_key", "no_host_key_check")
    found = {name: extra[name] for name in names if extra.get(name)}
    for name, value in (("username", conn.login), ("password", conn.password), ("port", conn.port)):
        if value:
            found[name] = value
    return found


def open_sftp(uri: str, options: Mapping[str, Any]) -> Sftp:
    """The store of a ``sftp://`` URI. Nothing is contacted yet.

    :raises ValueError: options that cannot be used.
    :raises ImportError: asyncssh is not there.
    """
    parts = urlsplit(uri)
    user = unquote(parts.username) if parts.username else None
    session = shared(Where(str(parts.hostname), parts.port, user), options)
    return Sftp(session, unquote(parts.path))


@dataclass(frozen=True)
class Answer:
    """What ``get`` answers, as obstore's does."""

    data: bytes

    def bytes(self) -> bytes:
        return self.data


class Pages:
    """A listing: one page of what obstore says of a file; and ``folders``, also those without a file."""

    def __init__(self, files: list[dict[str, Any]], folders: list[str]) -> None:
        self.files, self.folders = files, folders

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        return iter([self.files] if self.files else [])

    def collect(self) -> list[dict[str, Any]]:
        return self.files


class Sftp(Place):
    """The folder ``root`` (absolute) of a server. Paths are relative to it; names may be any.

    Every method raises OSError: FileNotFoundError, and ``ECONNRESET`` for what may pass.
    """

    def __repr__(self) -> str:
        return f"Sftp({self.session.where.host!r}, {self.root!r})"

    # -- reading

    def head(self, path: str) -> dict[str, Any]:
        """:raises FileNotFoundError: no regular file is there, or a link leads to it."""
        found = self.session.run(lambda client: self.file(client, self.full(path)))
        return _meta(path, found)

    def get(self, path: str, *, options: Mapping[str, Any] | None = None) -> Answer:
        """A file, or the ``range`` of it; empty beyond its end.

        :raises FileNotFoundError: no regular file is there, or a link leads to it.
        """
        asked = (options or {}).get("range")
        if isinstance(asked, Mapping):
            return Answer(self._read(path, asked["offset"], None))
        if asked is not None:
            return Answer(self._read(path, asked[0], asked[1] - asked[0]))
        data = self._read(path, 0, None)
        until = time.monotonic() + HALF
        while _half(data) and time.monotonic() < until and not self.session.links():
            time.sleep(0.1)
            data = self._read(path, 0, None)
        return Answer(data)

    def _read(self, path: str, start: int, limit: int | None) -> bytes:
        full = self.full(path)

        async def begin(client: Any) -> tuple[Any, Any, bytes]:
            await self.file(client, full)  # first: to open a pipe would hold the server up
            file = await client.open(full, "rb", encoding=None)
            wanted = PIECE if limit is None else min(limit, PIECE)
            data = await file.read(wanted, start)
            if len(data) < wanted or wanted == limit:
                await file.close()
                return client, None, data
            return client, file, data

        client, file, data = self.session.run(begin)
        if file is None:
            return bytes(data)
        pieces, got = [data], len(data)
        try:
            while limit is None or got < limit:
                wanted = PIECE if limit is None else min(limit - got, PIECE)
                at = start + got
                piece = self.session.run(partial(_read_at, file, wanted, at), client)
                pieces.append(piece)
                got += len(piece)
                if len(piece) < wanted:
                    break
        finally:
            with contextlib.suppress(OSError):
                self.session.run(lambda _: file.close(), client)
        return b"".join(pieces)

    def list(self, prefix: str | None = None, **_: Any) -> Pages:
        """All regular files below a folder, at any depth, sorted; none where there is no such folder."""
        files: list[dict[str, Any]] = []
        folders: list[str] = []
        waiting = [prefix or ""]
        while waiting:
            now, waiting = waiting[:AT_ONCE], waiting[AT_ONCE:]
            for at, entries in zip(now, self._scan_all(now), strict=True):
                for name, attrs in entries:
                    path = f"{at}/{name}" if at else name
                    if stat.S_ISDIR(attrs.permissions or 0):
                        folders.append(path)
                        if path.count("/") < DEEPEST:
                            waiting.append(path)
                    elif stat.S_ISREG(attrs.permissions or 0):
                        files.append(_meta(path, attrs))
        return Pages(sorted(files, key=lambda meta: meta["path"]), sorted(folders))

    def list_with_delimiter(self, prefix: str | None = None) -> dict[str, Any]:
        """Files and folders directly below a folder; nothing where there is none."""
        at = prefix or ""
        (entries,) = self._scan_all([at])
        named = [(f"{at}/{name}" if at else name, attrs) for name, attrs in entries]
        return {
            "common_prefixes": [path for path, attrs in named if stat.S_ISDIR(attrs.permissions or 0)],
            "objects": [_meta(path, attrs) for path, attrs in named if stat.S_ISREG(attrs.permissions or 0)],
        }

    def _scan_all(self, folders: Sequence[str]) -> Sequence[_Scanned]:
        return self.session.run(
            lambda client: asyncio.gather(*(self._scan(client, self.full(path)) for path in folders))
        )

    async def _scan(self, client: Any, full: str) -> _Scanned:
        """Names and attributes below one folder, links themselves among them."""
        try:
            _, found = await asyncio.gather(self.inside(client, full), client.readdir(full))
        except (client_errors().SFTPNoSuchFile, Linked):
            return []
        return [(entry.filename, entry.attrs) for entry in found if entry.filename not in (".", "..")]

    # -- writing

    def put(self, path: str, data: bytes, *, mode: str = "overwrite", use_multipart: bool = False) -> None:
        """Write a file whole.

        :raises AlreadyExistsError: with ``mode="create"``, if the name is taken.
        """
        if mode == "create":
            create(self, path, data)
            return
        with self.open_writer(path) as writer:
            writer.write(data)

    def open_writer(self, path: str, **_: Any) -> Writer:
        """A file that is written in blocks, and has its name when it is whole."""
        return Writer(self, self.full(path, writing=True))

    # -- removing

    def delete(self, paths: str | Sequence[str]) -> None:
        """Remove files, or links themselves; what is not there is no error."""
        wanted = [self.full(path) for path in ([paths] if isinstance(paths, str) else paths)]
        for at in range(0, len(wanted), AT_ONCE):
            self.session.run(partial(self._remove_all, wanted[at : at + AT_ONCE]))

    async def _remove_all(self, some: Sequence[str], client: Any) -> None:
        await asyncio.gather(*(self._remove(client, full) for full in some))

    async def _remove(self, client: Any, full: str) -> None:
        try:
            await self.inside(client, posixpath.dirname(full))
            await client.remove(full)
        except (client_errors().SFTPNoSuchFile, Linked):
            pass

    def remove_tree(self, prefix: str) -> None:
        """Remove a folder with all that is in it, links themselves and unfinished files too.

        :raises OSError: ``ELOOP`` where a link is in its place.
        """
        full = self.full(prefix)

        async def links(client: Any) -> None:
            try:
                await self.inside(client, full)
            except client_errors().SFTPNoSuchFile:
                pass

        self.session.run(links)
        (entries,) = self._scan_all([prefix])
        folders = {name for name, attrs in entries if stat.S_ISDIR(attrs.permissions or 0)}
        for name in sorted(folders):
            self.remove_tree(f"{prefix}/{name}")
        self.delete([f"{prefix}/{name}" for name, _ in entries if name not in folders])
        self.session.run(lambda client: _rmdir(client, full))


async def _read_at(file: Any, size: int, at: int, _: Any) -> bytes:
    return bytes(await file.read(size, at))


async def _rmdir(client: Any, full: str) -> None:
    with contextlib.suppress(client_errors().SFTPNoSuchFile):
        await client.rmdir(full)


def _meta(path: str, attrs: Any) -> dict[str, Any]:
    at = datetime.fromtimestamp(attrs.mtime or 0, UTC)
    return {"path": path, "size": int(attrs.size or 0), "last_modified": at}


def _half(data: bytes) -> bool:
    """Whether a file may be without its end: empty, or the beginning of a JSON object."""
    if not data.startswith(b"{"):
        return not data
    try:
        json.loads(data)
    except ValueError:
        return True
    return False
