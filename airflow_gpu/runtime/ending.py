"""How a life ends: which end was the first, stopping the rest, and the evidence that is left behind.

Purpose: every way out of a life goes through :meth:`Ending.fail`,
:meth:`Ending.preempted`, :meth:`Ending.stop` or the last good end, and every
one of them comes to :meth:`Ending._finish`, in which node 0's record is the
last thing written.

Limits: lives in the control server's thread.
"""

from __future__ import annotations

import asyncio
from typing import Callable, Dict, List, Optional

from airflow_gpu.runtime.control import Peer, Server
from airflow_gpu.runtime.ends import End, first_of, preempted
from airflow_gpu.runtime.records import Records
from airflow_gpu.runtime.state import ENDING, FINISHING, OVER, RUNNING, State, Tasks, Verdict
from airflow_gpu.runtime.wire import BEAT_SECONDS, SILENCE_SECONDS, Message
from airflow_gpu.runtime.words import EXIT_PREEMPTED, Log, code_of

SETTLE_SECONDS = 0.5
"""From the first bad end to the decision which was first: the others' reports may be on their way."""

TERM_SETTLE_SECONDS = 2.0
"""The same for an end by SIGTERM: the platform's notice may reach the agent a little later than the rank."""

SUSPECT_SECONDS = 2.5 * BEAT_SECONDS
"""An agent that was not heard for so long may be the cause of what other ranks report; its fate is awaited first."""

KILL_SECONDS = 30.0
"""For agents to say that all is over, after the last process should be dead."""

FINISH_SECONDS = 120.0
"""For agents to write down how their ranks ended."""


