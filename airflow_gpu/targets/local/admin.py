"""What the operator of a machine does: take nodes and gangs away, and give them back.

Purpose: the calls behind ``python -m airflow_gpu.targets.local``; tests use
them to make a real cluster misbehave.

What it does not do: submit or cancel single jobs (the target does), or change
the shape (the next submit of a changed connection does).

Limits: needs the rights of the folder's owner.

Example::

    admin = Admin("/scratch/gpu")
    admin.preempt("train-fit-abc-1")
    admin.kill_node(1)
    admin.status()["jobs"]["train-fit-abc-1"]["native"]  # "STOPPING"
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from airflow_gpu.targets.local.client import Client, ClientError
from airflow_gpu.targets.local.files import Damaged, read_json
from airflow_gpu.targets.local.words import HOLDING, WAITING

STOP_LIMIT = 60.0
"""Seconds beyond the grace for all gangs to be gone."""

STOP_PAUSE = 0.05


class AdminError(Exception):
    """The cluster refused, or cannot be reached. The message says why."""


class Admin:
    """The operator's side of one cluster folder. All calls block."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser().absolute()
        self._client = Client(self.path)

    def status(self) -> dict[str, Any]:
        """The daemon's table, with ``daemon`` saying whether one lives and who it is. Starts none."""
        try:
            table = self._client.table()
            about = read_json(self._client.folder.daemon) or {}
        except Damaged as error:
            raise AdminError(str(error)) from None
        table["daemon"] = {"alive": self._client.alive(), "pid": about.get("pid")}
        return table

    def preempt(self, name: str, notice: bool = True) -> str:
        """Take the nodes of a gang: after a notice and its grace, or at once."""
        return self._call("preempt", name=name, notice=notice)

    def kill_node(self, node: int) -> str:
        """SIGKILL everything on a node, and keep it down until it is restored."""
        return self._call("kill_node", node=node)

    def restore_node(self, node: int) -> str:
        """Bring a killed node back."""
        return self._call("restore_node", node=node)

    def drain(self, node: int) -> str:
        """Let nothing new start on a node; what runs there goes on."""
        return self._call("drain", node=node)

    def undrain(self, node: int) -> str:
        """Let gangs start on a drained node again."""
        return self._call("undrain", node=node)

    def cancel_all(self, grace: float = 0.0) -> str:
        """Cancel every job, queued or running."""
        return self._call("cancel_all", grace=grace)

    def stop(self, *, gangs: bool = False, grace: float = 0.0) -> str:
        """End the daemon. Gangs go on without it, unless ``gangs``: then all jobs are cancelled first.

        The next submit or observe starts a daemon again.
        """
        if not self._client.folder.cluster.exists():
            return "there is no cluster"
        if gangs:
            self.cancel_all(grace)
            end = time.monotonic() + grace + STOP_LIMIT
            while self._unfinished():
                if time.monotonic() >= end:
                    raise AdminError(f"still not ended: {', '.join(self._unfinished())}")
                time.sleep(STOP_PAUSE)
        if not self._client.alive():
            return "no daemon runs"
        answer = self._call("stop")
        end = time.monotonic() + STOP_LIMIT
        while self._client.alive():
            if time.monotonic() >= end:
                raise AdminError("the daemon does not end")
            time.sleep(STOP_PAUSE)
        return answer

    def _unfinished(self) -> list[str]:
        jobs = self.status()["jobs"]
        return [name for name, row in jobs.items() if row.get("native") in WAITING | HOLDING]

    def _call(self, kind: str, **fields: Any) -> str:
        try:
            return self._client.call(kind, **fields)
        except ClientError as error:
            raise AdminError(str(error)) from None
