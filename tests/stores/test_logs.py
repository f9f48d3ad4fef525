"""A log in segments reads as the file that it would be."""

from __future__ import annotations

import asyncio
import secrets
from itertools import accumulate
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from airflow_gpu.rundir.channel import Channel
from airflow_gpu.rundir.store import Store

SEGMENTS = st.lists(st.binary(min_size=1, max_size=40), max_size=40)


async def write(channel: Channel, parts: list[bytes], begin: int = 0, life: int = 1, rank: int = 0) -> None:
    """As the runtime does: each segment is named after the offset of its first byte."""
    offsets = accumulate((len(part) for part in parts), initial=begin)
    for offset, part in zip(offsets, parts, strict=False):
        await channel.store.create(
            f"{channel.path}/lives/{life:04d}/logs/rank-{rank:05d}/{offset:015d}", part
        )


def memory() -> Channel:
    return Channel(Store(f"memory://{secrets.token_hex(8)}"), "run")


@given(parts=SEGMENTS, start=st.integers(0, 1700), limit=st.integers(0, 1700))
def test_any_segmentation_is_the_same_bytes(parts: list[bytes], start: int, limit: int) -> None:
    async def check() -> None:
        channel = memory()
        await write(channel, parts)
        assert await channel.log(1, 0, start, limit) == b"".join(parts)[start : start + limit]
        assert await channel.log_size(1, 0) == len(b"".join(parts))

    asyncio.run(check())


@given(
    turns=st.lists(st.tuples(SEGMENTS, st.integers(0, 200), st.integers(1, 200)), max_size=6),
)
def test_it_grows_while_it_is_read(turns: list[tuple[list[bytes], int, int]]) -> None:
    """Between any two reads there may come more; a reader that was there before and a new one see the same."""

    async def check() -> None:
        channel, whole = memory(), b""
        for parts, start, limit in turns:
            await write(channel, parts, len(whole))
            whole += b"".join(parts)
            fresh = Channel(channel.store, channel.path)
            for reader in (channel, fresh):
                assert await reader.log(1, 0, start, limit) == whole[start : start + limit]

    asyncio.run(check())


@given(
    parts=st.lists(st.binary(min_size=1, max_size=9), min_size=2, max_size=12),
    gone=st.integers(0, 11),
)
def test_what_is_behind_a_gap_waits_for_it(parts: list[bytes], gone: int) -> None:
    async def check() -> None:
        channel, whole, missing = memory(), b"".join(parts), gone % len(parts)
        before = sum(map(len, parts[:missing]))
        for index, part in enumerate(parts):
            if index != missing:
                await write(channel, [part], sum(map(len, parts[:index])))
        assert await channel.log(1, 0, 0, 1000) == whole[:before]
        await write(channel, [parts[missing]], before)
        assert await channel.log(1, 0, 0, 1000) == whole

    asyncio.run(check())


async def test_on_real_stores(bucket: Store) -> None:
    """Hundreds of segments, of which later reads list only what is new."""
    channel = Channel(bucket, "v1/run")
    parts = [f"line {n} of the log\n".encode() for n in range(120)]
    await write(channel, parts[:100])
    await write(channel, [b"another rank"], rank=1)
    await write(channel, [b"another life"], life=2)
    whole, seen = b"".join(parts), b""
    while data := await channel.log(1, 0, len(seen), 500):
        assert len(data) == 500 or seen + data == b"".join(parts[:100])
        seen += data
    assert seen == b"".join(parts[:100])
    await write(channel, parts[100:], len(seen))
    assert await channel.log(1, 0, len(seen), 10**6) == whole[len(seen) :]
    assert await Channel(bucket, "v1/run").log(1, 0, 7, 10**6) == whole[7:]
    assert await channel.log(1, 2, 0, 100) == b""
    assert await channel.log(1, 1, 8, 100) == b"rank"
    last = f"v1/run/lives/0001/logs/rank-00000/{len(b''.join(parts[:-1])):015d}"
    assert [entry.path for entry in await bucket.list("v1/run/lives/0001/logs/rank-00000", last)] == []


async def test_on_a_folder_it_is_one_file(tmp_path: Path) -> None:
    channel = Channel(Store(str(tmp_path)), "run")
    file = tmp_path / "run/lives/0001/logs/rank-00000.log"
    assert await channel.log(1, 0, 0, 10) == b""
    file.parent.mkdir(parents=True)
    file.write_bytes(b"0123456789abc")
    assert await channel.log(1, 0, 3, 5) == b"34567"
    assert await channel.log(1, 0, 13, 5) == b""
