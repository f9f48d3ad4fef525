"""A rank's end of the control channel: notices, decisions, saves, and leaving when the gang does.

Purpose: what the handle (:mod:`airflow_gpu.runtime.api`) needs of the gang.
:class:`Member` talks to node 0; :class:`Alone` stands in for it outside of a gang.

Limits: Python runs signal handlers in the main thread only, and only between
two instructions. A rank that hangs in a collective cannot be asked to leave; a
thread ends its process ``CLEANUP_SECONDS`` after it was asked.
"""

from __future__ import annotations

import itertools
import os
import queue
import signal
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Tuple

from airflow_gpu.runtime.due import Decider, Follower
from airflow_gpu.runtime.wire import RANK, Link, Message
from airflow_gpu.runtime.words import EXIT_PREEMPTED, VERSION

JOIN_SECONDS = 120.0
"""For a rank to reach node 0: all ranks of a large gang come at once."""

DUE_SECONDS = 1800.0
"""How long a rank waits for rank 0's decision about a step. Rank 0 may be in a long evaluation."""

REPLY_SECONDS = 60.0
"""For node 0 to answer what needs no other rank."""

BYE_SECONDS = 5.0
"""For node 0 to answer a good-bye. Without it nothing is lost but time."""

CLEANUP_SECONDS = 3.0
"""For a program to clean up (``finally``) once its gang has ended, before its process is ended."""

