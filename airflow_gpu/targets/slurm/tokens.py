"""Tokens of slurmrestd: where one comes from, and when the next is needed.

Purpose: a JWT lives for minutes to days. One that is known to be over, or that the server
refuses, is asked for anew; gangs of many hours never notice.

What it does not do: check a signature. Of a token only the time of its end and its user are read.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

from airflow_gpu.targets.slurm.access import AccessError

MARGIN = 60.0
"""Seconds before its end at which a token is taken for over."""


class Tokens:
    """Gives out a token that is good for a while.

    :param fetch: answers a new one; None: ``given`` is all there is.
    """

    def __init__(self, cluster: str, given: str | None, fetch: Callable[[], Awaitable[str]] | None) -> None:
        self._cluster = cluster
        self._token = given
        self._fetch = fetch
        self._turn: asyncio.Lock | None = None

    @property
    def renewable(self) -> bool:
        return self._fetch is not None

    async def token(self, *, not_this: str | None = None) -> str:
        """A token; another one than ``not_this``, which was refused.

        :raises AccessError: there is none, and no way to get one.
        """
        if self._turn is None:
            self._turn = asyncio.Lock()
        async with self._turn:
            known = self._token
            if known is not None and known != not_this and not over(known, time.time() + MARGIN):
                return known
            if self._fetch is None:
                if known is not None and known != not_this and not over(known, time.time()):
                    return known
                raise AccessError(
                    f"{self._cluster}: the token is {'over' if known and over(known, time.time()) else 'refused'}: put a "
                    "new one (scontrol token lifespan=...) into the connection's password, or have it renewed with "
                    "token_command or token_ssh"
                )
            self._token = (await self._fetch()).strip()
            if not self._token:
                raise AccessError(f"{self._cluster}: what should give a token answered nothing")
            return self._token


def claims(token: str) -> dict[str, Any]:
    """What a JWT says of itself; empty when it is none."""
    try:
        part = token.split(".")[1]
        found = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    except (IndexError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def over(token: str, now: float) -> bool:
    """Whether it says that it ends before ``now``."""
    end = claims(token).get("exp")
    return isinstance(end, (int, float)) and end <= now


def last_line(output: str) -> str:
    """Of the output of ``scontrol token`` (``SLURM_JWT=...``) or of a command: the token."""
    rows = [row.strip() for row in output.splitlines() if row.strip()]
    return rows[-1].removeprefix("SLURM_JWT=").strip() if rows else ""
