"""Payloads that the target carries, for channels that are no folder: whole, private, there first, and gone with the job."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from airflow_gpu.gang.run import State
from airflow_gpu.targets.base import PAYLOAD, Job, Rejected
from airflow_gpu.targets.local import submission

from .conftest import SAVE, STAY, Bed

CHANNEL = "s3://gangs/v1/test/dag/run/task/_/abcdefgh23"


def carried(bed: Bed, script: str, name: str = "fit-1", **fields: object) -> Job:
    """A job as the driver asks for it where the channel is on an object store."""
    files = {
        "runtime.pyz": f"export MARKS={bed.marks}\n{script}".encode(),
        "job.json": json.dumps({"channel": CHANNEL}).encode(),
        "function.py": os.urandom(300_000),
    }
    given = {
        "payload": PAYLOAD,
        "channel": CHANNEL,
        "files": files,
        "argv": ("/bin/sh", f"{PAYLOAD}/runtime.pyz", "agent", f"{PAYLOAD}/job.json"),
        **fields,
    }
    return replace(bed.job("exit 1", name), **given)  # type: ignore[arg-type]


async def test_the_agents_find_the_same_bytes_and_nobody_else_does(bed: Bed) -> None:
    target = bed.target(channel="s3://gangs")
    job = carried(
        bed,
        'cd "$(dirname "$2")" && sha256sum * > $MARKS/sums-$GANG_NODE_RANK && pwd > $MARKS/where',
        nodes=2,
    )
    await target.submit(job)
    await bed.until(target, job, State.SUCCEEDED)
    sums = sorted(f"{hashlib.sha256(data).hexdigest()}  {name}" for name, data in job.files.items())
    for rank in (0, 1):
        assert sorted((bed.marks / f"sums-{rank}").read_text().splitlines()) == sums
    where = Path((bed.marks / "where").read_text().strip())
    assert where == bed.folder.job(job.name).payload
    assert stat.S_IMODE(where.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in where.iterdir()} == {0o600}


async def test_they_are_there_for_as_long_as_it_may_start_again(bed: Bed) -> None:
    target = bed.target(channel="s3://gangs", requeue=True)
    job = carried(bed, SAVE + STAY)
    await target.submit(job)
    await bed.appears("up-0-0")
    bed.admin.preempt(job.name)
    await bed.appears("up-1-0")  # the second start read the same script from there
    await target.cancel(bed.ref(job), grace=5, since=0.0)
    await bed.until(target, job, State.CANCELLED)


async def test_they_are_gone_with_the_job(bed: Bed) -> None:
    target = bed.target(channel="s3://gangs", keep=0.0)
    job = carried(bed, "exit 0", secrets={"AWS_SECRET_ACCESS_KEY": "hunter2"})
    payload = bed.folder.job(job.name).payload
    await target.submit(job)
    await bed.until(target, job, State.SUCCEEDED)
    assert (payload / "function.py").exists()
    bed.admin.stop()  # a daemon tidies when it begins
    await bed.until(target, job, State.GONE)
    assert not payload.exists()
    await bed.holds(lambda: os.listdir(bed.folder.trash) == [], "the trash is emptied")


async def test_the_channel_comes_back_as_it_was_given(bed: Bed) -> None:
    """A sweep finds the job by it, without any journal."""
    target = bed.target(channel="s3://gangs")
    job = carried(bed, STAY)
    await target.submit(job)
    (listed,) = await target.inventory({"airflow-gpu/installation": "test"})
    assert listed.ref.channel == CHANNEL
    assert not (bed.path / "runs").exists(), "there is no folder to make for it"
    await target.cancel(bed.ref(job), grace=0, since=0.0)


CRASH = """
import asyncio, os, pickle, signal, sys
from pathlib import Path
from airflow_gpu.targets.local import LocalConfig, LocalTarget, submission

