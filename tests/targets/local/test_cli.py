"""The operator's command line, on a real cluster."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import subprocess
import sys
from typing import Any

import pytest

from airflow_gpu.gang.run import State
from airflow_gpu.targets.local.__main__ import main

from .conftest import SAVE, STAY, Bed


class Shell:
    def __init__(self, bed: Bed, capsys: pytest.CaptureFixture[str]) -> None:
        self.bed = bed
        self.capsys = capsys

    async def __call__(self, *arguments: str) -> tuple[int, str]:
        self.capsys.readouterr()
        code = await asyncio.to_thread(main, ["--path", str(self.bed.path), *arguments])
        said = self.capsys.readouterr()
        return code, said.out + said.err

    async def json(self, *arguments: str) -> tuple[int, dict[str, Any]]:
        code, text = await self("--json", *arguments)
        answer: dict[str, Any] = json.loads(text)
        return code, answer


@pytest.fixture
def shell(bed: Bed, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.setenv("COLUMNS", "160")
    return Shell(bed, capsys)


async def test_status_preempt_and_nodes(bed: Bed, shell: Shell) -> None:
    target = bed.target(grace=60)
    job = bed.job(SAVE + STAY, nodes=2)
    await target.submit(job)
    await bed.appears("up-0-0", "up-0-1")
    await bed.until(target, job, State.RUNNING)
    code, text = await shell("status")
    assert code == 0
    assert f"daemon: pid {bed.daemon_pid()}" in text
    assert "node-1" in text
    assert "1 of 2" in text
    assert "RUNNING" in text
    code, answer = await shell.json("status")
    assert (code, answer["jobs"]["fit-1"]["native"]) == (0, "RUNNING")
    assert answer["jobs"]["fit-1"]["held"] == [[0, [0]], [1, [2]]]
    assert answer["daemon"] == {"alive": True, "pid": bed.daemon_pid()}
    assert await shell("preempt", "fit-1") == (0, "fit-1 has 60 s\n")
    await bed.until(target, job, State.PREEMPTED)
    assert "PREEMPTED" not in (await shell("status"))[1]
    assert "fit-1: preempted by the operator: node " in (await shell("status", "--all"))[1]
    code, answer = await shell.json("preempt", "fit-1")
    assert (code, answer["ok"]) == (1, False)
    assert "only a gang that runs can be preempted" in answer["message"]
    for command, state in (
        ("drain", "drained"),
        ("undrain", "up"),
        ("kill-node", "down"),
        ("restore-node", "up"),
    ):
        assert (await shell(command, "1"))[0] == 0
        assert (await shell.json("status"))[1]["nodes"][1]["state"] == state
    code, text = await shell("kill-node", "9")
    assert (code, text) == (1, "there is no node 9; this cluster has 0 to 1\n")


async def test_stop_leaves_gangs_alone_unless_told(bed: Bed, shell: Shell) -> None:
    target = bed.target()
    job = bed.job(SAVE + STAY)
    await target.submit(job)
    await bed.appears("up-0-0")
    assert await shell("stop") == (0, "the daemon ends; 1 gangs go on without it\n")
    assert "daemon: none" in (await shell("status"))[1]
    assert bed.processes(job)
    assert bed.notices() == []
    assert await shell("preempt", "fit-1", "--no-notice") == (0, "fit-1 is killed\n")
    await bed.until(target, job, State.PREEMPTED)
    again = bed.job(SAVE.replace("up-", "again-") + STAY, "again")
    await target.submit(again)
    await bed.appears("again-0-0")
    assert await shell("stop", "--gangs", "--grace", "60") == (0, "the daemon ends\n")
    assert not bed.processes(again)
    assert bed.notices() == ["0.0"]
    assert await shell("stop") == (0, "no daemon runs\n")


async def test_where_there_is_no_cluster(bed: Bed, shell: Shell) -> None:
    code, text = await shell("status")
    assert code == 1
    assert "table.json is missing" in text
    code, text = await shell("drain", "0")
    assert code == 1
    assert "is no cluster folder" in text
    assert await shell("stop") == (0, "there is no cluster\n")


LONG = "a-dag-with-a-long-name-and-a-task-with-another-hpyf6g52kao7"


@pytest.mark.parametrize("columns", ["20", "80"])
async def test_names_are_never_cut(bed: Bed, shell: Shell, columns: str) -> None:
    """On a terminal, which is narrower than the name or than the row."""
    target = bed.target()
    await target.submit(bed.job(SAVE + STAY, f"{LONG}-1"))
    await bed.appears("up-0-0")
    command = [sys.executable, "-m", "airflow_gpu.targets.local", "--path", str(bed.path), "status"]
    piped = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
    assert piped.stdout.count(f"{LONG}-1") == 2, "of its node and of its job"
    env = {**os.environ, "COLUMNS": columns, "TERM": "xterm"}
    main, side = pty.openpty()
    try:
        await asyncio.to_thread(subprocess.run, command, stdout=side, stderr=side, env=env, check=True)
        os.close(side)
        shown = b""
        with contextlib.suppress(OSError):  # the end of what a terminal shows
            while data := os.read(main, 65536):
                shown += data
    finally:
        os.close(main)
    assert shown.decode().count(f"{LONG}-1") == 2


async def test_the_beginning_of_a_name(bed: Bed, shell: Shell) -> None:
    target = bed.target(gpus_per_node=1)
    jobs = [bed.job(SAVE.replace("up-", f"{name}-") + STAY, name) for name in ("fit-one-1", "fit-two-1")]
    for job in jobs:
        await target.submit(job)
        await bed.appears(f"{job.name}-0-0")
    code, text = await shell("preempt", "fit")
    assert (code, text) == (1, "'fit' could be any of: fit-one-1, fit-two-1\n")
    assert await shell("preempt", "fit-o", "--no-notice") == (0, "fit-one-1 is killed\n")
    await bed.until(target, jobs[0], State.PREEMPTED)
    assert await shell("preempt", "nothing") == (1, "there is no job 'nothing'\n")
    # What has ended is no candidate, and is not listed unless asked for.
    assert list((await shell.json("status"))[1]["jobs"]) == ["fit-two-1"]
    assert sorted((await shell.json("status", "--all"))[1]["jobs"]) == ["fit-one-1", "fit-two-1"]
    assert await shell("preempt", "fit", "--no-notice") == (0, "fit-two-1 is killed\n")
