"""A checkpoint copied to another store, whole or not at all.

Purpose: the same folder, below the same run directory, on another target's
channel or on a store for keeping. Files go in parallel, in blocks; what is
there with the right size and digest is not sent again, so a copy that was cut
off goes on. Each file is read back and compared. The manifest is created last,
as the same bytes.

What it does not do: make a life start from it. A life goes down the chain of
its own channel; a copy elsewhere is for people, for another run's program, or
for keeping.

Limits: **not for a triggerer**: it moves every byte through this process, and
its threads are the store's, which all gangs of a process share. For a worker or
a command. The source must be whole; while it is copied the runtime may prune
it, which is an error here and leaves no manifest there.

Example::

    await copy(checkpoint, checkpoints.contents(checkpoint.channel), Store("s3://keep/models"))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from airflow_gpu.rundir.checkpoints import Checkpoint
from airflow_gpu.rundir.contents import Contents
from airflow_gpu.rundir.store import Store
from airflow_gpu.rundir.verifying import PARALLEL, compare, each
from airflow_gpu.runtime.manifest import BAD, MANIFEST, MOST_BYTES, Entry


class NotCopied(Exception):
    """The copy is not complete; the message says why. What was sent stays there for the next time."""


@dataclass
class Copied:
    """The copy's ``uri``; files and bytes that were ``sent``, and those that were there already."""

    uri: str
    sent: list[Entry] = field(default_factory=list)
    there: list[Entry] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Bytes that were sent."""
        return sum(entry.size for entry in self.sent)


async def copy(
    checkpoint: Checkpoint,
    source: Contents,
    to: Store,
    *,
    folder: str | None = None,
    parallel: int = PARALLEL,
    told: Callable[[int], None] = lambda _: None,
) -> Copied:
    """Copy a complete checkpoint, to ``folder`` in ``to`` (default: the same path as in its own store).

    ``told`` hears how many bytes more are there and compared.

    :raises NotCopied: it is not whole, the copy is marked as bad, or another checkpoint is in its place.
    :raises StoreError: a store failed.
    """
    manifest = checkpoint.manifest
    if manifest is None or not checkpoint.whole:
        raise NotCopied(
            f"{checkpoint.uri} is {checkpoint.what.value}: {checkpoint.trouble or 'it has no manifest'}"
        )
    target = Contents(to, folder or f"{source.folder}/{checkpoint.folder}")
    origin = Contents(source.store, f"{source.folder}/{checkpoint.folder}")
    if target.uri == origin.uri:
        raise NotCopied(f"{target.uri} is the checkpoint itself")
    data = await origin.read(MANIFEST, MOST_BYTES + 1)
    if data is None:
        raise NotCopied(f"{checkpoint.uri} is gone")
    await _room(target, data)
    done = Copied(target.uri)

    async def one(entry: Entry) -> None:
        if await _is_there(target, entry):
            done.there.append(entry)
        else:
            await _send(origin, target, entry)
            done.sent.append(entry)
        told(entry.size)

    await each(manifest.files, one, parallel)
    if not await target.create(MANIFEST, data):
        await _room(target, data)  # another copy of the same was first
    return done


async def _room(target: Contents, data: bytes) -> None:
    """Nothing in the target's place speaks against the copy."""
    if await target.read(BAD, 1) is not None:
        raise NotCopied(f"{target.uri} is marked as damaged ({BAD}); remove it first")
    there = await target.read(MANIFEST, MOST_BYTES + 1)
    if there is not None and there != data:
        raise NotCopied(f"{target.uri} is another checkpoint; copy to another place")


async def _is_there(target: Contents, entry: Entry) -> bool:
    # Its first byte beyond the end tells the size without reading it all.
    last = await target.read(entry.path, 2, max(0, entry.size - 1))
    if last is None or len(last) != min(1, entry.size):
        return False
    return await compare(target, "", entry) is None


async def _send(source: Contents, target: Contents, entry: Entry) -> None:
    reader = await source.opened()

    def blocks() -> Iterator[bytes]:
        return source.blocks(reader, entry.path, entry.size)

    await target.write(entry.path, entry.size, blocks)
    wrong = await compare(target, "", entry)
    if wrong is None:
        return
    here = await compare(source, "", entry)
    if here is not None:
        raise NotCopied(f"{source.uri}: {here.path} {here.what}")
    raise NotCopied(f"{target.uri}: {wrong.path} {wrong.what} after it was written")
