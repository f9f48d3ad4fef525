"""Free ports of this machine, for the servers that tests start."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A port on loopback that nobody used a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
