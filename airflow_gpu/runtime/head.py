"""Node 0's decisions: who belongs to the gang, the barrier, notices, and what ranks ask for.

Purpose: the control server's handler. It runs in the server's thread
(:mod:`airflow_gpu.runtime.control`) and so needs no locks. How a life ends is
the business of :mod:`airflow_gpu.runtime.ending`, how a save is committed that
of :mod:`airflow_gpu.runtime.saves`.

The phases of a life: ``gathering`` until every node is there, ``running``,
``ending`` once ranks are told to stop, ``finishing`` when no process is left,
``over``.

Limits: what node 0 does not see is not decided here: a node 0 that dies is
noticed by the other agents, which end their ranks.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from typing import Callable, Dict, List, Optional

from airflow_gpu.runtime import manifest
from airflow_gpu.runtime.claim import Claim, Entry, since_begun, superseded
from airflow_gpu.runtime.control import Peer, Server, free_ports
from airflow_gpu.runtime.copies import Copy, Levels, common
from airflow_gpu.runtime.ending import Ending
from airflow_gpu.runtime.ends import notice_cause
from airflow_gpu.runtime.files import Channel
from airflow_gpu.runtime.job import Job, Node
from airflow_gpu.runtime.parts import NotCollected, Parts
from airflow_gpu.runtime.records import PROGRESS_SECONDS, Records
from airflow_gpu.runtime.relay import Relay
from airflow_gpu.runtime.saves import Saver, Saves, save_key
from airflow_gpu.runtime.state import GATHERING, OVER, RUNNING, State, Tasks, Verdict
from airflow_gpu.runtime.wire import AGENT, HASH_SECONDS, RANK, REMOTE, Message
from airflow_gpu.runtime.words import (
    EXIT_FAILED,
    EXIT_NOT_CLAIMED,
    EXIT_NOT_WHOLE,
    EXIT_PREEMPTED,
    VERSION,
    Log,
)

LOOK_SECONDS = 5.0
"""Between looks for a newer entry in ``lives/``, and for checkpoints that a program has called complete."""

SUPERSEDED_GRACE = 5.0
"""For ranks of a superseded life: nothing that they still write counts."""

SHOWN_NODES = 16
"""Nodes named in a message."""


class Head:
    """A :class:`airflow_gpu.runtime.control.Handler` that decides for one life."""

    def __init__(
        self, channel: Channel, job: Job, node: Node, claim: Claim, server: Server, log: Log
    ) -> None:
        self._claimed = time.monotonic()
        self._channel = channel
        self._job = job
        self._node = node
        self._server = server
        self._log = log
        self._state = state = State(job, claim)
        self._parts = Parts(self._living, job.nodes)
        self._records = Records(channel, job, claim, log, None if channel.shared else self._collect)
        self._looking = False  # at the nodes' own copies
        self._copies = bool(job.local)  # the nodes can keep some
        self._tasks = Tasks(server.loop, log)
        self._decisions: Dict[int, Message] = {}  # by block: what rank 0 has published
        self._relay = Relay(lambda: state.agents)
        self._saves = Saves(
            channel,
            claim.life,
            job.keep,
            claim.start,
            claim.ancestors,
            self._savers,
            self._world,
            lambda: state.noticed,
            log,
            self._tasks.spawn,
            self._parts,
            every=job.every,
            levels=Levels(job.interval, claim.mtbf, server.loop.time()) if job.local else None,
            saved=self._records.note_saved,
        )
        self._grace = job.stop_grace
        self._fence = 0  # number of the fence that has left us time to save
        self._ending: Ending
        self._handlers: Dict[str, Callable[[Peer, Message], None]] = {}

    def begin(self) -> None:
        """First thing in the server's thread: the barrier's clock runs from here."""
        ending = self._ending = Ending(
            self._state, self._server, self._tasks, self._records, self._saves.abort, self._log
        )
        saves = self._saves
        self._handlers = {
            "ended": self._on_ended,
            "done": ending.done,
            "failing": ending.failing,
            "broken": self._on_broken,
            "notice": self._on_notice,
            "decide": self._on_decide,
            "begin": lambda peer, m: saves.begin(peer.index, save_key(m)),
            "written": lambda peer, m: saves.written(peer.index, save_key(m)),
            "unsaved": lambda peer, m: saves.unsaved(peer.index, save_key(m), str(m["error"])),
            "view": lambda peer, m: saves.viewed(peer.index, save_key(m), m.get("names")),
            "hashed": lambda peer, m: saves.hashed(peer.index, save_key(m), m["files"]),
            "progress": self._on_progress,
            "result": self._on_result,
            "bye": self._on_bye,
            "exec": self._relay.start,
            "output": self._relay.output,
            "exit": self._relay.exit,
            "part": self._parts.heard,
        }
        self._server.loop.call_later(self._job.barrier_timeout, self._not_whole)
        self._tasks.spawn(self._look())
        self._tasks.spawn(self._write_progress())

    # -- peers --------------------------------------------------------------------------------

    def joined(self, peer: Peer) -> Message:
        state = self._state
        if peer.kind == AGENT:
            return self._agent_joined(peer)
        if peer.kind == RANK and peer.index >= 0:
            if state.phase != RUNNING:
                return _refused(f"life {state.claim.life} is {state.phase}")
            state.ranks[peer.index] = peer
            self._saves.came(peer.index)
            decisions = self._decisions.get(int(peer.hello.get("block", 0)))
            return {"t": "welcome", "notice": state.noticed, "left": self._left(), "decisions": decisions}
        return {"t": "welcome"} if peer.kind == REMOTE else _refused("not understood")

    def _agent_joined(self, peer: Peer) -> Message:
        state, hello = self._state, peer.hello
        if hello.get("life") != state.claim.life or not 0 <= peer.index < self._job.nodes:
            return _refused(f"this is life {state.claim.life} of {self._job.nodes} nodes")
        if state.phase != GATHERING or peer.index in state.agents:
            return _refused(f"node {peer.index} is here already, or the gang has begun")
        state.agents[peer.index] = peer
        self._log(
            f"node {peer.index} ({hello.get('host')}) is here, {len(state.agents)} of {self._job.nodes}"
        )
        if len(state.agents) == self._job.nodes:
            self._server.loop.call_soon(self._whole)
        return {"t": "welcome"}

    def message(self, peer: Peer, message: Message) -> None:
        handler = self._handlers.get(str(message.get("t")))
        if handler is not None:
            handler(peer, message)

    def left(self, peer: Peer, reason: str) -> None:
        state = self._state
        if peer.kind == AGENT and state.agents.get(peer.index) is peer:
            if state.phase == GATHERING:
                del state.agents[peer.index]  # it may come again until the barrier's time is over
                self._saves.node_gone(peer.index, reason)
            elif state.phase != OVER and peer.index not in state.done and peer.index not in state.lost:
                self._relay.lost(peer.index)
                self._parts.abort(f"node {peer.index} is gone ({reason})")
                self._ending.lost(peer.index, reason)
        elif peer.kind == RANK and state.ranks.get(peer.index) is peer:
            del state.ranks[peer.index]
            self._saves.gone(peer.index, reason)
            if peer.index == 0:
                state.to_ranks({"t": "leaderless", "block": peer.hello.get("block")})
        elif peer.kind == REMOTE:
            self._relay.left(peer)

    def _living(self) -> Dict[int, Peer]:
        return {node: peer for node, peer in self._state.agents.items() if node not in self._state.lost}

    def _collect(self, folder: str) -> Optional[List[manifest.Entry]]:
        """For the recorder's threads: a program's checkpoint from all nodes; None when that failed."""
        task = asyncio.run_coroutine_threadsafe(self._parts.collect(folder), self._server.loop)
        try:
            return task.result()
        except NotCollected as error:
            self._log(f"checkpoint {folder} was not uploaded: {error}")
            return None

    def _savers(self) -> Dict[int, Saver]:
        return {
            rank: Saver(rank, int(peer.hello.get("node", 0)), peer.send)
            for rank, peer in self._state.ranks.items()
        }

    def _world(self) -> int:
        # Under mpirun only the program knows how many ranks there are.
        told = [int(peer.hello.get("world", 0)) for peer in self._state.ranks.values()]
        return max(told, default=self._job.world_size)

    # -- the barrier --------------------------------------------------------------------------

    def _whole(self) -> None:
        """All nodes are here."""
        if not self._job.local:
            self._start(None)
        elif not self._looking:
            self._looking = True
            self._tasks.spawn(self._look_at_copies())

    async def _look_at_copies(self) -> None:
        """Is there a further checkpoint on the nodes' own disks, whole on each of them?"""
        agents = self._state.agents
        unable = sorted(node for node, peer in agents.items() if not peer.hello.get("copies"))
        if unable:
            self._log(f"there are no copies: nodes {unable} cannot keep any; every save goes to the channel")
            self._copies = False
            self._saves.without_copies()
        held = [map(Copy.of, peer.hello.get("held") or ()) for peer in agents.values()]
        claim, shape = self._state.claim, f"{self._job.nodes}x{self._job.ranks_per_node}"
        found: Optional[Copy] = None
        lives = await self._tasks.disk(since_begun, self._channel, claim.earlier)
        for copy in common(held, lives, claim.start, shape):
            try:
                answers = await self._parts.copies({"t": "check", **asdict(copy)}, HASH_SECONDS)
            except NotCollected as error:
                self._log(f"the nodes' copies of step {copy.step} cannot be used: {error}")
                if len(self._state.agents) < self._job.nodes:
                    break
                continue
            wrong = {node: answer["wrong"] for node, answer in answers.items() if answer["wrong"]}
            if not wrong:
                found = copy
                break
            node, why = sorted(wrong.items())[0]
            self._log(f"the nodes' copies of step {copy.step} are passed over: node {node}: {why}")
        self._looking = False
        source = None if found is None else {"life": found.life, "step": found.step}
        body = {"v": VERSION, "life": claim.life, "from": source}
        await self._tasks.disk(self._records.note, "local.json", body)
        self._start(found)

    def _start(self, copy: Optional[Copy]) -> None:
        state = self._state
        if state.phase != GATHERING or len(state.agents) < self._job.nodes:
            return
        state.phase = RUNNING
        master, jax = free_ports(2)
        nodes = [state.agents[node].hello for node in range(self._job.nodes)]
        start = state.claim.start
        restore: Optional[Message] = None
        if copy is not None:
            restore = {**asdict(copy), "local": True, "verified": True}
            self._log(
                f"the nodes have copies of step {copy.step} on their own disks: the ranks start from those"
            )
        elif start is not None:
            restore = {**start.to_dict(), "verified": start.verified, "world_size": start.world_size}
        self._log(f"all {self._job.nodes} nodes are here; the ranks start")
        state.to_agents(
            {
                "t": "start",
                "master_addr": self._node.address,
                "master_port": master,
                "jax_port": jax,
                "nodes": [{"addr": hello.get("addr"), "host": hello.get("host")} for hello in nodes],
                "mtbf": state.claim.mtbf,
                "copies": self._copies,
                "restore": restore,
            }
        )

    def _not_whole(self) -> None:
        if self._state.phase != GATHERING:
            return
        if self._looking:  # all are there, and are busy with their copies
            self._server.loop.call_later(self._job.barrier_timeout, self._not_whole)
            return
        missing = [node for node in range(self._job.nodes) if node not in self._state.agents]
        shown = ", ".join(map(str, missing[:SHOWN_NODES])) + (", ..." if len(missing) > SHOWN_NODES else "")
        self._ending.never_started(
            Verdict(
                "not_whole",
                EXIT_NOT_WHOLE,
                f"nodes {shown} did not come within {self._job.barrier_timeout:g} s; nothing was started",
            ),
            {"cause": "not_whole", "node": missing[0] if missing else None},
        )

    def _on_broken(self, peer: Peer, m: Message) -> None:
        """An agent cannot start its ranks."""
        self._state.expected[peer.index] = int(m.get("started", 0))
        if self._state.verdict is None:
            message = f"node {peer.index} ({self._state.host(peer.index)}): {m.get('message', '')}"
            self._ending.fail(EXIT_FAILED, message, {"cause": "node", "node": peer.index})
        self._ending.changed()

    def _on_ended(self, peer: Peer, m: Message) -> None:
        self._ending.ended(peer, m)
        if self._job.launch == "rank" and int(m["rank"]) not in self._state.ranks:
            self._saves.gone(int(m["rank"]), "it has ended")  # also one that never connected

    # -- notices --------------------------------------------------------------------------------

    def _on_notice(self, peer: Peer, m: Message) -> None:
        """The platform has warned one node or rank, so all of them."""
        state = self._state
        if state.noticed or state.phase not in (GATHERING, RUNNING):
            return
        source = f"{m.get('signal', 'a signal')} to {peer.name}"
        node = peer.index if peer.kind == AGENT else peer.hello.get("node")
        cause = notice_cause(time.monotonic() - self._claimed, self._job.time_limit, self._job.stop_grace)
        self._notice(source, node, cause)

    def _left(self) -> Optional[float]:
        """Seconds of the grace that are left; None before a notice."""
        at = self._state.noticed_at
        return None if at is None else max(0.0, at + self._grace - self._server.loop.time())

    def _notice(self, source: str, node: Optional[int], cause: str, grace: Optional[float] = None) -> None:
        state = self._state
        state.noticed_at = self._server.loop.time()
        self._grace = self._job.stop_grace if grace is None else grace
        self._log(f"notice: {source}")
        self._tasks.write(self._records.notice, source, node, cause)
        if state.phase == GATHERING:
            self._ending.never_started(
                Verdict("preempted", EXIT_PREEMPTED, "a notice came before the gang was whole")
            )
            return
        state.told_to_end = {
            process
            for process in range(self._job.processes)
            if not self._ending.has_ended(process) and not self._uses_handle(process)
        }
        state.to_agents({"t": "notice", "end": sorted(state.told_to_end)})
        state.to_ranks({"t": "notice", "left": self._grace})

    def _uses_handle(self, process: int) -> bool:
        """Some rank of this process is connected, so it hears of the notice there."""
        ranks = self._state.ranks
        if self._job.launch == "rank":
            return process in ranks
        if self._job.launch == "head":
            return bool(ranks)
        return any(peer.hello.get("node") == process for peer in ranks.values())

    # -- what ranks say ----------------------------------------------------------------------------

    def _on_decide(self, peer: Peer, m: Message) -> None:
        if peer.index == 0:
            block = int(m["block"])
            before = self._decisions.get(block, {}).get("saves", [])
            self._decisions[block] = {"horizon": m["horizon"], "saves": [*before, *m["saves"]]}
            for rank, other in self._state.ranks.items():
                if rank != 0:
                    other.send(m)

    def _on_progress(self, peer: Peer, m: Message) -> None:
        if peer.index == 0:
            self._records.note_progress(int(m["step"]), m.get("total"), dict(m.get("metrics") or {}))

    def _on_result(self, peer: Peer, m: Message) -> None:
        if peer.index == 0:
            self._records.result = str(m["json"])
        peer.send({"t": "result"})

    def _on_bye(self, peer: Peer, m: Message) -> None:
        if m.get("code") == EXIT_PREEMPTED:
            self._state.left_after_save.add(peer.index)
        peer.send({"t": "bye"})

    # -- now and then --------------------------------------------------------------------------------

    async def _look(self) -> None:
        """Is there a newer entry, has a program finished a checkpoint?"""
        state = self._state
        while state.phase != OVER:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                over = await self._tasks.disk(superseded, self._channel, state.claim.life, self._job.attempt)
            except OSError as error:
                self._log(f"the channel cannot be read: {error}")
                continue
            if over is not None and state.verdict is None:
                self._superseded(*over)
            elif state.phase == RUNNING:
                self._tasks.spawn(self._tasks.disk(self._records.seal_declared))

    def _superseded(self, newest: int, found: Optional[Entry]) -> None:
        """A newer entry: this life is over. A fence may leave it the time to save, once."""
        state = self._state
        verdict = Verdict(
            "superseded",
            EXIT_NOT_CLAIMED,
            f"life {state.claim.life} is superseded: lives/{newest:04d}.json is there",
        )
        if state.phase == GATHERING:
            self._ending.never_started(verdict)
            return
        grace = min(found.grace, self._job.stop_grace) if found is not None and found.kind == "fence" else 0.0
        if grace <= 0:
            self._ending.stop(verdict, min(self._job.stop_grace, SUPERSEDED_GRACE))
        elif newest != self._fence:
            self._fence = newest
            self._server.loop.call_later(grace, lambda: self._ending.stop(verdict, 0.0))
            if not state.noticed and state.phase == RUNNING:
                self._notice(
                    f"lives/{newest:04d}.json ({found.reason if found else ''})", None, "stop", grace
                )

    async def _write_progress(self) -> None:
        while self._state.phase != OVER:
            await asyncio.sleep(PROGRESS_SECONDS)
            await self._tasks.disk(self._records.write_progress)


def _refused(why: str) -> Message:
    return {"t": "refused", "message": why}
