"""Saves: whole, or no checkpoint at all; what is kept; and checkpoints of programs that know nothing of the handle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_gpu.runtime.checkpoint import Start, complete, step_in, unfinished
from airflow_gpu.runtime.checkpointing import CheckpointError, GangCheckpoint
from airflow_gpu.runtime.files import Folder
from airflow_gpu.runtime.manifest import Manifest, listing
from airflow_gpu.runtime.member import Identity
from airflow_gpu.runtime.pruning import prune
from airflow_gpu.runtime.saves import divide
from tests.runtime.bed import NOTICE, QUICK, Bed, eventually
from tests.runtime.test_claim import save


def test_rank_killed_in_the_middle_of_a_save(bed: Bed) -> None:
    job = bed.payload(
        script="""
        import os, signal, time
        from airflow_gpu.runtime import gang
        with gang() as g:
            start = g.checkpoint.restore(lambda d: print("restored", sorted(p.name for p in d.iterdir())))
            print("start", start)
            for step in (10, 20):
                with g.checkpoint.save(step) as d:
                    (d / f"rank{g.rank}").write_bytes(b"x" * 1000)
                    if g.rank == 1 and step == 20 and g.life == 1:
                        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    assert bed.run(job)[0] == 137
    assert bed.read("lives/0001/failure.json")["rank"] == 1
    assert sorted(bed.manifests()) == [10]
    told = bed.read("lives/0001/progress.json")
    assert (told["step"], told["saved"]["step"], told["saved"]["bytes"]) == (None, 10, 4000)
    assert told["saved"]["seconds"] > 0
    assert (bed.channel / "checkpoints/0001/step-000000020").is_dir()
    assert "CHECKPOINT OF STEP 20 WAS NOT SAVED" in bed.lives[0].log()
    assert bed.run(job, restart=1) == [0, 0]
    assert bed.log(3, life=2).splitlines()[:2] == [
        "restored ['manifest.json', 'rank0', 'rank1', 'rank2', 'rank3']",
        "start 10",
    ]
    assert sorted(bed.manifests(2)) == [10, 20]


def test_exception_in_the_block_goes_on_its_way_and_the_others_go_on(bed: Bed) -> None:
    job = bed.payload(
        script="""
        from airflow_gpu.runtime import gang
        with gang() as g:
            try:
                with g.checkpoint.save(1) as d:
                    (d / f"rank{g.rank}").write_text("")
                    if g.rank == 2:
                        raise OSError("disk full")
            except OSError as error:
                print("caught", error)
            with g.checkpoint.save(2) as d:
                (d / f"rank{g.rank}").write_text("")
            g.result("on")
        """
    )
    assert bed.run(job) == [0, 0]
    assert sorted(bed.manifests()) == [2]
    assert "caught disk full" in bed.log(2)
    for rank in (0, 1, 3):
        assert "CHECKPOINT OF STEP 1 WAS NOT SAVED: rank 2 failed in it: OSError: disk full" in bed.log(rank)
    assert not (bed.channel / "checkpoints/0001/step-000000001").exists()  # half of one, and older


def test_a_save_can_be_tried_again(bed: Bed) -> None:
    job = bed.payload(
        script="""
        import time
        from airflow_gpu.runtime import gang
        for block in range(2):                 # and a program may join more than once
            with gang() as g:
                time.sleep(2 * block)  # until all are back: a save without one of them is given up
                for n in range(2):
                    try:
                        with g.checkpoint.save(5 + block) as d:
                            (d / f"rank{g.rank}").write_text("")
                            assert n or g.rank, "not this time"
                    except AssertionError:
                        pass
                assert [g.checkpoint.due(step) for step in range(1, 4)] == [False] * 3
        """
    )
    assert bed.run(job) == [0, 0]
    assert sorted(bed.manifests()) == [5, 6]


def test_a_rank_that_has_left_is_not_waited_for(bed: Bed) -> None:
    job = bed.payload(
        nodes=1,
        script="""
        from airflow_gpu.runtime import gang
        with gang() as g:
            if g.rank == 0:
                with g.checkpoint.save(1) as d:
                    (d / "x").write_text("")
        """,
    )
    assert bed.run(job) == [0]
    assert "rank 1 is gone" in bed.log(0)
    assert bed.manifests() == {}


def test_what_a_manifest_holds(bed: Bed) -> None:
    job = bed.payload(
        script="""
        import os
        from airflow_gpu.runtime import gang
        with gang() as g:
            with g.checkpoint.save(5) as d:
                (d / "deep" / "er").mkdir(parents=True, exist_ok=True)
                (d / "deep" / "er" / f"{g.rank} ü.bin").write_bytes(b"abc" * g.rank)
                if g.rank == 3:
                    (d / "empty").write_text("")
                    os.symlink("/etc/passwd", d / "link")
            with g.checkpoint.save(5) as again:
                (again / "other").write_text("")
                assert again != d
        """
    )
    assert bed.run(job) == [0, 0]
    [(step, folder)] = bed.manifests().items()
    manifest = json.loads((folder / "manifest.json").read_text())
    files = {f["path"]: f["size"] for f in manifest["files"]}
    assert files == {"empty": 0, **{f"deep/er/{rank} ü.bin": 3 * rank for rank in range(4)}}
    assert (manifest["step"], manifest["life"], manifest["world_size"], manifest["v"]) == (step, 1, 4, 1)
    assert not (folder / "other").exists()


