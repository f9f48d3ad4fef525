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
    """Print it; 1 when there is none."""
    seen = await find_run(place.store(), place.installation, name)
    run = seen.run
    assert run is not None
    if not run.attempts:
        raise click.ClickException(f"{seen.name} has not been placed yet: there is no output")
    if node is not None:
        return await _of_node(place, seen, _attempt_named(run.attempts, name), node, follow, as_json)
    return await _of_rank(place, seen, rank, life, follow, as_json)


def _attempt_named(attempts: tuple[Attempt, ...], name: str) -> Attempt:
    """The attempt whose job was named, else the newest."""
    return next((attempt for attempt in attempts if attempt.name == name), attempts[-1])


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
        if here is None and not follow:
            return await _nothing(place, seen, number, [life.number for _, life in lives])
        if here is not None:
            channel, life = here
            if not told:
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
                    say(f"rank {rank} of life {life.number} has printed nothing, or there is no such rank")
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
    if lives:
        raise click.ClickException(
            f"{seen.name} has no life {number}; there are {', '.join(map(str, lives))}"
        )
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
    printer = Printer(as_json, attempt=attempt.number, node=node)
    try:
        target: Target = await place.target(attempt.target)
        while True:
            run = seen.run
            over = run is None or run.current is None or run.current.number != attempt.number
            chunk = await target.logs(ref, node, since)
            printer(chunk.text)
            if not chunk.text and (over or not follow):
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
