"""A gang on this machine: real agents as processes, one for each node, on 127.0.0.1, 127.0.0.2, ...

Purpose: what the tests of the runtime share. A :class:`Bed` is one run
directory; :meth:`Bed.start` begins one life of it with as many agents as nodes.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from airflow_gpu.runtime.bundle import build

PYTHON = sys.executable


def _old_python() -> str:
    """The oldest Python that the runtime must run on, wherever there is one."""
    pyenv = sorted(Path("~/.pyenv/versions").expanduser().glob("3.8*/bin/python"))
    found = [os.environ.get("GANG_TEST_OLD_PYTHON"), *map(str, pyenv), shutil.which("python3.8")]
    return next((path for path in found if path), "python3.8")


OLD_PYTHON = _old_python()
needs_old_python = pytest.mark.skipif(not os.path.exists(OLD_PYTHON), reason=f"no Python 3.8 at {OLD_PYTHON}")
BOTH_PYTHONS = [PYTHON, pytest.param(OLD_PYTHON, marks=needs_old_python)]

QUICK: dict[str, float] = {"PROGRESS_SECONDS": 0.05, "LOOK_AGAIN": 0.05, "LOST_PAUSE": 0.1}
"""Time-outs of the runtime that tests would otherwise sit through."""

PATIENCE = 60.0
"""Seconds after which a test gives up waiting; never a measure of speed."""


def eventually(what: Callable[[], Any], why: str = "it did not happen") -> Any:
    """Wait until ``what()`` is true, and answer it."""
    until = time.monotonic() + PATIENCE
    while True:
        value = what()
        if value:
            return value
        if time.monotonic() > until:
            raise AssertionError(f"{why} within {PATIENCE:.0f} s")
        time.sleep(0.02)


def with_constants(archive: bytes, constants: dict[str, float]) -> bytes:
    """runtime.pyz with other time-outs, so that tests need not wait for the real ones."""
    out = io.BytesIO()
    done = set()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            text = old.read(name).decode()
            for constant, value in constants.items():
                text, count = re.subn(
                    rf"^{constant} = .*$", f"{constant} = {value}", text, flags=re.MULTILINE
                )
                done.update([constant] * count)
            new.writestr(name, text)
    assert done == set(constants)
    return out.getvalue()


class Life:
    """Agents that were started together."""

    def __init__(self, agents: list[subprocess.Popen[bytes]], logs: list[Path]) -> None:
        self.agents = agents
        self.logs = logs

    def wait(self) -> list[int]:
        """Exit codes, by node."""
        until = time.monotonic() + PATIENCE
        try:
            return [agent.wait(max(0.1, until - time.monotonic())) for agent in self.agents]
        except subprocess.TimeoutExpired:
            raise AssertionError("the agents did not end:\n" + self.log()) from None

    def log(self) -> str:
        return "\n".join(log.read_text() for log in self.logs)

    def agent(self, node: int) -> int:
        """Process number of a node's agent proper, below its guard."""
        guard = self.agents[node].pid
        [agent] = map(int, Path(f"/proc/{guard}/task/{guard}/children").read_text().split())
        return agent

    def signal(self, number: int, node: int = 0) -> None:
        self.agents[node].send_signal(number)

    def end(self) -> None:
        for node, agent in enumerate(self.agents):
            if agent.poll() is None:
                try:
                    below = self.agent(node)
                except (OSError, ValueError):
                    below = 0
                agent.kill()
                agent.wait()
                if below and alive(below):
                    os.kill(below, signal.SIGCONT)  # one that a test had stopped would stand there for ever


