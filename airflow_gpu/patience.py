"""Waiting out a store that is away, before a driver exists that would.

Purpose: a try that begins, and a trigger that starts, read the run directory
first. A store that restarts for a minute must not cost a try.

What it does not do: wait for anything but stores. Everything it is given may be
called again: what was written before the reply was lost is found.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_attempt,
    wait_exponential,
)

from airflow_gpu.rundir.store import StoreError

LONGEST_PAUSE = 10.0
"""Seconds between two attempts at most; the first comes after one second, the next after two."""

ATTEMPTS = 64
"""Together about ten minutes."""

T = TypeVar("T")


async def patiently(
    call: Callable[[], Awaitable[T]],
    *,
    sleep: Callable[[float], Awaitable[None]],
    say: Callable[[str], None],
) -> T:
    """The answer of ``call``, made again while the store is away.

    :raises StoreError: it was away for about ten minutes.
    """

    def tell(state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        say(f"the run directory cannot be reached, trying again: {error}")

    again = AsyncRetrying(
        retry=retry_if_exception_type(StoreError),
        stop=stop_after_attempt(ATTEMPTS),
        wait=wait_exponential(multiplier=1.0, max=LONGEST_PAUSE),
        sleep=sleep,
        before_sleep=tell,
        reraise=True,
    )

    async def called() -> T:  # tenacity awaits what is declared so; a lambda's coroutine it would hand back
        return await call()

    return await again(called)
