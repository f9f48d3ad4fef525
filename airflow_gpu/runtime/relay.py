"""Commands that mpirun on node 0 has started on the other nodes.

Purpose: mpirun starts a daemon on each node by what it takes for ``ssh``: a
small script that runs ``runtime.pyz rsh HOST COMMAND``. That process asks node
0 (this module), node 0 asks the agent of that node, and output and exit code
come back the same way. No sshd and no keys are needed, and what is started
dies with the gang.

Limits: standard input is not carried; mpirun sends its own over its daemons.
"""

from __future__ import annotations

import itertools
from typing import Callable, Dict, Optional, Tuple

from airflow_gpu.runtime.control import Peer
from airflow_gpu.runtime.wire import NO_SUCH_NODE, Message


class Relay:
    """Joins a remote start with the agent that runs its command. Lives in the control server's thread."""

    def __init__(self, agents: Callable[[], Dict[int, Peer]]) -> None:
        self._agents = agents
        self._numbers = itertools.count(1)
        self._running: Dict[int, Tuple[Peer, int]] = {}  # number -> who asked, on which node

    def start(self, peer: Peer, message: Message) -> None:
        """A remote start asks for a command line on a host."""
        host, line = str(message["host"]), str(message["line"])
        node = self.node_of(host)
        if node is None:
            known = ", ".join(str(agent.hello.get("addr")) for _, agent in sorted(self._agents().items()))
            self._answer(peer, NO_SUCH_NODE, f"{host} is no node of this gang ({known})\n")
            return
        number = next(self._numbers)
        self._running[number] = (peer, node)
        self._agents()[node].send({"t": "exec", "id": number, "line": line})

    def node_of(self, host: str) -> Optional[int]:
        """By address, by host name, and by the host name's first part."""
        for key in ("addr", "host"):
            for node, agent in self._agents().items():
                if agent.hello.get(key) == host:
                    return node
        for node, agent in self._agents().items():
            if str(agent.hello.get("host")).split(".")[0] == host.split(".")[0] and not host[:1].isdigit():
                return node
        return None

    def output(self, peer: Peer, message: Message) -> None:
        running = self._running.get(int(message["id"]))
        if running is not None:
            running[0].send(message)

    def exit(self, peer: Peer, message: Message) -> None:
        running = self._running.pop(int(message["id"]), None)
        if running is not None:
            running[0].send(message)

    def left(self, peer: Peer) -> None:
        """mpirun has let go of its remote start: end the command, as a hang-up of ssh would."""
        for number, (asker, node) in list(self._running.items()):
            if asker is peer:
                del self._running[number]
                agent = self._agents().get(node)
                if agent is not None:
                    agent.send({"t": "kill", "id": number})

    def lost(self, node: int) -> None:
        """A node is gone, and its commands with it."""
        for number, (asker, where) in list(self._running.items()):
            if where == node:
                del self._running[number]
                self._answer(asker, NO_SUCH_NODE, f"node {node} is lost\n")

    def _answer(self, peer: Peer, code: int, words: str) -> None:
        peer.send({"t": "output", "id": 0, "stream": "err", "text": f"gang: {words}"})
        peer.send({"t": "exit", "id": 0, "code": code})
