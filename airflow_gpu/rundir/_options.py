"""Options of a store that somebody else knows: asked for when they are needed, and again from time to time.

Purpose: credentials come from connections, which rotate, and which are read in an
event loop; a store is made where neither can be waited for.

What it does not do: know what the options mean, or show them.

Limits: while they cannot be had, the older ones serve; what the store then answers is its own word.

Example::

    asked = Asked(source)
    options = await asked.current()  # the same object, as long as they are the same
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

OPTIONS_AGE = 300.0
"""Seconds after which options are asked for again."""

ASK_AGAIN = 5.0
"""Seconds for which they are not asked for again when they could not be had: thousands of gangs may want them."""


class Asked:
    """The newest options of a source, for any number of callers in any number of event loops."""

    def __init__(self, source: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
        self._source = source
        self._options: dict[str, Any] | None = None
        self._error: Exception | None = None
        self._until = 0.0  # by the monotonic clock
        self._asking: asyncio.Task[None] | None = None

    async def current(self) -> dict[str, Any]:
        """The options.

        :raises Exception: what the source raised, while there are none yet.
        """
        if time.monotonic() >= self._until:
            await self._ask_once()
        if self._options is not None:
            return self._options
        assert self._error is not None
        raise self._error.with_traceback(None)

    async def _ask_once(self) -> None:
        """One question at a time; who comes meanwhile awaits its answer, or goes on with the older one."""
        asking = self._asking
        if asking is not None and not asking.done() and asking.get_loop() is asyncio.get_running_loop():
            if self._options is None:
                await asyncio.shield(asking)
            return
        # A task of its own: that one caller is cancelled does not end it for the others.
        self._asking = asyncio.ensure_future(self._ask())
        await asyncio.shield(self._asking)

    async def _ask(self) -> None:
        try:
            found = dict(await self._source())
        except Exception as error:
            self._error, self._until = error, time.monotonic() + ASK_AGAIN
            return
        if found != self._options:
            self._options = found
        self._until = time.monotonic() + OPTIONS_AGE
