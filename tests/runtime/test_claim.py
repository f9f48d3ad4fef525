"""Claims: who may compute, and from where. The rules of docs/run-directory.md, one by one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from airflow_gpu.runtime import claim as claims
from airflow_gpu.runtime.checkpoint import life_folder
from airflow_gpu.runtime.claim import Claim, NotClaimed, claim
from airflow_gpu.runtime.files import Exists, Folder, Missing, Torn, read_json, to_json
from airflow_gpu.runtime.job import Job, Node
from airflow_gpu.runtime.manifest import MANIFEST, Manifest, hash_files, listing
from tests.runtime.bed import Bed, eventually


def a_job(folder: Path, **fields: Any) -> Job:
    body = {
        "v": 1,
        "attempt": 1,
        "channel": str(folder),
        "nodes": 1,
        "ranks_per_node": 2,
        "command": ["true"],
        "barrier_timeout": 60,
    }
    return Job.of({**body, **fields}, str(folder))


def a_node(job_id: str = "a", restart: int = 0) -> Node:
    return Node(rank=0, job_id=job_id, restart=restart, address="127.0.0.1")


def take(folder: Path, job_id: str = "a", restart: int = 0, **fields: Any) -> Claim:
    said: list[str] = []
    job = a_job(folder, **fields)
    seed = None if job.seed is None else Folder(job.seed.channel)
    got = claim(Folder(str(folder)), job, a_node(job_id, restart), "127.0.0.1:1", said.append, seed)
    (folder / "said").write_text("\n".join(said))
    return got


def fence(folder: Path, number: int, attempt: int) -> None:
    Folder(str(folder)).create(
        f"lives/{number:04d}.json",
        to_json({"v": 1, "kind": "fence", "life": number, "attempt": attempt, "reason": "gone"}),
    )


def save(folder: Path, life: int, step: int, name: str = "", text: str = "state") -> Path:
    """A complete checkpoint, as a life would leave it."""
    name = name or f"step-{step:09d}"
    path = folder / life_folder(life) / name
    path.mkdir(parents=True)
    for rank in range(2):
        (path / f"rank{rank}.bin").write_text(f"{text} of rank {rank} at {step}")
    manifest = Manifest(life, step, 2, tuple(hash_files(str(path), listing(str(path)))))
    (path / MANIFEST).write_bytes(to_json(manifest.to_dict()))
    return path


# -- may it compute? -------------------------------------------------------------------------------


def test_first_claim(tmp_path: Path) -> None:
    got = take(tmp_path)
    assert (got.life, got.start) == (1, None)
    assert len(got.token) == 64
    for name in ("lives/0001/nodes", "lives/0001/logs", "checkpoints/0001"):
        assert (tmp_path / name).is_dir()


def test_twin_is_refused(tmp_path: Path) -> None:
    take(tmp_path, "a")
    with pytest.raises(NotClaimed, match=r"job b is a twin: lives/0001.json was claimed by job a"):
        take(tmp_path, "b")


def test_each_restart_claims_once_and_in_order(tmp_path: Path) -> None:
    assert take(tmp_path, restart=0).life == 1
    assert take(tmp_path, restart=2).life == 2
    for late in (0, 1, 2):
        with pytest.raises(NotClaimed, match="comes too late"):
            take(tmp_path, restart=late)
    assert take(tmp_path, restart=3).life == 3


def test_fence_beats_a_late_claim(tmp_path: Path) -> None:
    take(tmp_path)
    fence(tmp_path, 2, attempt=1)
    with pytest.raises(NotClaimed, match=r"attempt 1 is fenced by lives/0002\.json"):
        take(tmp_path, restart=1)
    assert take(tmp_path, "b", attempt=2).life == 3  # the next attempt is not concerned


def test_later_attempt_ends_the_earlier(tmp_path: Path) -> None:
    take(tmp_path, "b", attempt=2)
    with pytest.raises(NotClaimed, match="belongs to attempt 2"):
        take(tmp_path, "a", attempt=1)


def test_fence_of_a_later_attempt_counts(tmp_path: Path) -> None:
    fence(tmp_path, 1, attempt=3)
    for attempt in (1, 2, 3):
        with pytest.raises(NotClaimed):
            take(tmp_path, attempt=attempt)
    assert take(tmp_path, attempt=4).life == 2


def test_first_life_of_a_moved_channel(tmp_path: Path) -> None:
    assert take(tmp_path, first_life=7).life == 7
    assert take(tmp_path, restart=1, first_life=7).life == 8


def test_fence_between_reading_and_claiming_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create, times = Folder.create, []

    def fenced_first(self: Folder, name: str, data: bytes, *, private: bool = False) -> None:
        if name == "lives/0001.json" and not times:
            times.append(1)
            fence(tmp_path, 1, attempt=1)
        create(self, name, data, private=private)

    monkeypatch.setattr(Folder, "create", fenced_first)
    with pytest.raises(NotClaimed, match="fenced"):
        take(tmp_path)
    assert read_json(Folder(str(tmp_path)), "lives/0001.json")["kind"] == "fence"


def test_entry_that_cannot_be_read_stops_the_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("airflow_gpu.runtime.files.TORN_SECONDS", 0.1)
    monkeypatch.setattr(claims.read_json, "__defaults__", (0.1,))
    (tmp_path / "lives").mkdir()
    (tmp_path / "lives/0001.json").write_text('{"v": 1, "kind"')
    with pytest.raises(NotClaimed, match="may be a fence"):
        take(tmp_path)


RACE = """
import sys, time
sys.path.insert(0, sys.argv[1])
from airflow_gpu.runtime.claim import claim, NotClaimed
from airflow_gpu.runtime.files import Folder
from airflow_gpu.runtime.job import Job, Node
folder, who, start = sys.argv[2], sys.argv[3], float(sys.argv[4])
job = Job.of({"v": 1, "attempt": 1, "channel": folder, "nodes": 1, "ranks_per_node": 1, "command": ["x"]}, folder)
time.sleep(max(0, start - time.time()))
try:
    got = claim(Folder(folder), job, Node(0, who.split(":")[0], int(who.split(":")[1]), "x"), "x:1", print)
    print("life", got.life)
