"""The files in memory behave as the real stores do, so that what is proven on them holds for those."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from airflow_gpu.rundir.store import Exists, Missing, Store, StoreError
from tests.faults.clock import SimLoop
from tests.faults.disk import Disk, SeamStore
from tests.faults.seam import Actor, Seam


async def contract(store: Store) -> None:
    """What journal, channel, slot and staging rely on."""
    assert await store.names("a") == []
    assert await store.list("a") == []
    await store.create("a/b/0001.json", b"one")
    with pytest.raises(Exists):
        await store.create("a/b/0001.json", b"two")
    assert await store.get("a/b/0001.json") == b"one"
    with pytest.raises(Missing):
        await store.get("a/b/0002.json")
    with pytest.raises(Missing):
        await store.get("a/b")
    assert [await store.exists(path) for path in ("a/b/0001.json", "a/b", "a/c")] == [True, False, False]
    await store.create("a/b/c/deep", b"x")
    await store.create("a/b0/other", b"")
    assert await store.names("a") == ["b", "b0"]
    assert await store.names("a/b") == ["0001.json", "c"]
    assert [(entry.path, entry.size) for entry in await store.list("a/b")] == [
        ("a/b/0001.json", 3),
        ("a/b/c/deep", 1),
    ]
    assert len(await store.list()) == 3
    await store.put("log", b"0123456789")
    await store.put("log", b"abcdefghij")
    assert await store.get("log", 3) == b"defghij"
    assert await store.get("log", 3, 2) == b"de"
    assert await store.get("log", 8, 9) == b"ij"
    assert await store.get("log", 20, 5) == b""
    await store.delete("a/b/0001.json")
    await store.delete("a/b/0001.json")
    await store.create("a/b/0001.json", b"again")
    await store.delete_tree("a/b")
    assert await store.names("a/b") == []
    assert await store.get("a/b0/other") == b""
    for path in ("../x", "a//b", "/a", "a/", "a b"):
        with pytest.raises(StoreError):
            await store.create(path, b"")


@pytest.mark.parametrize(
    "make", [lambda folder: Store("memory://"), lambda folder: Store(f"file://{folder}/s")]
)
async def test_real(make: Callable[[Path], Store], tmp_path: Path) -> None:
    await contract(make(tmp_path))


def test_simulated() -> None:
    async def main() -> None:
        seam = Seam((), 1000)
        await contract(SeamStore(Actor(seam, "worker-1", "worker"), Disk("memory://x"), "state"))
        assert len(seam.calls) > 20

    SimLoop().run(main(), lambda: None, lambda: None)
