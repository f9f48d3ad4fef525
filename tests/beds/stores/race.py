"""Writers in several processes that all want the same names, and what became of each.

`race` has every writer try to create every slot, all at the same moment: a barrier across the processes
stands before each slot. `Outcome.judge` then holds the promise against it: one winner a slot, an `Exists`
for everybody else, and the winner's content, whole.
"""

from __future__ import annotations

import asyncio
import hashlib
import multiprocessing
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError
from obstore.store import LocalStore

from airflow_gpu.rundir.store import Exists, Store

WAIT = 120.0
"""Seconds a writer waits for the others before it gives up, so that a crash ends the race."""


@dataclass(frozen=True)
class Try:
    slot: int
    writer: str
    won: bool
    digest: str
    error: str | None = None


@dataclass
class Outcome:
    """All tries of a race, and how long it took."""

    tries: list[Try]
    seconds: float

    async def judge(self, store: Store, slots: int, writers: int) -> str:
        """Assert the promise of create for every slot; a line of figures for people."""
        assert [t.error for t in self.tries if t.error] == []
        assert len(self.tries) == slots * writers
        winners: dict[int, Try] = {}
        for won in (t for t in self.tries if t.won):
            assert won.slot not in winners, f"slot {won.slot} was won by {winners[won.slot]} and by {won}"
            winners[won.slot] = won
        assert sorted(winners) == list(range(slots))
        found = await asyncio.gather(*(store.get(path(slot)) for slot in range(slots)))
        assert [_digest(data) for data in found] == [winners[slot].digest for slot in range(slots)]
        shares = {w.writer.split(":")[1] for w in winners.values()}
        return (
            f"{writers} writers x {slots} slots on {store.uri.split(':')[0]}: {len(winners)} winners, "
            f"{len(self.tries) - len(winners)} times Exists, {self.seconds:.1f} s; won by {sorted(shares)}"
        )


def path(slot: int) -> str:
    return f"race/{slot:06d}.json"


def race(
    uri: str,
    options: dict[str, Any],
    *,
    slots: int,
    processes: int = 4,
    kinds: tuple[str, ...] = ("store",) * 4,
) -> Outcome:
    """Let `processes` times `len(kinds)` writers race.

    :param kinds: How the writers of each process write: `store` by `Store.create`, `obstore` by obstore
        itself and `link` by plain Python, as the runtime in a job does; the last two on a local folder only.
    """
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(processes)
    begin = time.monotonic()
    with context.Pool(processes, initializer=_share, initargs=(barrier,)) as pool:
        jobs = [
            pool.apply_async(_process, (uri, options, slots, [f"{p}.{i}:{k}" for i, k in enumerate(kinds)]))
            for p in range(processes)
        ]
        tries = [t for job in jobs for t in job.get(WAIT)]
    return Outcome(tries, time.monotonic() - begin)


async def race_here(store: Store, *, slots: int, writers: int) -> Outcome:
    """The same race within one process, for a store that no other process can see."""
    begin = time.monotonic()
    tries: list[Try] = []
    for slot in range(slots):
        tries += await asyncio.gather(*(_try(store, slot, f"0.{w}:store") for w in range(writers)))
    return Outcome(tries, time.monotonic() - begin)


_barrier: Any = None


def _share(barrier: Any) -> None:
    global _barrier
    _barrier = barrier


def _process(uri: str, options: dict[str, Any], slots: int, writers: list[str]) -> list[Try]:
    return asyncio.run(_writers(uri, options, slots, writers))


async def _writers(uri: str, options: dict[str, Any], slots: int, writers: list[str]) -> list[Try]:
    stores = [Store(uri, options) for _ in writers]
    tries: list[Try] = []
    for slot in range(slots):
        await asyncio.to_thread(_barrier.wait, WAIT)
        tries += await asyncio.gather(*(_try(s, slot, w) for s, w in zip(stores, writers, strict=True)))
    return tries


async def _try(store: Store, slot: int, writer: str) -> Try:
    """One writer at one slot. A loser reads at once what it lost to, which has to be whole already."""
    data = _content(writer)
    kind = writer.split(":")[1]
    try:
        if kind == "store":
            try:
                await store.create(path(slot), data)
            except Exists:
                _check_whole(await store.get(path(slot)))
                return Try(slot, writer, False, _digest(data))
        elif not await asyncio.to_thread(_plain, kind, store.uri.removeprefix("file://"), slot, data):
            return Try(slot, writer, False, _digest(data))
    except Exception as error:
        return Try(slot, writer, False, _digest(data), f"{type(error).__name__}: {error}")
    return Try(slot, writer, True, _digest(data))


def _plain(kind: str, folder: str, slot: int, data: bytes) -> bool:
    target = Path(folder) / path(slot)
    try:
        if kind == "obstore":
            obstore.put(LocalStore(prefix=folder), path(slot), data, mode="create")
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            staged = target.parent / f".tmp-{secrets.token_hex(8)}"
            staged.write_bytes(data)
            try:
                os.link(staged, target)
            finally:
                staged.unlink()
    except (AlreadyExistsError, FileExistsError):
        _check_whole(target.read_bytes())
        return False
    return True


def _content(writer: str) -> bytes:
    """Unique to the writer, and with a digest at its end, so that a reader knows that it has all of it."""
    body = f"{writer} {secrets.token_hex(16)} ".encode() * 100
    return body + hashlib.sha256(body).digest()


def _check_whole(data: bytes) -> None:
    if hashlib.sha256(data[:-32]).digest() != data[-32:]:
        raise AssertionError(f"a reader saw {len(data)} bytes that are not whole")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
