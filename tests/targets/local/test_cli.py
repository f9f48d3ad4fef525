"""The operator's command line, on a real cluster."""

from __future__ import annotations

import asyncio
import json
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
