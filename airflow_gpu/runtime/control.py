"""The server end of the control channel: connections, greetings, heartbeats. It decides nothing.

Purpose: node 0's agent serves the other agents, the ranks that use the handle,
and mpirun's remote starts. One thread with an event loop; everything a
:class:`Handler` does happens in that thread, so it needs no locks.

Limits: whoever does not say the token within ``HELLO_SECONDS`` is hung up on
and otherwise ignored. A peer that sends garbage after its greeting is treated
as lost.
"""

from __future__ import annotations

import asyncio
import hmac
import random
import socket
import threading
import traceback
from typing import Any, Callable, Dict, List, Optional, Protocol, Set, cast

from airflow_gpu.runtime.wire import (
    AGENT,
    BEAT_SECONDS,
    MAX_HELLO,
    MAX_LINE,
    RANK,
    REMOTE,
    SILENCE_SECONDS,
    Message,
    decode,
    encode,
    harden,
    join_address,
)
from airflow_gpu.runtime.words import VERSION, Log

HELLO_SECONDS = 10.0
"""For a new connection to say the token."""

BACKLOG = 1024
"""Connections that may wait to be accepted: every rank of a large gang comes at the same moment."""

FLUSH_SECONDS = 5.0
"""For the last messages to leave before the server closes."""

LATE_FACTOR = 3.0
"""If the watch itself comes so much later than ``BEAT_SECONDS``, this machine slept: others are not blamed for it."""


class Peer:
    """Somebody who has greeted. ``index`` is the node of an agent, the rank of a rank, -1 for a remote start."""

    def __init__(self, kind: str, index: int, hello: Message, transport: asyncio.Transport) -> None:
        self.kind = kind
        self.index = index
        self.hello = hello
        self._transport = transport

    @property
    def name(self) -> str:
        return {AGENT: f"node {self.index}", RANK: f"rank {self.index}"}.get(self.kind, "a remote start")

    def send(self, message: Message) -> None:
        if not self._transport.is_closing():
            self._transport.write(encode(message))

    def hang_up(self) -> None:
        """After what is queued was sent."""
        self._transport.close()


class Handler(Protocol):
    """What decides. Called in the server's thread only."""

    def joined(self, peer: Peer) -> Message:
        """The welcome (any message), or ``{"t": "refused", "message": ...}``."""

    def message(self, peer: Peer, message: Message) -> None:
        """One message of a peer that has joined."""

    def left(self, peer: Peer, reason: str) -> None:
        """The peer is gone; called once."""


class _Connection(asyncio.Protocol):
    def __init__(self, server: Server) -> None:
        self.server = server
        self.buffer = bytearray()
        self.searched = 0
        self.transport: Optional[asyncio.Transport] = None
        self.peer: Optional[Peer] = None
        self.reason = "it hung up"
        self.heard = 0.0
        self.hello_timer: Optional[asyncio.TimerHandle] = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            harden(sock)
        self.server.connections.add(self)
        self.hello_timer = self.server.loop.call_later(HELLO_SECONDS, self.transport.abort)

    def data_received(self, data: bytes) -> None:
        self.heard = self.server.loop.time()
        self.buffer += data
        while self.transport is not None and not self.transport.is_closing():
            end = self.buffer.find(b"\n", self.searched)
            limit = MAX_HELLO if self.peer is None else MAX_LINE
            if (end if end >= 0 else len(self.buffer)) > limit:
                self.drop("it sent too long a line")
                return
            if end < 0:
                self.searched = len(self.buffer)
                return
            line = bytes(self.buffer[:end])
            del self.buffer[: end + 1]
            self.searched = 0
            self.line(line)

    def line(self, line: bytes) -> None:
        try:
            message = decode(line)
        except (ValueError, RecursionError):
            self.drop("it sent what is no message")
            return
        if self.peer is None:
            self.greet(message)
        elif message.get("t") != "beat":
            self.server.guarded(self.server.handler.message, self.peer, message)

    def greet(self, hello: Message) -> None:
        assert self.transport is not None
        token, kind, index = hello.get("token"), hello.get("hello"), hello.get("index", -1)
        known = kind in (AGENT, RANK, REMOTE) and isinstance(index, int) and hello.get("v") == VERSION
        if (
            not known
            or not isinstance(token, str)
            or not hmac.compare_digest(token.encode(), self.server.token)
        ):
            self.transport.abort()
            return
        if self.hello_timer is not None:
            self.hello_timer.cancel()
        hello.pop("token")
        peer = Peer(str(kind), index, hello, self.transport)
        welcome: Message = {"t": "refused", "message": "node 0 could not take it in"}
        try:
            welcome = self.server.handler.joined(peer)
        except Exception:
            self.server.log(traceback.format_exc())
        peer.send(welcome)
        if welcome.get("t") == "refused":
            self.transport.close()
        else:
            self.peer = peer

    def drop(self, reason: str) -> None:
        self.reason = reason
        if self.transport is not None:
            self.transport.abort()

    def connection_lost(self, error: Optional[Exception]) -> None:
        self.server.connections.discard(self)
        if self.hello_timer is not None:
            self.hello_timer.cancel()
        if self.peer is not None:
            reason = str(error) if error is not None else self.reason
            self.server.guarded(self.server.handler.left, self.peer, reason)


