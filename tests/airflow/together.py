"""Tests of one module that wait for Airflow together, not one after the other.

Each scenario waits most of its time: for a scheduler, a deferral, a gang that
saves. The first marked test that runs starts all marked ones that pytest has
selected of its module, each in a thread; every test then waits for its own end
and passes or fails by that.

Limits: what a marked test uses must be safe in threads; it gets one fixture,
``gangs``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.airflow.conftest import Gangs

Test = Callable[[Gangs], None]


class Together:
    """Example::

    together = Together()

    @together
    def test_one(gangs): ...
    """

    def __init__(self, most: int = 8) -> None:
        self.most = most
        self._tests: dict[str, Test] = {}
        self._futures: dict[str, Future[None]] = {}

    def __call__(self, test: Test) -> Callable[[Gangs, pytest.FixtureRequest], None]:
        name = test.__name__
        self._tests[name] = test

        def run(gangs: Gangs, request: pytest.FixtureRequest) -> None:
            if not self._futures:
                self._start(gangs, request)
            self._futures[name].result()

        run.__name__, run.__doc__, run.__module__ = name, test.__doc__, test.__module__
        run.__qualname__ = test.__qualname__
        return run

    def _start(self, gangs: Gangs, request: pytest.FixtureRequest) -> None:
        module = request.node.path
        chosen = [
            item.name for item in request.session.items if item.path == module and item.name in self._tests
        ]
        pool = ThreadPoolExecutor(self.most, thread_name_prefix="scenario")
        for name in chosen:
            self._futures[name] = pool.submit(functools.partial(self._tests[name], gangs))
        pool.shutdown(wait=False)
