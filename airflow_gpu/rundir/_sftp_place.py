"""Paths below the root of a store behind SSH: that no link leads to them, and the folders above them.

Purpose: what reading and writing over SFTP have in common.

Limits: a path is asked about before it is opened; see :mod:`airflow_gpu.rundir.sftp`.
"""

from __future__ import annotations

import asyncio
import errno
import posixpath
import secrets
import stat
from typing import Any

from airflow_gpu.rundir._folder import HIDDEN
from airflow_gpu.ssh import Session


class Place:
    """The folder ``root`` (absolute) of a server. Paths below it are relative; ``full`` is what the server is told."""

    def __init__(self, session: Session, root: str) -> None:
        self.session = session
        self.root = root.rstrip("/")

    def full(self, path: str, *, writing: bool = False) -> str:
        parts = path.split("/") if path else []
        if any(part in ("", ".", "..") or "\0" in part for part in parts):
            if writing:
                raise OSError(errno.EINVAL, "no path below the store")
            raise FileNotFoundError(errno.ENOENT, "no path below the store")
        return "/".join([self.root, *parts])

    def staged(self, full: str) -> str:
        return f"{posixpath.dirname(full)}/{HIDDEN}{secrets.token_hex(8)}"

    async def inside(self, client: Any, full: str) -> None:
        """Make sure that no link leads to it. Raises Linked, or SFTPNoSuchFile."""
        root, real = await asyncio.gather(client.realpath(self.root), client.realpath(full))
        if real != root + full[len(self.root) :]:
            raise Linked(errno.ELOOP, "a symbolic link is in the path")

    async def file(self, client: Any, full: str) -> Any:
        """The attributes of a regular file.

        :raises FileNotFoundError: it is none, or a link leads to it.
        """
        try:
            _, found = await asyncio.gather(self.inside(client, full), client.lstat(full))
        except (client_errors().SFTPNoSuchFile, Linked):
            raise FileNotFoundError(errno.ENOENT, "no such file", full) from None
        if not stat.S_ISREG(found.permissions or 0):
            raise FileNotFoundError(errno.ENOENT, "no regular file", full)
        return found

    async def parent(self, client: Any, full: str) -> None:
        """Make the folder of a file that is to be written."""
        parent = posixpath.dirname(full)
        try:
            await self.inside(client, parent)
            if stat.S_ISDIR((await client.lstat(parent)).permissions or 0) or parent == self.root:
                return
        except client_errors().SFTPNoSuchFile:
            pass
        await self.make(client, parent)
        await self.inside(client, parent)

    async def make(self, client: Any, folder: str) -> None:
        ssh = client_errors()
        try:
            await client.mkdir(folder)
        except ssh.SFTPNoSuchFile:
            above = posixpath.dirname(folder)
            if above == folder:
                raise
            await self.make(client, above)
            await self.make(client, folder)
        except (ssh.SFTPFailure, ssh.SFTPFileAlreadyExists):  # another made it, or a file is in its place
            if not await client.isdir(folder):
                raise OSError(errno.ENOTDIR, "a file is where a folder should be") from None


class Linked(OSError):
    """A symbolic link is where none may be."""


def client_errors() -> Any:
    """The asyncssh module: an optional one, so it is loaded with the first store that needs it."""
    import asyncssh

    return asyncssh


async def there(client: Any, full: str) -> bool:
    try:
        await client.lstat(full)
    except client_errors().SFTPNoSuchFile:
        return False
    return True