except NotClaimed as error:
    sys.exit(76)
"""


@pytest.mark.parametrize("kind", ["twins", "restarts"])
def test_racing_claims(tmp_path: Path, kind: str) -> None:
    import time

    root = str(Path(claims.__file__).parents[2])
    start = time.time() + 1.0
    people = [f"{n}:0" if kind == "twins" else f"a:{n}" for n in range(16)]
    racers = [
        subprocess.Popen(
            [sys.executable, "-S", "-c", RACE, root, str(tmp_path), who, str(start)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for who in people
    ]
    said = [racer.communicate(timeout=60)[0] for racer in racers]
    won = [int(words.split()[-1]) for racer, words in zip(racers, said, strict=True) if racer.returncode == 0]
    assert all(racer.returncode in (0, 76) for racer in racers)
    assert len(won) == len(set(won)) == len(list((tmp_path / "lives").glob("*.json")))
    assert sorted(won) == list(range(1, len(won) + 1))
    if kind == "twins":
        assert won == [1]
    else:  # whoever won, restarts grow with the lives
        restarts = [json.loads(p.read_text())["restart"] for p in sorted((tmp_path / "lives").glob("*.json"))]
        assert restarts == sorted(set(restarts))
        assert restarts[-1] == 15


# -- from where? -----------------------------------------------------------------------------------


def start_of(got: Claim) -> tuple[int, int] | None:
    return (got.start.life, got.start.step) if got.start else None


def test_furthest_complete_checkpoint_of_the_newest_life(tmp_path: Path) -> None:
    take(tmp_path)
    save(tmp_path, 1, 100)
    save(tmp_path, 1, 300)
    save(tmp_path, 1, 200)
    (tmp_path / "checkpoints/0001/step-000000400").mkdir()  # torn: no manifest
    got = take(tmp_path, restart=1)
    assert start_of(got) == (1, 300)
    assert got.start is not None
    assert got.start.verified
    assert read_json(Folder(str(tmp_path)), "lives/0002.json")["from"] == {
        "life": 1,
        "step": 300,
        "dir": "checkpoints/0001/step-000000300",
    }


def test_life_without_checkpoints_hands_on_its_own_start(tmp_path: Path) -> None:
    take(tmp_path)
    save(tmp_path, 1, 100)
    assert start_of(take(tmp_path, restart=1)) == (1, 100)
    save(tmp_path, 1, 900)  # life 1 was superseded, and still writes
    got = take(tmp_path, restart=2)
    assert start_of(got) == (1, 100)
    assert got.ancestors == (2, 1)


def test_chain_over_several_lives_and_attempts(tmp_path: Path) -> None:
    take(tmp_path)
    save(tmp_path, 1, 10)
    take(tmp_path, restart=1)
    save(tmp_path, 2, 20)
    take(tmp_path, restart=2)
    fence(tmp_path, 4, attempt=1)
    save(tmp_path, 2, 25)  # late
    save(tmp_path, 1, 99)  # late
    assert start_of(take(tmp_path, "b", attempt=2)) == (2, 20)


def test_fresh_attempt_cuts_the_chain_but_resumes_its_own_restarts(tmp_path: Path) -> None:
    take(tmp_path)
    save(tmp_path, 1, 100)
    assert start_of(take(tmp_path, "b", attempt=2, resume=False)) is None
    assert start_of(take(tmp_path, "b", 1, attempt=2, resume=False)) is None
    save(tmp_path, 3, 7)
    assert start_of(take(tmp_path, "b", 2, attempt=2, resume=False)) == (3, 7)
    assert start_of(take(tmp_path, "c", attempt=3)) == (3, 7)  # life 4 has none, and hands on its start


@pytest.mark.parametrize("damage", ["bit", "short", "long", "missing", "manifest", "outside"])
def test_damaged_checkpoint_is_passed_over(tmp_path: Path, damage: str) -> None:
    take(tmp_path)
    save(tmp_path, 1, 100)
    path = save(tmp_path, 1, 200)
    file = path / "rank1.bin"
    data = file.read_bytes()
    if damage == "bit":
        file.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    elif damage == "short":
        file.write_bytes(data[:-1])
    elif damage == "long":
        file.write_bytes(data + b"!")
    elif damage == "missing":
        file.unlink()
    elif damage == "manifest":
        (path / MANIFEST).write_bytes((path / MANIFEST).read_bytes()[:-20])
    else:
        body = json.loads((path / MANIFEST).read_text())
        body["files"][0]["path"] = "../../../secret"
        (path / MANIFEST).write_text(json.dumps(body))
    assert start_of(take(tmp_path, restart=1)) == (1, 100)
    assert "step-000000200 is passed over" in (tmp_path / "said").read_text()


def test_when_all_of_a_life_is_damaged_its_ancestors_serve(tmp_path: Path) -> None:
    take(tmp_path)
    save(tmp_path, 1, 50)
    save(tmp_path, 1, 100)
    take(tmp_path, restart=1)
    save(tmp_path, 1, 500)  # late: beyond where the chain left life 1
    (save(tmp_path, 2, 200) / "rank0.bin").unlink()
    (tmp_path / "checkpoints/0001/step-000000100/rank0.bin").unlink()
    assert start_of(take(tmp_path, restart=2)) == (1, 50)


def test_hashing_is_bounded(tmp_path: Path) -> None:
    take(tmp_path)
    save(tmp_path, 1, 100)
    got = take(tmp_path, restart=1, barrier_timeout=0)  # no time at all
    assert start_of(got) == (1, 100)
    assert got.start is not None
    assert not got.start.verified
    assert "the rest comes later" in (tmp_path / "said").read_text()


# -- agents that claim -----------------------------------------------------------------------------


def test_agents_of_a_twin_leave_with_76(bed: Bed) -> None:
    job = bed.payload(script="import time; time.sleep(1.5)")
    life = bed.start(job, "job-1")
    bed.await_file("lives/0001.json")
    twin = bed.start(job, "job-2")
    assert twin.wait() == [76, 76]
    assert "job-2 is a twin" in twin.log()
    assert life.wait() == [0, 0]
    assert len(bed.entries(1)) == 4
    assert not (bed.channel / "lives/0002.json").exists()


def test_a_gang_that_is_started_again_after_its_success_does_nothing(bed: Bed) -> None:
    job = bed.payload(script="import os; open('ran', 'a').write('x')")
    assert bed.run(job) == [0, 0]
    again = bed.start(job, restart=1)
    assert again.wait() == [0, 0]
    assert "life 1 has succeeded" in again.log()
    assert (bed.folder / "ran").read_text() == "xxxx"
    assert not (bed.channel / "lives/0002.json").exists()
    # One record less is no success, and neither is one of another attempt.
    (bed.channel / "lives/0001/nodes/0001.json").rename(bed.folder / "record")
    assert take(bed.channel, "job-1", restart=2).life == 2
    (bed.folder / "record").rename(bed.channel / "lives/0001/nodes/0001.json")
    assert take(bed.channel, "job-2", attempt=2).life == 3


def test_agents_that_start_after_the_fence_leave_with_76(bed: Bed) -> None:
    job = bed.payload(script="open('started', 'w')")
    fence(bed.channel, 1, attempt=1)
    assert bed.run(job) == [76, 76]
    assert not (bed.folder / "started").exists()


# -- the folder ------------------------------------------------------------------------------------


@pytest.mark.parametrize("links", [True, False])
def test_create_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    if not links:
        monkeypatch.setattr(os, "link", lambda a, b: (_ for _ in ()).throw(OSError(95, "not supported")))
    folder = Folder(str(tmp_path))
    winners: list[int] = []

    def write(number: int) -> None:
        try:
            folder.create("a/b.json", to_json({"who": number}))
            winners.append(number)
        except Exists as error:
            assert error.args == ("a/b.json",)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read_json(folder, "a/b.json") == {"who": winners[0]}
    assert len(winners) == 1
    assert folder.names("a") == os.listdir(tmp_path / "a") == ["b.json"]


def test_create_whose_first_reply_was_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link: Callable[..., None] = os.link

    def twice(a: str, b: str) -> None:
        link(a, b)
        link(a, b)  # as an NFS client repeats a request: the second answer is "exists"

    monkeypatch.setattr(os, "link", twice)
    Folder(str(tmp_path)).create("x.json", b"{}\n")
    assert (tmp_path / "x.json").read_bytes() == b"{}\n"


def test_reading(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    assert folder.names("nothing/here") == []
    with pytest.raises(Missing):
        folder.read("nothing")
    folder.replace("x.json", b"half")
    with pytest.raises(Torn):
        read_json(folder, "x.json", patience=0.0)
    threading.Timer(0.1, folder.replace, ("x.json", b'{"a": 1}')).start()
    assert eventually(lambda: read_json(folder, "x.json", patience=30.0)) == {"a": 1}


# -- from another place ------------------------------------------------------------------------


def seeded(tmp_path: Path, life: int, step: int, **fields: Any) -> Claim:
    seed = {"channel": str(tmp_path / "there"), "life": life, "step": step}
    return take(tmp_path / "here", first_life=7, seed=seed, **fields)


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """A channel with two lives: the second saved at 30, and the first went on to 90 behind its back."""
    for folder in ("there", "here"):
        (tmp_path / folder).mkdir()
    there = tmp_path / "there"
    take(there)
    save(there, 1, 20)
    take(there, restart=1)
    save(there, 2, 30), save(there, 1, 90)
    return there


def test_a_life_begins_where_another_place_left_off(tmp_path: Path, there: Path) -> None:
    got = seeded(tmp_path, 2, 30)
    assert (got.life, got.ancestors) == (7, ())
    assert got.start is not None
    assert (got.start.seed, got.start.folder) == (True, "checkpoints/0002/step-000000030")
    start = read_json(Folder(str(tmp_path / "here")), "lives/0007.json")["from"]
    assert (start["dir"], start["seed"]) == (got.start.folder, True)


def test_its_own_checkpoints_come_before_those_of_another_place(tmp_path: Path, there: Path) -> None:
    seeded(tmp_path, 2, 30)
    assert seeded(tmp_path, 2, 30, restart=1).start.seed  # none of its own yet
    save(tmp_path / "here", 8, 40)
    assert seeded(tmp_path, 2, 30, restart=2).start.step == 40


def test_another_place_is_followed_down_its_chain(tmp_path: Path, there: Path) -> None:
    (there / "checkpoints/0002/step-000000030/rank0.bin").write_text("not what it was")
    assert seeded(tmp_path, 2, 30).start.step == 20


def test_nothing_begins_from_nothing_in_silence(tmp_path: Path, there: Path) -> None:
    import shutil

    shutil.rmtree(there / "checkpoints")
    with pytest.raises(NotClaimed, match=r"step 30.*cannot be read on this node"):
        seeded(tmp_path, 2, 30)
    assert not (tmp_path / "here/lives").exists()
