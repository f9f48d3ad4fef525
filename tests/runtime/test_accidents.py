"""Nodes that go, disks and stores that fail, in the middle of saving and restoring where nodes share no folder."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from airflow_gpu.runtime.copies import Copies
from airflow_gpu.runtime.opening import PREFIX, Scratch
from tests.beds.stores.started import Servers
from tests.beds.stores.wire import Refuse, Request, Wire
from tests.runtime.bed import NOTICE, QUICK, Bed, Life, eventually
from tests.runtime.objects import ObjectBed

MakeObjects = Callable[[str], ObjectBed]


class Deny(Wire):
    """A wire that refuses those requests of which ``no(method, path)`` says so."""

    status = 403

    def __init__(self, upstream: int) -> None:
        super().__init__(upstream)
        self.no: Callable[[str, str], bool] = lambda method, path: False

    def fault(self, request: Request) -> Refuse | None:
        return Refuse(self.status) if self.no(request.method, request.path) else None


@pytest.fixture
def store(make_objects: MakeObjects) -> ObjectBed:
    return make_objects("s3")


@pytest.fixture
def wire(servers: Servers) -> Iterator[Deny]:
    with Deny(servers["s3"].port) as wire:
        yield wire


def through(bed: ObjectBed, wire: Deny) -> dict[str, object]:
    return {**bed.options, "endpoint": f"http://127.0.0.1:{wire.port}"}


def marks(bed: Bed, what: str) -> list[Path]:
    return list(bed.folder.glob(f"channel/payload/0001/{what}-*"))


def kill_node(life: Life, node: int) -> None:
    agent = life.agent(node)
    os.kill(life.agents[node].pid, signal.SIGKILL)
    os.kill(agent, signal.SIGKILL)


SLOW = """
    import os, time
    from airflow_gpu.runtime import gang
    P = os.environ["GANG_PAYLOAD"]
    with gang() as g:
        start = g.checkpoint.restore()
        print("start", start, flush=True)
        n = 0
        for step in range(start, 10**6):
            time.sleep(0.02)
            due = g.checkpoint.due(step + 1)
            open(f"{P}/asked-{g.rank}", "w").close()
            if due:
                n += 1
                with g.checkpoint.save(step + 1) as d:
                    (d / f"rank-{g.rank}").write_text("x")
                    if n == SLOW:
                        open(f"{P}/wrote-{g.rank}", "w").close()
                        if g.node_rank == 0:
                            time.sleep(3)
"""


def test_a_node_goes_after_its_ranks_have_written(store: ObjectBed) -> None:
    """What was on it is gone with it: nothing is committed without it."""
    life = store.start(store.payload(script=SLOW.replace("SLOW", "1"), stop_grace=30))
    eventually(lambda: len(marks(store, "asked")) == 4)
    life.signal(NOTICE)
    eventually(lambda: len(marks(store, "wrote")) == 4)
    time.sleep(0.5)  # for node 1's ranks to say that they have written
    kill_node(life, 1)
    assert life.wait()[0] == 75, life.log()
    assert store.saved() == {}
    assert "WAS NOT SAVED" in life.log()


def test_a_node_goes_while_copies_are_made(bed: Bed) -> None:
    """The copies before stay: nothing that is whole goes for what is not."""
    job = bed.payload(script=SLOW.replace("SLOW", "2"), stop_grace=30, checkpoint=bed.two_levels())
    life = bed.start(job)
    eventually(lambda: len(marks(bed, "wrote")) == 4)
    [step] = bed.copies(0)
    life.signal(NOTICE)
    time.sleep(0.5)
    kill_node(life, 1)
    life.wait()
    assert set(bed.copies(0)) >= {step}
    assert set(bed.copies(1)) == {step}
    bed.start(job, restart=1)
    eventually(lambda: f"start {step}" in bed.log(3, life=2))


FOLDER = """
    import os, pathlib, time
    d = pathlib.Path(os.environ["GANG_CHECKPOINT_DIR"]) / "checkpoint-10"
    d.mkdir(parents=True, exist_ok=True)
    (d / f"rank-{os.environ['RANK']}.bin").write_bytes(b"x")
    time.sleep(0.5)
    if os.environ["RANK"] == "0":
        (d / ".complete").touch()
    pathlib.Path(os.environ["GANG_PAYLOAD"], f"ready-{os.environ['RANK']}").touch()
    time.sleep(WAIT)
