"""Run directories made by hand: what a driver and the ranks of a gang would have written.

Times are given in seconds after ``T0``, so that pages of tests look alike.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from airflow_gpu.gang.entries import (
    attempt_entry,
    iso,
    over_entry,
    owner_entry,
    stop_entry,
    submitted_entry,
    verdict_entry,
)
from airflow_gpu.gang.identity import RunKey, attempt_name, run_path, slot_path
from airflow_gpu.gang.run import Cause, CheckpointRef, Failure, Outcome
from airflow_gpu.rundir.channel import Channel
from airflow_gpu.rundir.journal import Journal
from airflow_gpu.rundir.ranklog import in_segments
from airflow_gpu.rundir.store import Store

INSTALLATION = "tests"
GANG = {
    "v": 1,
    "nodes": 2,
    "gpus_per_node": 4,
    "ranks_per_node": None,
    "accelerator": "H100",
    "launch": "rank",
    "command": ["python", "train.py"],
    "env": {"PASSPHRASE": "not for the page"},
    "targets": ["slurm_a", "eks_spot"],
}


def _offer(target: str, **more: Any) -> dict[str, Any]:
    return {
        "target": target,
        "accelerator": "H100",
        "provisioning": "spot",
        "price_per_node_hour": 12.5,
        "source": "declared",
        "at": 0.0,
        "free_nodes": 4,
        "total_nodes": 16,
        "expected_wait": None,
        "reason": "",
        **more,
    }


DECISION = {
    "chosen": _offer("slurm_a", provisioning="owned", price_per_node_hour=0.0),
    "others": [
        _offer("eks_spot", reason="would have to wait", free_nodes=1),
        _offer(
            "vertex_eu",
            reason="has no H100",
            accelerator=None,
            free_nodes=None,
            total_nodes=None,
            price_per_node_hour=31.2,
        ),
    ],
}

MOVED = {
    "chosen": _offer("eks_spot"),
    "others": [
        _offer(
            "slurm_a",
            provisioning="owned",
            price_per_node_hour=0.0,
            free_nodes=0,
            reason="would have to wait",
        )
    ],
}


class Made:
    """One run, written step by step."""

    def __init__(
        self,
        root: Path,
        key: RunKey,
        incarnation: str = "abcdefgh23",
        t0: float | None = None,
        channel: str | None = None,
    ) -> None:
        self.key, self.incarnation = key, incarnation
        self.t0 = time.time() - 7200 if t0 is None else t0
        self.state = Store(f"file://{root}/state")
        self.path = run_path(key, incarnation)
        self.channel = Channel(Store(channel or f"file://{root}/channel"), self.path)
        self.folder = root / "channel" / self.path
        self.journal = Journal(self.state, self.path)
        self.epoch = 0
        self.attempt = 0
        self.lives = 0

    async def begin(self, number: int = 1) -> Made:
        body = json.dumps(
            {"v": 1, "incarnation": self.incarnation, "key": asdict(self.key), "at": iso(self.t0)}
        ).encode()
        await self.state.create(f"{self.path}/run.json", body)
        await self.state.create(f"{slot_path(self.key)}/incarnations/{number:04d}.json", body)
        return self

    async def _append(self, entry: Mapping[str, Any], at: float) -> None:
        await self.journal.append(dict(entry), epoch=self.epoch, now=self.t0 + at)

    async def owner(
        self, at: float, *, reason: str = "start", gang: Mapping[str, Any] = GANG, resume: bool = True
    ) -> None:
        self.epoch += 1
        await self._append(
            owner_entry(
                ti_id=f"0197-ti-{self.epoch}",
                try_number=self.epoch,
                max_tries=2,
                reason=reason,
                resume=resume,
                deadline=self.t0 + 86400,
                gang=gang,
                digest="d" * 64,
            ),
            at,
        )

    async def start(
        self,
        at: float,
        *,
        target: str = "slurm_a",
        submitted: bool = True,
        decision: Mapping[str, Any] = DECISION,
        channel: str | None = None,
    ) -> None:
        self.attempt += 1
        await self._append(
            attempt_entry(
                attempt=self.attempt,
                name=attempt_name(self.key, self.incarnation, self.attempt),
                target=target,
                channel=channel or self.channel.uri,
                offer=decision,
                resume=True,
                first_life=self.lives + 1,
                digest="d" * 64,
            ),
            at,
        )
        if submitted:
            await self._append(submitted_entry(self.attempt, str(4700 + self.attempt)), at + 2)

    async def stop(
        self, at: float, reason: str = "user", detail: str = "the task was ended by a user's action"
    ) -> None:
        await self._append(stop_entry(self.attempt, reason, detail), at)

    async def over(
        self,
        at: float,
        cause: Cause,
        detail: str = "",
        *,
        failure: Failure | None = None,
        checkpoint: tuple[int, int] | None = None,
        life: int | None = None,
        restarts: int = 0,
    ) -> None:
        await self.channel.fence(self.attempt, 1, cause.value, self.t0 + at)
        mine = life or self.lives
        self.lives += 1
        outcome = Outcome(
            cause,
            self.t0 + at,
            detail,
            failure,
            mine,
            CheckpointRef(*checkpoint) if checkpoint else None,
            restarts,
        )
        await self._append(over_entry(self.attempt, outcome), at)

    async def verdict(self, at: float, outcome: str, cause: Cause, message: str = "") -> None:
        cost = {"node_hours": 3.5, "gpu_hours": 28.0, "usd": 43.75}
        await self._append(verdict_entry(outcome, cause, message, {"cost": cost}), at)

    # -- the ranks' side

    async def put(self, path: str, body: Any) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        await self.channel.store.put(f"{self.path}/{path}", data)

    async def life(
        self,
        at: float,
        *,
        origin: tuple[int, int] | None = None,
        restart: int = 0,
        ranks: int = 8,
        nodes: int = 2,
    ) -> int:
        self.lives += 1
        await self.put(f"lives/{self.lives:04d}.json", {
            "v": 1, "kind": "life", "life": self.lives, "attempt": self.attempt, "job": str(4700 + self.attempt),
            "restart": restart, "nodes": nodes, "world_size": ranks, "processes": ranks,
            "from": {"life": origin[0], "step": origin[1]} if origin else None, "at": iso(self.t0 + at),
        })  # fmt: skip
        for rank in range(ranks):
            await self.log(self.lives, rank, f"rank {rank} of life {self.lives} says hello\n".encode())
        return self.lives

    async def log(self, life: int, rank: int, data: bytes) -> None:
        name = f"rank-{rank:05d}"
        if not in_segments(self.channel.store):
            await self.put(f"lives/{life:04d}/logs/{name}.log", data)
            return
        for start in range(0, len(data), 20):
            await self.put(f"lives/{life:04d}/logs/{name}/{start:015d}", data[start : start + 20])

    async def save(self, at: float, step: int, *, complete: bool = True, files: int = 8) -> None:
        folder = f"checkpoints/{self.lives:04d}/step-{step:09d}"
        for rank in range(2):
            await self.put(f"{folder}/rank-{rank}.bin", b"x")
        if complete:
            listed = [
                {"path": f"rank-{n}.bin", "size": 3 * 2**30 + n, "sha256": "0" * 64} for n in range(files)
            ]
            await self.put(
                f"{folder}/manifest.json",
                {
                    "v": 1,
                    "life": self.lives,
                    "step": step,
                    "world_size": 8,
                    "files": listed,
                    "at": iso(self.t0 + at),
                },
            )

    async def progress(self, at: float, step: int, total: int = 5000) -> None:
        await self.put(
            f"lives/{self.lives:04d}/progress.json",
            {"step": step, "total": total, "metrics": {"loss": 0.0397}, "at": iso(self.t0 + at)},
        )

    async def notice(self, at: float) -> None:
        await self.put(
            f"lives/{self.lives:04d}/notice.json",
            {"v": 1, "life": self.lives, "source": "SIGTERM to node 0", "at": iso(self.t0 + at)},
        )

    async def ends(self, at: float, codes: Sequence[int | str], *, nodes: int = 2) -> None:
        """How the ranks ended: exit codes, or names of signals."""
        each = len(codes) // nodes
        for node in range(nodes):
            ranks = [
                {
                    "rank": rank,
                    "local_rank": rank % each,
                    "exit_code": code if isinstance(code, int) else None,
                    "signal": code if isinstance(code, str) else None,
                    "started": iso(self.t0 + at - 60),
                    "ended": iso(self.t0 + at),
                }
                for rank, code in list(enumerate(codes))[node * each : (node + 1) * each]
            ]
            await self.put(f"lives/{self.lives:04d}/nodes/{node:04d}.json", {
                "v": 1, "life": self.lives, "node": node, "host": f"gpu-{node:02d}.cluster", "ranks": ranks, "at": iso(self.t0 + at),
            })  # fmt: skip


def key(
    task: str, *, dag: str = "train_llm", run: str = "manual__2026-03-01T08:00:00+00:00", map_index: int = -1
) -> RunKey:
    return RunKey(INSTALLATION, dag, run, task, map_index)


async def succeeded(root: Path, task: str = "succeeded", **where: Any) -> Made:
    """Two preemptions: one that Slurm requeued, one after which the gang went on elsewhere; then success."""
    made = await Made(root, key(task, **where)).begin()
    await made.owner(0)
    await made.start(5)
    await made.life(240)
    await made.save(900, 400)
    await made.save(1500, 800)
    await made.notice(1700)
    await made.save(1720, 910)
    await made.ends(1730, [75] * 8)
    await made.life(2100, origin=(1, 910), restart=1)
    await made.progress(3100, 1500)
    await made.save(2700, 1300)
    await made.notice(3200)
    await made.ends(3230, [75] * 7 + ["SIGKILL"])
    await made.over(
        3300,
        Cause.PREEMPTED,
        "PREEMPTED by partition priority; not requeued",
        checkpoint=(2, 1300),
        restarts=1,
    )
    await made.start(3310, target="eks_spot", decision=MOVED)
    await made.life(3900, origin=(2, 1300))
    await made.save(4600, 2400)
    await made.save(5400, 3800)
    await made.progress(6300, 5000)
    await made.save(6300, 5000)
    await made.ends(6310, [0] * 8)
    await made.over(6330, Cause.SUCCEEDED, "every rank ended with 0", checkpoint=(4, 5000))
    await made.verdict(6331, "success", Cause.SUCCEEDED)
    return made


TAIL = """Traceback (most recent call last):
  File "/srv/train.py", line 212, in <module>
    main()
  File "/srv/train.py", line 180, in main
    loss = step(model, batch)
