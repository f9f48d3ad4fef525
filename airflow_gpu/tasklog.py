"""Rank 0's output and its gang's checkpoints in the task log while it runs, capped in rate.

Purpose: people watch a task's log. The full logs of all ranks are in the run
directory; this is the live view.

Limits: at most ``BYTES_A_LOOK`` a look, and looks come further apart where one
process watches many gangs (``pacing.py``). Airflow passes trigger logs through one
supervisor process for all triggers, so a chatty gang must not drown the others;
what is left out is said.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Mapping
from typing import Any

from airflow_gpu.gang.run import Life
from airflow_gpu.rundir.channel import Channel
from airflow_gpu.rundir.store import StoreError

BYTES_A_LOOK = 16 * 1024
"""Shown in one look, at most. With the default interval that is about 3 KB a second."""

READ = 1024 * 1024
READS_A_LOOK = 32
"""Pieces of ``READ`` bytes read in one look, at most; only the end of it is shown."""

LONGEST_LINE = 4096
"""Characters after which a line without an end is shown all the same."""

SAVES_AT_ONCE = 3
"""Checkpoints of a life that are told as they come."""

SAVE_EVERY = 60.0
"""Seconds between two lines on checkpoints after those."""

UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))

_LINE_END = re.compile(r"\r\n|\n|\r")  # progress bars write \r


def size(count: float) -> str:
    """Bytes for people: ``1.5 GiB``."""
    for one, unit in UNITS:
        if count >= one:
            return f"{count / one:.1f} {unit}"
    return f"{count:.0f} B"


class SaveLog:
    """Tells of checkpoints as they are saved: the first few of each life, then the newest from time to time."""

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._newest = (0, -1)
        self._told, self._at = 0, 0.0

    def note(self, life: int, progress: Mapping[str, Any], now: float) -> None:
        """What a life's ``progress.json`` says; anybody may have written it."""
        saved = progress.get("saved")
        if not isinstance(saved, dict):
            return
        step = saved.get("step")
        if not isinstance(step, int) or (life, step) <= self._newest:
            return
        if life != self._newest[0]:
            self._told = 0
        elif self._told >= SAVES_AT_ONCE and now - self._at < SAVE_EVERY:
            return
        seconds, count = saved.get("seconds"), saved.get("bytes")
        how = [f"{seconds:.1f} s"] if isinstance(seconds, (int, float)) else []
        how += [size(count)] if isinstance(count, int) else []
        self._emit(f"checkpoint of step {step} is saved" + (f": {', '.join(how)}" if how else ""))
        self._newest, self._told, self._at = (life, step), self._told + 1, now


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
        text, left_out = "", 0
        try:
            for _ in range(READS_A_LOOK):
                data = await channel.log(life.number, 0, self._since, READ)
                self._since += len(data)
                # A character that is not whole yet stays for the next look.
                text += self._decoder.decode(data, ended and len(data) < READ)
                left_out += max(0, len(text) - BYTES_A_LOOK)
                text = text[-BYTES_A_LOOK:]
                if len(data) < READ:
                    break
        except StoreError as error:
            self._emit(f"[rank 0: log not readable now: {error}]")
        if left_out:
            self._rest = ""
            self._emit(f"[rank 0: {left_out} characters left out here; the full log is in the run directory]")
        *lines, self._rest = _LINE_END.split(self._rest + text)
        if len(self._rest) > LONGEST_LINE:
            lines.append(self._rest)
            self._rest = ""
        for line in lines:
            if line:
                self._emit(f"[rank 0] {line}")
        if ended:
            self._flush()

    def _flush(self) -> None:
        if self._rest:
            self._emit(f"[rank 0] {self._rest}")
        self._rest = ""
