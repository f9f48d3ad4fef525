"""Files of a store behind SSH, created whole and for ever, or replaced.

Purpose: the order of questions that makes it so. What it costs on an unusual
server is said in :mod:`airflow_gpu.rundir.sftp`.

What it does not do: try again, but for what only the writer itself can mend.
"""

from __future__ import annotations

import contextlib
import errno
import posixpath
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from obstore.exceptions import AlreadyExistsError

from airflow_gpu.rundir._sftp_place import Place, client_errors, there

T = TypeVar("T")

PIECE = 8 << 20
"""Bytes that are asked for, or sent, in one question with a time-out."""

FILL_TRIES = 3
"""How often an exclusively opened file is filled, before a person is asked to remove it."""


def create(place: Place, path: str, data: bytes) -> None:
    """Create a file with all of its content.

    :raises AlreadyExistsError: the name is taken.
    """
    full = place.full(path, writing=True)
    if place.session.links():
        staged = place.staged(full)
        place.session.run(lambda client: _by_link(place, client, full, staged, data))
    else:
        _by_open(place, full, data)


async def _by_link(place: Place, client: Any, full: str, staged: str, data: bytes) -> None:
    """By a hard link."""
    ssh = client_errors()
    await place.parent(client, full)
    if await there(client, full):
        raise AlreadyExistsError(full)
    try:
        await _write(client, staged, "xb", data)
        await client.link(staged, full)
    except ssh.SFTPPermissionDenied:
        raise OSError(
            errno.EPERM,
            "no permission to write here, or a file system without hard links, which create-only files need",
        ) from None
    except (ssh.SFTPFailure, ssh.SFTPFileAlreadyExists):
        if not await there(client, full):
            raise  # the disk is full, perhaps
        # Behind an NFS server the answer to a link can be lost and the request repeated, which then finds the
        # name taken: as in a local folder, the count of names of our own file is the truth.
        if not await _linked(client, full, staged, data):
            raise AlreadyExistsError(full) from None
    finally:
        with contextlib.suppress(ssh.SFTPError):
            await client.remove(staged)


async def _linked(client: Any, full: str, staged: str, data: bytes) -> bool:
    found = await client.lstat(full)
    if found.size != len(data):
        return False
    async with client.open(full, "rb", encoding=None) as file:
        if await file.read(len(data) + 1, 0) != data:
            return False
    name = posixpath.basename(staged)
    for entry in await client.readdir(posixpath.dirname(full)):
        if entry.filename == name:
            # SFTP has no field for it, but a line as of `ls -l`: mode, names, owner, ...
            words = str(entry.longname or "").split()
            return len(words) > 1 and words[1].isdecimal() and int(words[1]) > 1
    return False


def _by_open(place: Place, full: str, data: bytes) -> None:
    """By an exclusive open, then filled. Who has opened it owns the name, whatever becomes of the connection."""

    async def claim(client: Any) -> None:
        await place.parent(client, full)
        if await there(client, full):
            raise AlreadyExistsError(full)
        try:
            file = await client.open(full, "xb", encoding=None)
        except (client_errors().SFTPFailure, client_errors().SFTPFileAlreadyExists):
            if await there(client, full):
                raise AlreadyExistsError(full) from None
            raise
        await file.close()

    place.session.run(claim)
    for left in reversed(range(FILL_TRIES)):
        try:
            place.session.run(lambda client: _write(client, full, "r+b", data))
            return
        except OSError as error:
            if error.errno != errno.ECONNRESET or not left:
                raise OSError(
                    errno.EIO,
                    f"it was created, and could not be filled ({error.strerror}): it must be removed by hand",
                ) from None
            time.sleep(0.2)


class Writer:
    """Of a file that is replaced when the last block is written; as a context."""

    def __init__(self, place: Place, full: str) -> None:
        self.place, self.full, self.staged = place, full, place.staged(full)
        self._client: Any = None
        self._file: Any = None
        self._at = 0

    def __enter__(self) -> Writer:
        async def begin(client: Any) -> tuple[Any, Any]:
            await self.place.parent(client, self.full)
            return client, await client.open(self.staged, "xb", encoding=None)

        self._client, self._file = self.place.session.run(begin)
        return self

    def write(self, block: bytes) -> None:
        for at in range(0, len(block), PIECE):
            piece = block[at : at + PIECE]
            self._run(partial(_write_at, self._file, piece, self._at))
            self._at += len(piece)

    def __exit__(self, kind: Any, *_: object) -> None:
        try:
            if kind is None:
                self._run(self._finish)
        except OSError:
            self._discard()
            raise
        if kind is not None:
            self._discard()

    async def _finish(self, client: Any) -> None:
        await _flush(self._file)
        await self._file.close()
        ssh = client_errors()
        try:
            await client.posix_rename(self.staged, self.full)
        except ssh.SFTPOpUnsupported:
            with contextlib.suppress(ssh.SFTPNoSuchFile):
                await client.remove(self.full)
            await client.rename(self.staged, self.full)

    def _discard(self) -> None:
        with contextlib.suppress(OSError):
            self.place.session.run(lambda client: client.remove(self.staged))

    def _run(self, work: Callable[[Any], Awaitable[T]]) -> T:
        return self.place.session.run(work, self._client)


async def _write(client: Any, full: str, mode: str, data: bytes) -> None:
    async with client.open(full, mode, encoding=None) as file:
        await file.write(data, 0)
        await _flush(file)


async def _flush(file: Any) -> None:
    with contextlib.suppress(client_errors().SFTPOpUnsupported):
        await file.fsync()


async def _write_at(file: Any, data: bytes, at: int, _: Any) -> None:
    await file.write(data, at)
