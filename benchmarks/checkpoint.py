"""What saving and restoring cost: the handle beside plain files, in one run, on one disk.

Four ranks (2 nodes of 2, as processes on this machine) hold the same number of
bytes each. In every round, in turn:

- *plain*: each rank writes its bytes into a file and fsyncs it, nothing else;
- *save*: ``with g.checkpoint.save(step)``: written, flushed, hashed, committed;
- *save_async*: what the program waits for (a copy of its bytes into memory that
  it has already, then the call), and how long the save takes in the background.

Then, with the files out of the page cache: *plain read* of each rank's file, and
a second life that *restores*: node 0 hashes everything before it claims, then
each rank reads its file.

With ``--s3`` the same on an S3 server that this script starts (versitygw, over the
same disk): *plain client* is obstore putting each rank's bytes from memory, all
ranks at once, in parts, with nothing around it.

Where Orbax or torch.distributed.checkpoint are installed (``make frameworks``) they
save one rank's bytes from one process, beside plain files from one process.

Example::

    python benchmarks/checkpoint.py --gib 2 --rounds 5
    python benchmarks/checkpoint.py --gib 2 --s3
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.runtime.bed import Bed

RANKS = 4

WRITE = """
def write(path, data):
    with open(path, "wb", buffering=0) as file:
        view = memoryview(data)
        while view:
            view = view[file.write(view[: 1 << 24]):]
"""

S3_PROGRAM = (
    WRITE
    + """
import json, os, time
import obstore
from obstore.store import from_url
from airflow_gpu.runtime import gang

size, rounds, plain = int(os.environ["SIZE"]), int(os.environ["ROUNDS"]), os.environ["PLAIN"]
options = json.loads(os.environ["STORE"])
client = {"allow_http": options.pop("allow_http")}
store = from_url(os.environ["URI"], config=options, client_options=client)

with gang() as g:
    took = {}
    def told(name, since):
        took.setdefault(name, []).append(time.perf_counter() - since)
    steps = iter(range(1, 10**6))
    def together():
        with g.checkpoint.save(next(steps)) as d:
            (d / f"rank-{g.rank}").write_bytes(b"")
    data = bytearray(os.urandom(1 << 20)) * (size >> 20)
    copy = bytearray(data)
    if g.life == 1:
        for number in range(rounds):
            together(); begun = time.perf_counter()
            obstore.put(store, f"plain/rank-{g.rank}", memoryview(data), chunk_size=32 << 20, max_concurrency=4)
            together(); told("plain client", begun)
            begun = time.perf_counter()
            with g.checkpoint.save(next(steps)) as d:
                write(d / f"rank-{g.rank}", data)
            together(); told("save", begun)
            begun = time.perf_counter()
            copy[:] = data
            g.checkpoint.save_async(next(steps), lambda d: write(d / f"rank-{g.rank}", copy))
            told("save_async", begun)
            g.checkpoint.wait()
            told("in the background", begun)
        for number in range(rounds):
            together(); begun = time.perf_counter()
            ranges = [(at, min(32 << 20, size - at)) for at in range(0, size, 32 << 20)]
            for at in range(0, len(ranges), 4):
                some = ranges[at:at + 4]
                obstore.get_ranges(store, f"plain/rank-{g.rank}", starts=[a for a, _ in some], lengths=[n for _, n in some])
            told("plain get", begun)
        with g.checkpoint.save(next(steps)) as d:
            write(d / f"rank-{g.rank}", data)
    else:
        g.checkpoint.restore()
    with open(os.path.join(plain, f"took-{g.life}-{g.rank}.json"), "w") as file:
        json.dump(took, file)
    if g.life == 1:
        raise SystemExit(9)
"""
)

PROGRAM = (
    WRITE
    + """
import hashlib, json, os, sys, threading, time
from airflow_gpu.runtime import gang

size, rounds, plain = int(os.environ["SIZE"]), int(os.environ["ROUNDS"]), os.environ["PLAIN"]

block = bytearray(1 << 24)                              # into memory that is there, as weights are

def read(path, hasher=None):
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(block):
            if hasher:
                hasher.update(memoryview(block)[:size])

def forget(path):
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

with gang() as g:
    took = {}
    def told(name, since):
        took.setdefault(name, []).append(time.perf_counter() - since)
    steps = iter(range(1, 10**6))
    def together():
        with g.checkpoint.save(next(steps)) as d:      # a small save is a barrier of all ranks
            (d / f"rank-{g.rank}").write_bytes(b"")
    mine = os.path.join(plain, f"rank-{g.rank}")
    if g.life == 1:
        data = bytearray(os.urandom(1 << 20)) * (size >> 20)
        copy = bytearray(data)                          # memory that a program that saves often has already
        for number in range(rounds):
            together(); begun = time.perf_counter()
            write(mine, data)
            with open(mine, "rb") as file:
                os.fsync(file.fileno())
            told("plain", begun)
            together(); begun = time.perf_counter()
            with g.checkpoint.save(next(steps)) as d:
                write(d / f"rank-{g.rank}", data)
            told("save", begun)
            together(); begun = time.perf_counter()
            copy[:] = data
            g.checkpoint.save_async(next(steps), lambda d: write(d / f"rank-{g.rank}", copy))
            told("save_async", begun)
            g.checkpoint.wait()
            told("in the background", begun)
        for number in range(rounds):
            forget(mine); together(); begun = time.perf_counter()
            read(mine)
            told("plain read", begun)
            forget(mine); together(); begun = time.perf_counter()
            read(mine, hashlib.sha256())
            told("plain read with SHA-256", begun)
        with g.checkpoint.save(next(steps)) as d:
            write(d / f"rank-{g.rank}", data)
    else:
        begun = time.perf_counter()
        g.checkpoint.restore(lambda d: read(d / f"rank-{g.rank}"))
        told("restore", begun)
    with open(os.path.join(plain, f"took-{g.life}-{g.rank}.json"), "w") as file:
        json.dump(took, file)
    if g.life == 1:
        raise SystemExit(9)                             # so that there is another life
