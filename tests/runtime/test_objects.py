"""Gangs whose channel is an object store: nodes that share no folder, on servers of each kind."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from airflow_gpu.runtime.objects import Objects
from tests.runtime.bed import NOTICE, QUICK, Life, eventually
from tests.runtime.objects import ObjectBed

Make = Callable[[str], ObjectBed]
KINDS = ["s3", "gcs", "azure"]

TRAIN = """
    import os, time
    from airflow_gpu.runtime import gang

    with gang() as g:
        state = {"sum": 0}
        def load(d):
            assert sorted(p.name for p in d.iterdir()) == ["manifest.json", "rank-0", "rank-1", "rank-2", "rank-3", "same"]
            state["sum"] = int((d / f"rank-{g.rank}").read_text().split()[0])
        start = g.checkpoint.restore(load)
        print("start", start, state["sum"], flush=True)
        for step in range(start, TOTAL):
            time.sleep(0.01)
            state["sum"] += step
            g.progress(step + 1, TOTAL)
            due = g.checkpoint.due(step + 1)
            if step == start:
                open(f"{os.environ['GANG_PAYLOAD']}/asked-{g.rank}", "w").close()
            if due:
                with g.checkpoint.save(step + 1) as d:
                    (d / f"rank-{g.rank}").write_text(f"{state['sum']} " + "x" * SIZE)
                    (d / "same").write_text(f"of node {g.node_rank}")
                print("saved", step + 1, flush=True)
        g.result(state["sum"])
"""


def train(total: int, size: int = 10) -> str:
    return TRAIN.replace("TOTAL", str(total)).replace("SIZE", str(size))


def running(bed: ObjectBed) -> None:
    eventually(lambda: len(list(bed.folder.glob("channel/payload/0001/asked-*"))) == 4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_notice_and_the_next_life(make_objects: Make, kind: str) -> None:
    bed = make_objects(kind)
    job = bed.payload(script=train(100_000, size=40 << 20 if kind == "s3" else 10))
    life = bed.start(job)
    running(bed)
    life.signal(NOTICE, node=1)
    assert life.wait() == [75, 75], life.log()
    assert bed.read("lives/0001/notice.json")["node"] == 1
    [(step, manifest)] = bed.saved().items()
    assert [f["path"] for f in manifest["files"]] == ["rank-0", "rank-1", "rank-2", "rank-3", "same"]
    folder = f"checkpoints/0001/step-{step:09d}"
    for entry in manifest["files"]:
        if entry["size"] < 1 << 20:
            assert hashlib.sha256(bed.store.read(f"{folder}/{entry['path']}")).hexdigest() == entry["sha256"]
    assert bed.store.read(f"{folder}/same") == b"of node 0", "the lowest node's, and nobody's mixture"
    assert bed.store.names("checkpoints/0001") == [f"step-{step:09d}"], "no mark is left"
    assert bed.left() == []

    script = job.parent / "script.py"
    script.write_text(script.read_text().replace("100000", str(step + 5)))
    assert bed.run(job, restart=1) == [0, 0]
    assert bed.read("lives/0002.json")["from"] == {"life": 1, "step": step, "dir": folder}
    for rank in range(4):
        assert bed.log(rank, life=2).splitlines()[0] == f"start {step} {sum(range(step))}"
    assert bed.read("lives/0002/result.json") == sum(range(step + 5))
    assert bed.codes(life=2) == [0, 0, 0, 0]
    assert bed.read("lives/0002/progress.json")["step"] == step + 5
    assert bed.left() == []


def test_secrets_stay_where_they_are(make_objects: Make) -> None:
    bed = make_objects("s3")
    job = bed.payload(script="print('hello')")
    life = bed.start(job)
    assert life.wait() == [0, 0]
    key = bed.secrets["AWS_SECRET_ACCESS_KEY"]
    assert key not in life.log()
    assert key not in job.read_text()
    for name in bed.store.sizes("lives"):
        assert key.encode() not in bed.store.read(f"lives/{name}")


def test_old_checkpoints_go_and_the_interval_is_kept(make_objects: Make) -> None:
    bed = make_objects("s3")
    script = train(100_000).replace('print("saved"', 'state["n"] = state.get("n", 0) + 1; print("saved"')
    script = script.replace("g.result(", "#").replace(
        "flush=True)\n        #", "flush=True)\n                if state['n'] == 5: break\n        g.result("
    )
    assert bed.run(bed.payload(script=script, checkpoint={"interval": 0.05, "keep": 2})) == [0, 0]
    steps = [int(line.split()[1]) for line in bed.log(0).splitlines() if line.startswith("saved")]
    assert len(steps) == 5
    assert sorted(bed.saved()) == steps[-2:]
    assert bed.store.names("checkpoints/0001") == [f"step-{step:09d}" for step in steps[-2:]]


PROGRAM = """
    import os, pathlib, time
    root = pathlib.Path(os.environ["GANG_CHECKPOINT_DIR"])
    start = os.environ["GANG_RESTORE_DIR"]
    print("start", sorted(p.name for p in pathlib.Path(start).iterdir()) if start else None, flush=True)
    for step in (10, 20):
        d = root / f"checkpoint-{step}"
        (d / "shards").mkdir(parents=True, exist_ok=True)
        (d / "shards" / f"rank {os.environ['RANK']}.bin").write_bytes(os.urandom(1000))
        if os.environ["LOCAL_RANK"] == "0":
            time.sleep(0.3)
            (d / ".complete").touch()
            time.sleep(1.0)
        if step == 20 and os.environ["LOCAL_RANK"] == "0":
            import shutil
            shutil.rmtree(root / "checkpoint-10")
            time.sleep(1.0)