def test_ranks_find_a_damaged_checkpoint_that_the_claim_had_no_time_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Member:
        identity = Identity(1, 2, 1, 2, 0, 1, "127.0.0.1", 1)

    (tmp_path / "lives").mkdir()
    path = save(tmp_path, 1, 100)
    env = {"GANG_RESTORE_DIR": str(path), "GANG_RESTORE_STEP": "100", "GANG_RESTORE_VERIFIED": "0"}
    seen: list[Path] = []
    assert GangCheckpoint(Member(), env).restore(seen.append) == 100  # type: ignore[arg-type]
    assert seen == [path]
    (path / "rank1.bin").write_text("STATE of rank 1 at 100")
    with pytest.raises(CheckpointError, match=r"rank1\.bin has other content"):
        GangCheckpoint(Member(), env).restore(seen.append)  # type: ignore[arg-type]
    assert len(seen) == 1
    said: list[str] = []
    assert complete(Folder(str(tmp_path)), 1, said.append) == []
    assert "a rank found it damaged" in said[0]


# -- retention ---------------------------------------------------------------------------------


def steps(folder: Path, life: int) -> list[int]:
    return sorted(found.step for found in complete(Folder(str(folder)), life, print))


def test_retention(tmp_path: Path) -> None:
    channel = Folder(str(tmp_path))
    for step in (10, 20, 30):
        save(tmp_path, 1, step)
    save(tmp_path, 2, 40)
    start = Start(1, 20, "step-000000020", True)
    for step in (25, 35, 45):
        save(tmp_path, 3, step)
    for life, step in ((3, 30), (3, 99), (1, 33)):
        (tmp_path / f"checkpoints/000{life}/step-{step:09d}").mkdir()
        (tmp_path / f"checkpoints/000{life}/.step-{step:09d}.saving").touch()

    prune(channel, 3, 4, start, (1,), print)  # not yet 4 of its own: ancestors stay
    assert steps(tmp_path, 3) == [25, 35, 45]
    assert steps(tmp_path, 1) == [10, 20, 30]
    names = [p.name for p in (tmp_path / "checkpoints/0003").iterdir()]
    assert "step-000000030" not in names  # torn, and older than the newest
    assert "step-000000099" in names  # being written

    prune(channel, 3, 2, start, (1,), print)
    assert steps(tmp_path, 3) == [35, 45]
    assert steps(tmp_path, 1) == [20]  # what the life started from stays
    assert not (tmp_path / "checkpoints/0001/step-000000033").exists()
    assert steps(tmp_path, 2) == [40]  # no ancestor of this life


def test_retention_keeps_every_nth_step(tmp_path: Path) -> None:
    """Also of ancestors, as far as they are this life's history; of two with the same step the newer one."""
    channel = Folder(str(tmp_path))
    for step in (50, 100, 110, 200, 300):
        save(tmp_path, 1, step)
    start = Start(1, 110, "step-000000110", True)
    for step in (150, 200, 210, 220):
        save(tmp_path, 2, step)
    prune(channel, 2, 1, start, (1,), print, every=100)
    assert steps(tmp_path, 2) == [200, 220]
    assert steps(tmp_path, 1) == [100, 110]
    later = Start(2, 220, "step-000000220", True)
    save(tmp_path, 3, 230)
    prune(channel, 3, 1, later, (2, 1), print, every=100)
    assert (steps(tmp_path, 1), steps(tmp_path, 2), steps(tmp_path, 3)) == ([100], [200, 220], [230])


def test_a_gang_keeps_every_nth_step(bed: Bed) -> None:
    """From the payload to the disk, through a preemption."""
    job = bed.payload(
        script="""
        from airflow_gpu.runtime import gang
        with gang() as g:
            start = g.checkpoint.restore(lambda d: None)
            for step in range(start + 1, start + 8):
                with g.checkpoint.save(step) as d:
                    (d / f"rank{g.rank}").write_text(str(step))
        """,
        checkpoint={"interval": None, "keep": 2, "every": 3},
    )
    assert bed.run(job) == [0, 0]
    assert sorted(bed.manifests()) == [3, 6, 7]


