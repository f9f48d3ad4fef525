"""The files of a checkpoint that lie on many nodes, brought to the channel together.

Purpose: where the nodes share no folder, each has its part of a checkpoint. Node
0 asks every agent for the names of its files, then to upload those that are its
own: of a name that several nodes have, the lowest node's file counts, as the
content is then one node's and not a mixture.

Limits: an agent that does not answer fails the whole. Runs in the control
server's thread.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, Callable, Dict, List, Set, Tuple

from airflow_gpu.runtime.control import Peer
from airflow_gpu.runtime.manifest import Entry
from airflow_gpu.runtime.wire import HASH_SECONDS, LIST_SECONDS, Message


class NotCollected(Exception):
    """Some node's files are not on the channel. The message says which and why."""


class Parts:
    """Asks ``agents``, by node. All ``nodes`` must be there: one that is gone had files too."""

    def __init__(self, agents: Callable[[], Dict[int, Peer]], nodes: int) -> None:
        self._agents = agents
        self._nodes = nodes
        self._numbers = itertools.count(1)
        self._asked: Dict[Tuple[int, int], asyncio.Future[Message]] = {}

    async def collect(self, folder: str) -> List[Entry]:
        """Bring all files below ``folder`` of every node to the channel. Raises NotCollected."""
        listed = await self._ask(
            self._all({"t": "list", "dir": folder}), LIST_SECONDS, "listing of its files"
        )
        seen: Set[str] = set()
        tasks: Dict[int, Message] = {}
        for node in sorted(listed):
            own = [name for name in map(str, listed[node]["names"]) if name not in seen]
            seen.update(own)
            if own:
                tasks[node] = {"t": "upload", "dir": folder, "names": own}
        done = await self._ask(tasks, HASH_SECONDS, "upload of its files")
        entries = [
            Entry(str(path), int(size), str(digest))
            for node in sorted(done)
            for path, size, digest in done[node]["files"]
        ]
        if {entry.path for entry in entries} != seen:
            raise NotCollected("not all files were uploaded")
        return sorted(entries, key=lambda entry: entry.path)

    async def copies(self, message: Message, seconds: float) -> Dict[int, Message]:
        """The same question to every node about its own copies; answers by node. Raises NotCollected."""
        return await self._ask(self._all(message), seconds, str(message["t"]))

    def tell(self, message: Message) -> None:
        """To every node; nobody answers."""
        for peer in self._agents().values():
            peer.send(message)

    def drop(self, folder: str) -> None:
        """It is on the channel: the nodes need not keep their copies, nor any of an earlier step beside it."""
        self.tell({"t": "drop", "dir": folder})

    def heard(self, peer: Peer, m: Message) -> None:
        """An agent's answer."""
        future = self._asked.pop((peer.index, int(m["id"])), None)
        if future is not None and not future.done():
            future.set_result(m)

    def abort(self, reason: str) -> None:
        """A node is gone, or the gang ends: nobody needs to wait any longer."""
        for future in self._asked.values():
            if not future.done():
                future.set_exception(NotCollected(reason))
        self._asked.clear()

    def _all(self, message: Message) -> Dict[int, Message]:
        """The same to every node. Raises NotCollected."""
        peers = self._agents()
        gone = [node for node in range(self._nodes) if node not in peers]
        if gone:
            raise NotCollected(f"nodes {', '.join(map(str, gone[:8]))} are gone, and their files with them")
        return {node: dict(message) for node in peers}

    async def _ask(self, what: Dict[int, Message], seconds: float, words: str) -> Dict[int, Message]:
        peers = self._agents()
        futures: Dict[int, asyncio.Future[Message]] = {}
        for node, message in what.items():
            if node not in peers:
                raise NotCollected(f"node {node} is gone")
            number = next(self._numbers)
            futures[node] = self._asked[node, number] = asyncio.get_running_loop().create_future()
            peers[node].send({**message, "id": number})
        if futures:
            await asyncio.wait(futures.values(), timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for future in futures.values():
            if future.done():
                future.result()  # raises what ended the waiting
        answers: Dict[int, Any] = {}
        for node, future in futures.items():
            if not future.done():
                future.cancel()
                raise NotCollected(f"node {node} did not answer for {seconds:.0f} s: {words}")
            answers[node] = future.result()
            if "error" in answers[node]:
                raise NotCollected(f"node {node}: {answers[node]['error']}")
        return answers
