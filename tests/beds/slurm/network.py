"""The network of a cluster: a bridge, a link to the host, and one to each node.

Each cluster has 10.77.K.0/24 with a K that no other one has: .1 is the host, .2 the login node, .11 and on the nodes.
Nothing leads further: a cluster reaches the host, and the host the cluster.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from tests.beds.slurm.space import Space


@dataclass(frozen=True)
class Network:
    """`k` is the third figure of all addresses."""

    k: int

    @property
    def host(self) -> str:
        return f"10.77.{self.k}.1"

    @property
    def login(self) -> str:
        return f"10.77.{self.k}.2"

    def node(self, index: int) -> str:
        """The address of the node `index`, counted from 0."""
        return f"10.77.{self.k}.{11 + index}"

    def nodes(self, count: int) -> str:
        """The addresses of the first nodes, as Slurm writes them."""
        return f"10.77.{self.k}.[11-{10 + count}]"

    def plug(self, login: Space, node: Space, index: int, name: str) -> None:
        """Link a node to the bridge; its end there has the node's name.

        The hardware address is the same for each life of the node, so that nobody talks to a former one.
        """
        login.network(
            f"link add {name} type veth peer name eth0 netns {node.pid}\nlink set {name} master cluster up"
        )
        node.network(
            f"link set eth0 address 02:4d:00:00:{self.k:02x}:{11 + index:02x}\n"
            f"addr add {self.node(index)}/24 dev eth0\nlink set eth0 up"
        )


@contextlib.contextmanager
def network(login: Space) -> Iterator[Network]:
    """The bridge of `login`, linked to the host."""
    net = _take(login)
    try:
        login.network(
            f"link set host master cluster up\naddr add {net.login}/24 dev cluster\nlink set cluster up"
        )
        _ip("addr", "add", f"{net.host}/24", "dev", _name(net.k))
        _ip("link", "set", _name(net.k), "up")
        yield net
    finally:
        _ip("link", "delete", _name(net.k), check=False)


def _take(login: Space) -> Network:
    """A K that is free: the name of a link can be taken once only."""
    for k in random.sample(range(1, 255), 254):
        if f"10.77.{k}." in _ip("-4", "route", "show", "table", "all"):
            continue
        peer = ("peer", "name", "host", "netns", str(login.pid))
        if not _run("link", "add", _name(k), "type", "veth", *peer).returncode:
            return Network(k)
    raise RuntimeError(f"no link to the host: {_run('link', 'add', 'slurm0', 'type', 'veth').stderr}")


def _name(k: int) -> str:
    return f"slurm{k}"


def _ip(*arguments: str, check: bool = True) -> str:
    done = _run(*arguments)
    if check and done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr}")
    return done.stdout


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin:/usr/bin:/bin"}
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, env=environment)
