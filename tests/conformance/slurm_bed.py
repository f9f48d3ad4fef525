"""A Slurm cluster of two nodes as a bed of the conformance suite, through any way of access."""

from __future__ import annotations

import asyncio
import secrets
import shlex
from typing import Any

from airflow_gpu.hooks.slurm import make_target
from airflow_gpu.rundir.store import Store
from airflow_gpu.targets.base import JobRef
from airflow_gpu.targets.slurm.config import SlurmConfig
from airflow_gpu.targets.slurm.records import hosts
from airflow_gpu.targets.slurm.rest import Rest
from airflow_gpu.targets.slurm.target import SlurmTarget

USER = "alice"


class SlurmBed:
    """``way``: ``rest``, ``ssh`` or ``command``. The channel is a folder on the cluster that Airflow reaches by SFTP."""

    nodes = 2
    gpus_per_node = 2
    pace = 4.0
    limit = 180.0

    def __init__(self, cluster: Any, way: str = "rest", **fields: Any) -> None:
        self.cluster = cluster
        self.way = way
        self.root = f"/shared/gangs/{secrets.token_hex(4)}"
        self.fields = fields
        self.target = self.make()
        self._requests: Any = None

    def make(self, **more: Any) -> SlurmTarget:
        ssh = self.cluster.ssh
        login = f"{USER}@{ssh.host}:{ssh.port}"
        self.ssh = {"key_file": str(ssh.key_file), "known_hosts": str(ssh.known_hosts), "ssh_config": ""}
        access: dict[str, Any] = {
            "rest": {"url": self.cluster.rest, "user": USER, "token_ssh": f"ssh://{login}"},
            "ssh": {"url": f"ssh://{login}"},
            "command": {"url": "local", "command_prefix": shlex.join(self.cluster.prefix(USER))},
        }[self.way]
        config = SlurmConfig.from_mapping(
            {
                **access,
                "ssh": self.ssh,
                "channel": f"sftp://{login}{self.root}",
                "exclusive": True,
                "partition": "train",
                "account": "research",
                "login_shell": False,
                **self.fields,
                **more,
            }
        )
        return make_target("slurm", config)

    def channel_store(self, uri: str) -> Store:
        return Store(uri, self.ssh)

    async def number(self, job: str) -> int:
        out = await asyncio.to_thread(self.cluster.run, "squeue", "-h", "-a", "-n", job, "-o", "%A")
        return int(out.split()[0])

    async def preempt(self, job: str, *, notice: bool) -> None:
        # Slurm gives notice always, if only of KillWait.
        await asyncio.to_thread(self.cluster.preempt, await self.number(job))

    async def kill_node(self, job: str) -> str:
        out = await asyncio.to_thread(self.cluster.run, "squeue", "-h", "-a", "-n", job, "-o", "%N")
        name = hosts(out.strip())[-1]
        await asyncio.to_thread(self.cluster.kill_node, name)
        # It comes back once it has been missed: a node that is back too early was never away.
        self._coming = asyncio.create_task(self._restore(name))
        return name

    async def _restore(self, name: str) -> None:
        while True:
            out = await asyncio.to_thread(self.cluster.run, "sinfo", "-h", "-N", "-n", name, "-o", "%T")
            if "down" in out:
                break
            await asyncio.sleep(0.5)
        await asyncio.to_thread(self.cluster.start_node, name)

    async def end_outside(self, job: JobRef) -> None:
        await asyncio.to_thread(self.cluster.run, "scancel", str(job.platform_id), user=USER)

    async def restored(self) -> None:
        """Until the node that was killed has come back."""
        await self._coming

    async def requeueing(self) -> SlurmTarget:
        return self.make(requeue=True)

    async def obscure(self, job: str) -> None:
        """What Slurm answers of this job has a word in it that nobody knows; the rest of the answer is its own."""
        number = await self.number(job)
        access = self.target._access
        if isinstance(access, Rest):
            whole = access._request

            async def request(*args: Any, **more: Any) -> tuple[int, dict[str, Any]]:
                status, answer = await whole(*args, **more)
                for row in answer.get("jobs") or ():
                    if str(row.get("job_id")) == str(number):
                        row |= {name: ["WIBBLE"] for name in ("state", "job_state") if name in row}
                return status, answer

            access._request = request  # type: ignore[method-assign]
        else:
            runner = access._runner  # type: ignore[attr-defined]
            run = runner.run

            async def changed(argv: Any, stdin: bytes = b"") -> tuple[int, str, str]:
                code, out, err = await run(argv, stdin)
                if argv[0] == "squeue":
                    rows = [
                        row.replace("RUNNING", "WIBBLE ") if row.startswith(str(number)) else row
                        for row in out.splitlines()
                    ]
                    out = "\n".join(rows)
                return code, out, err

            runner.run = changed

    async def clear(self) -> None:
        access: Any = self.target._access
        access.__dict__.pop("_request", None)
        if hasattr(access, "_runner"):
            access._runner.__dict__.pop("run", None)

    async def submissions(self, job: str) -> int:
        out = await asyncio.to_thread(
            self.cluster.run, "squeue", "-h", "-a", "-t", "all", "-n", job, "-o", "%A"
        )
        return len(out.split())

    async def end(self) -> None:
        await asyncio.to_thread(self.cluster.run, "scancel", "--quiet", "-u", USER)
        await asyncio.to_thread(self.cluster.wait_idle, 60)
