"""What node 0 knows of a life, shared by the parts that decide.

Purpose: one plain object; who changes what is said with each field. All of it
lives in the control server's thread.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Awaitable, Callable, Dict, Optional, Set

from airflow_gpu.runtime.claim import Claim
from airflow_gpu.runtime.control import Peer
from airflow_gpu.runtime.job import Job
from airflow_gpu.runtime.wire import Message
from airflow_gpu.runtime.words import Log

GATHERING, RUNNING, ENDING, FINISHING, OVER = "gathering", "running", "ending", "finishing", "over"


@dataclass(frozen=True)
class Verdict:
    """How the life ended: ``ended``, ``failed``, ``preempted``, ``superseded``, ``not_whole``; the agents' exit code."""

    kind: str
    code: int
    message: str = ""


class Tasks:
    """Work in the event loop, and on disks beside it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, log: Log) -> None:
        self.loop = loop
        self._log = log
        self._running: Set[asyncio.Future[Any]] = set()
        self._writes: Set[asyncio.Future[Any]] = set()

    def spawn(self, what: Awaitable[None]) -> None:
        """Do it, and log if it fails. The loop itself holds tasks only weakly."""
        task = asyncio.ensure_future(what, loop=self.loop)
        self._running.add(task)
        task.add_done_callback(self._finished)

    async def disk(self, what: Callable[..., Any], *args: Any) -> Any:
        """In a thread: a slow file system must not silence the heartbeats."""
        return await self.loop.run_in_executor(None, what, *args)

    def write(self, what: Callable[..., Any], *args: Any) -> None:
        """Begin to write something that the life must leave behind; see :meth:`written`."""
        task = self.loop.run_in_executor(None, what, *args)
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)
        task.add_done_callback(self._finished)

    async def written(self) -> None:
        """All that was begun with :meth:`write` is on the channel, or was given up."""
        if self._writes:
            await asyncio.wait(list(self._writes))

    def cancel(self) -> None:
        """All that is still going on."""
        for task in self._running:
            task.cancel()

    def _finished(self, task: asyncio.Future[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._log(f"{type(task.exception()).__name__}: {task.exception()}")


@dataclass
class State:
    """One life, as node 0 sees it."""

    job: Job
    claim: Claim
    phase: str = GATHERING
    verdict: Optional[Verdict] = None
    agents: Dict[int, Peer] = field(default_factory=dict)  # by node; stay here when lost
    ranks: Dict[int, Peer] = field(default_factory=dict)  # by rank: those connected through the handle
    lost: Dict[int, str] = field(default_factory=dict)  # nodes, and why
    done: Set[int] = field(default_factory=set)  # nodes that have written down how their ranks ended
    expected: Dict[int, int] = field(
        default_factory=dict
    )  # nodes that started fewer processes than they should
    noticed_at: Optional[float] = None  # of the loop's clock
    told_to_end: Set[int] = field(default_factory=set)  # processes that got SIGTERM because of the notice
    left_after_save: Set[int] = field(default_factory=set)  # ranks that said good-bye with 75

    @property
    def noticed(self) -> bool:
        return self.noticed_at is not None

    def to_agents(self, message: Message) -> None:
        for node, peer in self.agents.items():
            if node not in self.lost:
                peer.send(message)

    def to_ranks(self, message: Message) -> None:
        for peer in self.ranks.values():
            peer.send(message)

    def host(self, node: Optional[int]) -> str:
        peer = self.agents.get(node) if node is not None else None
        return str(peer.hello.get("host", "")) if peer is not None else ""
