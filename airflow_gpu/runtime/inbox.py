"""What an agent hears: signals, its guard's end, node 0's messages, ends of ranks. One queue, one reader.

Purpose: everything reaches the agent's main loop in the order in which it came,
also what comes before that loop has begun.

Limits: :meth:`Inbox.listen` must be called in the main thread.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from typing import Any, Callable, Optional, Tuple, TypeVar

from airflow_gpu.runtime.words import NOTICE_SIGNALS

TELL_SECONDS = 10.0
"""How long a node that got a notice before it has joined still tries to tell node 0."""

LISTEN_SECONDS = 0.2
"""Between looks for a notice while something else is awaited."""

T = TypeVar("T")

Item = Tuple[str, Any]
"""A kind (``signal``, ``guard``, ``message``, ``lost``, ``ended``, ``brought``) and what belongs to it."""


class Inbox:
    """Filled from any thread and from signal handlers."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._heard_at: Optional[float] = None  # when something came while this node had not joined yet

    def put(self, kind: str, value: Any) -> None:
        """Never blocks. SimpleQueue may be filled from a signal handler."""
        self._queue.put((kind, value))

    def get(self, seconds: float) -> Item:
        """The next item; one of kind ``""`` when there is none for so long."""
        try:
            return self._queue.get(timeout=seconds)
        except queue.Empty:
            return "", None

    def listen(self, guard: Optional[int]) -> None:
        """To signals, and to the descriptor ``guard``, which ends when the guard does."""
        numbers = [getattr(signal, name) for name in NOTICE_SIGNALS]
        for number in numbers:
            signal.signal(number, lambda number, frame: self.put("signal", number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
        if guard is not None:
            threading.Thread(target=self._watch, args=(guard,), name="gang-guard", daemon=True).start()

    def interrupted(self) -> bool:
        """Something came that ends the waiting for node 0. It is put back for whoever listens next.

        After a notice the wait still goes on for a moment: node 0 should hear
        of it, or it would wait for this node until the barrier's time is over.
        """
        try:
            item = self._queue.get_nowait()
        except queue.Empty:
            return False
        self._queue.put(item)
        if self._heard_at is None:
            self._heard_at = time.monotonic()
        return item[0] == "guard" or time.monotonic() - self._heard_at >= TELL_SECONDS

    def beside(self, work: Callable[[Callable[[], bool]], T]) -> Optional[T]:
        """What ``work`` answers, or raises: in a thread, since a store that hangs must not keep a notice from being heard.

        None when something came that ends the waiting (see :meth:`interrupted`). Then the function that ``work`` is
        given answers True, and what it still does must count for nothing.
        """
        answers: queue.SimpleQueue[Tuple[Optional[T], Optional[BaseException]]] = queue.SimpleQueue()
        over = threading.Event()

        def run() -> None:
            try:
                answers.put((work(over.is_set), None))
            except BaseException as error:  # for the main thread to deal with
                answers.put((None, error))

        threading.Thread(target=run, name="gang-join", daemon=True).start()
        while True:
            try:
                answer, error = answers.get(timeout=LISTEN_SECONDS)
            except queue.Empty:
                if self.interrupted():
                    over.set()
                    return None
                continue
            if error is not None:
                raise error
            return answer

    def _watch(self, descriptor: int) -> None:
        try:
            os.read(descriptor, 1)
        except OSError:
            pass
        self.put("guard", None)