"""


def test_a_node_goes_before_a_programs_folder_is_sealed(store: ObjectBed) -> None:
    life = store.start(store.payload(script=FOLDER.replace("WAIT", "600"), stop_grace=1))
    eventually(lambda: len(marks(store, "ready")) == 4)
    kill_node(life, 1)
    life.wait()
    assert store.saved() == {}


@pytest.mark.parametrize(("status", "seconds"), [(503, 8.0), (403, None)])
def test_a_manifest_is_refused_at_the_end(
    store: ObjectBed, wire: Deny, status: int, seconds: float | None
) -> None:
    """For a while: it comes later. For ever: it is said, and the life ends all the same."""
    wire.status = status
    wire.no = lambda method, path: method == "PUT" and "manifest.json" in path
    constants = {**QUICK, "RETRY_SECONDS": 3.0 if seconds is None else 60.0}
    job = store.payload(script=FOLDER.replace("WAIT", "0"), store=through(store, wire), constants=constants)
    life = store.start(job)
    if seconds is not None:
        eventually(lambda: len(marks(store, "ready")) == 4)
        time.sleep(seconds)
        wire.no = lambda method, path: False
    assert life.wait() == [0, 0], life.log()
    assert store.codes() == [0, 0, 0, 0]
    assert len(store.saved()) == (0 if seconds is None else 1), life.log()
    assert ("COULD NOT BE COMPLETED" in life.log()) is (seconds is None)


SAVES = """
    import os, time
    from airflow_gpu.runtime import gang
    with gang() as g:
        start = g.checkpoint.restore()
        print("start", start, flush=True)
        for step in range(start, 10**6):
            time.sleep(0.01)
            if g.checkpoint.due(step + 1):
                with g.checkpoint.save(step + 1) as d:
                    (d / f"rank-{g.rank}").write_text("x" * SIZE)
