"""Gangs that do nothing but save are killed with -9, again and again, wherever they are in a save.

Purpose: after each kill the next life starts from the furthest checkpoint that
is whole, on the chain of lives as the documentation has it. What is whole, and
what the chain is, is found out here by other code than the runtime's. A quarter
of the lives is not killed but overtaken: the old one goes on saving while the
new one starts, and counts for nothing any more.

``SAVE_KILLS`` says how many lives (20 in CI, 200 for the figure in docs/checkpoints.md).
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.runtime.bed import QUICK, Bed, Life, eventually
from tests.runtime.objects import ObjectBed

KILLS = int(os.environ.get("SAVE_KILLS") or (200 if os.environ.get("FAULTS") == "all" else 12))
SEED = int(os.environ.get("SAVE_SEED") or time.time())
OVERTAKEN = 0.25

PROGRAM = """
import hashlib, os, random, sys, time
from airflow_gpu.runtime import gang

def content(step, rank):
    return hashlib.sha256(f"{step}/{rank}".encode()).digest() * (1 << 15)       # 1 MiB

# What is said on this very node outlives every kill, at once.
told = os.path.join(os.environ["GANG_PAYLOAD"], f"told-{os.environ['RANK']}-{int(os.environ['GANG_LIFE'])}")
sys.stderr = open(told, "a", buffering=1)

with gang() as g:
    def load(d):
        step = int(d.name[-9:])
        for rank in range(g.world_size):
            assert (d / f"rank-{rank}").read_bytes() == content(step, rank), "torn"
    step = g.checkpoint.restore(load)
    print("start", step, flush=True)
    def write(d, step):
        data = content(step, g.rank)
        with open(d / f"rank-{g.rank}", "wb") as file:
            for at in range(0, len(data), 1 << 18):
                file.write(data[at:at + (1 << 18)])
                file.flush()
                time.sleep(0.002)
    while True:
        step += 1
        if step % 2:
            with g.checkpoint.save(step) as d:
                write(d, step)
            print("saved", step, file=sys.stderr)
        else:
            g.checkpoint.save_async(step, lambda d, step=step: write(d, step))
"""


def whole(bed: Bed, folder: str) -> int | None:
    """The step of a checkpoint that has every byte that it says; None: it is none."""
    text = bed.content(f"{folder}/manifest.json")
    if text is None:
        return None
    manifest = json.loads(text)
    for entry in manifest["files"]:
        data = bed.content(f"{folder}/{entry['path']}")
        if data is None:
            return None
        assert (len(data), hashlib.sha256(data).hexdigest()) == (entry["size"], entry["sha256"])
    assert len(manifest["files"]) == 4
    return int(manifest["step"])


def furthest(bed: Bed, life: int) -> int:
    """Where a life after this one has to start: its furthest whole checkpoint, else where it started itself."""
    found = [whole(bed, f"checkpoints/{life:04d}/{name}") for name in bed.saves(life)]
    steps = [step for step in found if step is not None]
    if steps:
        return max(steps)
    start = bed.read(f"lives/{life:04d}.json")["from"]
    return int(start["step"]) if start else 0


def stage(bed: Bed, life: int) -> str:
    """How far the newest save was when everything had died."""
    saves = bed.saves(life)
    if not saves:
        return "before the first save"
    files = saves[max(saves)]
    sizes = [size for name, size in files.items() if name.startswith("rank-")]
    if "manifest.json" in files:
        return "complete"
    if len(sizes) < 4:
        return f"{len(sizes)} of 4 files"
    if any(size < 1 << 20 for size in sizes):
        return "files half written"
    return "all written, no manifest"


def victims(life: Life) -> list[int]:
    """Guards, agents and ranks."""
    found = [guard.pid for guard in life.agents]
    for node in range(len(life.agents)):
        try:
            agent = life.agent(node)
            found += [agent, *map(int, Path(f"/proc/{agent}/task/{agent}/children").read_text().split())]
        except (OSError, ValueError):
            pass
    return found


def kill(life: Life, rng: random.Random) -> None:
    """First one process; the others have up to a moment to notice."""
    try:
        os.kill(rng.choice(victims(life)), signal.SIGKILL)
    except ProcessLookupError:
        pass
    time.sleep(rng.choice((0.0, 0.02, 0.2)))
    life.end()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["folder", "s3", "gcs"])
def test_killed_at_every_stage_of_a_save(
    kind: str, make_bed: Callable[..., Bed], make_objects: Callable[[str], ObjectBed]
) -> None:
    bed = make_bed() if kind == "folder" else make_objects(kind)
    rng = random.Random(SEED)
    job = bed.payload(script=PROGRAM, constants={**QUICK, "LOOK_SECONDS": 0.5}, stop_grace=2)
    stages: Counter[str] = Counter()
    old: Life | None = None
    number = overtaken = lost = 0
    for restart in range(KILLS):
        least = furthest(bed, number) if number else 0
        life = bed.start(job, restart=restart)
        number = eventually(lambda before=number: _newest(bed, before), "no life was claimed")
        start = bed.read(f"lives/{number:04d}.json")["from"]
        begun = int(start["step"]) if start else 0
        if old is None:
            assert begun == least, f"seed {SEED}: life {number} starts from {begun}, {least} was whole"
        else:  # it went on saving until this life was claimed
            assert begun >= least, f"seed {SEED}: life {number} starts from {begun}, {least} was whole"
            old.end()
            old = None
        eventually(lambda number=number: saved(bed, number), f"life {number} saves nothing")
        time.sleep(rng.uniform(0.0, 0.6))
        if rng.random() < OVERTAKEN and restart < KILLS - 1:
            old, overtaken = life, overtaken + 1
            continue
        kill(life, rng)
        stages[stage(bed, number)] += 1
        lost += max(told(bed, number), default=0) > furthest(bed, number)
        for path in (bed.channel / "payload/0001").glob("told-*"):
            assert "torn" not in path.read_text()
    print(
        f"\n{kind}: {KILLS} lives, {overtaken} overtaken; killed at: {dict(stages.most_common())}; seed {SEED}"
    )
    assert lost == 0, "a checkpoint that rank 3 was told to be complete is not there"


def told(bed: Bed, life: int) -> list[int]:
    """Steps of which rank 3 was told that they are saved."""
    path = bed.channel / f"payload/0001/told-3-{life}"
    log = path.read_text() if path.exists() else ""
    steps = [int(line.split()[1]) for line in log.splitlines() if line.startswith("saved ")]
    return [step for step in steps if f"STEP {step} WAS NOT SAVED" not in log]


def saved(bed: Bed, life: int) -> bool:
    """It has a complete checkpoint of its own, so a kill now meets it between two saves or in one."""
    return any("manifest.json" in files for files in bed.saves(life).values())


def _newest(bed: Bed, before: int) -> int:
    newest = bed.newest()
    return newest if newest > before else 0
