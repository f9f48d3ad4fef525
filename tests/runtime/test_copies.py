"""Two levels of checkpoints: quick copies on the nodes' own disks, and some that go to the channel."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_gpu.runtime.checkpoint import Start
from airflow_gpu.runtime.copies import Copies, Copy, Levels, common
from tests.runtime.bed import NOTICE, Bed, Life, eventually
from tests.runtime.objects import ObjectBed

Make = Callable[..., Bed]
MakeObjects = Callable[[str], ObjectBed]

TRAIN = """
    import time
    from airflow_gpu.runtime import gang

    with gang() as g:
        total = {"sum": 0}
        def load(d):
            print("from", d, flush=True)
            total["sum"] = int((d / f"rank-{g.rank}").read_text())
        start = g.checkpoint.restore(load)
        print("start", start, total["sum"], flush=True)
        for step in range(start, TOTAL):
            time.sleep(0.01)
            total["sum"] += step
            if g.checkpoint.due(step + 1):
                with g.checkpoint.save(step + 1) as d:
                    (d / f"rank-{g.rank}").write_text(str(total["sum"]))
        g.result(total["sum"])
"""
FOREVER = 10**6


def train(total: int = FOREVER) -> str:
    return TRAIN.replace("TOTAL", str(total))


def with_copies(bed: Bed, job: Path, restart: int = 0) -> tuple[Life, int]:
    """Run a life until it has some copies, and kill it; the furthest step that both nodes have whole."""
    life = bed.start(job, restart=restart)
    first = eventually(lambda: max(bed.copies(0), default=0), "no copy was made")
    eventually(lambda: max(bed.copies(0), default=0) > first)
    life.end()
    return life, max(set(bed.copies(0)) & set(bed.copies(1)))


@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_the_next_life_goes_on_from_the_copies(make_bed: Make, make_objects: MakeObjects, kind: str) -> None:
    bed = make_bed() if kind == "folder" else make_objects(kind)
    job = bed.payload(script=train(), checkpoint=bed.two_levels())
    _, step = with_copies(bed, job)
    assert bed.saves(1) == {}, "nothing has gone to the channel"
    bed.payload(script=train(step + 5), checkpoint=bed.two_levels())
    life = bed.start(job, restart=1)
    assert life.wait() == [0, 0], life.log()
    assert bed.read("lives/0002.json")["from"] is None
    assert bed.read("lives/0002/local.json")["from"] == {"life": 1, "step": step}
    for rank in range(4):
        assert f"start {step} {sum(range(step))}" in bed.log(rank, life=2)
    assert bed.read("lives/0002/result.json") == sum(range(step + 5))
    assert list((bed.folder / "disk").iterdir()) == [], "a run that has succeeded leaves no copies"


def test_some_go_to_the_channel_and_a_notice_does(bed: Bed) -> None:
    job = bed.payload(script=train(), checkpoint=bed.two_levels(interval=0.5))
    life = bed.start(job)
    eventually(lambda: len(bed.manifests()) >= 2 and bed.copies(0))
    life.signal(NOTICE)
    assert life.wait() == [75, 75]
    newest = max(bed.manifests())
    assert all(step >= newest for step in bed.copies(0)), "older copies are of no use"
    said = life.log()
    assert "is complete on the nodes' own disks" in said
    assert said.count(f"checkpoint of step {newest} is complete:") == 1
    assert bed.run(bed.payload(script=train(newest + 3), checkpoint=bed.two_levels()), restart=1) == [0, 0]
    assert bed.read("lives/0002.json")["from"]["step"] == newest
    assert bed.read("lives/0002/local.json")["from"] is None


@pytest.mark.parametrize("nodes", ["0", "1", "0 and 1"])
def test_a_folder_that_cannot_be_used_costs_the_copies_and_nothing_else(bed: Bed, nodes: str) -> None:
    """On one node or on all: said in its log, and every save goes to the channel."""
    run = bed.folder / "disk" / f"airflow-gpu-{hashlib.sha256(str(bed.channel).encode()).hexdigest()[:16]}"
    run.mkdir(parents=True, mode=0o700)
    for node in nodes.split(" and "):
        (run / f"node-000{node}").write_text("not a folder: here not even root may write")
    life = bed.start(bed.payload(script=train(150), checkpoint=bed.two_levels(interval=0.2)))
    assert life.wait() == [0, 0], life.log()
    for node in (0, 1):
        assert ("CHECKPOINTING.LOCAL CANNOT BE USED" in life.logs[node].read_text()) is (str(node) in nodes)
    assert "there are no copies" in life.logs[0].read_text()
    assert bed.copies(0) == bed.copies(1) == {}
    assert len(bed.manifests()) >= 2, "the durable saves go on"
    assert bed.read("lives/0001/local.json")["from"] is None


def flip(folder: Path) -> None:
    [path] = folder.glob("rank-3")
    path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))


SPOILT = {
    "a node without its disk": lambda bed: shutil.rmtree(bed.folder / "disk" / _run(bed) / "node-0001"),
    "a part that was never finished": lambda bed: [
        (p / "manifest.json").unlink() for p in bed.copies(1).values()
    ],
    "a flipped bit": lambda bed: [flip(path) for path in bed.copies(1).values()],
    "a manifest that says anything": lambda bed: [
        (path / "manifest.json").write_text("[" * 10000) for path in bed.copies(0).values()
    ],
    "saved by a gang of another shape": lambda bed: [
        path.joinpath("manifest.json").write_text(
            json.dumps({**json.loads(path.joinpath("manifest.json").read_text()), "writer": "4x1"})
        )
        for path in bed.copies(0).values()
    ],
}


def _run(bed: Bed) -> str:
    [run] = (bed.folder / "disk").iterdir()
    return run.name


@pytest.mark.parametrize("what", SPOILT)
def test_else_it_starts_from_the_channel(bed: Bed, what: str) -> None:
    """All nodes from the same step, whichever node's part is not what it should be."""
    job = bed.payload(script=train(), checkpoint=bed.two_levels(interval=0.3))
    life = bed.start(job)
    eventually(lambda: bed.manifests() and bed.copies(0) and max(bed.copies(0)) > max(bed.manifests()))
    life.end()
    SPOILT[what](bed)
    step = max(bed.manifests())
    life = bed.start(bed.payload(script=train(step + 500), checkpoint=bed.two_levels()), restart=1)
    assert life.wait() == [0, 0], life.log()
    for rank in range(4):
        assert f"start {step} {sum(range(step))}" in bed.log(rank, life=2), what


