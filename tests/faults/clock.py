"""An event loop whose clock jumps: nothing waits, everything is in order.

Purpose: hours of a run in milliseconds, the same every time. The loop asks its
"selector" how long to sleep until the next timer; this one answers at once and
moves the clock there instead. Coroutines, time-outs, locks and shields are
asyncio's own.

What it does not do: files, sockets, threads. What is handed to an executor runs
in the loop, as a task (it may be a coroutine function there, so that a test can
delay "the thread").

Limits: relies on ``BaseEventLoop`` asking ``_selector.select(timeout)`` and
nothing else of it, as it has done since Python 3.4.

Example::

    loop = SimLoop()
    loop.run(main())
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from typing import Any

from tests.faults.seam import ACTOR

BEGINNING = 1_900_000_000.0
"""The moment at which every simulated world begins, in seconds since the epoch."""


class Stuck(AssertionError):
    """Nothing is left that could ever happen, but the run is not over."""


class _Jump:
    """Stands where a selector would: no files, and a sleep that takes no time."""

    def __init__(self, loop: SimLoop) -> None:
        self.loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise Stuck("every task waits for something that nobody will do")
        if timeout > 0:
            self.loop.now += timeout
        return []


class SimLoop(asyncio.BaseEventLoop):
    """A loop on a simulated clock; ``now`` is its time in seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._clock_resolution = 1e-6  # rounding of the sums of many small waits
        self._selector = _Jump(self)
        self.set_exception_handler(lambda loop, context: self.complaints.append(context))
        self.complaints: list[dict[str, Any]] = []

    def time(self) -> float:
        return self.now

    def clock(self) -> float:
        """The time of day in this world."""
        return BEGINNING + self.now

    def create_task(self, coro: Any, **kwargs: Any) -> asyncio.Task[Any]:
        """As always; the process to which the task belongs knows it."""
        task = super().create_task(coro, **kwargs)
        context = kwargs["context"] if "context" in kwargs else copy_context()
        if (actor := context.get(ACTOR)) is not None:
            actor.tasks.add(task)
            task.add_done_callback(actor.tasks.discard)
        return task

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        async def inline() -> Any:
            found = func(*args)
            return await found if inspect.isawaitable(found) else found

        return self.create_task(inline())

    def run(
        self, main: Coroutine[Any, Any, Any], on_exit: Callable[[], None], at_end: Callable[[], None]
    ) -> Any:
        """Run to the end of ``main``, then end whatever is left.

        :param on_exit: called when a simulated process has ended itself (SystemExit); the others go on.
        :param at_end: called before the rest is ended.
        """
        task = self.create_task(main)
        asyncio.set_event_loop(self)
        try:
            while True:
                try:
                    return self.run_until_complete(task)
                except SystemExit:
                    on_exit()
        finally:
            at_end()
            self._sweep()
            asyncio.set_event_loop(None)
            self.close()

    def _sweep(self) -> None:
        for _ in range(20):
            left = asyncio.all_tasks(self)
            if not left:
                return
            for task in left:
                task.cancel()
            try:
                self.run_until_complete(asyncio.wait(left, timeout=1.0))
            except SystemExit:
                continue
        raise Stuck(f"tasks that do not end: {left}")
