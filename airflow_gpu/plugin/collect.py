"""What the pages know of one run: its journal, its lives, and what the ranks left behind.

Purpose: reads both halves of a run directory into :class:`Facts`, from which
:mod:`airflow_gpu.plugin.view` makes what people see. Whatever cannot be read is
named in ``Facts.missing`` instead of making the page fail.

How much: a journal is read once and then only its new end; records that are
create-only are kept. A few runs are remembered, per event loop.

Limits: at most ``LIVES`` lives are shown, and the ranks of ``LIVES_IN_FULL``.
Reading a channel ends after ``CHANNEL_LIMIT`` seconds, with what there is.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from airflow_gpu.gang.entries import JournalError
from airflow_gpu.gang.identity import RunKey, run_path, slot_path
from airflow_gpu.gang.run import Attempt, Life, Run
from airflow_gpu.plugin.reading import PageStore, channel_store, state_store
from airflow_gpu.rundir.channel import Channel
from airflow_gpu.rundir.journal import Journal
from airflow_gpu.rundir.ranklog import in_segments, log_name
from airflow_gpu.rundir.store import Missing, StoreError

T = TypeVar("T")

LIVES = 200
LIVES_IN_FULL = 8
CHECKPOINTS = 100  # of one life
RUNS_REMEMBERED = 16
RECORDS_REMEMBERED = 5000  # of one run
INCARNATIONS = 100

JOURNAL_LIMIT = 15.0
CHANNEL_LIMIT = 10.0
"""Seconds for one page."""

READERS = 16
"""Records of one channel that are read at the same time."""

SETTLED = 600.0
"""Seconds after the end of an attempt, after which its lives are not read again: late writers have ended too."""

LAST_TIME = 32503680000.0
"""The year 3000."""

_LOG = re.compile(r"rank-(\d{5,})\.log")
_SEGMENTS = re.compile(r"rank-(\d{5,})")
_RECORD = re.compile(r"\d{4,}\.json")
_STEP = re.compile(r"step-(\d+)")


class NoRun(Exception):
    """There is no such run; the message says so in words."""


@dataclass
class LifeFacts:
    """One life and what its ranks wrote. ``ranks_read``: its nodes' records and logs were looked for."""

    life: Life
    nodes: list[dict[str, Any]] = field(default_factory=list)
    failure: dict[str, Any] | None = None
    notice: dict[str, Any] | None = None
    progress: dict[str, Any] | None = None
    logs: dict[int, int | None] = field(default_factory=dict)  # sizes in bytes; None: not known
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    ranks_read: bool = False


@dataclass
class Facts:
    """All that is known of one incarnation of a run."""

    key: RunKey
    incarnation: str
    incarnations: list[dict[str, Any]]  # newest first: number, incarnation, at
    run: Run
    entries: list[dict[str, Any]]
    journal: str
    lives: list[LifeFacts]
    lives_left_out: int
    fences: list[Life]
    missing: list[str]


@dataclass
class _Opened:
    """A run that was read before."""

    journal: Journal
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    channels: dict[str, Channel] = field(default_factory=dict)
    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    settled: dict[int, LifeFacts] = field(default_factory=dict)


_opened: WeakKeyDictionary[asyncio.AbstractEventLoop, OrderedDict[tuple[str, str], _Opened]] = (
    WeakKeyDictionary()
)


def _remembered(store: PageStore, path: str) -> _Opened:
    runs = _opened.setdefault(asyncio.get_running_loop(), OrderedDict())
    found = runs.pop((store.uri, path), None) or _Opened(Journal(store, path))
    found.journal.store = store  # its credentials may be newer
    runs[(store.uri, path)] = found
    while len(runs) > RUNS_REMEMBERED:
        runs.popitem(last=False)
    return found


# -- the journal's half --------------------------------------------------------------------------------


async def find(
    dag_id: str, run_id: str, task_id: str, map_index: int, incarnation: str | None
) -> tuple[PageStore, Facts, _Opened]:
    """The run of a task instance with its journal; nothing of the channel yet.

    :param incarnation: an older run of the same task instance; None for the newest.
    :raises NoRun: there is none.
    :raises NotSet: this Airflow is not set up for gangs.
    :raises StoreError: the journals cannot be read.
    """
    installation, store = await state_store()
    try:
        key = RunKey(installation, dag_id, run_id, task_id, map_index)
    except ValueError as error:
        raise NoRun(str(error)) from None
    async with _within(JOURNAL_LIMIT, f"{store.uri}: no answer within {JOURNAL_LIMIT:.0f} s"):
        known = await _incarnations(store, key)
    if not known:
        raise NoRun(
            f"No gang has been started for {key} yet. A run appears here as soon as the task, if it is a "
            f"GangOperator, begins to execute. (Looked for it at {store.uri}/{slot_path(key)}.)"
        )
    names = [item["incarnation"] for item in known]
    wanted = incarnation or names[0]
    if wanted not in names:
        raise NoRun(f"{key} has had {len(names)} run(s), and none of them is called like that.")
    path = run_path(key, wanted)
    opened = _remembered(store, path)
    missing: list[str] = []
    async with opened.lock:
        try:
            async with _within(JOURNAL_LIMIT, "the journal was not read to its end in time"):
                await opened.journal.refresh()
        except (JournalError, StoreError) as error:
            if not opened.journal.run.seq:
                raise StoreError(f"the journal cannot be read: {error}") from None
            missing.append(f"The journal is shown up to entry {opened.journal.run.seq}: {error}")
        run, entries = opened.journal.run, list(opened.journal.entries)
    facts = Facts(key, wanted, known, run, entries, f"{store.uri}/{path}", [], 0, [], missing)
    return store, facts, opened


