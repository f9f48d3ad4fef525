"""The control channel's wire: JSON lines over TCP, and the client's end of it.

Purpose: :class:`Link` is how agents, ranks and mpirun's remote starts talk to
node 0: one thread reads, one writes, so that ``send`` never blocks and may be
called from a signal handler.

Limits: no encryption; the token keeps strangers out of the conversation, not
from listening on the network between the nodes. Messages are small, except
listings of checkpoints.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
import time
from typing import Any, Callable, Dict, Optional, Tuple

BEAT_SECONDS = 2.0
"""How often agents and node 0 tell each other that they are there."""

SILENCE_SECONDS = 15.0
"""After so long without a word the other side is dead, whatever TCP thinks."""

CONNECT_SECONDS = 10.0
"""For one try to connect, with the greeting."""

CONNECT_PAUSE = 0.3
"""Between tries."""

CLOSE_SECONDS = 5.0
"""For what is still to be sent when a link is closed."""

MAX_LINE = 64 << 20
"""Bytes of a message: the listing of a checkpoint with several hundred thousand files."""

MAX_HELLO = 4096
"""Bytes that a stranger may send before it has said the token."""

AGENT, RANK, REMOTE = "agent", "rank", "remote"
"""Who may connect: a node's agent, a rank that uses the handle, a remote start of mpirun."""

NO_SUCH_NODE = 255
"""What a remote start answers, as ssh does, when it cannot reach the host."""

WRITE_SECONDS = 3600.0
"""For a save: from the first rank that begins to the last one that has written."""

LIST_SECONDS = 120.0
"""For a save: the other nodes' listings."""

HASH_SECONDS = 3600.0
"""For a save: hashing, all ranks at once."""

Message = Dict[str, Any]


class Refused(Exception):
    """Node 0 does not want this peer. The message says why."""


class Unreachable(Exception):
    """Node 0 could not be reached in time."""


def encode(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Raises ValueError when it is no JSON object."""
    message = json.loads(line.decode())
    if not isinstance(message, dict):
        raise ValueError("no JSON object")
    return message


def split_address(address: str) -> Tuple[str, int]:
    """``host:port``; an IPv6 address stands in brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def harden(sock: socket.socket) -> None:
    """Let the kernel notice within about ``SILENCE_SECONDS`` that the other machine is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    third = max(1, int(SILENCE_SECONDS / 3))
    for option, value in (
        ("TCP_KEEPIDLE", third),
        ("TCP_KEEPINTVL", third),
        ("TCP_KEEPCNT", 2),
        ("TCP_USER_TIMEOUT", int(SILENCE_SECONDS * 1000)),
    ):
        number = getattr(socket, option, None)  # not every system has all of them
        if number is not None:
            try:
                sock.setsockopt(socket.IPPROTO_TCP, number, value)
            except OSError:
                pass


class Link:
    """A connection to node 0.

    ``on_message`` and ``on_lost`` are called in the reading thread;
    ``on_lost`` at most once, and never after :meth:`close`. With ``beats`` both
    sides notice silence: for agents, which are always awake. A rank may hold
    the interpreter lock for minutes, so for ranks only the kernel watches.
    """

    def __init__(
        self,
        on_message: Callable[[Message], None],
        on_lost: Callable[[str], None],
        *,
        beats: bool = False,
    ) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._beats = beats
        self._outgoing: queue.SimpleQueue[Optional[Message]] = queue.SimpleQueue()
        self._closing = False
        self._sock: Optional[socket.socket] = None
        self._buffer = b""
        self._writer: Optional[threading.Thread] = None

    def open(
        self, address: str, hello: Message, until: float, give_up: Callable[[], bool] = lambda: False
    ) -> Message:
        """Connect and greet, again and again until ``until`` (of ``time.monotonic``); answers the welcome.

        Raises Refused, Unreachable.
        """
        host, port = split_address(address)
        trouble = "no try was made"
        while not give_up():
            patience = min(CONNECT_SECONDS, until - time.monotonic())
            if patience <= 0:
                break
            try:
                welcome = self._greet(host, port, hello, patience)
            except (OSError, ValueError) as error:
                trouble = str(error) or type(error).__name__
                time.sleep(CONNECT_PAUSE)
                continue
            if welcome.get("t") == "refused":
                self._drop()
                raise Refused(str(welcome.get("message", "no reason given")))
            return welcome
        raise Unreachable(f"node 0 at {address} cannot be reached: {trouble}")

    def start(self) -> None:
        """Begin to read and write, once the caller is ready for messages."""
        assert self._sock is not None
        self._sock.settimeout(SILENCE_SECONDS if self._beats else None)
        self._writer = threading.Thread(target=self._write, name="gang-link-out", daemon=True)
        self._writer.start()
        threading.Thread(target=self._read, name="gang-link-in", daemon=True).start()
        if hasattr(os, "register_at_fork"):
            # A data loader's workers must not keep the rank's connection open.
            os.register_at_fork(after_in_child=self._forked)

    def send(self, message: Message) -> None:
        """Returns at once. What cannot be sent any more is dropped: ``on_lost`` tells."""
        self._outgoing.put(message)

    def close(self) -> None:
        """Send what is queued, then hang up."""
        self._closing = True
        self._outgoing.put(None)
        if self._writer is not None and self._writer is not threading.current_thread():
            self._writer.join(CLOSE_SECONDS)
        self._drop()

    def _greet(self, host: str, port: int, hello: Message, patience: float) -> Message:
        deadline = time.monotonic() + patience
        self._drop()
        self._sock = sock = socket.create_connection((host, port), timeout=patience)
        harden(sock)
        sock.sendall(encode(hello))
        buffer = b""
        while b"\n" not in buffer:
            sock.settimeout(max(0.01, deadline - time.monotonic()))
            data = sock.recv(65536)
            if not data:
                raise ConnectionError("node 0 hung up")
            buffer += data
        line, _, self._buffer = buffer.partition(b"\n")
        return decode(line)

    def _read(self) -> None:
        sock, buffer = self._sock, bytearray(self._buffer)
        assert sock is not None
        reason = "node 0 hung up"
        searched = 0
        try:
            while True:
                end = buffer.find(b"\n", searched)
                if end >= 0:
                    line = bytes(buffer[:end])
                    del buffer[: end + 1]
                    searched = 0
                    message = decode(line)
                    if message.get("t") != "beat":
                        self._on_message(message)
                    continue
                searched = len(buffer)
                data = sock.recv(1 << 16)
                if not data:
                    break
                buffer += data
        except socket.timeout:
            reason = f"nothing was heard of node 0 for {SILENCE_SECONDS:.0f} s"
        except (OSError, ValueError) as error:
            reason = f"the connection to node 0 broke: {error}"
        if not self._closing:
            self._closing = True
            self._outgoing.put(None)
            self._on_lost(reason)

    def _write(self) -> None:
        sock = self._sock
        assert sock is not None
        while True:
            try:
                message = self._outgoing.get(timeout=BEAT_SECONDS)
            except queue.Empty:
                message = {"t": "beat"}
                if not self._beats:
                    continue
            if message is None:
                return
            try:
                sock.sendall(encode(message))
            except (OSError, ValueError):
                return  # the reader finds out too, and tells

    def _drop(self) -> None:
        sock, self._sock = self._sock, None
        if sock is not None:
            try:
                sock.shutdown(socket.SHUT_RDWR)  # also for copies that forked children hold
            except OSError:
                pass
            sock.close()

    def _forked(self) -> None:
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()
