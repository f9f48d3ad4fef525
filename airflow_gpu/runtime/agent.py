"""The agent of one node: claims (node 0) or joins a life, starts the ranks, and sees them to their end.

Purpose: a target starts ``runtime.pyz agent job.json`` once on each node; this
is what then happens on that node. What concerns the whole gang is decided by
node 0 (:mod:`airflow_gpu.runtime.head`), with which every agent is connected,
node 0's own too, so that there is one way for all.

Limits: the exit code follows the table in ``docs/run-directory.md``. The first
signal is a notice for the whole gang; further ones change nothing. An agent
never ends its ranks because of a notice: that is up to them, and after the
grace up to the platform.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from typing import Callable, Dict, Optional

from airflow_gpu.runtime.checkpoint import life_folder
from airflow_gpu.runtime.claim import AlreadyDone, Claim, NoLife, NotClaimed, await_life, claim, life_root
from airflow_gpu.runtime.control import FLUSH_SECONDS, Server, control_address, listen
from airflow_gpu.runtime.environment import Place, mpi_environment, node_environment, rank_environment
from airflow_gpu.runtime.files import Channel
from airflow_gpu.runtime.hands import Hands
from airflow_gpu.runtime.head import Head
from airflow_gpu.runtime.inbox import Inbox
from airflow_gpu.runtime.job import Job, Node, Unusable
from airflow_gpu.runtime.objects import Away, NoClient, is_uri
from airflow_gpu.runtime.opening import Scratch, open_channel, take_credentials
from airflow_gpu.runtime.ranks import Processes, Rank
from airflow_gpu.runtime.records import create_surely, failure_record, node_record
from airflow_gpu.runtime.remote import Remote, write_tools
from airflow_gpu.runtime.wire import AGENT, Link, Message, Refused, Unreachable
from airflow_gpu.runtime.words import (
    EXIT_FAILED,
    EXIT_NO_CREDENTIALS,
    EXIT_NOT_CLAIMED,
    EXIT_NOT_WHOLE,
    EXIT_PREEMPTED,
    EXIT_USAGE,
    VERSION,
    Log,
)

TICK_SECONDS = 1.0
"""Longest sleep of the main loop."""

FORMER_SECONDS = 3.0
"""On a platform that does not count its restarts: for how long the newest life is tried. It may be the one before."""

LOST_GRACE = 10.0
"""For ranks to end after node 0 was lost; they cannot save without it."""

LOST_PAUSE = 2.0
"""Before an agent says in failure.json that node 0 is lost: node 0 may know better, and be first."""

ORPHANED = 137
"""The guard is gone; as if killed with it."""

RUNTIME = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
"""What goes onto the ranks' PYTHONPATH: runtime.pyz itself."""