def test_a_life_that_saved_nothing_itself_hands_its_start_on(bed: Bed) -> None:
    job = bed.payload(script=train(), checkpoint=bed.two_levels())
    _, step = with_copies(bed, job)
    slow = bed.two_levels() | {"local_interval": 600}
    second = bed.start(bed.payload(script=train(), checkpoint=slow), restart=1)
    eventually(lambda: f"start {step} " in bed.log(3, life=2))
    second.end()
    third = bed.start(bed.payload(script=train(step + 5), checkpoint=slow), restart=2)
    assert third.wait() == [0, 0], third.log()
    assert bed.read("lives/0003/local.json")["from"] == {"life": 1, "step": step}


def test_other_runs_on_the_same_disk(tmp_path: Path) -> None:
    mine, other = Copies(str(tmp_path), "s3://a/run", 0, "2x2"), Copies(str(tmp_path), "s3://b/run", 0, "2x2")
    (Path(mine.path(1, "step-000000005")) / "x").write_text("x")
    mine.keep(1, "step-000000005", 5, 2)
    assert [copy.step for copy in mine.held()] == [5]
    assert other.held() == []
    other.forget()
    assert [copy.step for copy in mine.held()] == [5]


@pytest.mark.parametrize("trap", ["a link", "open to others"])
def test_a_folder_that_others_may_write_to_is_not_used(tmp_path: Path, trap: str) -> None:
    """In /dev/shm or /tmp anybody may have made it, and what lies there is loaded."""
    run = Path(Copies(str(tmp_path), "s3://a/run", 0, "2x2").root).parent
    assert run.stat().st_mode & 0o777 == 0o700
    if trap == "a link":
        run.rename(tmp_path / "elsewhere")
        run.symlink_to(tmp_path / "elsewhere")
    else:
        run.chmod(0o777)
    with pytest.raises(PermissionError, match="others can write to it"):
        Copies(str(tmp_path), "s3://a/run", 0, "2x2")


def test_levels() -> None:
    levels = Levels(300.0, None, now=0.0)
    assert not levels.to_channel(299.0)
    assert levels.to_channel(300.0)
    levels.saved(300.0, 310.0)
    assert not levels.to_channel(609.0)
    assert levels.to_channel(610.0)
    assert not Levels(None, None, 0.0).to_channel(1e9)
    dear, cheap = Levels(300.0, 3600.0, 0.0), Levels(300.0, 3600.0, 0.0)
    dear.saved(0.0, 100.0)
    cheap.saved(0.0, 1.0)
    assert dear.interval is not None
    assert cheap.interval is not None
    assert cheap.interval < 300.0 < dear.interval


PARTS = st.lists(
    st.builds(
        Copy,
        folder=st.integers(1, 4),
        life=st.integers(1, 4),
        name=st.just("x"),
        step=st.integers(1, 6),
        world_size=st.just(4),
        shape=st.sampled_from(["2x2", "2x2", "2x2", "4x1"]),
    ),
    max_size=6,
)


@given(
    held=st.lists(PARTS, min_size=1, max_size=3),
    ancestors=st.sets(st.integers(1, 4)),
    start=st.none()
    | st.builds(
        Start, life=st.integers(1, 4), step=st.integers(1, 6), name=st.just("x"), verified=st.just(True)
    ),
)
def test_what_is_common(held: list[list[Copy]], ancestors: set[int], start: Start | None) -> None:
    found = common(held, ancestors, start, "2x2")
    assert found == sorted(found, key=lambda one: (one.folder, one.step), reverse=True)
    for copy in found:
        for node in held:
            assert any((c.life, c.step, c.shape) == (copy.life, copy.step, "2x2") for c in node)
        assert copy.folder in ancestors
        if start is not None:
            assert copy.step > start.step
            assert copy.folder >= start.life
