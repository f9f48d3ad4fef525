"""One listing finds every run directory with its newest entry, and jumps over what has no journals."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest

from airflow_gpu.gang.identity import RunKey, run_path, slot_path
from airflow_gpu.rundir.store import Store
from airflow_gpu.sweeping import listing
from airflow_gpu.sweeping.listing import run_dirs


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return Store(f"file://{tmp_path}" if request.param == "file" else f"memory://{secrets.token_hex(4)}")


async def begin(store: Store, key: RunKey, incarnation: str, entries: int, files: int = 0) -> str:
    path = run_path(key, incarnation)
    await store.create(
        f"{slot_path(key)}/incarnations/0001.json", json.dumps({"incarnation": incarnation}).encode()
    )
    await store.create(f"{path}/run.json", b"{}")
    for number in range(1, entries + 1):
        await store.create(f"{path}/journal/{number:06d}.json", b"{}")
    for number in range(files):
        for folder in ("checkpoints/0001/step-000000001", "lives/0001/logs", "payload/0001"):
            await store.put(f"{path}/{folder}/f{number:05d}", b"")
    return path


async def test_every_run_directory(store: Store) -> None:
    """Beside other installations, unfinished beginnings, odd ids, and the files of the channel."""
    odd = RunKey("prod", "dag=1", "scheduled__2026-01-01T00:00:00+00:00", "group.fit", 3)
    expected = {
        await begin(store, RunKey("prod", "dag", "r1", "fit"), "aaaaaaaaaa", 5, files=4): 5,
        await begin(store, odd, "bbbbbbbbbb", 12): 12,
        await begin(store, RunKey("prod", "dag", "r1", "other"), "cccccccccc", 0): 0,
    }
    await begin(store, RunKey("staging", "dag", "r1", "fit"), "dddddddddd", 2)
    await begin(store, RunKey("prod-2", "dag", "r1", "fit"), "eeeeeeeeee", 2)
    found = await run_dirs(store, "prod")
    assert {path: run.entries for path, run in found.items()} == expected
    assert {run.incarnation for run in found.values()} == {"aaaaaaaaaa", "bbbbbbbbbb", "cccccccccc"}
    assert await run_dirs(store, "nobody") == {}


async def test_times(tmp_path: Path) -> None:
    """A run directory was touched when its newest journal entry was written."""
    store = Store(f"file://{tmp_path}")
    path = await begin(store, RunKey("prod", "dag", "r1", "fit"), "aaaaaaaaaa", 2)
    long_ago = time.time() - 1000
    os.utime(tmp_path / path / "journal" / "000002.json", (long_ago, long_ago))
    [found] = (await run_dirs(store, "prod")).values()
    assert abs(found.touched - long_ago) < 1


async def test_jumps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of files of the channel cost a page or two, not one page for each thousand."""
    monkeypatch.setattr(listing, "PAGE", 50)
    store = Store(f"memory://{secrets.token_hex(4)}")
    expected = {}
    for number in range(6):
        path = await begin(
            store, RunKey("prod", "dag", f"r{number}", "fit"), "aaaaaaaaaa", 3 + number, files=400
        )
        expected[path] = 3 + number
    pages = 0
    real = obstore.list

    def counting(*args: Any, **kwargs: Any) -> Iterator[Any]:
        nonlocal pages
        for page in real(*args, **kwargs):
            pages += 1
            yield page

    monkeypatch.setattr(obstore, "list", counting)
    found = await run_dirs(store, "prod")
    assert {path: run.entries for path, run in found.items()} == expected
    whole = 6 * (3 * 400 + 10) / 50
    assert pages < whole / 3, (pages, whole)


async def test_a_store_without_an_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where names come in no order nothing may be jumped over."""
    monkeypatch.setattr(listing, "PAGE", 50)
    store = Store(f"memory://{secrets.token_hex(4)}")
    paths = {
        await begin(store, RunKey("prod", "dag", f"r{number}", "fit"), "aaaaaaaaaa", 3, files=100)
        for number in range(4)
    }
    real = obstore.list

    def shuffled(*args: Any, **kwargs: Any) -> Iterator[Any]:
        pages = list(real(*args, **kwargs))
        return iter(pages[1:] + pages[:1])

    monkeypatch.setattr(obstore, "list", shuffled)
    monkeypatch.setattr(listing, "ordered", lambda _: False)
    assert set(await run_dirs(store, "prod")) == paths


@pytest.mark.parametrize(
    ("uri", "so"),
    [("s3://bucket/gangs", True), ("gs://bucket", True), ("s3://fast--use1-az4--x-s3/gangs", False)],
)
def test_which_stores_have_an_order(uri: str, so: bool) -> None:
    assert listing.ordered(uri) is so
