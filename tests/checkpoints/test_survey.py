"""What there is of a run: what each checkpoint is, which one counts; the same as the runtime would say."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_gpu.gang.run import Cause, Seed
from airflow_gpu.rundir.checkpoints import What
from airflow_gpu.rundir.contents import Contents
from airflow_gpu.rundir.store import Store
from airflow_gpu.runtime.checkpoint import Ancestor, choose
from airflow_gpu.runtime.files import Folder
from tests.checkpoints.conftest import Run, one_life, steps


async def test_what_each_is(run: Run) -> None:
    await run.write(10)
    await run.write(20, manifest=b"")
    bad = await run.write(30)
    await run.channel.store.create(
        f"{run.path}/checkpoints/{bad}/bad.json", b'{"reason": "rank-0.bin is wrong"}'
    )
    await run.write(40, manifest=b"[" * 100_000)
    await run.write(50, claims=(7, 50))
    await run.write(60, claims=(1, 61))
    short = await run.write(70)
    await Contents(run.channel.store, f"{run.path}/checkpoints").remove(f"{short}/empty")
    await run.write(80, name="my run, step=80", writer="program")
    survey = await run.survey()
    assert [(one.step, one.what, one.trouble) for one in survey.found] == [
        (10, What.COMPLETE, ""),
        (20, What.UNFINISHED, ""),
        (30, What.DAMAGED, "rank-0.bin is wrong"),
        (40, What.TORN, survey.found[3].trouble),
        (50, What.FOREIGN, "its manifest is of life 7"),
        (61, What.FOREIGN, "its manifest is of step 61"),
        (70, What.DAMAGED, "empty is not there"),
        (80, What.COMPLETE, ""),
    ]
    assert "is no JSON" in survey.found[3].trouble
    first = survey.found[0]
    assert (first.files, first.size, first.world_size, first.life) == (3, 4000 + 2997, 2, 1)
    assert first.uri == f"{run.channel.uri}/checkpoints/0001/step-000000010"
    assert abs(first.at - survey.found[1].at) < 60
    # The runtime takes what is whole, whatever its place.
    assert steps(survey.chain) == [(1, 80), (1, 61), (1, 50), (1, 10)]
    assert survey.next is not None
    assert survey.next.name == "my run, step=80"


async def test_the_chain_leaves_out_what_came_after_a_successor_began(run: Run) -> None:
    for step in (10, 20, 30):
        await run.write(step)
    await run.life(2, origin=(1, 20), ranks=2)
    survey = await run.survey()
    assert steps(survey.chain) == [(1, 20), (1, 10)]
    assert steps([one for one in survey.found if one.in_use]) == [(1, 20)]
    await run.write(25)
    survey = await run.survey()
    assert steps(survey.chain) == [(2, 25), (1, 20), (1, 10)]
    assert [one.step for one in survey.found if not one.on_chain] == [30]
    assert survey.open


async def test_a_run_that_went_elsewhere_and_began_again(tmp_path: Path, bucket: Store) -> None:
    """Its first channel is a folder, its second a bucket; what it brought along is in use, and still a way back."""
    run = await one_life(Run(tmp_path))
    await run.write(10)
    await run.write(20)
    first = run.channel.uri
    await run.over(5, Cause.MOVED, checkpoint=(1, 20))
    run.on(bucket)
    await run.goes_on(Seed(first, 1, 20))
    survey = await run.survey()
    assert steps(survey.chain) == [(1, 20), (1, 10)]
    life = await run.seeded_life((1, 20))
    await run.write(30)
    survey = await run.survey()
    assert steps(survey.chain) == [(life, 30), (1, 20), (1, 10)]
    assert [one.uri for one in survey.found if one.in_use] == [f"{first}/checkpoints/0001/step-000000020"]
    assert {one.channel for one in survey.found} == {first, run.channel.uri}
    await run.over(9, Cause.PREEMPTED)
    await run.goes_on(resume=False, since=run.lives + 1)
    assert (await run.survey()).chain == ()


async def test_a_channel_that_does_not_answer_is_told(tmp_path: Path, bucket: Store) -> None:
    run = await one_life(Run(tmp_path))
    await run.write(10)
    await run.over(5, Cause.MOVED)
    run.on(Store("s3://no-such-bucket", {"endpoint": "http://127.0.0.1:9", "allow_http": True, "region": "x", "access_key_id": "none", "secret_access_key": "none"}))  # fmt: skip
    import airflow_gpu.rundir.store as module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TRIES", 2)
        patch.setattr(module, "FIRST_WAIT", 0.01)
        await run.goes_on()
        survey = await run.survey()
    assert list(survey.troubles) == [run.channel.uri]
    assert steps(survey.found) == [(1, 10)]


async def test_looking_makes_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path)
    await run.begin()
    await run.owner(0)
    assert (await run.survey()).found == ()
    await run.goes_on()
    survey = await run.survey()
    assert (survey.found, survey.troubles) == ((), {})
    assert not (tmp_path / "channel").exists()


async def test_names_and_links_on_a_folder(tmp_path: Path) -> None:
    """Links are not followed, a name that is no UTF-8 is no trouble, and an empty folder is unfinished."""
    run = await one_life(Run(tmp_path))
    await run.write(10)
    life = run.folder / "checkpoints/0001"
    (life / "latest").symlink_to("step-000000010")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "manifest.json").write_text("{}")
    (life / "step-000000099").symlink_to(outside)
    (life / "step-000000020").mkdir()
    (life / ".step-000000020.saving").touch()
    (life / "step-000000010/link").symlink_to(outside)
    os.mkfifo(life / "step-000000010/pipe")
    (life / "step-000000010" / os.fsdecode(b"n\xff")).write_bytes(b"x")
    os.mkfifo(life / "step-000000020/manifest.json")
    survey = await run.survey()
    assert [(one.name, one.what, one.saving) for one in survey.found] == [
        ("step-000000010", What.COMPLETE, False),
        ("step-000000020", What.UNFINISHED, True),
    ]


# -- the same as the runtime --------------------------------------------------------------------

SAVES = st.lists(
    st.tuples(
        st.integers(1, 9),
        st.sampled_from(["ok", "bad", "short", "torn", "none"]),
        st.integers(0, 2),  # so many lives back: a life that was superseded may write for a while
    ),
    max_size=4,
)
LIVES = st.lists(SAVES, min_size=1, max_size=4)


@given(LIVES)
@settings(max_examples=60, deadline=None)
def test_what_a_next_life_would_take_is_what_it_takes(lives: list[list[tuple[int, str, int]]]) -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        asyncio.run(_compare(folder, lives))
    finally:
        shutil.rmtree(folder)


async def _compare(root: Path, lives: list[list[tuple[int, str, int]]]) -> None:
    run = Run(root)
    await run.begin()
    await run.owner(0)
    await run.goes_on()
    ancestors: list[Ancestor] = []
    for saves in lives:
        start = choose(Folder(str(run.folder)), ancestors, lambda _: None, 10.0)
        survey = await run.survey()
        expected = (start.life, start.name) if start else None
        assert (survey.next and (survey.next.life, survey.next.name)) == expected
        origin = (start.life, start.step) if start else None
        number = await run.life(1, origin=origin, ranks=1)
        ancestors.append(Ancestor(number, *(origin or (None, None))))
        for (step, back), kind in {(step, back): kind for step, kind, back in saves}.items():
            life = max(1, number - back)
            if (run.folder / f"checkpoints/{life:04d}/step-{step:09d}").exists():
                continue
            where = await run.write(
                step, life=life, files={"a": b"x" * step}, manifest={"torn": b"{}", "none": b""}.get(kind)
            )
            if kind == "bad":
                (run.folder / "checkpoints" / where / "bad.json").write_text("{}")
            elif kind == "short":
                (run.folder / "checkpoints" / where / "a").write_bytes(b"")


async def test_a_program_names_its_folders_as_it_likes(run: Run) -> None:
    """The driver finds such a checkpoint too, which the runtime would start from."""
    await run.write(80, name="my run, step=80", writer="program")
    bad = await run.write(90, name="my run, step=90", writer="program")
    await Contents(run.channel.store, f"{run.path}/checkpoints").create(f"{bad}/bad.json", b"{}")
    await run.write(70, name="half; step 70", manifest=b"")
    assert [ref.step for ref in await run.channel.checkpoints(1)] == [80]