async def _incarnations(store: PageStore, key: RunKey) -> list[dict[str, Any]]:
    folder = f"{slot_path(key)}/incarnations"
    names = sorted(
        (name for name in await store.names(folder) if _RECORD.fullmatch(name)), key=lambda n: int(n[:-5])
    )
    found = []
    for body, name in zip(
        await asyncio.gather(*(_json(store, f"{folder}/{name}") for name in names[-INCARNATIONS:])),
        names[-INCARNATIONS:],
        strict=True,
    ):
        with suppress(ValueError):
            incarnation = str((body or {}).get("incarnation"))
            run_path(key, incarnation)  # refuses what is no plain name
            found.append({"number": int(name[:-5]), "incarnation": incarnation, "at": (body or {}).get("at")})
    return found[::-1]


# -- the channel's half --------------------------------------------------------------------------------


async def gather(
    store: PageStore, facts: Facts, opened: _Opened, *, now: float, life: int | None = None
) -> None:
    """Read the lives of the run into ``facts``.

    :param life: a life whose ranks are wanted although it is not among the newest.
    """
    path = run_path(facts.key, facts.incarnation)
    by_channel: dict[str, list[Attempt]] = {}
    for attempt in facts.run.attempts:
        by_channel.setdefault(attempt.channel, []).append(attempt)
    lives: list[tuple[Channel, Life]] = []
    async with opened.lock:
        for uri, attempts in by_channel.items():
            try:
                async with _within(CHANNEL_LIMIT, f"no answer within {CHANNEL_LIMIT:.0f} s"):
                    channel = _channel(opened, uri, path, store)
                    numbers = {attempt.number for attempt in attempts}
                    found = await channel.lives()
                    lives += [(channel, _timely(one, facts.run)) for one in found if one.attempt in numbers]
            except (StoreError, KeyError, TypeError, ValueError) as error:
                facts.missing.append(_unreadable(uri, attempts, error))
        lives.sort(key=lambda item: item[1].number)
        facts.fences = [one for _, one in lives if one.fence]
        real = [item for item in lives if not item[1].fence]
        facts.lives_left_out = max(0, len(real) - LIVES)
        real = real[-LIVES:]
        full = {one.number for _, one in real[-LIVES_IN_FULL:]} | ({life} if life else set())
        ready = asyncio.Semaphore(READERS)
        facts.lives = list(
            await asyncio.gather(
                *(_life(opened, channel, one, facts, ready, one.number in full, now) for channel, one in real)
            )
        )


def _timely(life: Life, run: Run) -> Life:
    """With a time that is one; ranks may write anything."""
    return life if 0 < life.at < LAST_TIME else replace(life, at=run.attempts[life.attempt - 1].at)


def _unreadable(uri: str, attempts: list[Attempt], error: Exception) -> str:
    which = "attempt " + ", ".join(str(attempt.number) for attempt in attempts)
    how = str(error) if isinstance(error, StoreError) else f"an entry is malformed ({error!r})"
    advice = ""
    if not uri.startswith("file:"):
        advice = (
            " The API server reads a channel with the connection that [gpu] store_conn_ids names for it (or "
            "state_conn_id, in the bucket of [gpu] state_uri), and else with the credentials of its own environment."
        )
    return f"Lives, logs and checkpoints of {which} on {uri} cannot be shown: {how}.{advice}"


def _channel(opened: _Opened, uri: str, path: str, store: PageStore) -> Channel:
    if uri not in opened.channels:
        opened.channels[uri] = Channel(channel_store(uri, path, store), path)
    return opened.channels[uri]