"""


def test_programs_that_only_know_folders(make_objects: Make) -> None:
    bed = make_objects("s3")
    job = bed.payload(script=PROGRAM, constants={**QUICK, "LOOK_SECONDS": 0.2})
    life = bed.start(job)
    assert life.wait() == [0, 0]
    assert list(bed.saved()) == [20], "what a program removes goes from the store as well: " + life.log()
    manifest = bed.saved()[20]
    assert [f["path"] for f in manifest["files"]] == [f"shards/rank {rank}.bin" for rank in range(4)]
    assert manifest["writer"] == "program"
    for node in range(2):  # the record of success would end a restart at once
        bed.store.remove(f"lives/0001/nodes/{node:04d}.json")
    assert bed.run(job, restart=1) == [0, 0]
    assert bed.log(3, life=2).splitlines() == ["start ['manifest.json', 'shards']"]


def damaged(bed: ObjectBed, first: Life) -> None:
    """Wait until a second checkpoint is there, kill the gang, and flip a byte in the newest one."""
    eventually(lambda: len(bed.saved()) >= 2)
    first.end()
    step = max(bed.saved())
    name = f"checkpoints/0001/step-{step:09d}/rank-2"
    data = bytearray(bed.store.read(name))
    data[-1] ^= 1
    bed.store.replace(name, bytes(data))


def test_a_damaged_one_is_passed_over(make_objects: Make) -> None:
    bed = make_objects("s3")
    job = bed.payload(script=train(100_000), checkpoint={"interval": 0.05, "keep": 50})
    first = bed.start(job)
    damaged(bed, first)
    steps = sorted(bed.saved())
    second = bed.start(job, restart=1)
    eventually(lambda: bed.read("lives/0002.json"))
    assert bed.read("lives/0002.json")["from"]["step"] == steps[-2]
    assert "has other content than was saved" in second.log()


def test_a_damaged_one_that_the_claim_had_no_time_for(make_objects: Make) -> None:
    """The nodes find it when they fetch it: nothing is started, and the next life takes the one before."""
    bed = make_objects("s3")
    constants = {**QUICK, "VERIFY_SECONDS": 0.0}
    job = bed.payload(script=train(100_000), checkpoint={"interval": 0.05, "keep": 50}, constants=constants)
    first = bed.start(job)
    damaged(bed, first)
    steps = sorted(bed.saved())
    second = bed.start(job, restart=1)
    assert second.wait() == [1, 1], second.log()
    assert "is damaged, the next life will not take it" in bed.read("lives/0002/failure.json")["message"]
    assert bed.codes(life=2) == []
    third = bed.start(job, restart=2)
    eventually(lambda: bed.read("lives/0003.json"))
    assert bed.read("lives/0003.json")["from"]["step"] == steps[-2]
    third.end()


def test_a_seed_of_another_store(make_objects: Make) -> None:
    """A run that was on S3 goes on where nodes share a folder, and the other way round."""
    there = make_objects("s3")
    job = there.payload(script=train(100_000))
    life = there.start(job)
    running(there)
    life.signal(NOTICE)
    assert life.wait() == [75, 75]
    [step] = there.saved()
    here = make_objects("gcs")
    seed = {"channel": there.uri, "store": there.options, "life": 1, "step": step}
    job = here.payload(
        script=train(step + 3), first_life=2, seed=seed, secrets_file=str(there.folder / "secrets.json")
    )
    life = here.start(job)
    assert life.wait() == [0, 0], life.log()
    assert here.read("lives/0002.json")["from"]["seed"] is True
    assert here.log(1, life=2).splitlines()[0] == f"start {step} {sum(range(step))}"


def test_what_a_killed_agent_left_is_removed_by_the_next(make_objects: Make) -> None:
    bed = make_objects("s3")
    job = bed.payload(script=train(100_000))
    life = bed.start(job)
    running(bed)
    life.end()
    left = bed.left()
    assert len(left) == 2
    other = bed.start(job, restart=1)
    eventually(lambda: bed.read("lives/0002.json"))
    eventually(lambda: not set(left) & set(bed.left()))
    eventually(lambda: len(bed.left()) == 2, "the living ones have theirs")
    other.end()


def test_without_the_library_it_says_what_to_do(make_objects: Make, tmp_path: Path) -> None:
    bed = make_objects("s3")
    (tmp_path / "obstore.py").write_text("raise ImportError('no obstore here')")
    life = bed.start(bed.payload(script="print('hello')"), PYTHONPATH=str(tmp_path))
    assert life.wait() == [64, 64]
    assert "add it to the image (pip install obstore)" in life.log()


def test_a_store_that_is_away_is_waited_for_and_named(make_objects: Make) -> None:
    bed = make_objects("s3")
    job = bed.payload(
        script="print('hello')",
        store={**bed.options, "endpoint": "http://127.0.0.1:9"},
        constants={**QUICK, "AWAY_SECONDS": 3.0},
    )
    life = bed.start(job)
    codes = life.wait()
    assert codes == [77, 77], "the gang has not become whole; the driver tries again"
    assert bed.uri in life.log()


def test_names_that_stores_spell_differently(make_objects: Make, tmp_path: Path) -> None:
    for kind in KINDS:
        bed = make_objects(kind)
        names = ["ü ö/%20#?&=+.bin", "a b", "empty", "deep/er/x"]
        folder = Path(bed.store.folder("checkpoints/0001/x"))
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(b"" if name == "empty" else name.encode() * 1000)
        entries = bed.store.upload("checkpoints/0001/x", names)
        assert bed.store.sizes("checkpoints/0001/x") == {e.path: e.size for e in entries}
        other = Objects(bed.uri, {**bed.options, **_keys(bed)}, str(tmp_path / kind))
        assert other.fetch("checkpoints/0001/x", entries, None) == (None, True)
        for name in names:
            assert (Path(other.path("checkpoints/0001/x")) / name).read_bytes() == (
                folder / name
            ).read_bytes()


def _keys(bed: ObjectBed) -> dict[str, str]:
    return json.loads(json.dumps({name.lower(): value for name, value in bed.secrets.items()}))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_a_log_are_written_once(make_objects: Make, kind: str) -> None:
    store = make_objects(kind).store
    assert store.append("logs/rank-00000", 0, b"hello ") == 6
    assert store.append("logs/rank-00000", 0, b"hello world") == 6, (
        "its answer was lost; the rest is the next piece"
    )
    assert store.append("logs/rank-00000", 6, b"world") == 5
    assert store.names("logs/rank-00000") == ["000000000000000", "000000000000006"]
    assert store.read("logs/rank-00000/000000000000000") == b"hello "


def test_options_as_people_type_them(make_objects: Make, tmp_path: Path) -> None:
    bed = make_objects("s3")
    typed = {
        name: str(value).lower() if isinstance(value, bool) else value for name, value in bed.options.items()
    }
    store = Objects(bed.uri, {**typed, **_keys(bed)}, str(tmp_path))
    store.create("x", b"1")
    assert store.read("x") == b"1"


def test_a_job_without_credentials_is_told_what_would_do(make_objects: Make) -> None:
    bed = make_objects("s3")
    bed.secrets = {}
    job = bed.payload(script="print('hello')", constants={**QUICK, "AWAY_SECONDS": 1.0}, barrier_timeout=3.0)
    life = bed.start(job, AWS_EC2_METADATA_DISABLED="false")
    assert life.wait() == [78, 78]
    assert "THIS JOB HAS NO CREDENTIALS" in life.log()
    assert "Gang(secrets=" in life.log()
