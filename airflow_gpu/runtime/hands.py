"""What node 0 asks an agent to do with files, and what a life starts from on this node.

Purpose: keeps the agent itself to processes and signals. Work that takes time is
done in threads, and answered with a message of kind ``part``.

Limits: as those of :mod:`airflow_gpu.runtime.transfer` (a channel that is no
folder) and :mod:`airflow_gpu.runtime.copies` (quick copies on the node's disk).
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, Callable, Dict, List, Optional

from airflow_gpu.runtime.checkpoint import in_order
from airflow_gpu.runtime.copies import Copies, Copy
from airflow_gpu.runtime.files import Channel
from airflow_gpu.runtime.job import Job, Node
from airflow_gpu.runtime.manifest import listing
from airflow_gpu.runtime.objects import Objects
from airflow_gpu.runtime.transfer import Logs, brought
from airflow_gpu.runtime.wire import Message

THREADS = 2
"""Jobs of node 0 that are worked on at a time; each uses several threads of its own for the files."""

MOST_HELD = 8
"""Copies that a node tells of when it joins, the newest: a greeting is a short message."""


class Hands:
    """One agent's. ``seed``: the channel of the checkpoint of another place; ``answer`` sends to node 0.

    A folder for copies that cannot be used is said, and there are none then: every save goes to the channel.
    """

    def __init__(
        self,
        job: Job,
        node: Node,
        channel: Channel,
        seed: Channel,
        answer: Callable[[Message], None],
        say: Callable[[str], None],
    ) -> None:
        self._node = node
        self._channel = channel
        self._seed = seed
        self._answer = answer
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="gang-files")
        shape = f"{job.nodes}x{job.ranks_per_node}"
        self._copies: Optional[Copies] = None
        if job.local:
            try:
                self._copies = Copies(job.local, job.channel, node.rank, shape)
            except OSError as error:
                say(
                    f"CHECKPOINTING.LOCAL CANNOT BE USED ON THIS NODE: {error}. The gang goes on WITHOUT COPIES; every "
                    "save goes to the channel"
                )
        self.logs: Optional[Logs] = None
        self.handlers: Dict[str, Callable[[Message], None]] = {}
        if isinstance(channel, Objects):
            self.logs = Logs(channel, say)
            self._serve_store(channel)
        if self._copies is not None:
            self._serve_copies(self._copies)

    def _serve_store(self, store: Objects) -> None:
        def upload(m: Message) -> Message:
            entries = store.upload(str(m["dir"]), [str(name) for name in m["names"]])
            return {"files": [[entry.path, entry.size, entry.sha256] for entry in entries]}

        def drop(m: Message) -> None:
            # This node's copy, and those of earlier saves beside it that came to nothing.
            root, _, name = str(m["dir"]).rpartition("/")
            for other in store.here.names(root):
                if in_order(other) <= in_order(name):
                    store.here.remove_tree(f"{root}/{other}")

        self._answers("list", lambda m: {"names": listing(store.folder(str(m["dir"])))})
        self._answers("upload", upload)
        self.handlers["drop"] = lambda m: self._quietly(drop, m)

    def _serve_copies(self, copies: Copies) -> None:
        def keep(m: Message) -> Message:
            name, step, world = str(m["name"]), int(m["step"]), int(m["world"])
            files, size = copies.keep(int(m["life"]), name, step, world)
            return {"files": files, "bytes": size}

        self._answers("keep", keep)
        self._answers("check", lambda m: {"wrong": copies.wrong(Copy.of(m))})
        self.handlers["kept"] = lambda m: self._quietly(
            lambda m: copies.kept(int(m["life"]), str(m["name"])), m
        )
        self.handlers["undo"] = lambda m: self._quietly(
            lambda m: copies.undo(int(m["life"]), str(m["name"])), m
        )

    # -- what a life starts from -------------------------------------------------------------------------

    @property
    def copies(self) -> bool:
        """This node can keep copies."""
        return self._copies is not None

    def held(self) -> List[Dict[str, Any]]:
        """Copies of earlier lives on this node's disk."""
        return [] if self._copies is None else [asdict(copy) for copy in self._copies.held()[:MOST_HELD]]

    def local(self, life: int) -> str:
        """Where ranks write quick copies; empty where there are none."""
        return "" if self._copies is None else self._copies.path(life)

    def bring(self, life: int, restore: Optional[Message], then: Callable[[str, str], None]) -> None:
        """See to it that what the life starts from is on this node, then say where it is, or why it is not.

        ``then`` may be called from another thread.
        """
        if restore is None:
            then("", "")
            return
        if restore.get("local"):
            assert self._copies is not None
            try:
                then(self._copies.adopt(life, Copy.of(restore)), "")
            except OSError as error:
                then("", f"the copy of step {restore['step']} on this node cannot be used: {error}")
            return
        channel = self._seed if restore.get("seed") else self._channel
        where = str(restore["dir"])
        if channel.shared:
            then(channel.path(where), "")
            return
        whole = bool(restore.get("verified"))
        judge = self._node.rank == 0 and not whole
        threading.Thread(
            target=lambda: then(*brought(channel, where, judge, whole)), name="gang-restore", daemon=True
        ).start()

    def close(self, succeeded: bool, failed: int = 0) -> None:
        """The life is over on this node. ``succeeded``: the whole gang has; ``failed``: the life, if it has failed."""
        if self.logs is not None:
            self.logs.finish()
        self._pool.shutdown(wait=False)
        if succeeded and self._copies is not None:
            self._copies.forget()
        if failed and self._copies is not None:
            self._copies.distrust(failed)

    # -- threads ---------------------------------------------------------------------------------------------

    def _answers(self, kind: str, work: Callable[[Message], Message]) -> None:
        def run(m: Message) -> None:
            try:
                answer = work(m)
            except Exception as error:  # node 0 must hear of whatever it is
                answer = {"error": f"{type(error).__name__}: {error}"}
            self._answer({"t": "part", "id": m["id"], **answer})

        self.handlers[kind] = lambda m: self._quietly(run, m)

    def _quietly(self, work: Callable[[Message], None], m: Message) -> None:
        try:
            self._pool.submit(work, m)
        except RuntimeError:
            pass  # it is closed: the gang is over