async def _life(
    opened: _Opened,
    channel: Channel,
    life: Life,
    facts: Facts,
    ready: asyncio.Semaphore,
    full: bool,
    now: float,
) -> LifeFacts:
    kept = opened.settled.get(life.number)
    if kept is not None and (kept.ranks_read or not full):
        return kept
    attempt = facts.run.attempts[life.attempt - 1]
    outcome = attempt.outcome
    found = LifeFacts(life, ranks_read=full)
    store = channel.store
    assert isinstance(store, PageStore)
    root = f"{channel.path}/lives/{life.number:04d}"
    try:
        async with _within(CHANNEL_LIMIT, f"no answer within {CHANNEL_LIMIT:.0f} s"), ready:
            found.failure = await _once(opened, store, f"{root}/failure.json")
            found.notice = await _once(opened, store, f"{root}/notice.json")
            found.progress = await _json(store, f"{root}/progress.json")
            found.checkpoints = await _checkpoints(
                opened, store, f"{channel.path}/checkpoints/{life.number:04d}"
            )
            if full:
                names = [name for name in await store.names(f"{root}/nodes") if _RECORD.fullmatch(name)]
                found.nodes = await _all(_once(opened, store, f"{root}/nodes/{name}") for name in names)
                found.logs = await _logs(store, f"{root}/logs")
    except StoreError as error:
        found.ranks_read = False
        facts.missing.append(f"Life {life.number} is not shown in full: {error}.")
    else:
        if outcome is not None and now - outcome.at > SETTLED:
            opened.settled[life.number] = replace(found)
    return found


async def _logs(store: PageStore, folder: str) -> dict[int, int | None]:
    """Size of each rank's log; None where it lies in segments, which would have to be listed for each rank."""
    if in_segments(store):
        names = await store.names(folder)
        return {int(match[1]): None for name in names if (match := _SEGMENTS.fullmatch(name))}
    sizes = await store.sizes(folder)
    return {int(match[1]): sizes[name] for name in sizes if (match := _LOG.fullmatch(name))}


async def _checkpoints(opened: _Opened, store: PageStore, folder: str) -> list[dict[str, Any]]:
    """The furthest checkpoints of a life, complete or not, by step."""
    steps = {name: int(match[1]) for name in await store.names(folder) if (match := _STEP.fullmatch(name))}
    names = sorted(steps, key=lambda name: steps[name])[-CHECKPOINTS:]

    async def one(name: str) -> dict[str, Any]:
        where = f"{folder}/{name}/manifest.json"
        if where not in opened.records:
            body = await _json(store, where)
            told = _summary(body) if body is not None else None
            if told is None:
                return {"step": steps[name], "complete": False, "size": None, "files": None, "at": None}
            opened.records[where] = told
        return opened.records[where]

    return list(await asyncio.gather(*(one(name) for name in names)))


def _summary(manifest: Mapping[str, Any]) -> dict[str, Any] | None:
    step, files = manifest.get("step"), manifest.get("files")
    if not isinstance(step, int) or not 0 <= step < 2**53 or not isinstance(files, list):
        return None
    sizes = [item.get("size") for item in files if isinstance(item, dict)]
    size = sum(one for one in sizes if isinstance(one, int) and 0 <= one < 2**53)
    return {"step": step, "complete": True, "size": size, "files": len(files), "at": manifest.get("at")}


# -- one rank's log ------------------------------------------------------------------------------------


async def rank_log(
    store: PageStore, facts: Facts, opened: _Opened, life: int, rank: int
) -> tuple[Channel, int]:
    """The channel with the log of a rank, and the log's size.

    :raises NoRun: there is no such life, or no log of such a rank.
    :raises StoreError: the channel cannot be read.
    """
    path = run_path(facts.key, facts.incarnation)
    for uri in dict.fromkeys(attempt.channel for attempt in facts.run.attempts):
        channel = _channel(opened, uri, path, store)
        reader = channel.store
        assert isinstance(reader, PageStore)
        async with _within(CHANNEL_LIMIT, f"{uri}: no answer within {CHANNEL_LIMIT:.0f} s"):
            body = await _json(reader, f"{path}/lives/{life:04d}.json")
            if body is None or body.get("kind") == "fence":
                continue
            size = await _log_size(channel, reader, life, rank)
            if size is None:
                raise NoRun(f"Rank {rank} of life {life} of {facts.key} has written no log (yet).")
            return channel, size
    raise NoRun(f"The run {facts.incarnation} of {facts.key} has no life {life}.")


async def _log_size(channel: Channel, reader: PageStore, life: int, rank: int) -> int | None:
    """None when there is no log."""
    if in_segments(reader):
        return await channel.log_size(life, rank) or None
    try:
        return await reader.size(f"{channel.path}/lives/{life:04d}/logs/{log_name(rank)}.log")
    except Missing:
        return None


# -- small readers -------------------------------------------------------------------------------------


@asynccontextmanager
async def _within(seconds: float, words: str) -> AsyncIterator[None]:
    """A bound on a reading, whose end is a StoreError."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise StoreError(words) from None


async def _json(store: PageStore, path: str) -> dict[str, Any] | None:
    """A JSON object; None when there is none (yet)."""
    try:
        body = json.loads(await store.get(path))
    except (Missing, ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


async def _once(opened: _Opened, store: PageStore, path: str) -> dict[str, Any] | None:
    """A record that is created once: read once."""
    if path not in opened.records:
        body = await _json(store, path)
        if body is None:
            return None
        if len(opened.records) >= RECORDS_REMEMBERED:
            opened.records.clear()
        opened.records[path] = body
    return opened.records[path]


async def _all(readings: Iterable[Awaitable[T | None]]) -> list[T]:
    return [one for one in await asyncio.gather(*readings) if one is not None]
