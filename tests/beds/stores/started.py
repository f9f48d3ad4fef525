"""Stores that tests share: each started when it is first asked for; a test is skipped, and says so, where one cannot be.

with started() as servers:
    store = Store(servers["s3"].uri, servers["s3"].options)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.beds.stores.servers import SERVERS, Server, Unavailable
from tests.beds.stores.sshd import sshd

ALL = {**SERVERS, "sftp": sshd}


class Servers(dict[str, Server]):
    """Running stores by name, see ``ALL``."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        super().__init__()
        self._stack = stack

    def __missing__(self, name: str) -> Server:
        try:
            self[name] = self._stack.enter_context(ALL[name]())
        except Unavailable as reason:
            pytest.skip(f"{name} IS NOT PROVED HERE: {reason}")
        return self[name]


@contextlib.contextmanager
def started() -> Iterator[Servers]:
    with contextlib.ExitStack() as stack:
        yield Servers(stack)