"""
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=2.0, help="bytes of all four ranks together")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure")
    parser.add_argument("--s3", action="store_true", help="to an S3 server on this machine")
    given = parser.parse_args()
    if given.s3:
        measure_s3(int(given.gib * 2**30) // RANKS >> 20 << 20, given.rounds, given.folder)
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        measure(Path(folder), int(given.gib * 2**30) // RANKS >> 20 << 20, given.rounds)


def measure(folder: Path, size: int, rounds: int) -> None:
    bed = Bed(folder / "bed")
    plain = folder / "plain"
    plain.mkdir()
    env = {"SIZE": str(size), "ROUNDS": str(rounds), "PLAIN": str(plain)}
    job = bed.payload(script=PROGRAM, env=env, constants={}, time_limit=7200)
    try:
        started = _wait(bed, job, 0, 9)
        for path in bed.channel.glob("checkpoints/*/*/rank-*"):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        again = _wait(bed, job, 1, 0)
        took = _slowest(plain, 1)
        # The start of the agents is no reading: the first life has it, too, and nothing to compare.
        took["restore"] = [max(0.0, again - started) + _slowest(plain, 2)["restore"][0]]
    finally:
        bed.close()
    show(took, size * RANKS, rounds)
    peers(folder / "peers", size)


def measure_s3(size: int, rounds: int, folder: Path | None) -> None:
    from tests.beds.stores.servers import s3
    from tests.runtime.objects import ObjectBed

    with tempfile.TemporaryDirectory(dir=folder) as place, s3() as server:
        bed = ObjectBed(Path(place) / "bed", server)
        plain = Path(place) / "plain"
        plain.mkdir()
        env = {
            "SIZE": str(size),
            "ROUNDS": str(rounds),
            "PLAIN": str(plain),
            "URI": bed.uri,
            "STORE": json.dumps({**server.options}),
        }
        job = bed.payload(script=S3_PROGRAM, env=env, constants={}, time_limit=7200)
        try:
            _wait(bed, job, 0, 9)
            took = _slowest(plain, 1)
        finally:
            bed.close()
    beside = {"save": "plain client", "save_async": "save", "in the background": "plain client"}
    show(took, size * RANKS, rounds, beside, "to S3, ")


def _wait(bed: Bed, job: Path, restart: int, code: int) -> float:
    """One life, to its end. Answers the seconds to its claim."""
    begun = time.time()
    life = bed.start(job, restart=restart)
    codes = [agent.wait() for agent in life.agents]
    assert codes[0] == code, life.log()
    at: str = bed.read(f"lives/{restart + 1:04}.json")["at"]
    return datetime.fromisoformat(at).timestamp() - begun


def _slowest(plain: Path, life: int) -> dict[str, list[float]]:
    """By what was measured: each round's slowest rank."""
    ranks = [json.loads(path.read_text()) for path in plain.glob(f"took-{life}-*.json")]
    assert len(ranks) == RANKS
    return {
        name: [max(each) for each in zip(*(rank[name] for rank in ranks), strict=True)] for name in ranks[0]
    }


BESIDE = {
    "save": "plain",
    "save_async": "save",
    "in the background": "plain",
    "plain read with SHA-256": "plain read",
    "restore": "plain read",
}


def show(
    took: dict[str, list[float]],
    size: int,
    rounds: int,
    beside: dict[str, str] = BESIDE,
    where: str = "",
) -> None:
    middle = {name: statistics.median(seconds) for name, seconds in took.items()}
    table = Table(
        title=f"{size / 2**30:.2f} GiB from {RANKS} ranks, {where}{rounds} rounds, {datetime.now(UTC):%Y-%m-%d}"
    )
    for head in ("", "seconds (median)", "least", "most", "GiB/s", "beside"):
        table.add_column(head, justify="left" if head in ("", "beside") else "right")
    for name, seconds in took.items():
        other = beside.get(name, "")
        ratio = middle.get(other, 0.0) / middle[name]
        if name == "save_async":
            ratio = 1 / ratio
        words = (
            f"{ratio:.2f} of the time of {other}"
            if name == "save_async"
            else f"{ratio:.2f} of the speed of {other}"
        )
        table.add_row(
            name,
            f"{middle[name]:.2f}",
            f"{min(seconds):.2f}",
            f"{max(seconds):.2f}",
            f"{size / 2**30 / middle[name]:.2f}",
            words if other else "",
        )
    Console(width=120).print(table)


def peers(folder: Path, size: int) -> None:
    """Orbax and torch.distributed.checkpoint save the same bytes, in the Python that has them."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "airflow-gpu" / "frameworks"
    python = next((str(p) for p in [home / "bin" / "python"] if p.exists()), sys.executable)
    script = Path(__file__).with_name("checkpoint_peers.py")
    subprocess.run([python, str(script), str(folder), str(size)], check=True)


if __name__ == "__main__":
    main()
