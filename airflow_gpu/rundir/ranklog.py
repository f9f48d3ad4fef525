"""The log of one rank: a file where the channel is a folder, else segments that are created once.

Purpose: object stores cannot append, so a rank's output lies there as
``logs/rank-00000/<offset of its first byte, 15 digits>``. Here the segments read as
the one file that they are.

What it does not do: write; that is the runtime's. Follow a log: callers ask again.

Limits: what lies behind a gap is not shown before the gap is filled. A listing
asks only for what follows the last known segment; what was known stays known.

Example::

    log = Segments(store, f"{path}/lives/0001/logs/rank-00000")
    await log.read(start=0, limit=65536)
"""

from __future__ import annotations

import asyncio
import re
from bisect import bisect_right
from typing import TYPE_CHECKING

from airflow_gpu.rundir.store import Missing

if TYPE_CHECKING:
    from airflow_gpu.rundir.store import Store

TOGETHER = 16
"""Segments that are read at once."""

_OFFSET = re.compile(r"\d{15}")


def log_name(rank: int) -> str:
    """Of a rank's folder of segments; its file is the same with ``.log``."""
    return f"rank-{rank:05d}"


def in_segments(store: Store) -> bool:
    """Whether logs lie in segments there."""
    return not store.uri.startswith(("file:", "sftp:"))


class Segments:
    """One rank's log in ``folder`` of a store that cannot append."""

    def __init__(self, store: Store, folder: str) -> None:
        self._store = store
        self._folder = folder
        self._offsets: list[int] = []  # of the known segments, without a gap
        self._end = 0

    async def size(self) -> int:
        """Bytes that are there now, up to the first gap."""
        await self._look()
        return self._end

    async def read(self, start: int, limit: int) -> bytes:
        """``limit`` bytes from byte ``start``; fewer only where the log ends by now.

        :raises StoreError: a segment could not be read.
        """
        if start < 0 or limit < 0:
            raise ValueError(f"a range begins at 0 or later, and has no negative length: {start}, {limit}")
        if start + limit > self._end:
            await self._look()
        found: list[bytes] = []
        parts = self._parts(start, min(start + limit, self._end))
        for first in range(0, len(parts), TOGETHER):
            some = parts[first : first + TOGETHER]
            for part, data in zip(some, await asyncio.gather(*map(self._part, some)), strict=True):
                found.append(data)
                if len(data) < part[2]:  # removed meanwhile: what follows would be at a wrong place
                    return b"".join(found)
        return b"".join(found)

    def _parts(self, start: int, end: int) -> list[tuple[int, int, int]]:
        """What to read for these bytes: offset of a segment, the first byte of it, how many."""
        parts = []
        at, index = start, bisect_right(self._offsets, start) - 1
        while at < end:
            offset = self._offsets[index]
            until = self._offsets[index + 1] if index + 1 < len(self._offsets) else self._end
            parts.append((offset, at - offset, min(until, end) - at))
            at, index = until, index + 1
        return parts

    async def _part(self, part: tuple[int, int, int]) -> bytes:
        offset, start, length = part
        try:
            return await self._store.get(self._path(offset), start, length)
        except Missing:
            return b""

    async def _look(self) -> None:
        """Add the segments that came since, as far as they follow on each other."""
        after = self._path(self._offsets[-1]) if self._offsets else ""
        for entry in await self._store.list(self._folder, after):
            name = entry.path.rpartition("/")[2]
            offset = int(name) if _OFFSET.fullmatch(name) else -1
            if offset > self._end:
                return
            # Another caller may have looked meanwhile, and an empty one covers nothing.
            if offset == self._end and entry.size:
                self._offsets.append(offset)
                self._end += entry.size

    def _path(self, offset: int) -> str:
        return f"{self._folder}/{offset:015d}"
