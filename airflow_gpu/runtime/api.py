"""The handle of a program in its gang: who am I, where do I start, when do I save, what do I hand back.

Purpose::

    from airflow_gpu.runtime import gang

    with gang() as g:
        start = g.checkpoint.restore(load)           # completed steps, 0 when there is nothing
        for step in range(start, total):
            train(step)
            g.progress(step + 1, total, loss=loss)
            if g.checkpoint.due(step + 1):
                with g.checkpoint.save(step + 1) as d:
                    write(d / f"rank{g.rank}.bin")
        g.result({"loss": loss})

``step`` counts completed steps. After a notice of the platform ``due`` is true
on every rank at the same step, and once that save is committed (or is given up)
``save`` raises ``SystemExit(75)`` on every rank: the gang is resumed from there.

Outside of a gang the same program runs on its own (or under torchrun): nothing
is restored, nothing is due, saves go to a temporary folder (or to
GANG_CHECKPOINT_DIR), results are printed.

Limits: every rank asks ``due`` for the same steps and takes part in every save.
One thread, the main one, uses the handle.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any, Dict, Optional, Type

from airflow_gpu.runtime.alone import LocalCheckpoint
from airflow_gpu.runtime.checkpointing import Checkpoint, GangCheckpoint
from airflow_gpu.runtime.member import (
    REPLY_SECONDS,
    GangError,
    Identity,
    Leave,
    Member,
    inside,
    say,
)
from airflow_gpu.runtime.plain import plain

__all__ = ["Checkpoint", "Gang", "GangError", "Leave", "gang"]

RESULT_BYTES = 1 << 20
"""Largest result, as JSON. Larger things are written to a file, and its path handed back."""

PROGRESS_SECONDS = 1.0
"""Reports of progress that come sooner after the last are kept back; the newest is sent at the end."""

PROGRESS_BYTES = 16384
"""Largest report of progress, as JSON."""


class Gang:
    """This rank's handle. ``rank`` of ``world_size``; ``local_rank`` of ``local_world_size`` on node ``node_rank`` of ``nodes``.

    ``master_addr`` and ``master_port`` are where frameworks meet, ``life`` and
    ``attempt`` count starts (0 outside of a gang), ``run`` names the run.
    """

    def __init__(self, identity: Identity, member: Optional[Member], checkpoint: Checkpoint) -> None:
        self.rank = identity.rank
        self.world_size = identity.world_size
        self.local_rank = identity.local_rank
        self.local_world_size = identity.local_world_size
        self.node_rank = identity.node_rank
        self.nodes = identity.nodes
        self.master_addr = identity.master_addr
        self.master_port = identity.master_port
        self.life = int(os.environ.get("GANG_LIFE") or 0) if member else 0
        self.attempt = int(os.environ.get("GANG_ATTEMPT") or 0) if member else 0
        self.run = os.environ.get("GANG_RUN", "") if member else ""
        self.checkpoint = checkpoint
        self.result_given = False
        self._member = member
        self._progress: Optional[Dict[str, Any]] = None
        self._progress_at = float("-inf")

    @property
    def notice(self) -> bool:
        """The platform has given notice. A program that reads this is expected to save and leave by itself, with 75."""
        if self._member is None:
            return False
        self._member.cooperative = True
        return self._member.notice

    @property
    def grace_left(self) -> Optional[float]:
        """Seconds until the platform kills what still runs; None before a notice. At most the gang's ``stop_grace``."""
        if self._member is None or not self._member.notice:
            return None
        return max(0.0, self._member.grace_end - time.monotonic())

    def progress(self, step: int, total: Optional[int] = None, **metrics: Any) -> None:
        """Say how far the work is. ``step`` of ``total`` steps are completed; small numbers or words in ``metrics``.

        Rank 0's counts, at most one a second; calls on other ranks do nothing.
        It is for people and for estimates, and never decides anything.
        Raises TypeError when a metric cannot be JSON, ValueError when they are too large.
        """
        if self.rank != 0 or self._member is None:
            return
        values, _ = plain(metrics, "progress")
        if len(repr(values)) > PROGRESS_BYTES:
            raise ValueError(f"metrics of more than {PROGRESS_BYTES} bytes: report small ones")
        self._progress = {"t": "progress", "step": int(step), "total": total, "metrics": values}
        if time.monotonic() - self._progress_at >= PROGRESS_SECONDS:
            self._send_progress()

    def result(self, value: Any) -> None:
        """Hand back a value; it becomes the task's XCom if the gang succeeds. Rank 0's counts, the last one.

        JSON: numbers, text, lists, dicts with text as keys; also single numbers
        of NumPy, JAX and PyTorch. NaN and infinities become null, with a line in
        the log. Raises TypeError that names what cannot travel, ValueError above
        1 MiB, GangError when node 0 does not confirm.
        """
        if self.rank != 0:
            return
        value, gaps = plain(value, "result")
        for gap in gaps:
            say(f"{gap}: JSON has no such number, null is handed back")
        text = json.dumps(value, allow_nan=False)
        if len(text.encode()) > RESULT_BYTES:
            raise ValueError(
                f"the result has {len(text.encode())} bytes, more than {RESULT_BYTES}: "
                "write it to a file and hand back where it is"
            )
        self.result_given = True
        if self._member is None:
            print(f"[gang] result: {text}", flush=True)
        elif not self._member.ask({"t": "result", "json": text}, REPLY_SECONDS):
            raise GangError("node 0 did not confirm the result")

    def _send_progress(self) -> None:
        if self._member is not None and self._progress is not None:
            self._member.send(self._progress)
            self._progress, self._progress_at = None, time.monotonic()

    def __repr__(self) -> str:
        return f"<Gang rank {self.rank} of {self.world_size}, life {self.life}>"


class gang:
    """``with gang() as g:`` joins the gang that this process was started for, and leaves it at the end.

    Raises GangError when node 0 cannot be reached.
    """

    def __init__(self) -> None:
        self._member: Optional[Member] = None
        self._handle: Optional[Gang] = None

    def __enter__(self) -> Gang:
        identity = Identity.of(os.environ)
        checkpoint: Checkpoint
        if inside(os.environ):
            member = self._member = Member(identity, os.environ)
            member.join()
            checkpoint = GangCheckpoint(member, os.environ)
        else:
            folder = os.environ.get("GANG_CHECKPOINT_DIR")
            checkpoint = LocalCheckpoint(identity, Path(folder) if folder else None)
        self._handle = Gang(identity, self._member, checkpoint)
        return self._handle

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        if self._member is None or self._handle is None:
            return
        if error is None:
            self._handle.checkpoint.wait()
        self._handle._send_progress()
        code, words = 0, None
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
            words = f"SystemExit: {error.code}" if code not in (0, 75, 143) else None
        elif error is not None:
            code, words = 1, "".join(traceback.format_exception_only(kind, error)).strip()[-2000:]
        self._member.leave(code, words)
