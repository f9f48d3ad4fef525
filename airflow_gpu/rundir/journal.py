"""The journal of a run: one totally ordered log of create-only files.

Purpose: every decision is written against the whole history. An entry is added
by creating the file with the next number; a writer that loses the race reads
what is new and decides again. So two drivers of one run cannot both act on the
same past, whatever their clocks say.

Limits: a stale reader is harmless, because its next write fails. Entries are
small and few (about three an attempt); a journal is read once and then only
its new end.

Errors: :class:`LostRace` when another writer was first;
:class:`~airflow_gpu.gang.entries.JournalError` when what is written cannot be.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from typing import Any

from airflow_gpu.gang.entries import VERSION, Entry, JournalError, fold, iso
from airflow_gpu.gang.run import Run
from airflow_gpu.rundir.store import Exists, Missing, Store


class LostRace(Exception):
    """Another writer added an entry first: read it and decide again."""


class Journal:
    """The journal below ``path`` in ``store``; ``run`` is its fold as last read.

    Example::

        journal = Journal(Store("file:///srv/gangs"), run_path(key, incarnation))
        await journal.refresh()
        await journal.append(submitted_entry(1, "4711"), epoch=1, now=time.time())
    """

    def __init__(self, store: Store, path: str) -> None:
        self.store = store
        self.path = path
        self.run = Run()
        self.entries: list[Entry] = []
        # A driver and the one who stops it share this object: two readers at once would fold an entry twice.
        self._lock = asyncio.Lock()

    def _file(self, seq: int) -> str:
        return f"{self.path}/journal/{seq:06d}.json"

    async def refresh(self) -> Run:
        """Read what others have added since the last time."""
        async with self._lock:
            return await self._read_on()

    async def _read_on(self) -> Run:
        while True:
            try:
                data = await self.store.get(self._file(self.run.seq + 1))
            except Missing:
                return self.run
            entry = _parse(data, self._file(self.run.seq + 1))
            self.run = fold(self.run, entry)
            self.entries.append(entry)

    async def append(self, content: Entry, *, epoch: int, now: float, after: int | None = None) -> Run:
        """Add one entry after the last one read.

        The entry is folded before it is written, so that one which must not be
        is refused by its own writer.

        :param after: the number of the entry up to which the caller had read
            when it decided; None when that is surely the last one read.
        :raises LostRace: there is a newer entry than those read, or than ``after``.
        """
        async with self._lock:
            if after is not None and after != self.run.seq:
                raise LostRace(self._file(after + 1))
            return await self._append(content, epoch, now)

    async def _append(self, content: Entry, epoch: int, now: float) -> Run:
        entry: Entry = {
            "v": VERSION,
            "seq": self.run.seq + 1,
            "at": iso(now),
            "epoch": epoch,
            # Tells the writer of an ambiguous create (the reply was lost) whether the file is its own.
            "writer": secrets.token_hex(8),
            **content,
        }
        after = fold(self.run, entry)
        try:
            await self.store.create(self._file(entry["seq"]), _dump(entry))
        except Exists:
            raise LostRace(self._file(entry["seq"])) from None
        self.run = after
        self.entries.append(entry)
        return after

    def gang_of(self, epoch: int) -> dict[str, Any]:
        """The request of an owner, as it was journalled.

        :raises JournalError: there is no such owner.
        """
        for entry in self.entries:
            if entry["kind"] == "owner" and entry["epoch"] == epoch:
                return dict(entry["gang"])
        raise JournalError(f"{self.path} has no owner {epoch}")


def _dump(entry: Entry) -> bytes:
    return json.dumps(
        entry, indent=1
    ).encode()  # ASCII: no text whatever can keep a decision from being written


def _parse(data: bytes, where: str) -> Entry:
    try:
        entry = json.loads(data)
    except ValueError as error:
        raise JournalError(f"{where} is not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise JournalError(f"{where} is not a JSON object")
    return entry