def test_retention_leaves_what_programs_wrote(tmp_path: Path) -> None:
    path = save(tmp_path, 1, 10, name="checkpoint-10")
    manifest = Manifest.load(str(path))
    assert manifest is not None
    (path / "manifest.json").write_text(json.dumps({**manifest.to_dict(), "writer": "program"}))
    for step in (20, 30):
        save(tmp_path, 1, step)
    prune(Folder(str(tmp_path)), 1, 1, None, (), print)
    assert steps(tmp_path, 1) == [10, 30]


# -- programs that only take a folder ------------------------------------------------------------


PROGRAM = """
    import os, sys, time, pathlib
    root = pathlib.Path(os.environ["GANG_CHECKPOINT_DIR"])
    assert root.is_dir()
    if os.environ["RANK"] == "0":
        print(os.environ["GANG_RESTORE_DIR"].rpartition("/channel/")[2], os.environ["GANG_RESTORE_STEP"])
        for step in (500, 1000):
            d = root / f"epoch=3-step={step}"
            d.mkdir()
            (d / "model.bin").write_bytes(b"m" * step)
            DECLARE
        (root / "latest").symlink_to(d.name)
        (root / "notes").mkdir()
    END
"""


def test_clean_end_makes_the_newest_one_complete(bed: Bed) -> None:
    job = bed.payload(script=PROGRAM.replace("DECLARE", "").replace("END", ""))
    assert bed.run(job) == [0, 0]
    assert {s: p.name for s, p in bed.manifests().items()} == {1000: "epoch=3-step=1000"}
    [found] = complete(Folder(str(bed.channel)), 1, print)
    assert (found.manifest.writer, found.manifest.world_size) == ("program", 4)
    assert [(f.path, f.size) for f in found.manifest.files] == [("model.bin", 1000)]
    again = bed.payload(attempt=2, script=PROGRAM.replace("DECLARE", "").replace("END", ""))
    assert bed.run(again) == [0, 0]
    assert bed.log(0, life=2) == "checkpoints/0001/epoch=3-step=1000 1000\n"


def test_a_declared_one_outlives_a_failure_and_a_half_written_one_does_not(bed: Bed) -> None:
    declare = "if step == 500: (d / '.complete').touch()"
    job = bed.payload(script=PROGRAM.replace("DECLARE", declare).replace("END", "sys.exit(9)"))
    assert bed.run(job) == [9, 9]
    assert list(bed.manifests()) == [500]


def test_a_declared_one_is_sealed_while_the_program_goes_on(bed: Bed) -> None:
    job = bed.payload(
        nodes=1,
        ranks_per_node=1,
        constants={**QUICK, "LOOK_SECONDS": 0.3},
        script=PROGRAM.replace("DECLARE", "(d / '.complete').touch()").replace("END", "time.sleep(1000)"),
    )
    life = bed.start(job)
    eventually(lambda: sorted(bed.manifests()) == [500, 1000])
    life.signal(NOTICE)
    assert life.wait() == [75]


def test_an_end_by_the_notices_signal_is_not_clean(bed: Bed) -> None:
    job = bed.payload(
        script=PROGRAM.replace("DECLARE", "").replace("END", "open('up', 'w'); time.sleep(1000)")
    )
    life = bed.start(job)
    eventually((bed.folder / "up").exists)
    eventually((bed.channel / "checkpoints/0001/notes").exists)
    life.signal(NOTICE)
    assert life.wait() == [75, 75]
    assert bed.manifests() == {}


@pytest.mark.parametrize(
    ("name", "step"),
    [("checkpoint-500", 500), ("step_500", 500), ("epoch=3-step=500", 500), ("epoch2", 2), ("latest", None)],
)
def test_step_in_a_name(name: str, step: int | None) -> None:
    assert step_in(name) == step


def test_halves_of_the_handles_saves_are_not_a_programs(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints/0001"
    for name in ("step-000000010", "step-000000020", "9"):
        (root / name).mkdir(parents=True)
    (root / ".step-000000020.saving").touch()
    assert unfinished(Folder(str(tmp_path)), 1) == ["9", "step-000000010"]


# -- parts -----------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 10**9), max_size=60), st.integers(1, 9))
def test_files_are_shared_out_evenly(sizes: list[int], shares: int) -> None:
    files = [(size, f"f{n}") for n, size in enumerate(sizes)]
    parts = divide(files, shares)
    assert sorted(name for part in parts for name in part) == sorted(name for _, name in files)
    size_of = dict((name, size) for size, name in files)
    loads = sorted(sum(size_of[name] for name in part) for part in parts)
    assert loads[-1] - loads[0] <= max(sizes, default=0) + len(sizes)


def test_listing_leaves_out_what_is_no_content(tmp_path: Path) -> None:
    for name in (
        "a",
        "b/c",
        "manifest.json",
        "bad.json",
        ".complete",
        ".tmp-x-1",
        "b/manifest.json",
        ".metadata",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert listing(str(tmp_path)) == [".metadata", "a", "b/c", "b/manifest.json"]
