"""What a life leaves on the channel: failure, notice, progress, result, how each node's ranks ended.

Purpose: the driver believes these files and nothing else. Each is written once,
except progress, which decides nothing.

Limits: a channel that fails for a moment is tried again for ``RETRY_SECONDS``;
what cannot be written then is logged, and missing evidence is never success.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Callable, Dict, List, Optional

from airflow_gpu.runtime.checkpoint import declared, seal, unfinished
from airflow_gpu.runtime.claim import Claim, life_root
from airflow_gpu.runtime.files import Exists, Folder, to_json
from airflow_gpu.runtime.job import Job
from airflow_gpu.runtime.words import VERSION, utc

RETRY_SECONDS = 60.0
"""How long a write that decides something is tried again."""

RETRY_PAUSE = 2.0
"""Between those tries."""

PROGRESS_SECONDS = 2.0
"""At least so long between two writes of progress.json."""

Report = Callable[[str], None]


def create_surely(channel: Folder, name: str, data: bytes, report: Report) -> bool:
    """Create a file, or find that it is there; False when the channel refused for ``RETRY_SECONDS``."""
    until = time.monotonic() + RETRY_SECONDS
    while True:
        try:
            channel.create(name, data)
            return True
        except Exists:
            return True
        except OSError as error:
            if time.monotonic() >= until:
                report(f"COULD NOT WRITE {name}: {error}")
                return False
            time.sleep(RETRY_PAUSE)


def failure_record(life: int, failure: Dict[str, Any]) -> bytes:
    """``failure.json``. Fields that do not apply are null."""
    body: Dict[str, Any] = {
        "v": VERSION,
        "life": life,
        "cause": "rank",
        "rank": None,
        "node": None,
        "host": "",
        "exit_code": None,
        "signal": None,
        "tail": "",
        "message": "",
        "at": utc(),
    }
    body.update(failure)
    return to_json(body)


def node_record(life: int, node: int, host: str, ranks: List[Dict[str, Any]]) -> bytes:
    """``nodes/<node>.json``: how the processes of one node ended."""
    return to_json({"v": VERSION, "life": life, "node": node, "host": host, "ranks": ranks, "at": utc()})


class Records:
    """Node 0's writer for one life. Its methods block; they run in an executor."""

    def __init__(self, channel: Folder, job: Job, claim: Claim, report: Report) -> None:
        self._channel = channel
        self._job = job
        self._life = claim.life
        self._root = life_root(claim.life)
        self._report = report
        self._sealing = threading.Lock()
        self._progress: Optional[Dict[str, Any]] = None
        self.result: Optional[str] = None
        """What rank 0 handed back, as JSON text; None when it handed back nothing."""

    def failure(self, failure: Dict[str, Any]) -> None:
        create_surely(
            self._channel, f"{self._root}/failure.json", failure_record(self._life, failure), self._report
        )

    def notice(self, source: str, node: Optional[int], cause: str) -> None:
        body = {"v": VERSION, "life": self._life, "node": node, "source": source, "cause": cause, "at": utc()}
        create_surely(self._channel, f"{self._root}/notice.json", to_json(body), self._report)

    def note_progress(self, step: int, total: Optional[int], metrics: Dict[str, Any]) -> None:
        """Kept, to be written when it is time. Does not block."""
        self._progress = {
            "v": VERSION,
            "life": self._life,
            "step": step,
            "total": total,
            "metrics": metrics,
            "at": utc(),
        }

    def write_progress(self) -> None:
        body, self._progress = self._progress, None
        if body is not None:
            try:
                self._channel.replace(f"{self._root}/progress.json", to_json(body))
            except (OSError, ValueError) as error:
                self._report(f"progress could not be written: {error}")

    def seal_declared(self) -> None:
        """Give manifests to checkpoints that the program has called complete."""
        if self._sealing.acquire(blocking=False):  # a large one may take longer than the time between looks
            try:
                for name in declared(self._channel, self._life):
                    self._seal(name)
            finally:
                self._sealing.release()

    def finish(self, clean: bool) -> None:
        """All processes have ended. ``clean``: each with 0 or 75, so what a program wrote last is whole."""
        self.write_progress()
        with self._sealing:
            for name in declared(self._channel, self._life):
                self._seal(name)
            if clean:
                for name in unfinished(self._channel, self._life)[-1:]:
                    self._seal(name)
        if self.result is not None:
            # As rank 0 gave it, without a wrapper: whoever is handed the file's URI finds the value.
            create_surely(
                self._channel, f"{self._root}/result.json", self.result.encode() + b"\n", self._report
            )

    def _seal(self, name: str) -> None:
        manifest = seal(self._channel, self._life, name, self._job.world_size)
        if manifest is not None:
            self._report(
                f"checkpoint {name} of step {manifest.step} is complete: {len(manifest.files)} files"
            )