class Agent:
    """One node's agent. ``guard``: a descriptor that closes when the guard is gone (None: there is none)."""

    def __init__(self, job: Job, node: Node, guard: Optional[int] = None) -> None:
        self.job = job
        self.node = node
        self.log = Log(f"attempt {job.attempt} node {node.rank}")
        self.scratch = Scratch()
        self.channel: Channel
        self.seed: Channel  # of the checkpoint of another place to begin from, where there is one
        self.hands: Hands
        self.inbox = Inbox()
        self.processes = Processes(lambda rank: self.inbox.put("ended", rank))
        self.claim: Claim
        self.link: Optional[Link] = None
        self.server: Optional[Server] = None
        self.code: Optional[int] = None
        self.noticed: Optional[str] = None
        self.started = False
        self.finishing = False
        self.recorded = False
        self.unwritten = False  # the channel did not take this node's record
        self.lost: Optional[str] = None
        self.succeeded = self.failed = False  # the whole gang
        self.environment: Dict[str, str] = {}
        self._guard = guard
        self._tools = ""
        self._remote = Remote(self.processes, self._send)
        self._handlers: Dict[str, Callable[[Message], None]] = {
            "start": self._on_start,
            "notice": self._on_notice,
            "stop": lambda m: self.processes.stop(float(m["grace"])),
            "finish": self._on_finish,
            "exec": lambda m: self._remote.start(int(m["id"]), str(m["line"]), self.environment),
            "kill": lambda m: self._remote.kill(int(m["id"]), signal.SIGTERM),
            "over": self._on_over,
        }

    def run(self) -> int:
        """Until all is over; answers the exit code."""
        self.inbox.listen(self._guard)
        try:
            self._open()
            joined = self._join()
            while self.code is None and joined:
                self._turn()
        except (Unusable, NoClient) as error:
            self.log(str(error))
            self.code = EXIT_USAGE
        except OSError as error:
            what = "the channel cannot be reached" if isinstance(error, Away) else "this node's files fail"
            self.log(f"{what}: {error}")
            nobody = isinstance(error, Away) and error.nobody and not hasattr(self, "claim")
            self.code = EXIT_NO_CREDENTIALS if nobody else EXIT_NOT_WHOLE
        except AlreadyDone as error:
            self.log(str(error))
            self.code = 0
        except NotClaimed as error:
            self.log(f"not claimed: {error}")
            self.code = EXIT_NOT_CLAIMED
        except Refused as error:
            self.log(f"node 0 refuses this node: {error}")
            self.code = EXIT_NOT_CLAIMED
        except (NoLife, Unreachable) as error:
            self.log(f"the gang is not whole: {error}")
            self.code = EXIT_PREEMPTED if self.inbox.interrupted() or self._left("notice") else EXIT_NOT_WHOLE
        finally:
            self.processes.kill()
            self._close()
        return EXIT_PREEMPTED if self.code is None else self.code

    def _open(self) -> None:
        """The channel. Raises Away, NoClient, Unusable."""
        if is_uri(self.job.channel) or (self.job.seed is not None and is_uri(self.job.seed.channel)):
            take_credentials(self.job.secrets())
        try:
            self.channel = self.seed = open_channel(self.job.channel, self.job.store, self.scratch, "channel")
            if self.job.seed is not None:
                seed = self.job.seed
                self.seed = open_channel(seed.channel, seed.store, self.scratch, "seed")
        except Away:
            raise
        except OSError as error:
            raise Unusable(str(error)) from None
        self.hands = Hands(self.job, self.node, self.channel, self.seed, self._send, self.log)
        self._handlers.update(self.hands.handlers)

    # -- joining ----------------------------------------------------------------------------------

    def _join(self) -> bool:
        """Claim or find the life and connect to node 0. False when a notice came first."""
        until = time.monotonic() + self.job.barrier_timeout
        if self.node.rank == 0:
            sock = listen(self.node.address)
            address = control_address(sock, self.node.address)
            claimed = self.inbox.beside(
                lambda over: claim(self.channel, self.job, self.node, address, self.log, self.seed, over)
            )
            if claimed is None:
                self.log("a notice came before a life was claimed")
                return False
            self.claim = claimed
            start = self.claim.start
            self.log(
                f"life {self.claim.life} is claimed, "
                + (f"from step {start.step} of life {start.life}" if start else "from the beginning")
            )
            self.server = Server(sock, self.log)
            head = Head(self.channel, self.job, self.node, self.claim, self.server, self.log)
            self.server.start(self.claim.token, head, head.begin)
        else:
            found = self._await_life(until)
            if found is None:
                self.log("a notice came before node 0 had claimed a life")
                return False
            self.claim = found
        self.log.prefix = f"life {self.claim.life} node {self.node.rank}"
        self.link = Link(
            lambda m: self.inbox.put("message", m), lambda why: self.inbox.put("lost", why), beats=True
        )
        if self.node.rank == 0:
            # Claiming may have taken its time. A notice waits until it can be told: the server is in this process.
            self.link.open(self.claim.control, self._hello(), time.monotonic() + self.job.barrier_timeout)
        elif not self._meet(until):
            return False
        self.link.start()
        return True

    def _await_life(self, until: float, after: int = 0) -> Optional[Claim]:
        return self.inbox.beside(
            lambda over: await_life(self.channel, self.job, self.node, until, over, after=after)
        )

    def _hello(self) -> Message:
        assert self.claim is not None
        return {
            "hello": AGENT,
            "v": VERSION,
            "index": self.node.rank,
            "token": self.claim.token,
            "life": self.claim.life,
            "addr": self.node.address,
            "host": self.node.host,
            "copies": self.hands.copies,
            "held": self.hands.held(),
        }

    def _meet(self, until: float) -> bool:
        """Connect to node 0 of the life that was found. False when a notice came first."""
        assert self.claim is not None
        assert self.link is not None
        counted = self.node.restart is not None
        while True:
            try:
                # Node 0 may have left by now; what it wrote says so sooner than the barrier's time.
                self.link.open(
                    self.claim.control,
                    self._hello(),
                    until if counted else min(until, time.monotonic() + FORMER_SECONDS),
                    lambda: self.inbox.interrupted() or self._left("notice") or self._left("failure"),
                )
                return True
            except (Refused, Unreachable) as error:
                if counted or self.inbox.interrupted() or time.monotonic() >= until:
                    raise
                self.log(f"life {self.claim.life} does not take this node: {error}; awaiting a newer one")
            found = self._await_life(until, after=self.claim.life)
            if found is None:
                return False
            self.claim = found
            self.log.prefix = f"life {found.life} node {self.node.rank}"

    def _left(self, what: str) -> bool:
        """The life that this node wants to join has a notice.json or failure.json."""
        try:
            return hasattr(self, "claim") and f"{what}.json" in self.channel.names(life_root(self.claim.life))
        except OSError:
            return False  # nobody can tell

    # -- the main loop ------------------------------------------------------------------------------

    def _turn(self) -> None:
        due = self.processes.due_in()
        kind, value = self.inbox.get(TICK_SECONDS if due is None else min(TICK_SECONDS, due + 0.001))
        if kind == "message":
            handler = self._handlers.get(str(value.get("t")))
            if handler is not None:
                handler(value)
        elif kind == "ended":
            self._on_ended(value)
        elif kind == "brought":
            self._launch(*value)
        elif kind == "signal":
            self._on_signal(value)
        elif kind == "lost":
            self._on_lost(value)
        elif kind == "guard":
            self.log("the guard is gone: everything is ended")
            self.processes.kill()
            self.code = ORPHANED
            return
        if self.processes.due_in() == 0.0:
            stuck = self.processes.kill()
            if stuck:
                self.log(f"processes {stuck} do not die")
        self.processes.reap()
        self._record_if_ended()

    def _on_start(self, m: Message) -> None:
        """All nodes are there. What they start from comes to this node first, beside the main loop if it takes time."""
        self.started = True

        def then(where: str, error: str) -> None:
            self.inbox.put("brought", (m, where, error))

        self.hands.bring(self.claim.life, m.get("restore"), then)

    def _launch(self, m: Message, where: str, error: str) -> None:
        """Start the ranks, with the checkpoint at ``where``; or say why not."""
        if self.recorded or self.code is not None:
            return
        if self.processes.stopped:
            error = error or "the gang was ended before its ranks were started"
        if error:
            self.log(error)
            self._send({"t": "broken", "message": error, "started": 0})
            return
        try:
            place = self._place(m, where)
            secrets = self.job.secrets()
            self.environment = node_environment(place, os.environ, secrets)
            if self.job.launch == "head":
                self.environment.update(mpi_environment(place, self.environment))
            for local in range(self.job.processes_on(self.node.rank)):
                if self.job.launch == "rank":
                    number = self.node.rank * self.job.ranks_per_node + local
                    env = rank_environment(place, self.environment, local)
                else:
                    number, env = self.node.rank, self.environment
                logs = f"{life_root(self.claim.life)}/logs"
                name = f"{logs}/rank-{number:05d}"
                self.channel.folder(logs)
                self.processes.start(number, local, self.job.command, env, self.channel.path(f"{name}.log"))
                if self.hands.logs is not None:
                    self.hands.logs.follow(name, close=local == 0)
        except (OSError, Unusable) as error:
            self.log(f"the ranks cannot be started: {error}")
            self._send({"t": "broken", "message": str(error), "started": len(self.processes.ranks)})
            return
        if self.noticed is not None:  # it came while the checkpoint was on its way
            self.processes.terminate(list(self.processes.ranks))
        count = len(self.processes.ranks)
        self.log(f"started {count} process{'' if count == 1 else 'es'}: {self.job.command[0]}")

    def _place(self, m: Message, restore: str) -> Place:
        self._tools = tempfile.mkdtemp(prefix="gang-")
        hostfile, hydra, rsh = write_tools(self._tools, self.job, m["nodes"], RUNTIME)
        return Place(
            job=self.job,
            node=self.node,
            life=self.claim.life,
            control=self.claim.control,
            token=self.claim.token,
            start=m,
            channel=self.channel.root,
            checkpoints=self.channel.path(life_folder(self.claim.life)),
            runtime=RUNTIME,
            hostfile=hostfile,
            hydra_hostfile=hydra,
            rsh=rsh,
            restore=restore,
            local=self.hands.local(self.claim.life) if m["copies"] else "",
            verified=bool(restore) and (not self.channel.shared or bool(m["restore"]["verified"])),
        )

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self.noticed is not None:
            self.log(f"{name} again: the notice stands, nothing changes")
            return
        self.noticed = name
        self.log(f"{name}: the platform gives notice")
        self._send({"t": "notice", "signal": name, "node": self.node.rank})

    def _on_notice(self, m: Message) -> None:
        """Node 0 says that a notice was given to some node. Processes that cannot hear of it otherwise get a signal."""
        self.noticed = self.noticed or "the gang's"
        self.processes.terminate(m["end"])

    def _on_ended(self, rank: Rank) -> None:
        bad = rank.exit_code != 0
        self._send(
            {
                "t": "ended",
                "rank": rank.number,
                "exit_code": rank.exit_code,
                "signal": rank.signal,
                "age": time.monotonic() - rank.ended_clock,
                "tail": rank.tail() if bad else "",
            }
        )

    def _on_lost(self, why: str) -> None:
        self.log(f"node 0 is lost: {why}")
        self.lost = why
        self.finishing = True
        if self.started:
            self.processes.stop(min(LOST_GRACE, self.job.stop_grace))
        else:
            self.code = EXIT_PREEMPTED if self.noticed or self._left("notice") else EXIT_FAILED

    def _on_finish(self, m: Message) -> None:
        self.finishing = True

    def _record_if_ended(self) -> None:
        """Write down how this node's ranks ended, once they all have."""
        if not self.started or self.recorded or self.processes.running():
            return
        if not self.finishing and (self.node.rank == 0 or not self.processes.ranks):
            return  # node 0 says when: its record is the last, and a node without ranks ends with the others
        self.recorded = True
        self.processes.kill()  # what ranks left behind
        if self.hands.logs is not None:
            self.hands.logs.finish()
        ranks = [rank.to_dict() for _, rank in sorted(self.processes.ranks.items())]
        self.unwritten = not create_surely(
            self.channel,
            f"{life_root(self.claim.life)}/nodes/{self.node.rank:04d}.json",
            node_record(self.claim.life, self.node.rank, self.node.host, ranks),
            self.log,
        )
        if self.lost is None:
            self._send({"t": "done"})
        else:
            self._leave_lost()

    def _leave_lost(self) -> None:
        if self._all_good() and not self.unwritten:
            self.code = 0
        elif self.noticed is not None:
            self.code = EXIT_PREEMPTED
        else:
            self.code = EXIT_FAILED
            time.sleep(LOST_PAUSE)
            failure = {
                "cause": "node",
                "node": 0,
                "message": f"node {self.node.rank} lost node 0: {self.lost}",
            }
            create_surely(
                self.channel,
                f"{life_root(self.claim.life)}/failure.json",
                failure_record(self.claim.life, failure),
                self.log,
            )

    def _on_over(self, m: Message) -> None:
        code = int(m["code"])
        # A node whose ranks all ended well has done its part, whatever became of the others.
        self.code = 0 if self._all_good() else code
        self.succeeded = m["kind"] == "ended" and code == 0
        self.failed = m["kind"] == "failed"
        if self.code == 0 and self.unwritten:
            self.code = EXIT_FAILED  # nobody could tell that it went well
        self.log(f"life {self.claim.life} is over ({m['kind']}); this node ends with {self.code}")

    def _all_good(self) -> bool:
        """Every process that this node should start has ended with 0; False for a node that starts none."""
        ranks = self.processes.ranks.values()
        return 0 < len(ranks) == self.job.processes_on(self.node.rank) and all(
            r.exit_code == 0 for r in ranks
        )

    # -- helpers ------------------------------------------------------------------------------------

    def _send(self, message: Message) -> None:
        if self.link is not None:
            self.link.send(message)

    def _close(self) -> None:
        if self.link is not None:
            self.link.close()
        if self.server is not None:
            self.server.call(self.server.stop)
            self.server.join(FLUSH_SECONDS + 1.0)
        if hasattr(self, "hands"):
            self.hands.close(self.succeeded, self.claim.life if self.failed else 0)
        self.scratch.remove()
        if self._tools:
            shutil.rmtree(self._tools, ignore_errors=True)
