"""``airflow-gpu logs``: what a rank printed, from the run directory; or what the platform says of a node."""

from __future__ import annotations

import asyncio
import codecs
import json
import sys

import click

from airflow_gpu.cli.finding import find_run
from airflow_gpu.cli.place import POLL, Place
from airflow_gpu.cli.show import say
from airflow_gpu.gang.identity import run_path
from airflow_gpu.gang.run import Attempt, Life
from airflow_gpu.rundir.channel import Channel
from airflow_gpu.rundir.store import StoreError
from airflow_gpu.staging import ref_for
from airflow_gpu.sweeping.looking import SeenRun
from airflow_gpu.targets.base import Target, TargetError

CHUNK = 256 * 1024
"""Bytes that are read at once."""


class Printer:
    """Text as it is, or as one JSON object a piece. Characters that are cut in two are put together."""

    def __init__(self, as_json: bool, **about: object) -> None:
        self._as_json = as_json
        self._about = about
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def __call__(self, data: bytes | str) -> None:
        text = self._decoder.decode(data) if isinstance(data, bytes) else data
        if not text:
            return
        if self._as_json:
            print(json.dumps({**self._about, "text": text}, ensure_ascii=False), flush=True)
        else:
            sys.stdout.write(text)
            sys.stdout.flush()


async def print_logs(
    place: Place, name: str, *, rank: int, life: int | None, follow: bool, node: int | None, as_json: bool
) -> int:
    """Print it.

    :raises click.ClickException: there is no such life, rank or node; it says which there are.
    """
    seen = await find_run(place.store(), place.installation, name)
    run = seen.run
    assert run is not None
    if not run.attempts:
        raise click.ClickException(f"{seen.name} has not been placed yet: there is no output")
    if node is not None:
        attempt = _attempt_named(run.attempts, name)
        if life is not None:
            attempt = await _attempt_of(place, seen, life)
        _has_node(seen, attempt, node)
        return await _of_node(place, seen, attempt, node, follow, as_json)
    return await _of_rank(place, seen, rank, life, follow, as_json)


def _attempt_named(attempts: tuple[Attempt, ...], name: str) -> Attempt:
    """The attempt whose job was named, else the newest."""
    return next((attempt for attempt in attempts if attempt.name == name), attempts[-1])


async def _attempt_of(place: Place, seen: SeenRun, number: int) -> Attempt:
    """The attempt of which a life is one start. The platform's output of it may begin with earlier starts."""
    run = seen.run
    assert run is not None
    lives = [life for _, life in await _lives(place, seen, {})]
    found = next((life.attempt for life in lives if life.number == number), None)
    if found is None:
        raise _no_life(seen, number, [life.number for life in lives])
    return next(attempt for attempt in run.attempts if attempt.number == found)


def _no_life(seen: SeenRun, number: int | None, lives: list[int]) -> click.ClickException:
    there = f"there are {', '.join(map(str, lives))}" if lives else "no rank of it has started yet"
    return click.ClickException(f"{seen.name} has no life {number}; {there}")


def _has_node(seen: SeenRun, attempt: Attempt, node: int) -> None:
    assert seen.journal is not None
    nodes = int(seen.journal.gang_of(attempt.epoch).get("nodes", 1))
    if node >= nodes:
        raise click.ClickException(
            f"attempt {attempt.number} of {seen.name} has no node {node}; {_there_are(nodes)}"
        )


def _has_rank(seen: SeenRun, life: Life, rank: int) -> None:
    if rank >= life.world_size > 0:
        raise click.ClickException(
            f"life {life.number} of {seen.name} has no rank {rank}; {_there_are(life.world_size)}"
        )


def _there_are(count: int) -> str:
    return f"there are 0 to {count - 1}" if count > 1 else "there is only 0"


def channel_of(place: Place, seen: SeenRun, attempt: Attempt) -> Channel:
    """Where an attempt's files are."""
    assert seen.key is not None
    path = run_path(seen.key, seen.dir.incarnation)
    return place.channel(attempt.channel, path)


