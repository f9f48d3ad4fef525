"""The files below one folder of a store, whatever their names: listed, read in ranges, hashed, written, removed.

Purpose: what a program writes into a checkpoint has names that
:class:`~airflow_gpu.rundir.store.Store` refuses, and may be a terabyte. So
files go through memory in blocks, and names are taken as they are.

What it does not do: know what a checkpoint is.

Limits: on a local folder only regular files count, and no symbolic link below
``folder`` is followed: what a job's user can make there never leads out of it.
Folders deeper than ``DEEPEST`` are left out. A file system's names that are no
UTF-8 cannot be copied to an object store.

Example::

    contents = Contents(Store("s3://bucket/gangs"), "v1/prod/dag/run/task/_/abcdefgh23/checkpoints")
    for file in (await contents.walk()).files:
        print(file.path, await contents.digest(file.path))
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from obstore import exceptions as obstore_errors

from airflow_gpu.rundir import beneath
from airflow_gpu.rundir._folder import HIDDEN
from airflow_gpu.rundir._opening import open_writer, passing, remove_all
from airflow_gpu.rundir.store import Store, StoreError

BLOCK = 8 << 20
"""Bytes of one file that are in memory at once; of a file that is sent to an object store, up to four times as much."""

PARTS = 9000
"""Of a large object at most; S3 takes 10,000."""

DEEPEST = 32
"""Levels of folders that are looked into."""

_NOT_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EISDIR})


@dataclass(frozen=True, order=True)
class Stored:
    """One file: ``path`` below the folder, ``size`` in bytes, ``at`` when it was last written (epoch seconds)."""

    path: str
    size: int
    at: float = 0.0


@dataclass(frozen=True)
class Listing:
    """Files, sorted; and folders, which only a local store has without files in them."""

    files: list[Stored]
    folders: list[str]


class Contents:
    """All that lies below ``folder`` (a path in ``store``). Raises StoreError where the store fails."""

    def __init__(self, store: Store, folder: str) -> None:
        self.store = store
        self.folder = folder.rstrip("/")
        self._root = store.folder / folder if store.folder is not None else None

    @property
    def uri(self) -> str:
        return f"{self.store.uri.rstrip('/')}/{self.folder}"

    def _path(self, path: str) -> str:
        return f"{self.folder}/{path}" if path else self.folder

    async def _ask(self, once: Callable[[Any], Any], path: str = "") -> Any:
        """In a thread of the store, with its retries. ``once`` gets the obstore store; of a folder it gets None."""
        if self._root is not None:
            return await self.store.work(lambda: once(None), self._path(path))
        return await self.store.ask(once, self._path(path))

    # -- reading

    async def walk(self, below: str = "") -> Listing:
        """Everything below, at any depth. Unfinished files of this package are left out."""
        if self._root is not None:
            root = self._root
            found = await self._ask(lambda _: _walk(root, below), below)
            return Listing(sorted(found[0]), sorted(found[1]))

        def once(store: Any) -> tuple[list[Stored], Iterable[str]]:
            pages = store.list(self._path(below), chunk_size=1000)
            files = [
                Stored(meta["path"][len(self.folder) + 1 :], meta["size"], meta["last_modified"].timestamp())
                for batch in pages
                for meta in batch
                if not meta["path"].rpartition("/")[2].startswith(HIDDEN)
            ]
            return files, (path[len(self.folder) + 1 :] for path in getattr(pages, "folders", ()))

        files, folders = await self._ask(once, below)
        return Listing(sorted(files), sorted({a for file in files for a in _above(file.path)}.union(folders)))

    async def read(self, path: str, limit: int, start: int = 0) -> bytes | None:
        """Up to ``limit`` bytes from ``start``; None when there is no such file."""
        data: bytes | None = await self._ask(lambda store: self.read_now(store, path, limit, start), path)
        return data

    def read_now(self, store: Any, path: str, limit: int, start: int = 0) -> bytes | None:
        """The same in this thread, of the obstore ``store``."""
        if self._root is not None:
            try:
                with beneath.opened(self._root, path) as descriptor:
                    return _pread(descriptor, limit, start)
            except OSError as error:
                if error.errno in _NOT_THERE:
                    return None
                raise
        try:
            full = self._path(path)
            return bytes(store.get(full, options={"range": (start, start + limit)}).bytes())
        except FileNotFoundError:
            return None
        except obstore_errors.GenericError as error:
            # Each store words a range beyond the end, or in an empty file, in its own way.
            if passing(error):
                raise
            if store.head(self._path(path))["size"] <= start:
                return b""
            raise

    async def digest(
        self, path: str, most: int | None = None, told: Callable[[int], None] = lambda _: None
    ) -> tuple[int, str] | None:
        """Size and SHA-256; None when there is no such file.

        Ends soon after ``most`` bytes: a file that is longer has another digest anyway.
        ``told`` hears of each block's bytes.
        """
        hasher, total = hashlib.sha256(), 0

        def once(store: Any) -> int | None:
            block = self.read_now(store, path, BLOCK, total)
            if block is None:
                return None
            hasher.update(block)  # here, in the store's thread; nothing after it can fail
            return len(block)

        while True:
            read = await self._ask(once, path)
            if read is None:
                return None
            total += read
            told(read)
            if read < BLOCK or (most is not None and total > most):
                return total, hasher.hexdigest()

    async def opened(self) -> Any:
        """The obstore store, for :meth:`blocks`."""
        return await self._ask(lambda store: store)

    # -- writing

    async def create(self, path: str, data: bytes) -> bool:
        """Create a small file whole; False when the name is taken, by whatever content."""

        def once(store: Any) -> bool:
            try:
                if self._root is not None:
                    beneath.write(self._root, path, [data], replace=False)
                else:
                    store.put(self._path(path), data, mode="create", use_multipart=False)
            except (FileExistsError, obstore_errors.AlreadyExistsError):
                return False
            return True

        return bool(await self._ask(once, path))

    async def write(self, path: str, size: int, blocks: Callable[[], Iterator[bytes]]) -> None:
        """Write a large file over whatever is there. ``blocks`` answers its content, anew for each try."""

        def once(store: Any) -> None:
            if self._root is not None:
                beneath.write(self._root, path, blocks(), replace=True)
            elif size <= BLOCK:
                store.put(self._path(path), b"".join(blocks()), use_multipart=False)
            else:
                # Not put() with an iterator: it asks for blocks in its own runtime, where no other store can be read.
                part = max(BLOCK, -(-size // PARTS))
                with open_writer(store, self._path(path), part=part) as writer:
                    for block in blocks():
                        writer.write(block)

        await self._ask(once, path)

    def blocks(self, store: Any, path: str, size: int) -> Iterator[bytes]:
        """The first ``size`` bytes of a file, in blocks, in this thread. Raises StoreError when they are not there."""
        at = 0
        while at < size:
            block = self.read_now(store, path, min(BLOCK, size - at), at)
            if not block:
                raise StoreError(f"{self.uri}/{path} ends at {at} of {size} bytes")
            yield block
            at += len(block)

    # -- removing

    async def remove(self, path: str) -> None:
        """Remove one file; it is no error if there is none."""

        def once(store: Any) -> None:
            try:
                if self._root is not None:
                    beneath.remove(self._root, path)
                else:
                    store.delete(self._path(path))
            except OSError as error:
                if error.errno not in _NOT_THERE and not isinstance(error, FileNotFoundError):
                    raise

        await self._ask(once, path)

    async def remove_tree(self, path: str) -> None:
        """Remove a folder with all that is in it, links themselves and unfinished files too. Can be repeated."""

        def once(store: Any) -> None:
            if self._root is not None:
                try:
                    beneath.remove_tree(self._root, path)
                except OSError as error:
                    if error.errno not in _NOT_THERE:
                        raise
                return
            remove_all(store, self._path(path))

        await self._ask(once, path)


def _above(path: str) -> Iterable[str]:
    parts = path.split("/")
    return ("/".join(parts[:n]) for n in range(1, len(parts)))


def _pread(descriptor: int, limit: int, start: int) -> bytes:
    pieces, left = [], limit
    while left > 0 and (piece := os.pread(descriptor, min(left, BLOCK), start + limit - left)):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def _walk(root: Any, below: str) -> tuple[list[Stored], list[str]]:
    files: list[Stored] = []
    folders: list[str] = []
    waiting = [below]
    while waiting:
        at = waiting.pop()
        try:
            with beneath.folder(root, at) as descriptor, os.scandir(descriptor) as entries:
                for entry in entries:
                    name = f"{at}/{entry.name}" if at else entry.name
                    try:
                        found = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:  # removed meanwhile
                        continue
                    if stat.S_ISDIR(found.st_mode):
                        folders.append(name)
                        if name.count("/") < DEEPEST:
                            waiting.append(name)
                    elif stat.S_ISREG(found.st_mode) and not entry.name.startswith(HIDDEN):
                        files.append(Stored(name, found.st_size, found.st_mtime))
        except OSError as error:
            if error.errno not in _NOT_THERE:
                raise
    return files, folders
