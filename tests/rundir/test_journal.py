"""The journal: one order of events for all writers, and no order that must not be."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from airflow_gpu.gang.entries import (
    JournalError,
    attempt_entry,
    over_entry,
    owner_entry,
    stop_entry,
    verdict_entry,
)
from airflow_gpu.gang.run import Cause, Outcome
from airflow_gpu.rundir.journal import Journal, LostRace
from airflow_gpu.rundir.store import Store


def owner(ti_id: str = "a") -> dict[str, object]:
    return owner_entry(
        ti_id=ti_id,
        try_number=1,
        max_tries=0,
        reason="start",
        resume=True,
        deadline=None,
        gang={"v": 1},
        digest="d",
    )


def attempt(number: int) -> dict[str, object]:
    return attempt_entry(
        attempt=number,
        name=f"g-{number}",
        target="t",
        channel="c",
        offer={},
        resume=True,
        first_life=1,
        digest="d",
    )


async def test_two_writers_see_one_history(tmp_path: Path) -> None:
    """Who has not read what is new cannot write."""
    store = Store(f"file://{tmp_path}")
    one, two = Journal(store, "run"), Journal(store, "run")
    await one.append(owner(), epoch=1, now=1.0)
    with pytest.raises(LostRace):
        await two.append(owner("b"), epoch=1, now=1.0)
    await two.refresh()
    assert two.run == one.run
    await two.append(owner("b"), epoch=2, now=2.0)
    with pytest.raises(LostRace):
        await one.append(attempt(1), epoch=1, now=3.0)
    await one.refresh()
    with pytest.raises(JournalError, match="taken over"):
        await one.append(attempt(1), epoch=1, now=3.0)


async def test_a_race_for_every_entry_has_one_winner(tmp_path: Path) -> None:
    """Ten owners at a time: one gets each epoch, the others read on."""
    store = Store(f"file://{tmp_path}")
    won: list[int] = []

    async def fight(name: str) -> None:
        journal = Journal(store, "run")
        for _ in range(5):
            while True:
                await journal.refresh()
                try:
                    await journal.append(owner(name), epoch=journal.run.epoch + 1, now=1.0)
                except LostRace:
                    continue
                won.append(journal.run.epoch)
                break

    await asyncio.gather(*[fight(str(n)) for n in range(10)])
    assert sorted(won) == list(range(1, 51))


async def test_one_journal_used_by_two_tasks(tmp_path: Path) -> None:
    """A driver and its stop share it."""
    store = Store(f"file://{tmp_path}")
    writer, shared = Journal(store, "run"), Journal(store, "run")
    for number in range(1, 21):
        await writer.append(owner(str(number)), epoch=number, now=1.0)
        await asyncio.gather(*[shared.refresh() for _ in range(5)])
        assert shared.run.epoch == number


async def test_what_must_not_be_is_refused_by_its_own_writer(tmp_path: Path) -> None:
    journal = Journal(Store(f"file://{tmp_path}"), "run")
    await journal.append(owner(), epoch=1, now=1.0)
    with pytest.raises(JournalError, match="success without an attempt"):
        await journal.append(verdict_entry("success", Cause.SUCCEEDED, "", {}), epoch=1, now=1.0)
    await journal.append(attempt(1), epoch=1, now=1.0)
    with pytest.raises(JournalError, match="not over"):
        await journal.append(attempt(2), epoch=1, now=1.0)
    await journal.append(over_entry(1, Outcome(Cause.SUCCEEDED, 2.0)), epoch=1, now=2.0)
    with pytest.raises(JournalError, match="not the current one"):
        await journal.append(stop_entry(1, "user", ""), epoch=1, now=2.0)
    await journal.append(verdict_entry("success", Cause.SUCCEEDED, "", {}), epoch=1, now=2.0)
    with pytest.raises(JournalError, match="after a verdict of success"):
        await journal.append(owner("b"), epoch=2, now=3.0)
    again = Journal(journal.store, "run")
    assert await again.refresh() == journal.run


async def test_an_unknown_kind_is_no_small_matter(tmp_path: Path) -> None:
    """A newer version's decision that we skip could let something run twice."""
    store = Store(f"file://{tmp_path}")
    await store.create(
        "run/journal/000001.json", b'{"v":1,"seq":1,"kind":"wibble","at":"2026-01-01T00:00:00Z","epoch":1}'
    )
    with pytest.raises(JournalError, match="wibble"):
        await Journal(store, "run").refresh()