class Server:
    """The thread that serves. ``loop`` is its event loop, for timers and executors of the handler."""

    def __init__(self, sock: socket.socket, log: Log) -> None:
        self.log = log
        self.loop = asyncio.new_event_loop()
        self.connections: Set[_Connection] = set()
        self.token = b""
        self.handler: Handler
        self._sock = sock
        self._listening: Optional[asyncio.AbstractServer] = None
        self._thread: Optional[threading.Thread] = None
        self._watched = 0.0
        self._stopping = False

    def start(self, token: str, handler: Handler, then: Callable[[], None]) -> None:
        """Begin to serve; ``then`` is called first, in the server's thread."""
        self.token, self.handler = token.encode(), handler
        self._thread = threading.Thread(target=self._run, args=(then,), name="gang-control", daemon=True)
        self._thread.start()

    def call(self, what: Callable[[], None]) -> None:
        """Have something done in the server's thread, from any other."""
        self.loop.call_soon_threadsafe(what)

    def join(self, seconds: float) -> None:
        """Wait until it has stopped."""
        if self._thread is not None:
            self._thread.join(seconds)

    def heard(self, peer: Peer) -> float:
        """Seconds since the peer's last word; endless when it is not connected."""
        for connection in self.connections:
            if connection.peer is peer:
                return self.loop.time() - connection.heard
        return float("inf")

    def stop(self) -> None:
        """In the server's thread: take no more connections, send what is queued, and end. Once is enough."""
        if self._stopping:
            return
        self._stopping = True
        if self._listening is not None:
            self._listening.close()
        for connection in list(self.connections):
            if connection.transport is not None:
                connection.transport.close()
        until = self.loop.time() + FLUSH_SECONDS

        def look() -> None:
            if self.connections and self.loop.time() < until:
                self.loop.call_later(0.02, look)
            else:
                self.loop.stop()

        look()

    def guarded(self, what: Callable[..., None], *args: Any) -> None:
        """A mistake in one message must not end the service of the gang."""
        try:
            what(*args)
        except Exception:
            self.log(traceback.format_exc())

    def _run(self, then: Callable[[], None]) -> None:
        asyncio.set_event_loop(self.loop)
        self._listening = self.loop.run_until_complete(
            self.loop.create_server(lambda: _Connection(self), sock=self._sock, backlog=BACKLOG)
        )
        self._watched = self.loop.time()
        self.loop.call_later(BEAT_SECONDS, self._watch)
        self.loop.call_soon(then)
        self.loop.run_forever()

    def _watch(self) -> None:
        now = self.loop.time()
        slept = now - self._watched > LATE_FACTOR * BEAT_SECONDS
        self._watched = now
        self.loop.call_later(BEAT_SECONDS, self._watch)
        for connection in list(self.connections):
            if connection.peer is None or connection.peer.kind != AGENT:
                continue
            connection.peer.send({"t": "beat"})
            if slept:
                connection.heard = now
            elif now - connection.heard > SILENCE_SECONDS:
                connection.drop(f"nothing was heard of it for {SILENCE_SECONDS:.0f} s")


def listen(address: str) -> socket.socket:
    """A listening socket on a free port of this address; of all addresses when it is not one of this machine's own.

    The latter is so behind address translation, and in containers that are
    reached by their host's name. Raises OSError.
    """
    families: Dict[int, str] = {}
    try:
        for family, _, _, _, where in socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM):
            families.setdefault(int(family), str(where[0]))
    except OSError:
        families[int(socket.AF_INET)] = ""
    tries = [*families.items(), *((number, "") for number in families)]
    trouble: Optional[OSError] = None
    for number, host in tries:
        sock = socket.socket(number, socket.SOCK_STREAM)
        try:
            sock.bind((host, 0))
            sock.listen(BACKLOG)
            sock.setblocking(False)
            return sock
        except OSError as error:
            sock.close()
            trouble = error
    raise trouble if trouble is not None else OSError(f"cannot listen on {address}")


def control_address(sock: socket.socket, address: str) -> str:
    """``host:port`` under which the other nodes reach it."""
    return join_address(address, int(sock.getsockname()[1]))


PORTS = range(20000, 32000)
"""Where ports for the ranks are looked for: below the kernel's own range, so that no connection takes one meanwhile."""

PORT_TRIES = 200
"""Ports tried before any free one is taken."""


def free_ports(count: int) -> List[int]:
    """Ports of this machine that nobody listens on, for the ranks' own rendezvous."""
    found: List[int] = []
    generator = random.SystemRandom()
    for _ in range(PORT_TRIES):
        if len(found) == count:
            break
        port = generator.choice(PORTS)
        if port not in found and _free(port):
            found.append(port)
    while len(found) < count:
        with socket.socket() as probe:
            probe.bind(("", 0))
            found.append(int(probe.getsockname()[1]))
    return found


def _free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True