TERMINATED = 143
"""The exit code of a rank whose gang was ended."""

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Platforms that signal every process of a job reach the ranks too; to them it is a notice as well."""


_blocks = itertools.count(1)
"""Each ``with gang()`` of a process is a block; ranks go through the same ones. Decisions belong to one block."""

SaveKey = Tuple[int, int]
"""A save: its step, and the how-manieth save of this step it is in this process, from 1."""

_tries: Dict[int, int] = {}
"""By step: how often this process has begun to save it. Tells a second save of a step from the first."""


class GangError(RuntimeError):
    """The gang cannot do what was asked. The message says what, and what to look at."""


class Leave(SystemExit):
    """Raised in the main thread to leave the gang; an ordinary SystemExit for everyone else."""


def say(message: str) -> None:
    """A line in the rank's log."""
    try:
        sys.stderr.write(f"[gang] {message}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        pass


@dataclass(frozen=True)
class Identity:
    """Which rank this is. Outside of a gang: what torchrun or mpirun set, else a gang of one."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    nodes: int
    master_addr: str
    master_port: int

    @classmethod
    def of(cls, env: Mapping[str, str]) -> Identity:
        """Raises GangError when a variable is no number."""

        def number(default: int, *names: str) -> int:
            for name in names:
                if env.get(name):
                    try:
                        return int(env[name])
                    except ValueError:
                        raise GangError(f"{name} is {env[name]!r}, not a number") from None
            return default

        world = number(1, "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
        local_world = number(1, "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
        return cls(
            rank=number(0, "RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"),
            world_size=world,
            local_rank=number(0, "LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
            local_world_size=local_world,
            node_rank=number(0, "GANG_NODE_RANK", "GROUP_RANK", "NODE_RANK"),
            nodes=number(max(1, world // max(1, local_world)), "NNODES", "GROUP_WORLD_SIZE"),
            master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
            master_port=number(29500, "MASTER_PORT"),
        )


class Member:
    """This rank in its gang. Made by :meth:`join`; all methods are for the main thread unless said otherwise."""

    def __init__(self, identity: Identity, env: Mapping[str, str]) -> None:
        self.identity = identity
        self.notice = False
        self.grace_end = 0.0  # of time.monotonic, after a notice
        self.cooperative = False
        self._saves: Dict[SaveKey, queue.SimpleQueue[Optional[Message]]] = {}
        self._env = env
        self._pid = os.getpid()
        self._block = next(_blocks)
        self._link = Link(self._on_message, self._on_lost)
        self._news = threading.Condition()
        self._follower = Follower()
        self._decider: Optional[Decider] = None
        self._leaderless = False
        self._ending: Optional[int] = None
        self._why = ""
        self._replies: Dict[str, threading.Event] = {"result": threading.Event(), "bye": threading.Event()}
        self._handlers: List[Tuple[int, Any]] = []
        self._owns_term = False

    def join(self) -> None:
        """Connect, and take over signals. Raises GangError; Leave when the gang is to leave already."""
        hello = {
            "hello": RANK,
            "v": VERSION,
            "index": self.identity.rank,
            "token": self._env.get("GANG_TOKEN", ""),
            "world": self.identity.world_size,
            "node": self.identity.node_rank,
            "block": self._block,
        }
        try:
            welcome = self._link.open(self._env["GANG_CONTROL"], hello, time.monotonic() + JOIN_SECONDS)
        except Exception as error:
            raise GangError(f"rank {self.identity.rank} cannot join its gang: {error}") from None
        decisions = welcome.get("decisions") or {}
        self._follower.learn(decisions.get("horizon"), decisions.get("saves") or ())
        if self.identity.rank == 0:
            interval, mtbf = self._env.get("GANG_CHECKPOINT_INTERVAL"), self._env.get("GANG_MTBF")
            self._decider = Decider(
                float(interval) if interval else None, time.monotonic(), float(mtbf) if mtbf else None
            )
        self._take_signals()
        self._link.start()
        if welcome.get("notice"):
            self._on_message({"t": "notice", "left": welcome.get("left")})

    # -- decisions ---------------------------------------------------------------------------------

    def due(self, step: int) -> bool:
        """Is a save due at this step? Raises GangError after ``DUE_SECONDS`` without an answer, Leave after a notice
        that nobody can save for."""
        self.cooperative = True
        if self._decider is not None:
            due, news = self._decider.ask(step, time.monotonic(), self.notice)
            if news is not None:
                decide = {
                    "t": "decide",
                    "block": self._block,
                    "horizon": news.horizon,
                    "saves": list(news.saves),
                }
                self._link.send(decide)
            return due
        until = time.monotonic() + DUE_SECONDS
        with self._news:
            while not self._follower.knows(step):
                if self._leaderless:
                    if self.notice:
                        # Rank 0 had not asked yet when the notice came, and has left at once: nobody will save any more.
                        say(
                            "leaving without a save: rank 0 left at the notice, before its first question whether to save"
                        )
                        raise Leave(EXIT_PREEMPTED)
                    raise GangError(
                        f"rank {self.identity.rank} asks whether to save at step {step}, but rank 0 has left the gang: "
                        "every rank must ask checkpoint.due() for the same steps"
                    )
                left = until - time.monotonic()
                if left <= 0:
                    raise GangError(
                        f"rank {self.identity.rank} waited {DUE_SECONDS:.0f} s for rank 0 to ask checkpoint.due({step}): "
                        "every rank must ask it for the same steps"
                    )
                self._news.wait(min(left, 1.0))
            return self._follower.ask(step)

    def begin_save(self, step: int) -> SaveKey:
        """A save begins, in the order that is the same on every rank."""
        _tries[step] = _tries.get(step, 0) + 1
        key = (step, _tries[step])
        with self._news:
            self._saves[key] = queue.SimpleQueue()
            if self._ending is not None:
                self._saves[key].put(None)
        return key

    def end_save(self, key: SaveKey) -> None:
        """It is over, however it ended. From any thread."""
        with self._news:
            self._saves.pop(key, None)

    def saved(self, seconds: float) -> None:
        """The program goes on after a save, which held it up so long: the interval and the measure of steps begin anew."""
        if self._decider is not None:
            self._decider.saved(time.monotonic(), seconds)

    # -- messages ------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Never blocks; from any thread."""
        self._link.send(message)

    def receive(self, key: SaveKey, seconds: float) -> Optional[Message]:
        """The next message about a save; None when there is none in time. From any thread.

        Raises GangError when the gang is gone.
        """
        inbox = self._saves[key]
        try:
            message = inbox.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return None
        if message is None:
            inbox.put(None)
            raise GangError(f"the gang is over: {self._why}")
        return message

    def ask(self, message: Message, seconds: float) -> bool:
        """Send what node 0 confirms; False when it did not in time."""
        event = self._replies[str(message["t"])]
        event.clear()
        self._link.send(message)
        return event.wait(seconds)

    def leave(self, code: int, error: Optional[str] = None) -> None:
        """Say good-bye. ``error``: what the program fails with."""
        if os.getpid() != self._pid:
            return
        if error is not None:
            self._link.send({"t": "failing", "error": error})
        if self._ending is None:
            self.ask({"t": "bye", "code": code}, BYE_SECONDS)
        self._give_signals_back()
        self._link.close()

    # -- what comes in the reading thread ----------------------------------------------------------

    def _on_message(self, m: Message) -> None:
        kind = m.get("t")
        if kind == "decide":
            if m["block"] == self._block:
                with self._news:
                    self._follower.learn(m["horizon"], m["saves"])
                    self._news.notify_all()
        elif kind == "leaderless":
            if m["block"] == self._block:
                with self._news:
                    self._leaderless = True
                    self._news.notify_all()
        elif kind == "notice":
            self._on_notice(m.get("left"))
        elif kind == "stop":
            self._end(TERMINATED, f"the gang is ended: {m.get('reason', '')}")
        elif kind in self._replies:
            self._replies[str(kind)].set()
        else:
            with self._news:
                inbox = self._saves.get((m.get("step", -1), m.get("try", -1)))
            if inbox is not None:
                inbox.put(m)

    def _on_notice(self, left: Optional[float]) -> None:
        if left is None:
            left = float(self._env.get("GANG_STOP_GRACE") or 0.0)
        self.grace_end = time.monotonic() + left
        self.notice = True
        if self.cooperative:
            say("the platform gives notice: the gang saves at its next step, and leaves")
        elif self._owns_term:
            # It never asked when to save, nor whether there was a notice. Nothing
            # is lost that it would have saved: the sooner it goes the better.
            self._end(
                EXIT_PREEMPTED, "the platform gives notice, and this program has not asked when to save"
            )
        else:
            self._interrupt()  # its own handler knows what to do

    def _on_lost(self, reason: str) -> None:
        self._end(TERMINATED, f"the gang is lost: {reason}")

    def _end(self, code: int, why: str) -> None:
        """This process is to end: by an exception in the main thread, or else without one."""
        if self._ending is not None:
            return
        self._ending, self._why = code, why
        say(why)
        with self._news:
            for inbox in self._saves.values():
                inbox.put(None)
            self._leaderless = True
            self._news.notify_all()
        self._interrupt()  # our handler, or the program's own, or the end
        seconds = CLEANUP_SECONDS
        if not self._owns_term:  # it handles that itself: as long as its agent would wait
            seconds = float(self._env.get("GANG_STOP_GRACE") or CLEANUP_SECONDS)
        timer = threading.Timer(seconds, self._exit, (code,))
        timer.daemon = True
        timer.start()

    def _interrupt(self) -> None:
        # To the main thread itself: a signal that any other thread takes does not wake it from a sleep.
        main = threading.main_thread().ident
        if main is not None:
            signal.pthread_kill(main, signal.SIGTERM)

    def _exit(self, code: int) -> None:
        if self._ending is not None:
            os._exit(code)

    # -- signals ----------------------------------------------------------------------------------------

    def _take_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            # A program that has its own handler is left alone: it is told by g.notice as well.
            if signal.getsignal(number) is signal.SIG_DFL:
                self._handlers.append((number, signal.signal(number, self._on_signal)))
                self._owns_term = self._owns_term or number == signal.SIGTERM

    def _give_signals_back(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, before in self._handlers:
                if signal.getsignal(number) == self._on_signal:
                    signal.signal(number, before)
        self._handlers = []

    def _on_signal(self, number: int, frame: Any) -> None:
        if os.getpid() != self._pid:  # a data loader's worker has inherited the handler
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif self._ending is not None:
            raise Leave(self._ending)
        else:
            self._link.send({"t": "notice", "signal": signal.Signals(number).name})


def inside(env: Mapping[str, str]) -> bool:
    """This process was started by an agent (or below one)."""
    return bool(env.get("GANG_CONTROL"))