"""


def test_failed_saves_leave_nothing_and_copies_go_on(store: ObjectBed, wire: Deny) -> None:
    wire.no = lambda method, path: method == "PUT" and "/rank-" in path and "checkpoints" in path
    script = SAVES.replace("SIZE", "1000")
    plain = store.payload(script=script, store=through(store, wire), checkpoint={"interval": 0.1, "keep": 3})
    life = store.start(plain)
    eventually(lambda: life.log().count("WAS NOT SAVED") >= 8)
    steps = list((store.folder / "scratch").glob("*/channel/checkpoints/0001/step-*"))
    assert len(steps) <= 6, "those of the newest saves, on two nodes"
    life.end()

    both = store.payload(script=script, store=through(store, wire), checkpoint=store.two_levels(2.0))
    life = store.start(both, restart=1)
    eventually(lambda: "WAS NOT SAVED" in life.log())
    failed = life.log().count("own disks")
    eventually(lambda: life.log().count("own disks") >= failed + 3)
    assert life.log().count("WAS NOT SAVED") <= 8


def test_copies_that_one_node_cannot_make_go_everywhere(bed: Bed) -> None:
    script = (
        SAVES.replace("SIZE", "10")
        + "                    if g.rank == 3: time.sleep(0.1); __import__('shutil').rmtree(d)\n"
    )
    job = bed.payload(script=script, checkpoint=bed.two_levels())
    life = bed.start(job)
    eventually(lambda: life.log().count("WAS NOT SAVED") >= 12)
    assert len(bed.copies(0)) <= 2
    life.end()
    bed.start(job, restart=1)
    eventually(lambda: "start 0" in bed.log(3, life=2))


def test_one_rank_writes_for_all(bed: Bed) -> None:
    """Copies are of no use to such a program. It is said once, and all goes on as without them."""
    script = """
    import time
    from airflow_gpu.runtime import gang
    with gang() as g:
        def load(d):
            assert (d / "model.pt").read_text() == "weights"
        start = g.checkpoint.restore(load)
        print("start", start, flush=True)
        for step in range(start, 10**6):
            time.sleep(0.01)
            if g.checkpoint.due(step + 1):
                with g.checkpoint.save(step + 1) as d:
                    if g.rank == 0:
                        (d / "model.pt").write_text("weights")
    """
    job = bed.payload(script=script, checkpoint=bed.two_levels(0.3))
    life = bed.start(job)
    eventually(lambda: len(bed.manifests()) >= 2)
    assert life.log().count("WAS NOT SAVED") == 1
    assert "node 1 wrote no file of its own" in life.log()
    life.end()
    step = max(bed.manifests())
    bed.start(job, restart=1)
    eventually(lambda: f"start {step}" in bed.log(3, life=2))


def test_a_life_that_fails_on_its_copies_is_the_last_to_get_them(bed: Bed) -> None:
    script = SAVES.replace("SIZE", "10").replace(
        "g.checkpoint.restore()",
        "g.checkpoint.restore(lambda d: 1 / 0 if 'airflow-gpu-' in str(d) else None)",
    )
    job = bed.payload(script=script, checkpoint=bed.two_levels(0.3))
    life = bed.start(job)
    eventually(lambda: bed.manifests() and bed.copies(0) and max(bed.copies(0)) > max(bed.manifests()))
    life.end()
    assert bed.run(job, restart=1) == [1, 1]
    assert "ZeroDivisionError" in bed.read("lives/0002/failure.json")["message"]
    step = max(bed.manifests())
    bed.start(job, restart=2)
    eventually(lambda: f"start {step}" in bed.log(3, life=3))


def test_another_shape_starts_from_the_channel(bed: Bed) -> None:
    script = SAVES.replace("SIZE", "10")
    job = bed.payload(script=script, nodes=4, ranks_per_node=1, checkpoint=bed.two_levels(0.3))
    life = bed.start(job)
    eventually(lambda: bed.manifests() and bed.copies(0) and max(bed.copies(0)) > max(bed.manifests()))
    life.end()
    step = max(bed.manifests())
    bed.start(bed.payload(2, script=script, checkpoint=bed.two_levels(0.3)), job_id="job-2")
    eventually(lambda: f"start {step}" in bed.log(3, life=2))


def test_a_step_that_is_saved_again_is_not_written_over(bed: Bed) -> None:
    """Life 2 starts from a copy, and is killed while it saves the very same step."""
    script = """
    import os, time
    from airflow_gpu.runtime import gang
    with gang() as g:
        def load(d):
            assert (d / f"rank-{g.rank}").read_text() == "life 1"
        print("start", g.checkpoint.restore(load), flush=True)
        with g.checkpoint.save(20) as d:
            (d / f"rank-{g.rank}").write_text(f"life {int(os.environ['GANG_LIFE'])}")
            if int(os.environ["GANG_LIFE"]) == 2:
                print("halfway", flush=True)
                time.sleep(600)
        print("saved", flush=True)
        time.sleep(600)
    """
    job = bed.payload(script=script, checkpoint=bed.two_levels())
    for number, word in enumerate(("saved", "halfway", "start 20"), 1):
        life = bed.start(job, restart=number - 1)
        eventually(lambda number=number, word=word: word in bed.log(3, life=number))
        life.end()
    assert "start 20" in bed.log(0, life=3)


def test_a_node_that_cannot_fetch_does_not_condemn_the_checkpoint(store: ObjectBed) -> None:
    """Node 1 can write no file of more than 1 MiB. That is told of node 1, and the checkpoint stays good."""
    script = SAVES.replace("SIZE", "1500000")
    job = store.payload(script=script, checkpoint={"interval": 0.2, "keep": 3})
    life = store.start(job)
    eventually(lambda: store.saved())
    life.end()
    step = max(store.saved())
    other = store.start(job, restart=1, nodes=[1])
    agent = eventually(lambda: _below(other))
    resource.prlimit(agent, resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    assert store.start(job, restart=1, nodes=[0]).wait() == [1]
    failure = store.read("lives/0002/failure.json")
    assert (failure["cause"], failure["node"]) == ("node", 1)
    assert not [name for name in store.store.sizes("checkpoints") if "bad" in name]
    other.wait()
    store.start(job, restart=2)
    eventually(lambda: store.read("lives/0003.json"))
    assert store.read("lives/0003.json")["from"]["step"] == step


def _below(life: Life) -> int:
    try:
        return life.agent(0)
    except (OSError, ValueError):
        return 0


def test_a_notice_while_the_store_does_not_answer(store: ObjectBed, servers: Servers) -> None:
    job = store.payload(script=SAVES.replace("SIZE", "10"), constants={**QUICK, "TELL_SECONDS": 1.0})
    os.kill(servers["s3"].pid, signal.SIGSTOP)
    try:
        life = store.start(job)
        time.sleep(1.5)
        life.signal(NOTICE, node=0)
        life.signal(NOTICE, node=1)
        assert life.wait() == [75, 75]
    finally:
        os.kill(servers["s3"].pid, signal.SIGCONT)
    time.sleep(1.0)
    assert store.store.names("lives") == [], "nothing is claimed after that"


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    old = time.time() - 30 * 86400
    for name in ("gang-results", "airflow-gpu-data", "airflow-gpu-0123456789abcdef", "gang-node-abc"):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (old, old))
    gone = Copies(str(tmp_path), "s3://gone/run", 0, "1x1")
    mark = Path(gone.root).parent / ".copies"
    os.utime(mark, (old, old))
    Copies(str(tmp_path), "s3://a/run", 0, "1x1")
    left = {path.name for path in tmp_path.iterdir()}
    assert left >= {"gang-results", "airflow-gpu-data", "airflow-gpu-0123456789abcdef", "gang-node-abc"}
    assert mark.parent.name not in left


def test_copies_go_with_the_run_when_a_node_has_changed_its_rank(tmp_path: Path) -> None:
    before = Copies(str(tmp_path), "c", 0, "2x1")
    (Path(before.path(1, "step-000000001")) / "rank-0").write_bytes(b"x")
    Copies(str(tmp_path), "c", 1, "2x1").forget()
    assert list(tmp_path.iterdir()) == []


def test_two_agents_that_begin_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one comes when the first has made its scratch folder, and not locked it yet."""
    from airflow_gpu.runtime import opening

    real, others = opening.fcntl.flock, list[str]()

    def flock(descriptor: int, how: int) -> None:
        if how == opening.fcntl.LOCK_EX and not others:
            others.append("")
            others.append(Scratch(str(tmp_path)).folder("channel"))
        real(descriptor, how)

    monkeypatch.setattr(opening.fcntl, "flock", flock)
    mine = Path(Scratch(str(tmp_path)).folder("channel"))
    folders = {path for path in tmp_path.iterdir() if path.name.startswith(PREFIX)}
    assert folders == {mine.parent, Path(others[1]).parent}
    assert all((path / ".lock").exists() for path in folders)
