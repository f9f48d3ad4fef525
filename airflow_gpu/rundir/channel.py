"""The job's half of a run directory, as Airflow's side reads it: lives, ends of ranks, result, checkpoints.

Purpose: turns files that ranks wrote into evidence for
:func:`airflow_gpu.gang.lifecycle.step`, and writes the one thing that Airflow's
side may add there: a fence.

Limits: reads only what its caller asks for; how the files come about is the
business of :mod:`airflow_gpu.runtime`. Formats: ``docs/run-directory.md``.
A record that cannot be parsed is treated as not there yet: it is never
evidence of success.
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from airflow_gpu.gang.entries import iso, seconds
from airflow_gpu.gang.run import Attempt, CheckpointRef, Failure, Life, Seed
from airflow_gpu.rundir.contents import Contents
from airflow_gpu.rundir.ranklog import Segments, in_segments, log_name
from airflow_gpu.rundir.store import Exists, Missing, Store, is_plain
from airflow_gpu.runtime.manifest import MOST_BYTES

MANIFEST, BAD = "manifest.json", "bad.json"

LOGS_KNOWN = 64
"""Logs of which a channel remembers the segments."""

_LIFE = re.compile(r"^(\d{4,})\.json$")


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the ranks of the newest life of an attempt have written so far."""

    life: Life | None = None
    processes: int = 0  # ranks (or launchers) whose end must be recorded
    ok: int = 0
    ended: int = 0
    nodes_reported: int = 0
    notice: bool = False
    notice_cause: str = ""
    failure: Failure | None = None
    step: int | None = None
    progress: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: CheckpointRef | None = None
    fruitless: int = 0
    fenced: str = ""  # why Airflow's side has fenced the attempt, if it has
    newest: int | None = (
        None  # number of the attempt's newest life; ``life`` is an earlier one if that succeeded
    )
    copy: int | None = None  # step of the nodes' own copies that the life started from
    started: bool = True  # what it started from is known by now; else ``life.start`` may not be it


