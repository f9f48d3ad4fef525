"""Triggers that exist for the benchmark only: one that measures, and the peer.

Both run in the triggerer process, beside the gangs. :class:`ProbeTrigger`
counts what the process asks of targets and stores, by wrapping their methods
when it starts (a benchmark only: nothing of it is in the package), and measures
how late the event loop is. :class:`PollingTrigger` waits as the job triggers of
today's providers do: each asks for its own job, each poll interval.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import psutil
from airflow.triggers.base import BaseTrigger, TriggerEvent

TICK = 0.05
"""Seconds that the probe sleeps between two measures of how late it is woken."""

LINE_EVERY = 0.5
"""Seconds between two lines of the probe's report."""

READS = ("get", "exists", "names", "list")
WRITES = ("create", "put", "delete", "delete_tree")
CALLS = ("observe", "submit", "cancel", "logs", "inventory", "offers")

counts: Counter[str] = Counter()


def count_calls() -> None:
    """From now on every call to a store or a target of this process is counted."""
    from airflow_gpu.rundir.store import Store
    from airflow_gpu.targets.local.target import LocalTarget

    def counted(kind: type, name: str, what: str) -> None:
        real = getattr(kind, name)

        async def call(self: Any, *arguments: Any, **more: Any) -> Any:
            counts[what] += 1
            return await real(self, *arguments, **more)

        setattr(kind, name, call)

    for name in READS:
        counted(Store, name, "reads")
    for name in WRITES:
        counted(Store, name, "writes")
    for name in CALLS:
        counted(LocalTarget, name, name)


def watched() -> int:
    """Gangs that have been looked at once and wait for something to change."""
    from airflow_gpu.hooks.world import _SHARED

    shared = _SHARED.get(asyncio.get_running_loop())
    waiting = [w for watcher in shared.watchers.values() for w in watcher._waiting.values()] if shared else []
    return sum(waiter.known is not None for waiters in waiting for waiter in waiters)


def append(path: str, line: str) -> None:
    with open(path, "a") as file:
        file.write(line + "\n")


class ProbeTrigger(BaseTrigger):
    """Writes one JSON line each ``LINE_EVERY`` seconds to ``report``, for ever."""

    def __init__(self, report: str = "") -> None:
        super().__init__()
        self.report = report

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "benchmarks.watch.probe.ProbeTrigger", {"report": self.report}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        count_calls()
        runner, supervisor = psutil.Process(), psutil.Process(os.getppid())
        while True:
            late: list[float] = []
            end = time.monotonic() + LINE_EVERY
            while time.monotonic() < end:
                begin = time.perf_counter()
                await asyncio.sleep(TICK)
                late.append(round((time.perf_counter() - begin - TICK) * 1000, 2))
            line = {
                "at": time.time(),
                "late_ms": late,
                "watched": watched() + PollingTrigger.seen,
                "counts": counts,
                "cpu_s": sum(runner.cpu_times()[:2]),
                "supervisor_cpu_s": sum(supervisor.cpu_times()[:2]),
                "rss": runner.memory_info().rss,
                "supervisor_rss": supervisor.memory_info().rss,
            }
            await asyncio.to_thread(append, self.report, json.dumps(line))
        yield TriggerEvent({})


class PollingTrigger(BaseTrigger):
    """The peer: one status call per job and poll interval, and nothing else. It reads no run directory."""

    seen: ClassVar[int] = 0

    def __init__(self, conn_id: str = "", job: dict[str, Any] | None = None, poll: float = 5.0) -> None:
        super().__init__()
        self.conn_id, self.job, self.poll = conn_id, job or {}, poll

    def serialize(self) -> tuple[str, dict[str, Any]]:
        arguments = {"conn_id": self.conn_id, "job": self.job, "poll": self.poll}
        return "benchmarks.watch.probe.PollingTrigger", arguments

    async def run(self) -> AsyncIterator[TriggerEvent]:
        from airflow_gpu.hooks.world import target
        from airflow_gpu.targets.base import JobRef

        ref, first = JobRef(**self.job), True
        while True:
            # The connection and the target's client are shared, which is kinder than one for each trigger.
            found = (await (await target(self.conn_id)).observe([ref]))[ref.name]
            PollingTrigger.seen += first
            first = False
            if found.state.ended:
                break
            await asyncio.sleep(self.poll)
        yield TriggerEvent({"state": found.state.value})
