"""Rank 0's output in the task log while it runs, capped in rate.

Purpose: people watch a task's log. The full logs of all ranks are in the run
directory; this is the live view.

Limits: at most ``BYTES_A_LOOK`` a look. Airflow passes trigger logs through one
supervisor process for all triggers, so a chatty gang must not drown the others;
what is left out is said.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable

from airflow_gpu.gang.run import Life
from airflow_gpu.rundir.channel import Channel
from airflow_gpu.rundir.store import StoreError

BYTES_A_LOOK = 16 * 1024
"""Shown in one look, at most. With the default interval that is about 3 KB a second."""

READ_A_LOOK = 1024 * 1024
"""Bytes read in one look, at most."""


class RankLog:
    """Follows rank 0 of the newest life."""

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._life = 0
        self._since = 0
        self._rest = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    async def follow(self, channel: Channel, life: Life, *, ended: bool) -> None:
        """Show what rank 0 wrote since the last look. Trouble with logs is never trouble for the gang."""
        if life.number != self._life:
            self._flush()
            self._life, self._since = life.number, 0
            self._decoder.reset()
        try:
            data = await channel.log(life.number, 0, self._since, READ_A_LOOK)
        except StoreError as error:
            self._emit(f"[rank 0: log not readable now: {error}]")
            return
        self._since += len(data)
        text = self._decoder.decode(data, ended)  # a character that is not whole yet stays for the next look
        if len(text) > BYTES_A_LOOK:
            left_out = len(text) - BYTES_A_LOOK
            text = text[-BYTES_A_LOOK:]
            text = text[text.find("\n") + 1 :]
            self._emit(f"[rank 0: {left_out} characters left out here; the full log is in the run directory]")
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._emit(f"[rank 0] {line}")
        if ended:
            self._flush()

    def _flush(self) -> None:
        if self._rest:
            self._emit(f"[rank 0] {self._rest}")
        self._rest = ""
