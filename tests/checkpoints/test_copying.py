"""A copy is whole or none, goes on where it was cut off, and leads nowhere out of its folder."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from airflow_gpu.rundir import contents as module
from airflow_gpu.rundir.checkpoints import Checkpoint
from airflow_gpu.rundir.contents import Contents
from airflow_gpu.rundir.copying import Copied, NotCopied, copy
from airflow_gpu.rundir.store import Store
from airflow_gpu.runtime.manifest import Manifest
from tests.beds.stores.servers import Server
from tests.checkpoints.conftest import FILES, Run, one_life


@pytest.fixture(params=["folder", "s3"])
def other(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "folder":
        return Store(str(tmp_path / "other"))
    server: Server = request.getfixturevalue("s3")
    return Store(f"{server.uri}/{secrets.token_hex(6)}", server.options)


async def first(run: Run) -> Checkpoint:
    return (await run.survey()).found[0]


async def copied(run: Run, to: Store) -> Copied:
    one = await first(run)
    return await copy(one, run.checkpoints().contents(one.channel), to)


async def test_there_it_is_the_same(run: Run, other: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger files travel in parts."""
    monkeypatch.setattr(module, "BLOCK", 5 << 20)
    await run.write(10, files={**FILES, "large": secrets.token_bytes(13 << 20)})
    done = await copied(run, other)
    one = await first(run)
    assert done.uri == f"{other.uri}/{run.path}/checkpoints/0001/step-000000010"
    assert (len(done.sent), len(done.there), done.size) == (4, 0, one.size)
    there = Contents(other, f"{run.path}/checkpoints/0001/step-000000010")
    assert await there.read("deep/er/rank 1, ü.bin", 10_000) == b"one" * 999
    assert {file.path for file in (await there.walk()).files} == {*FILES, "large", "manifest.json"}
    data = await there.read("manifest.json", 10_000)
    assert data is not None
    assert Manifest.parse(data) == one.manifest
    again = await copied(run, other)
    assert (len(again.sent), len(again.there)) == (0, 4)


async def test_it_goes_on_and_replaces_what_is_wrong(run: Run, other: Store) -> None:
    await run.write(10, files={"a": b"a" * 10, "b": b"b" * 10, "c": b"c" * 10})
    there = Contents(other, f"{run.path}/checkpoints/0001/step-000000010")
    await there.create("a", b"a" * 10)
    await there.create("b", b"B" * 10)
    await there.create("c", b"c" * 11)
    done = await copied(run, other)
    assert ([e.path for e in done.there], sorted(e.path for e in done.sent)) == (["a"], ["b", "c"])
    assert (await there.read("b", 20), await there.read("c", 20)) == (b"b" * 10, b"c" * 10)


async def test_what_is_not_whole_is_not_copied(run: Run, other: Store) -> None:
    where = await run.write(10)
    one = await first(run)
    contents = run.checkpoints().contents(one.channel)
    await contents.remove(f"{where}/rank-0.bin")
    await contents.create(f"{where}/rank-0.bin", b"ZERO" * 1000)
    with pytest.raises(NotCopied, match=r"rank-0\.bin has other content"):
        await copied(run, other)
    there = Contents(other, f"{run.path}/checkpoints/0001/step-000000010")
    assert await there.read("manifest.json", 10) is None
    await contents.remove(f"{where}/rank-0.bin")
    with pytest.raises(NotCopied, match=r"damaged: rank-0\.bin is not there"):
        await copied(run, other)
    with pytest.raises(Exception, match="ends at 0 of 4000 bytes"):  # it vanished after the look
        await copy(one, contents, other)
    assert await there.read("manifest.json", 10) is None


async def test_another_in_its_place(run: Run, other: Store) -> None:
    await run.write(10)
    there = Contents(other, f"{run.path}/checkpoints/0001/step-000000010")
    await there.create("bad.json", b"{}")
    with pytest.raises(NotCopied, match="marked as damaged"):
        await copied(run, other)
    await there.remove("bad.json")
    await there.create("manifest.json", b"{}")
    with pytest.raises(NotCopied, match="another checkpoint"):
        await copied(run, other)
    with pytest.raises(NotCopied, match="the checkpoint itself"):
        await copied(run, run.channel.store)


async def test_no_link_leads_out(tmp_path: Path) -> None:
    """Neither of the source, whose job could make it show Airflow's files, nor of the target."""
    run = await one_life(Run(tmp_path))
    where = await run.write(10, files={"sub/a": b"secret"})
    one = await first(run)
    source = run.folder / "checkpoints" / where
    (source / "sub").rename(tmp_path / "private")
    (source / "sub").symlink_to(tmp_path / "private")
    with pytest.raises(Exception, match="ends at 0"):
        await copy(one, run.checkpoints().contents(one.channel), Store(str(tmp_path / "other")))
    (source / "sub").unlink()
    (tmp_path / "private").rename(source / "sub")
    target = tmp_path / "third" / run.path / "checkpoints/0001/step-000000010"
    target.mkdir(parents=True)
    (tmp_path / "victim").mkdir()
    (target / "sub").symlink_to(tmp_path / "victim")
    with pytest.raises(Exception, match="Not a directory"):
        await copy(one, run.checkpoints().contents(one.channel), Store(str(tmp_path / "third")))
    assert list((tmp_path / "victim").iterdir()) == []
