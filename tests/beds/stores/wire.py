"""A faulty wire: an HTTP proxy for one server that loses, refuses and rewrites on demand, and remembers.

with Wire(server.port) as wire:
    store = Store(server.uri, server.through(wire.port))
    wire.faults.append(Lose())          # the next write takes effect, and its answer is lost
"""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections import deque
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Lose:
    """Let the request take effect, then close without its answer."""


@dataclass(frozen=True)
class Cut:
    """Close without letting the request through."""


@dataclass(frozen=True)
class Refuse:
    """Answer with this status without letting the request through."""

    status: int


@dataclass(frozen=True)
class Truncate:
    """Let the request take effect, and break off in the middle of its answer's body."""


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str] = field(repr=False)


class Wire:
    """Listens at `port`, speaks to `upstream`. `faults` are used up by requests of `method`, in order.

    One request a connection: simple, and enough for a test. `strip` names headers that get lost on the way.
    """

    def __init__(self, upstream: int, *, method: str = "PUT", strip: tuple[str, ...] = ()) -> None:
        self.upstream, self.method, self.strip = upstream, method, strip
        self.faults: deque[Lose | Cut | Refuse | Truncate] = deque()
        self.requests: list[Request] = []
        wire = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError):
                    wire._serve(self.request)

        class Listener(socketserver.ThreadingTCPServer):
            daemon_threads = True
            allow_reuse_address = True

        self._server = Listener(("127.0.0.1", 0), Handler)
        self.port: int = self._server.server_address[1]

    def __enter__(self) -> Wire:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def sent(self, method: str) -> list[Request]:
        return [request for request in self.requests if request.method == method]

    def fault(self, request: Request) -> Lose | Cut | Refuse | Truncate | None:
        """What happens to this request."""
        return self.faults.popleft() if self.faults and request.method == self.method else None

    def _serve(self, client: socket.socket) -> None:
        read = _read_request(client)
        if read is None:
            return
        request, head, body = read
        self.requests.append(request)
        fault = self.fault(request)
        if isinstance(fault, Cut):
            return
        if isinstance(fault, Refuse):
            client.sendall(
                f"HTTP/1.1 {fault.status} No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
            )
            return
        lines = head.split(b"\r\n")
        dropped = (*self.strip, "connection")
        kept = [lines[0]] + [x for x in lines[1:] if x.split(b":")[0].decode().lower() not in dropped]
        with socket.create_connection(("127.0.0.1", self.upstream), timeout=20) as server:
            server.sendall(b"\r\n".join([*kept, b"Connection: close", b"", b""]) + body)
            answer = b""
            while part := server.recv(65536):
                answer += part
        if isinstance(fault, Truncate):
            answer = answer[: (answer.index(b"\r\n\r\n") + len(answer)) // 2 + 2]
        if not isinstance(fault, Lose):
            client.sendall(answer)


def _read_request(client: socket.socket) -> tuple[Request, bytes, bytes] | None:
    data = b""
    while b"\r\n\r\n" not in data:
        part = client.recv(65536)
        if not part:
            return None
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    first, *rest = head.decode("latin-1").split("\r\n")
    headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in rest)}
    while len(body) < int(headers.get("content-length", "0")):
        part = client.recv(65536)
        if not part:
            return None
        body += part
    method, path, _ = first.split(" ", 2)
    return Request(method, path, headers), head, body