RuntimeError: shape mismatch: <script>alert("rank 5")</script> & [64, 1024] vs [64, 512]"""


async def failed(root: Path, task: str = "failed", **where: Any) -> Made:
    """A rank fails, the retry fails the same way."""
    made = await Made(root, key(task, **where)).begin()
    for n, begin in enumerate((0, 1400)):
        await made.owner(begin, reason="start" if n == 0 else "retry")
        await made.start(begin + 5)
        await made.life(begin + 100, origin=None if n == 0 else (1, 300))
        await made.save(begin + 600, 300 + n)
        await made.save(begin + 700, 400, complete=False)
        await made.log(made.lives, 5, b"step 1\nstep 2\n" + TAIL.encode() + b"\n")
        await made.ends(begin + 800, ["SIGTERM", "SIGTERM", 0, "SIGTERM", "SIGTERM", 1, "SIGTERM", "SIGTERM"])
        await made.put(f"lives/{made.lives:04d}/failure.json", {
            "v": 1, "life": made.lives, "cause": "rank", "rank": 5, "node": 1, "host": "gpu-01.cluster", "exit_code": 1,
            "signal": None, "tail": TAIL, "message": "", "at": iso(made.t0 + begin + 799),
        })  # fmt: skip
        told = Failure("rank", 5, 1, "gpu-01.cluster", 1, None, TAIL)
        await made.over(
            begin + 820,
            Cause.APPLICATION,
            "rank 5 ended with exit code 1",
            failure=told,
            checkpoint=(made.lives, 300 + n),
        )
        await made.verdict(
            begin + 821, "failed", Cause.APPLICATION, "attempt ended: rank 5 failed first with exit code 1"
        )
    return made


async def running(root: Path, task: str = "running", **where: Any) -> Made:
    """In its second life after a preemption, still computing."""
    made = await Made(root, key(task, **where), t0=time.time() - 3000).begin()
    await made.owner(0)
    await made.start(5)
    await made.life(120)
    await made.save(600, 300)
    await made.notice(900)
    await made.save(915, 520)
    await made.ends(920, [75] * 8)
    await made.life(1400, origin=(1, 520), restart=1)
    await made.save(2000, 900)
    await made.save(2600, 1300)
    await made.progress(2990, 1580)
    return made


async def stopped(root: Path, task: str = "stopped", **where: Any) -> Made:
    """Somebody marked the task failed; the gang saved and ended."""
    made = await Made(root, key(task, **where)).begin()
    await made.owner(0)
    await made.start(5)
    await made.life(60)
    await made.save(500, 200)
    await made.stop(900)
    await made.notice(901)
    await made.save(915, 390)
    await made.ends(920, [75] * 8)
    await made.over(930, Cause.STOPPED, "the task was ended by a user's action", checkpoint=(1, 390))
    await made.verdict(931, "cancelled", Cause.STOPPED, "the task was ended by a user's action")
    return made
