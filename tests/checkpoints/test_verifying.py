"""Every byte is compared, what is wrong is told by file, and a mark keeps lives away."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from airflow_gpu.rundir import contents as module
from airflow_gpu.rundir.checkpoints import Checkpoints, What
from airflow_gpu.rundir.contents import Contents
from airflow_gpu.rundir.verifying import Verified, mark, verify
from airflow_gpu.runtime.checkpoint import Ancestor, choose
from airflow_gpu.runtime.files import Folder
from tests.checkpoints.conftest import FILES, Run, one_life


async def look(checkpoints: Checkpoints) -> Verified:
    survey = await checkpoints.survey()
    one = survey.found[-1]
    return await verify(one, checkpoints.contents(one.channel))


async def test_whole(run: Run) -> None:
    await run.write(10)
    found = await look(run.checkpoints())
    assert (found.ok, found.damaged, found.wrong, found.extra) == (True, False, (), ())
    assert found.size == sum(map(len, FILES.values()))
    with pytest.raises(ValueError, match="not known to be damaged"):
        await mark(found, run.checkpoints().contents(run.channel.uri))


async def test_what_is_wrong_and_the_mark(run: Run) -> None:
    where = await run.write(10, files={"a": b"a" * 100, "b": b"b" * 100, "c": b"c", "d": b"d" * 5})
    contents = run.checkpoints().contents(run.channel.uri)
    survey = await run.survey()
    for path, data in (("a", b"a" * 99 + b"x"), ("c", b"longer"), ("d", b"d"), ("more", b"1")):
        await contents.remove(f"{where}/{path}")
        await contents.create(f"{where}/{path}", data)
    await contents.remove(f"{where}/b")
    found = await verify(survey.found[0], contents)
    assert [(wrong.path, wrong.what) for wrong in found.wrong] == [
        ("a", "has other content than was saved"),
        ("b", "is not there"),
        ("c", "has more than 1 bytes"),
        ("d", "has 1 bytes instead of 5"),
    ]
    assert found.extra == ("more",)
    assert found.damaged
    assert await mark(found, contents)
    assert not await mark(found, contents)  # somebody has
    [one] = (await run.survey()).found
    assert (one.what, one.trouble) == (What.DAMAGED, "a has other content than was saved, and 3 more")
    assert (await run.survey()).next is None


async def test_the_runtime_takes_the_mark(tmp_path: Path) -> None:
    run = await one_life(Run(tmp_path))
    await run.write(10)
    where = await run.write(20)
    (run.folder / "checkpoints" / where / "rank-0.bin").write_bytes(b"ZERO" * 1000)
    found = await look(run.checkpoints())
    await mark(found, run.checkpoints().contents(run.channel.uri))
    start = choose(Folder(str(run.folder)), [Ancestor(1)], lambda _: None, 0.0)
    assert start is not None
    assert start.step == 10


async def test_without_a_manifest_or_removed_meanwhile(run: Run) -> None:
    where = await run.write(10)
    survey = await run.survey()
    contents = run.checkpoints().contents(run.channel.uri)
    await contents.remove(f"{where}/manifest.json")
    await contents.remove_tree(where)
    found = await verify(survey.found[0], contents)
    assert (found.gone, found.ok, found.damaged) == (True, False, False)
    await run.write(20, manifest=b"")
    found = await look(run.checkpoints())
    assert [wrong.path for wrong in found.wrong] == ["manifest.json"]


async def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    """It points at the same bytes, and is no file of the checkpoint all the same."""
    run = await one_life(Run(tmp_path))
    where = await run.write(10)
    survey = await run.survey()
    file = run.folder / "checkpoints" / where / "rank-0.bin"
    file.rename(tmp_path / "secret")
    file.symlink_to(tmp_path / "secret")
    (run.folder / "checkpoints" / where / "deep").rename(tmp_path / "elsewhere")
    (run.folder / "checkpoints" / where / "deep").symlink_to(tmp_path / "elsewhere")
    found = await verify(survey.found[0], run.checkpoints().contents(run.channel.uri))
    assert [(wrong.path, wrong.what) for wrong in found.wrong] == [
        ("deep/er/rank 1, ü.bin", "is not there"),
        ("rank-0.bin", "is not there"),
    ]


async def test_memory_is_bounded(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen files of 4 MiB are read with less than four in memory."""
    await run.write(10, files={f"f{n}": bytes([n]) * (4 << 20) for n in range(16)})
    monkeypatch.setattr(module, "BLOCK", 1 << 20)
    survey = await run.survey()
    tracemalloc.start()
    try:
        found = await verify(
            survey.found[0], Contents(run.channel.store, f"{run.path}/checkpoints"), parallel=4
        )
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.ok
    assert peak < 16 << 20