class Bed:
    """One run directory in ``folder``. ``python`` runs agents and ranks."""

    def __init__(self, folder: Path, python: str = PYTHON) -> None:
        self.folder = folder
        self.python = python
        self.channel = folder / "channel"
        self.channel.mkdir(parents=True)
        self.lives: list[Life] = []
        self.env: dict[str, str] = {}  # of every agent

    def payload(
        self,
        attempt: int = 1,
        script: str | None = None,
        function: tuple[str, dict[str, Any]] | None = None,
        constants: dict[str, float] = QUICK,
        **fields: Any,
    ) -> Path:
        """Stage ``payload/<attempt>``; ``script`` is Python that every rank runs. Answers job.json."""
        payload = self.channel / "payload" / f"{attempt:04d}"
        payload.mkdir(parents=True, exist_ok=True)
        archive = build()
        (payload / "runtime.pyz").write_bytes(with_constants(archive, constants) if constants else archive)
        command: Sequence[str] = fields.pop("command", ())
        if script is not None:
            (payload / "script.py").write_text(textwrap.dedent(script))
            command = [self.python, "<payload>/script.py"]
        if function is not None:
            (payload / "function.py").write_text(textwrap.dedent(function[0]))
            (payload / "function.json").write_text(json.dumps(function[1]))
            command = [self.python, "-m", "airflow_gpu.runtime.call", str(payload / "function.py")]
        body = {
            "v": 1,
            "run": "dag/run/task",
            "key": {},
            "attempt": attempt,
            "name": "gang",
            "first_life": 1,
            "resume": True,
            "channel": str(self.channel),
            "nodes": 2,
            "ranks_per_node": 2,
            "gpus_per_node": 0,
            "launch": "rank",
            "command": list(command),
            "env": {},
            "secrets_file": None,
            "barrier_timeout": 30,
            "stop_grace": 5,
            "time_limit": 600,
            "checkpoint": {"interval": None, "keep": 3},
            "from_a_later_version": {"ignored": True},
        }
        body.update(fields)
        (payload / "job.json").write_text(json.dumps(body))
        return payload / "job.json"

    def start(
        self,
        job: Path,
        job_id: str = "job-1",
        restart: int | str = 0,
        nodes: Sequence[int] | None = None,
        **env: str,
    ) -> Life:
        """Start one agent for each node (or only for those named)."""
        count = json.loads(job.read_text())["nodes"]
        agents, logs = [], []
        for node in range(count) if nodes is None else nodes:
            log = self.folder / f"agent-{len(self.lives)}-{node}.log"
            logs.append(log)
            environment = {
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("GANG_", "SLURM_", "PYTHONPATH"))
            }
            environment.update(
                GANG_NODE_RANK=str(node),
                GANG_JOB_ID=job_id,
                GANG_RESTART=str(restart),
                GANG_NODE_ADDR=f"127.0.0.{node + 1}",
                **{**self.env, **env},
            )
            with log.open("wb") as output:
                agents.append(
                    subprocess.Popen(
                        [self.python, str(job.parent / "runtime.pyz"), "agent", str(job)],
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        cwd=self.folder,
                    )
                )
        life = Life(agents, logs)
        self.lives.append(life)
        return life

    def run(self, job: Path, **how: Any) -> list[int]:
        """Start a life and wait for its end."""
        return self.start(job, **how).wait()

    def read(self, name: str) -> Any:
        """A JSON file of the channel; None when it is not there."""
        path = self.channel / name
        return json.loads(path.read_text()) if path.exists() else None

    def await_file(self, name: str) -> Path:
        path = self.channel / name
        eventually(path.exists, f"{name} did not appear")
        return path

    def entries(self, life: int = 1) -> dict[int, dict[str, Any]]:
        """How each process of a life ended, by rank, from the nodes' records."""
        found: dict[int, dict[str, Any]] = {}
        for path in sorted((self.channel / f"lives/{life:04d}/nodes").glob("*.json")):
            for rank in json.loads(path.read_text())["ranks"]:
                assert rank["rank"] not in found
                found[rank["rank"]] = rank
        return found

    def codes(self, life: int = 1) -> list[int | None]:
        """Exit codes of all ranks in order; None for one that a signal ended."""
        return [entry["exit_code"] for _, entry in sorted(self.entries(life).items())]

    def log(self, rank: int, life: int = 1) -> str:
        path = self.channel / f"lives/{life:04d}/logs/rank-{rank:05d}.log"
        return path.read_text() if path.exists() else ""

    def manifests(self, life: int = 1) -> dict[int, Path]:
        """Complete checkpoints of a life: step and folder."""
        paths = (self.channel / f"checkpoints/{life:04d}").glob("*/manifest.json")
        return {json.loads(path.read_text())["step"]: path.parent for path in paths}

    def saves(self, life: int) -> dict[str, dict[str, int]]:
        """What lies below a life's checkpoints: by folder, the files with their bytes."""
        root = self.channel / f"checkpoints/{life:04d}"
        found = {}
        for folder in root.glob("step-*"):
            try:
                found[folder.name] = {path.name: path.stat().st_size for path in folder.iterdir()}
            except FileNotFoundError:
                continue
        return found

    def content(self, name: str) -> bytes | None:
        """A file of the channel; None when it is not there."""
        path = self.channel / name
        return path.read_bytes() if path.exists() else None

    def two_levels(self, interval: float | None = None) -> dict[str, object]:
        """``checkpoint`` of a payload: a copy on the nodes each tenth of a second, a save to the channel each ``interval``."""
        local = str(self.folder / "disk")
        return {"interval": interval, "keep": 3, "local": local, "local_interval": 0.1}

    def copies(self, node: int) -> dict[int, Path]:
        """Copies of a node that have a manifest, by their step."""
        paths = self.folder.glob(f"disk/airflow-gpu-*/node-{node:04d}/*/*/manifest.json")
        return {int(path.parent.name[-9:]): path.parent for path in paths}

    def newest(self) -> int:
        """Number of the newest entry of ``lives/``; 0 while there is none."""
        return max((int(path.stem) for path in (self.channel / "lives").glob("*.json")), default=0)

    def close(self) -> None:
        for life in self.lives:
            life.end()


def beds(folder: Path) -> Iterator[Callable[..., Bed]]:
    made: list[Bed] = []

    def make(python: str = PYTHON) -> Bed:
        made.append(Bed(folder / f"bed-{len(made)}", python))
        return made[-1]

    yield make
    for bed in made:
        bed.close()


def alive(pid: int) -> bool:
    """A process that computes; not a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


NOTICE = signal.SIGTERM