class Channel:
    """The channel half of one run directory: ``path`` below ``store``."""

    def __init__(self, store: Store, path: str) -> None:
        self.store = store
        self.path = path
        self._lives: dict[int, Life] = {}
        self._logs: dict[tuple[int, int], Segments] = {}
        # By life: the step of the nodes' own copies that it started from.
        self._local: dict[int, int | None] = {}
        self._whole: dict[int, bool] = {}  # of lives that a newer one followed: did every rank succeed

    @property
    def uri(self) -> str:
        return f"{self.store.uri.rstrip('/')}/{self.path}"

    # -- lives and fences ------------------------------------------------------------------------

    async def lives(self) -> list[Life]:
        """All entries of ``lives/`` in order, fences included."""
        return await self._lives_of(await self._numbers())

    async def _lives_of(self, numbers: Sequence[int]) -> list[Life]:
        for number in numbers:
            if number not in self._lives:  # create-only: what was read once stays true
                life = _life(number, await self._read(f"lives/{number:04d}.json"))
                if life is not None:
                    self._lives[number] = life
        return [self._lives[number] for number in sorted(self._lives)]

    async def _numbers(self) -> list[int]:
        """Numbers that are taken, also by an entry that cannot be read: the runtime treats that as a fence."""
        names = map(_LIFE.match, await self.store.names(f"{self.path}/lives"))
        return sorted(int(match[1]) for match in names if match)

    async def fence(
        self, attempt: int, first_life: int, reason: str, now: float, grace: float = 0.0
    ) -> list[Life]:
        """See to it that no further life of this attempt (or one before it) can be claimed.

        A life that runs finds the fence within seconds and ends itself; with
        ``grace`` it has so many seconds to save first. Answers all entries as they stand behind the fence. A life that was
        claimed before the fence stands is among them: the caller must look at
        it before it calls the attempt over.
        """
        while True:
            # One view for the question and for the number: between two, a process that slept would put its fence
            # behind a life of a later attempt.
            taken = await self._numbers()
            lives = await self._lives_of(taken)
            if any(life.fence and life.attempt >= attempt for life in lives):
                return lives
            number = max([number + 1 for number in taken] + [first_life])
            body = {
                "v": 1,
                "kind": "fence",
                "life": number,
                "attempt": attempt,
                "reason": reason,
                "grace": grace,
                "at": iso(now),
                "writer": secrets.token_hex(8),
            }
            try:
                await self.store.create(f"{self.path}/lives/{number:04d}.json", json.dumps(body).encode())
            except Exists:
                continue
            return await self.lives()

    # -- evidence --------------------------------------------------------------------------------

    async def evidence(
        self,
        attempt: int,
        *,
        ended: bool,
        known: Evidence | None = None,
        seed: Seed | None = None,
        since: int = 0,
        copies: bool = False,
    ) -> Evidence:
        """What the newest life of the attempt has written.

        :param ended: the platform says that the ranks have ended.
        :param seed: of the attempt: where it begins while this channel has no checkpoint for it.
        :param since: of the attempt: lives with a lower number do not count.
        :param copies: the gang keeps copies on its nodes, from which a life may start.
        :param known: an earlier answer. Reading checkpoints walks the chain,
            so while the ranks run it is kept from there.
        """
        lives = await self.lives()
        mine = [life for life in lives if life.attempt == attempt and not life.fence]
        real = [life for life in lives if not life.fence]
        if not mine:
            return Evidence(checkpoint=await self.newest_checkpoint(real, seed, since))
        # A platform may start a gang again that has just finished: a life that succeeded counts, not the newest.
        for life in mine[:-1]:
            # Records may lag, so the last one before the newest is read again until it is whole.
            if not self._whole.get(life.number) and (life is mine[-2] or life.number not in self._whole):
                self._whole[life.number] = _ok(life, await self._records(life)) == life.world_size
        life = next((life for life in mine[:-1] if self._whole[life.number]), mine[-1])
        root = f"lives/{life.number:04d}"
        failure = await self._read(f"{root}/failure.json")
        progress = await self._read(f"{root}/progress.json") or {}
        told = await self._read(f"{root}/notice.json")
        notice, notice_cause = told is not None, str((told or {}).get("cause") or "")
        records = await self._records(life)
        if (
            known is not None
            and known.life == life
            and not (ended or records or failure is not None or notice)
        ):
            checkpoint = known.checkpoint  # nothing has ended: it matters at the end only
        else:
            checkpoint = await self.newest_checkpoint(real, seed, since)
        ranks = _ranks(records)
        copy = await self._local_start(life) if copies else None
        return Evidence(
            life=life,
            processes=life.world_size,
            ok=_ok(life, records),
            ended=len({r.get("rank") for r in ranks}),
            nodes_reported=len(records),
            notice=notice,
            notice_cause=notice_cause,
            failure=_failure(failure),
            copy=copy,
            started=not copies or life.number in self._local,
            step=_int(progress.get("step")),
            progress=progress,
            checkpoint=checkpoint,
            fruitless=await self._fruitless(mine),
            fenced=next((x.reason for x in lives if x.fence and x.attempt >= attempt), ""),
            newest=mine[-1].number,
        )

    async def _fruitless(self, lives: Sequence[Life]) -> int:
        """Lives before the newest that started, in a row, from the same checkpoint as it did."""
        same = list(itertools.takewhile(lambda life: life.start == lives[-1].start, reversed(lives[:-1])))
        if not same:
            return 0
        newest = await self._local_start(lives[-1])
        count = 0
        for life in same:  # from the nodes' own copies they may have started further and further
            if await self._local_start(life) != newest:
                break
            count += 1
        return count

    async def _local_start(self, life: Life) -> int | None:
        """The step of the nodes' own copies from which a life started; None: it started from the channel."""
        if life.number not in self._local:
            body = await self._read(f"lives/{life.number:04d}/local.json")
            start = (body or {}).get("from")
            found = _int(start.get("step")) if isinstance(start, dict) else None
            if body is None and not await self.store.names(f"{self.path}/lives/{life.number:04d}/nodes"):
                return None  # it may be written yet
            self._local[life.number] = found
        return self._local[life.number]

    async def _records(self, life: Life) -> list[dict[str, Any]]:
        """How the ranks of each node ended, from the nodes that have said so."""
        found = []
        for name in await self.store.names(f"{self.path}/lives/{life.number:04d}/nodes"):
            record = (
                await self._read(f"lives/{life.number:04d}/nodes/{name}") if name.endswith(".json") else None
            )
            if record is not None and _is_record(record):
                found.append(record)
        return found

    async def log(self, life: int, rank: int, start: int, limit: int) -> bytes:
        """Output of a rank from byte ``start``, at most ``limit`` bytes; empty when there is nothing (yet)."""
        if in_segments(self.store):
            return await self._segments(life, rank).read(start, limit)
        try:
            return await self.store.get(
                f"{self.path}/lives/{life:04d}/logs/{log_name(rank)}.log", start, limit
            )
        except Missing:
            return b""

    async def log_size(self, life: int, rank: int) -> int:
        """Bytes that a rank has written so far, where logs lie in segments; 0 where it has none."""
        return await self._segments(life, rank).size()

    def _segments(self, life: int, rank: int) -> Segments:
        if (life, rank) not in self._logs and len(self._logs) >= LOGS_KNOWN:
            self._logs.clear()
        folder = f"{self.path}/lives/{life:04d}/logs/{log_name(rank)}"
        return self._logs.setdefault((life, rank), Segments(self.store, folder))

    async def ended_at(self, life: Life) -> float | None:
        """When the last rank of a life ended, by its nodes' records; None while one is missing."""
        records = await self._records(life)
        if len({record.get("node") for record in records}) != life.nodes:
            return None
        try:
            return max(seconds(str(record["at"])) for record in records)
        except (KeyError, ValueError):
            return None

    async def result(self, life: int) -> bytes | None:
        """What rank 0 handed back, as it was written; None when it handed back nothing."""
        try:
            return await self.store.get(f"{self.path}/lives/{life:04d}/result.json")
        except Missing:
            return None

    # -- checkpoints -----------------------------------------------------------------------------

    async def newest_checkpoint(
        self, lives: Sequence[Life], seed: Seed | None = None, since: int = 0
    ) -> CheckpointRef | None:
        """The checkpoint from which a next life would start: furthest complete one on the chain of ancestors.

        Files are not hashed here; the runtime does that before it restores.
        """
        found, _ = await self._newest(lives, seed, since)
        return found

    async def _newest(
        self, lives: Sequence[Life], seed: Seed | None, since: int
    ) -> tuple[CheckpointRef | None, bool]:
        """The same, and whether it lies on this channel (else it is the seed)."""
        # Lives here from before the run went elsewhere are behind what it brings back from there.
        behind = max(seed.life if seed is not None and not seed.run else 0, since - 1)
        lives = [life for life in lives if life.number > behind]
        if lives:
            newest = await self.checkpoints(lives[-1].number)
            if newest:
                return newest[-1], True
            if lives[-1].start is not None and not lives[-1].seeded:
                return lives[-1].start, True
        return (None, True) if seed is None else (seed.checkpoint, False)

    async def locate(self, attempt: Attempt) -> Seed | None:
        """Where the newest checkpoint is that a next attempt after this one would start from: here, or where it came from."""
        lives = [life for life in await self.lives() if not life.fence and life.attempt <= attempt.number]
        found, here = await self._newest(lives, attempt.seed, attempt.since)
        if found is None:
            return None
        return Seed(self.uri, found.life, found.step) if here else attempt.seed

    async def checkpoints(self, life: int) -> list[CheckpointRef]:
        """Complete checkpoints that this life wrote."""
        root = f"{self.path}/checkpoints/{life:04d}"
        found = []
        for name in await self.store.names(root):
            manifest = await self._manifest(f"checkpoints/{life:04d}", name) if name[0] != "." else None
            if manifest is not None and _int(manifest.get("step")) is not None:
                found.append(CheckpointRef(life, int(manifest["step"])))
        return sorted(found, key=lambda ref: ref.step)

    async def _manifest(self, folder: str, name: str) -> dict[str, Any] | None:
        """Of a complete checkpoint; None for one that is being written, or was found damaged."""
        if is_plain(name):
            files = await self.store.names(f"{self.path}/{folder}/{name}")
            whole = MANIFEST in files and BAD not in files
            return await self._read(f"{folder}/{name}/{MANIFEST}") if whole else None
        # A program's folder, with a name that the store would refuse.
        contents = Contents(self.store, f"{self.path}/{folder}/{name}")
        data = await contents.read(MANIFEST, MOST_BYTES)
        if data is None or await contents.read(BAD, 1) is not None:
            return None
        return _object(data)

    async def _read(self, path: str) -> dict[str, Any] | None:
        try:
            return _object(await self.store.get(f"{self.path}/{path}"))
        except Missing:
            return None


