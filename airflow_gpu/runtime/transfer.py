"""Between a node and a channel that is no folder: logs go up while they grow, checkpoints come down.

Purpose: logs are uploaded in pieces, each once, in a thread of their own; at
the end of the ranks the rest. The lowest rank of a node is followed closely,
since people watch it, the others at greater intervals.

Limits: the last seconds of a log are lost when a node dies; the tail of a rank
that failed is in failure.json all the same.
"""

from __future__ import annotations

import threading
import time
from typing import Callable, Dict, Optional, Tuple

from airflow_gpu.runtime.checkpoint import differs, manifest_of, mark_bad
from airflow_gpu.runtime.files import Channel, Folder, Missing
from airflow_gpu.runtime.manifest import BAD, MANIFEST, BadManifest
from airflow_gpu.runtime.objects import Objects

LOG_SECONDS = 3.0
"""Between two pieces of the log that people watch, while the life is young."""

OTHERS_SECONDS = 30.0
"""The same for the other ranks of the node."""

TICK = 1.0
"""Seconds between two looks for which log it is time."""

SLOWER = 100
"""A piece may take so many times less than the life's age: a day has no more than some thousand of them."""

SLOWEST = 60.0

JUDGE_SECONDS = 60.0
"""For node 0 to say that a checkpoint is damaged that another node finds so."""

PIECE = 8 << 20
"""Bytes. A larger piece is uploaded as several."""


class Logs:
    """Uploads the growing logs of one node."""

    def __init__(self, channel: Objects, say: Callable[[str], None]) -> None:
        self._channel = channel
        self._say = say
        self._logs: Dict[str, _Log] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="gang-logs", daemon=True)
        self._thread.start()

    def follow(self, name: str, close: bool) -> None:
        """Upload a growing file of this node. ``name``: below the channel, without ``.log``."""
        self._logs[name] = _Log(f"{name}.log", name, LOG_SECONDS if close else OTHERS_SECONDS)

    def finish(self) -> None:
        """What logs have got since the last piece. Before that the ranks must have ended."""
        self._ended.set()
        self._thread.join()
        for log in self._logs.values():
            self._piece(log)

    def _follow(self) -> None:
        begun = time.monotonic()
        while not self._ended.wait(TICK):
            now = time.monotonic()
            for log in list(self._logs.values()):
                if now >= log.due:
                    log.due = now + max(log.every, min(SLOWEST, (now - begun) / SLOWER))
                    self._piece(log)

    def _piece(self, log: _Log) -> None:
        try:
            while True:
                with open(self._channel.path(log.path), "rb") as file:
                    file.seek(log.sent)
                    data = file.read(PIECE)
                if not data:
                    return
                log.sent += self._channel.append(log.name, log.sent, data)
        except OSError as error:
            self._say(f"{log.path} could not be uploaded: {error}")


class _Log:
    def __init__(self, path: str, name: str, every: float) -> None:
        self.path, self.name, self.every = path, name, every
        self.sent, self.due = 0, 0.0


def brought(channel: Channel, where: str, judge: bool, seen_whole: bool) -> Tuple[str, str]:
    """The checkpoint in this folder of the channel, whole and on this node: where; else the reason why not.

    ``seen_whole``: node 0 has compared all of it. ``judge``: a damaged one is
    marked, so that no later life takes it. That is for one node to say, and only
    while nobody has seen it whole: another node's disk or memory may be what is damaged.
    """
    try:
        manifest = manifest_of(channel, where)
        wrong: Optional[str] = "it has lost its manifest"
        if manifest is not None:
            wrong, _ = differs(channel, where, manifest.files, None)
        if wrong is not None:
            if judge:
                mark_bad(channel, where, wrong)
            elif seen_whole or not _condemned(channel, where):
                return "", f"checkpoint {where} does not come to this node as it was saved: {wrong}"
            return "", f"checkpoint {where} is damaged, the next life will not take it: {wrong}"
        path = channel.path(where)
        Folder(path).replace(MANIFEST, channel.read(f"{where}/{MANIFEST}"))
    except (BadManifest, Missing, OSError) as error:
        return "", f"checkpoint {where} cannot be read: {error}"
    return path, ""


def _condemned(channel: Channel, where: str) -> bool:
    """Whether node 0, which is just finding out, finds it damaged as well. Raises OSError."""
    until = time.monotonic() + JUDGE_SECONDS
    while time.monotonic() < until:
        if channel.exists(f"{where}/{BAD}"):
            return True
        time.sleep(1.0)
    return False