async def _lives(place: Place, seen: SeenRun, opened: dict[str, Channel]) -> list[tuple[Channel, Life]]:
    """All lives of the run in order, with the channel on which each is."""
    run = seen.run
    assert run is not None
    found: dict[int, tuple[Channel, Life]] = {}
    for uri in dict.fromkeys(attempt.channel for attempt in run.attempts):
        if uri not in opened:
            opened[uri] = channel_of(place, seen, next(a for a in run.attempts if a.channel == uri))
        channel = opened[uri]
        for life in await channel.lives():
            if not life.fence:
                found[life.number] = (channel, life)
    return [found[number] for number in sorted(found)]


async def _of_rank(
    place: Place, seen: SeenRun, rank: int, number: int | None, follow: bool, as_json: bool
) -> int:
    start, told = 0, False
    current = number
    printer, opened = Printer(as_json), dict[str, Channel]()
    while True:
        lives = await _lives(place, seen, opened)
        if current is None and lives:
            current = lives[-1][1].number
        here = next((item for item in lives if item[1].number == current), None)
        gap = number is not None and any(life.number > number for _, life in lives)  # it will never be there
        if here is None and (gap or not follow):
            return await _nothing(place, seen, number, [life.number for _, life in lives])
        if here is not None:
            channel, life = here
            if not told:
                _has_rank(seen, life, rank)
                printer = Printer(as_json, life=life.number, attempt=life.attempt, rank=rank)
                say(f"--- {seen.name}, attempt {life.attempt}, life {life.number}, rank {rank}")
                told = True
            over = await _over(
                seen, channel, life
            )  # looked at before the log: what comes later is not missed
            while data := await channel.log(life.number, rank, start, CHUNK):
                printer(data)
                start += len(data)
            later = next((item[1].number for item in lives if item[1].number > life.number), None)
            if later is not None and number is None:
                current, start, told = later, 0, False
                continue
            if not follow or (over and (number is not None or _done(seen))):
                if not start:
                    say(f"rank {rank} of life {life.number} has printed nothing{'' if over else ' yet'}")
                return 0
        elif _done(seen):
            return await _nothing(place, seen, number, [life.number for _, life in lives])
        await asyncio.sleep(POLL)
        assert seen.journal is not None
        await seen.journal.refresh()


async def _over(seen: SeenRun, channel: Channel, life: Life) -> bool:
    """The life has ended: a later one begins, its attempt is over, or all its ranks have said so."""
    run = seen.run
    assert run is not None
    over = any(attempt.number == life.attempt and attempt.over for attempt in run.attempts)
    return over or await channel.ended_at(life) is not None


def _done(seen: SeenRun) -> bool:
    run = seen.run
    return run is not None and run.verdict is not None and run.current is None


async def _nothing(place: Place, seen: SeenRun, number: int | None, lives: list[int]) -> int:
    """No such life: say which there are; when there is none, the platform may know why."""
    if lives or number is not None:
        raise _no_life(seen, number, lives)
    run = seen.run
    assert run is not None
    attempt = run.attempts[-1]
    say(f"no rank of {seen.name} has started yet; what {attempt.target} says of node 0:")
    return await _of_node(place, seen, attempt, 0, False, False)


async def _of_node(
    place: Place, seen: SeenRun, attempt: Attempt, node: int, follow: bool, as_json: bool
) -> int:
    assert seen.key is not None
    ref, since = ref_for(seen.key, seen.dir.incarnation, attempt), ""
    printer, silent = Printer(as_json, attempt=attempt.number, node=node), True
    try:
        target: Target = await place.target(attempt.target)
        while True:
            run = seen.run
            over = run is None or run.current is None or run.current.number != attempt.number
            chunk = await target.logs(ref, node, since)
            printer(chunk.text)
            silent = silent and not chunk.text
            if not chunk.text and (over or not follow):
                if silent:
                    say(f"{attempt.target} has no output of node {node} of attempt {attempt.number}")
                return 0
            if not chunk.text:
                await asyncio.sleep(POLL)
                assert seen.journal is not None
                await seen.journal.refresh()
            since = chunk.next
    except TargetError as error:
        raise click.ClickException(f"{attempt.target} cannot be asked: {error}") from None
    except StoreError as error:
        raise click.ClickException(str(error)) from None