def _object(data: bytes) -> dict[str, Any] | None:
    """A JSON object; None when it is none. The job's user may have written anything."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def _life(number: int, body: Mapping[str, Any] | None) -> Life | None:
    """The entry; None when it cannot be understood."""
    try:
        return _understood(number, body or {})
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _understood(number: int, body: Mapping[str, Any]) -> Life:
    start = body.get("from")
    return Life(
        number=number,
        attempt=int(body["attempt"]),
        fence=body.get("kind") == "fence",
        job=str(body.get("job", "")),
        restart=int(body.get("restart", 0)),
        nodes=int(body.get("nodes", 0)),
        world_size=int(body.get("processes", body.get("world_size", 0))),
        start=CheckpointRef(int(start["life"]), int(start["step"])) if start else None,
        at=seconds(body["at"]) if body.get("at") else 0.0,
        reason=str(body.get("reason") or ""),
        seeded=bool(start and start.get("seed")),
    )


def _is_record(record: Mapping[str, Any]) -> bool:
    """It has the shape of a node's record; anything else is treated as not there."""
    ranks = record.get("ranks")
    return (
        isinstance(record.get("node"), int)
        and isinstance(ranks, list)
        and all(isinstance(rank, dict) and isinstance(rank.get("rank"), int) for rank in ranks)
    )


def _ok(life: Life, records: Sequence[Mapping[str, Any]]) -> int:
    """Ranks that ended well. None counts before all nodes have spoken: a gang of which one is missing did not succeed."""
    if len({record.get("node") for record in records}) != life.nodes:
        return 0
    return len({rank.get("rank") for rank in _ranks(records) if rank.get("exit_code") == 0})


def _ranks(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [rank for record in records for rank in record.get("ranks") or [] if isinstance(rank, dict)]


def _failure(body: Mapping[str, Any] | None) -> Failure | None:
    if body is None:
        return None
    return Failure(
        cause=str(body.get("cause", "rank")),
        rank=_int(body.get("rank")),
        node=_int(body.get("node")),
        host=str(body.get("host") or ""),
        exit_code=_int(body.get("exit_code")),
        signal=str(body["signal"]) if body.get("signal") else None,
        tail=str(body.get("tail") or ""),
        message=str(body.get("message") or ""),
    )


def _int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