class Ending:
    """Takes the ends of processes and nodes, and brings the life to its own."""

    def __init__(
        self,
        state: State,
        server: Server,
        tasks: Tasks,
        records: Records,
        abort: Callable[[str], None],
        log: Log,
    ) -> None:
        self._state = state
        self._server = server
        self._tasks = tasks
        self._records = records
        self._abort_saves = abort
        self._log = log
        self._ends: Dict[int, End] = {}
        self._errors: Dict[int, Message] = {}
        self._settling: Optional[asyncio.TimerHandle] = None
        self._news = asyncio.Event()

    def has_ended(self, process: int) -> bool:
        return process in self._ends

    # -- what is heard ---------------------------------------------------------------------------

    def failing(self, peer: Peer, m: Message) -> None:
        """The handle reports an exception while its process still lives: that is earlier than its end."""
        self._errors[peer.index] = {"at": self._server.loop.time(), "error": str(m.get("error", ""))}

    def ended(self, peer: Peer, m: Message) -> None:
        """A process has ended on a node."""
        rank = int(m["rank"])
        now, error = self._server.loop.time(), self._errors.get(rank, {})
        hide = self._state.job.redact  # these words leave the job: for the agent's log, failure.json, XCom
        end = self._ends[rank] = End(
            rank=rank,
            node=peer.index,
            exit_code=m.get("exit_code"),
            signal=m.get("signal"),
            at=min(now - float(m.get("age", 0.0)), float(error.get("at", now))),
            tail=hide(str(m.get("tail", ""))),
            error=hide(str(error.get("error", ""))),
        )
        if not end.good and self._state.verdict is None and self._settling is None:
            early = end.terminated and not self._state.noticed
            self._settle_in(TERM_SETTLE_SECONDS if early else SETTLE_SECONDS)
        self.changed()

    def done(self, peer: Peer, m: Message) -> None:
        """A node has written down how its ranks ended."""
        self._state.done.add(peer.index)
        self.changed()

    def lost(self, node: int, reason: str) -> None:
        """A node's agent is gone."""
        state = self._state
        state.lost[node] = reason
        self._log(f"node {node} ({state.host(node)}) is lost: {reason}")
        if state.verdict is None:
            if state.noticed:  # the platform takes its nodes back
                self.preempted(f"node {node} went after the notice")
            else:
                self.fail(
                    1, f"node {node} ({state.host(node)}) was lost: {reason}", {"cause": "node", "node": node}
                )
        self.changed()

    # -- which end was the first -------------------------------------------------------------------

    def _settle_in(self, seconds: float) -> None:
        self._settling = self._server.loop.call_later(seconds, self._settle)

    def _settle(self) -> None:
        """The first bad end has had company enough: decide what it was."""
        self._settling = None
        state = self._state
        if state.verdict is None:
            if self._silent_nodes():
                self._settle_in(SETTLE_SECONDS)
                return
            end = first_of([end for end in self._ends.values() if not end.good])
            launcher_left = state.job.launch != "rank" and bool(state.left_after_save)
            if preempted(end, state.noticed_at, state.told_to_end, launcher_left):
                self.preempted(f"rank {end.rank} ended with {end.words} after the notice")
            else:
                self._rank_failed(end)
        self.changed()

    def _silent_nodes(self) -> List[int]:
        return [
            node
            for node, peer in self._state.agents.items()
            if node not in self._state.lost
            and SUSPECT_SECONDS < self._server.heard(peer) < SILENCE_SECONDS + 2 * BEAT_SECONDS
        ]

    def _rank_failed(self, end: End) -> None:
        why = f": {end.error}" if end.error else ""
        self.fail(
            code_of(end.exit_code, end.signal),
            f"rank {end.rank} on node {end.node} ({self._state.host(end.node)}) ended with {end.words}{why}",
            {
                "cause": "rank",
                "rank": end.rank,
                "node": end.node,
                "exit_code": end.exit_code,
                "signal": end.signal,
                "tail": end.tail,
            },
        )

    # -- ways out ------------------------------------------------------------------------------------

    def fail(self, code: int, message: str, failure: Message) -> None:
        """Write failure.json and end the gang."""
        body = {**failure, "host": self._state.host(failure.get("node")), "message": message}
        self._tasks.write(self._records.failure, body)
        self.stop(Verdict("failed", code, message), self._state.job.stop_grace)

    def preempted(self, why: str) -> None:
        """The others may still be saving: they get their grace, and are ended only after it."""
        self._log(f"{why}; the gang is to be resumed")
        verdict = self._state.verdict = Verdict("preempted", EXIT_PREEMPTED, why)
        self._server.loop.call_later(self._state.job.stop_grace, lambda: self.stop(verdict, 0.0))

    def stop(self, verdict: Verdict, grace: float) -> None:
        """End every process: SIGTERM, and SIGKILL ``grace`` seconds later."""
        state = self._state
        if state.phase != RUNNING:
            return
        state.phase, state.verdict = ENDING, verdict
        self._log(f"{verdict.message}; the gang is ended")
        self._abort_saves("the gang is ended")
        state.to_ranks({"t": "stop", "reason": verdict.message})
        state.to_agents({"t": "stop", "reason": verdict.message, "grace": grace})
        self._server.loop.call_later(grace + KILL_SECONDS, self._give_up_on_agents)
        self.changed()

    def never_started(self, verdict: Verdict, failure: Optional[Message] = None) -> None:
        """The life ends before any rank was started: agents only leave."""
        self._state.phase, self._state.verdict = FINISHING, verdict
        self._log(verdict.message)
        self._tasks.spawn(self._leave(failure, verdict.message))

    async def _leave(self, failure: Optional[Message], message: str) -> None:
        if failure is not None:
            body = {**failure, "host": self._state.host(failure.get("node")), "message": message}
            self._tasks.write(self._records.failure, body)
        await self._tasks.written()
        self._over()

    def _give_up_on_agents(self) -> None:
        state = self._state
        if state.phase == ENDING:
            for node in state.agents:
                if node not in state.done and node not in state.lost:
                    state.lost[node] = "it did not say that its processes have ended"
                    self._log(f"node {node}: {state.lost[node]}")
        self.changed()

    # -- the last steps --------------------------------------------------------------------------------

    def changed(self) -> None:
        """Look whether no process is left."""
        self._news.set()
        state = self._state
        if state.phase not in (RUNNING, ENDING) or self._settling is not None:
            return
        for node in range(state.job.nodes):
            if node not in state.lost and node not in state.done and not self._all_ended(node):
                return
        state.phase = FINISHING
        self._tasks.spawn(self._finish())

    def _all_ended(self, node: int) -> bool:
        expected = self._state.expected.get(node, self._state.job.processes_on(node))
        return sum(1 for end in self._ends.values() if end.node == node) >= expected

    async def _finish(self) -> None:
        state = self._state
        if state.verdict is None:
            state.verdict = Verdict("ended", 0)
        for node, peer in state.agents.items():
            if node != 0 and node not in state.lost:
                peer.send({"t": "finish"})
        await self._wait(lambda: all(n in state.done or n in state.lost for n in state.agents if n != 0))
        await self._tasks.written()
        # Node 0's record is the last piece of evidence: what success promises is there before it.
        try:
            await self._tasks.disk(self._records.finish, self._clean())
        except Exception as error:  # the life must come to its end
            self._log(f"what the life leaves could not all be written: {type(error).__name__}: {error}")
        if 0 not in state.lost:
            state.agents[0].send({"t": "finish"})
        await self._wait(lambda: 0 in state.done or 0 in state.lost)
        self._over()

    def _clean(self) -> bool:
        """Every process ended with 0 or 75: what a program wrote last is whole."""
        state = self._state
        return (
            state.verdict is not None
            and state.verdict.kind in ("ended", "preempted")
            and len(self._ends) == state.job.processes
            and all(end.exit_code in (0, EXIT_PREEMPTED) for end in self._ends.values())
        )

    def _over(self) -> None:
        state = self._state
        assert state.verdict is not None
        state.phase = OVER
        state.to_agents({"t": "over", "kind": state.verdict.kind, "code": state.verdict.code})
        self._server.loop.call_soon(self._tasks.cancel)
        self._server.loop.call_soon(self._server.stop)

    async def _wait(self, done: Callable[[], bool]) -> None:
        until = self._server.loop.time() + FINISH_SECONDS
        while not done() and self._server.loop.time() < until:
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), 1.0)
            except asyncio.TimeoutError:
                pass
