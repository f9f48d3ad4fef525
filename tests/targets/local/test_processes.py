"""Finding a gang's processes wherever they went, and never anybody else's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from airflow_gpu.targets.local.processes import Census, Ident, alive, read_marker, read_process, send

PATIENCE = 30.0


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def job() -> Iterator[str]:
    name = f"census-{os.getpid()}-{time.monotonic_ns()}"
    yield name
    for ident in Census().take({name})[name]:
        send(ident, signal.SIGKILL)


def begin(job: str, script: str) -> subprocess.Popen[bytes]:
    environ = {**os.environ, "GANG_JOB_ID": job, "GANG_NODE_RANK": "3", "GANG_RESTART": "1"}
    return subprocess.Popen(["/bin/sh", "-c", script], env=environ, start_new_session=True)


def test_a_process_with_its_start_time_is_one_for_good() -> None:
    child = subprocess.Popen(["sleep", "60"])
    process = read_process(child.pid)
    assert process is not None
    assert alive(process.ident)
    assert not send(Ident(child.pid, process.ident.start + 1), signal.SIGKILL)
    assert child.poll() is None
    assert send(process.ident, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not alive(process.ident)  # a zombie
    assert not send(process.ident, signal.SIGTERM)
    child.wait()
    assert read_process(child.pid) is None
    assert not send(process.ident, signal.SIGTERM)


def test_members_by_mark_parent_and_session(job: str, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    bare = f"env -i {sys.executable} -S -c \"import os, time; open('{pids}', 'a').write(f'{{os.getpid()}} '); time.sleep(60)\""
    # A child without the mark, one in a session of its own without it, and an orphan that has only its session.
    child = begin(job, f"{bare} & setsid {bare} & ( {bare} & ) ; sleep 60")
    wait_for(lambda: pids.exists() and len(pids.read_text().split()) == 3)
    found = Census().take({job})[job]
    expected = {child.pid, *map(int, pids.read_text().split())}
    assert expected <= {ident.pid for ident in found}
    assert {(mark.rank, mark.restart) for mark in found.values()} == {(3, 1)}
    for ident in found:
        send(ident, signal.SIGKILL)
    child.wait()
    wait_for(lambda: not Census().take({job})[job])


def test_whoever_was_seen_stays_a_member(job: str, tmp_path: Path) -> None:
    pid_file, go = tmp_path / "pid", tmp_path / "go"
    # It drops its environment by exec, then its parent ends: nothing but memory is left.
    script = (
        f"setsid sh -c 'echo $$ > {pid_file}; while ! [ -e {go} ]; do sleep 0.02; done; exec env -i sleep 60' & "
        f"while ! [ -e {go} ]; do sleep 0.02; done"
    )
    child = begin(job, script)
    wait_for(lambda: pid_file.exists() and pid_file.read_text().strip())
    pid = int(pid_file.read_text())
    census = Census()
    assert pid in {ident.pid for ident in census.take({job})[job]}
    go.touch()
    child.wait()
    wait_for(lambda: read_marker(pid) is None)
    assert {ident.pid for ident in census.take({job})[job]} == {pid}
    assert not Census().take({job})[job]
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not census.take({job})[job])


def test_another_gang_started_from_within_one_is_no_part_of_it(job: str, tmp_path: Path) -> None:
    mark = tmp_path / "up"
    child = begin(job, f"GANG_JOB_ID={job}-inner sh -c 'echo > {mark}; sleep 60' & sleep 60")
    wait_for(mark.exists)
    found = Census().take({job, f"{job}-inner"})
    inner = {ident.pid for ident in found[f"{job}-inner"]}
    assert inner
    assert inner.isdisjoint({ident.pid for ident in Census().take({job})[job]})
    for members in found.values():
        for ident in members:
            send(ident, signal.SIGKILL)
    child.wait()


def test_a_look_never_finds_ourselves(job: str) -> None:
    assert Census().take({job}) == {job: {}}