def at(*_): os.kill(os.getpid(), signal.SIGKILL)
job, config, when = pickle.loads(Path(sys.argv[1]).read_bytes())
real = submission.os.rename
submission.os.rename = at if when == "before" else lambda *names: (real(*names), at())
asyncio.run(LocalTarget("here", config).submit(job))
"""


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_submitter_that_dies_between_the_files_and_the_submit(
    bed: Bed, tmp_path: Path, when: str
) -> None:
    """SIGKILL with the files written, just before or after they get their name: the next submit makes one job of it."""
    import pickle

    target = bed.target(channel="s3://gangs")
    job = carried(bed, "echo $GANG_JOB_ID >> $MARKS/ran; cat $2 > $MARKS/job.json")
    await target.offers(_small())  # the daemon lives
    (tmp_path / "job").write_bytes(pickle.dumps((job, target.config, when)))
    died = subprocess.run([sys.executable, "-c", CRASH, str(tmp_path / "job")], check=False, timeout=60)
    assert died.returncode == -signal.SIGKILL
    named = bed.folder.job(job.name).payload
    assert named.exists() == (when == "after")
    files = list(bed.folder.jobs.rglob("function.py"))
    assert [file.read_bytes() for file in files] == [job.files["function.py"]], (
        "it died with the files written"
    )
    identifier = await target.submit(job)
    assert await target.submit(job) == identifier
    await bed.until(target, job, State.SUCCEEDED)
    assert (bed.marks / "ran").read_text().split() == [identifier]
    assert (bed.marks / "job.json").read_bytes() == job.files["job.json"]


async def test_what_was_submitted_first_is_what_runs(bed: Bed) -> None:
    """Two submits of one name with other files, as of two versions of Airflow's side: one wins, whole."""
    target = bed.target(channel="s3://gangs", gpus_per_node=1, nodes=1)
    blocker = bed.job(STAY, "blocker")
    await target.submit(blocker)
    await bed.until(target, blocker, State.RUNNING)
    first, second = (carried(bed, f"echo {which} > $MARKS/which") for which in ("one", "two"))
    assert await target.submit(first) == await target.submit(second)
    await target.cancel(bed.ref(blocker), grace=0, since=0.0)
    await bed.until(target, first, State.SUCCEEDED)
    assert (bed.marks / "which").read_text() == "one\n"
    payload = bed.folder.job(first.name).payload
    assert {file.name: file.read_bytes() for file in payload.iterdir()} == first.files


@pytest.mark.parametrize("name", ["../state.json", "a/b", "", ".."])
async def test_a_file_cannot_leave_its_folder(bed: Bed, name: str) -> None:
    target = bed.target(channel="s3://gangs")
    with pytest.raises(Rejected, match="no name of a file of a payload"):
        await target.submit(replace(carried(bed, "true"), files={name: b"x"}))
    assert submission.names(bed.folder) == []
    assert list(bed.folder.jobs.iterdir()) == []


async def test_a_payload_that_is_nowhere_is_refused(bed: Bed) -> None:
    target = bed.target(channel="s3://gangs")
    with pytest.raises(Rejected, match="neither a payload that lies in a folder nor files to carry"):
        await target.submit(replace(carried(bed, "true"), files={}))


async def test_a_leftover_of_a_dead_submitter_is_swept(bed: Bed) -> None:
    """Folders without a name never become jobs; old ones are removed by the daemon."""
    target = bed.target(channel="s3://gangs")
    await target.offers(_small())  # the folder is there
    left = bed.folder.jobs / ".fit-1.0123456789ab"
    (left / "payload").mkdir(parents=True)
    (left / "payload/runtime.pyz").write_bytes(b"x")
    old = time.time() - 7200
    os.utime(left, (old, old))
    bed.admin.stop()  # a daemon tidies when it begins
    await target.offers(_small())
    await bed.holds(lambda: not left.exists(), "the leftover is gone")


def _small():  # type: ignore[no-untyped-def]
    from airflow_gpu.gang.spec import Gang

    return Gang(command=["true"], nodes=1, gpus_per_node=0, targets="here")
