"""Is a checkpoint what its manifest says: every file's size and SHA-256.

Purpose: finds out what a life would otherwise find out when it restores, and
says it by file. Files are read in blocks by a few threads at once, so memory
stays near ``parallel`` blocks of 8 MiB, whatever the sizes.

What it does not do: mark anything unless asked. A file that cannot be read now
is told, and never a reason for a mark: the disk may be back in a minute.

Limits: one file is hashed by one thread, about 1 GB/s at best. A checkpoint
that is pruned meanwhile answers ``gone``.

Example::

    verified = await verify(checkpoint, checkpoints.contents(checkpoint.channel))
    if verified.damaged:
        await mark(verified, checkpoints.contents(checkpoint.channel))
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from airflow_gpu.rundir.checkpoints import Checkpoint
from airflow_gpu.rundir.contents import Contents
from airflow_gpu.rundir.store import StoreError
from airflow_gpu.runtime.manifest import BAD, COMPLETE, MANIFEST, Entry
from airflow_gpu.runtime.words import VERSION, utc

PARALLEL = 8
"""Files at once."""

T = TypeVar("T")


@dataclass(frozen=True)
class Wrong:
    """What is wrong with one file. ``unreadable``: it could not be read, which proves nothing."""

    path: str
    what: str
    unreadable: bool = False


@dataclass(frozen=True)
class Verified:
    """The answer: ``size`` in bytes that were hashed, ``extra`` files that the manifest does not know."""

    checkpoint: Checkpoint
    wrong: tuple[Wrong, ...] = ()
    extra: tuple[str, ...] = field(default=(), repr=False)
    size: int = 0
    gone: bool = False  # it was removed while it was looked at
    marked: bool = False

    @property
    def ok(self) -> bool:
        """Every byte is as it was saved."""
        return not self.wrong and not self.gone and self.checkpoint.manifest is not None

    @property
    def damaged(self) -> bool:
        """It is proven that a life could not restore it."""
        return not self.gone and any(not wrong.unreadable for wrong in self.wrong)


async def verify(
    checkpoint: Checkpoint,
    contents: Contents,
    *,
    parallel: int = PARALLEL,
    told: Callable[[int], None] = lambda _: None,
) -> Verified:
    """Read all of it. ``told`` hears how many bytes more were hashed. Raises nothing for what it finds."""
    manifest, total = checkpoint.manifest, 0
    if manifest is None:
        what = checkpoint.trouble or "there is none: it was never completed"
        return Verified(checkpoint, (Wrong(MANIFEST, what),))

    def count(more: int) -> None:
        nonlocal total
        total += more
        told(more)

    async def one(entry: Entry) -> Wrong | None:
        return await compare(contents, checkpoint.folder, entry, count)

    wrong = [found for found in await each(manifest.files, one, parallel) if found is not None]
    listing = [
        file.path[len(checkpoint.folder) + 1 :] for file in (await contents.walk(checkpoint.folder)).files
    ]
    known = {entry.path for entry in manifest.files} | {MANIFEST, BAD, COMPLETE}
    return Verified(
        checkpoint,
        tuple(sorted(wrong, key=lambda found: found.path)),
        tuple(sorted(set(listing) - known)),
        total,
        gone=bool(wrong) and MANIFEST not in listing,
    )


async def compare(
    contents: Contents, folder: str, entry: Entry, told: Callable[[int], None] = lambda _: None
) -> Wrong | None:
    """One file against its entry; None when it is as it should be."""
    try:
        path = f"{folder}/{entry.path}" if folder else entry.path
        found = await contents.digest(path, entry.size, told)
    except StoreError as error:
        return Wrong(entry.path, f"cannot be read: {error}", unreadable=True)
    if found is None:
        return Wrong(entry.path, "is not there")
    size, digest = found
    if size > entry.size:  # hashing has ended there
        return Wrong(entry.path, f"has more than {entry.size} bytes")
    if size < entry.size:
        return Wrong(entry.path, f"has {size} bytes instead of {entry.size}")
    return None if digest == entry.sha256 else Wrong(entry.path, "has other content than was saved")


async def mark(verified: Verified, contents: Contents) -> bool:
    """Write ``bad.json``, so that no life takes it. False when somebody else had. Only for one that is ``damaged``.

    :raises ValueError: nothing is proven against it.
    """
    if not verified.damaged:
        raise ValueError(f"{verified.checkpoint.uri} is not known to be damaged")
    first = next(wrong for wrong in verified.wrong if not wrong.unreadable)
    reason = f"{first.path} {first.what}" + (
        f", and {len(verified.wrong) - 1} more" * (len(verified.wrong) > 1)
    )
    body = {"v": VERSION, "reason": reason, "at": utc()}
    return await contents.create(f"{verified.checkpoint.folder}/{BAD}", json.dumps(body).encode())


async def each(
    items: Iterable[Entry], work: Callable[[Entry], Awaitable[T]], parallel: int = PARALLEL
) -> list[T]:
    """Do it for all files, the largest first, so many at once. The first error ends it."""
    queue = iter(sorted(items, key=lambda entry: -entry.size))
    done: list[T] = []

    async def worker() -> None:
        for entry in queue:
            done.append(await work(entry))

    tasks = [asyncio.create_task(worker()) for _ in range(max(1, parallel))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return done
