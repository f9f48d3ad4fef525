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

from airflow_gpu.runtime.checkpoint import declared, life_folder, seal, step_in, unfinished
from airflow_gpu.runtime.claim import Claim, life_root
from airflow_gpu.runtime.files import Channel, Exists, Folder, to_json
from airflow_gpu.runtime.job import Job
from airflow_gpu.runtime.manifest import MANIFEST, Entry
from airflow_gpu.runtime.words import VERSION, utc

RETRY_SECONDS = 60.0
"""How long a write that decides something is tried again."""

RETRY_PAUSE = 2.0
"""Between those tries."""

PROGRESS_SECONDS = 2.0
"""At least so long between two writes of progress.json."""

Report = Callable[[str], None]
Collect = Callable[[str], Optional[List[Entry]]]


def create_surely(channel: Channel, name: str, data: bytes, report: Report) -> bool:
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
    """Node 0's writer for one life. Its methods block; they run in an executor.

    ``collect`` brings the files of a folder from all nodes to the channel, where that is no folder.
    """

    def __init__(
        self, channel: Channel, job: Job, claim: Claim, report: Report, collect: Optional[Collect] = None
    ) -> None:
        self._channel = channel
        self._here = channel if isinstance(channel, Folder) else Folder(channel.root)
        self._collect = collect
        self._job = job
        self._life = claim.life
        self._root = life_root(claim.life)
        self._report = report
        self._sealing = threading.Lock()
        self._sealed: List[
            str
        ] = []  # where the channel is no folder: what was uploaded of a program's checkpoints
        self._progress: Dict[str, Any] = {"step": None, "total": None, "metrics": {}}
        self._saved: Optional[Dict[str, Any]] = None  # the newest checkpoint on the channel
        self._news = False  # of either, since it was last written
        self.result: Optional[str] = None
        """What rank 0 handed back, as JSON text; None when it handed back nothing."""

    def failure(self, failure: Dict[str, Any]) -> None:
        create_surely(
            self._channel, f"{self._root}/failure.json", failure_record(self._life, failure), self._report
        )

    def notice(self, source: str, node: Optional[int], cause: str) -> None:
        body = {"v": VERSION, "life": self._life, "node": node, "source": source, "cause": cause, "at": utc()}
        create_surely(self._channel, f"{self._root}/notice.json", to_json(body), self._report)

    def note(self, name: str, body: Dict[str, Any]) -> None:
        """A further file of the life, for whoever reads it later."""
        create_surely(self._channel, f"{self._root}/{name}", to_json({**body, "at": utc()}), self._report)

    def note_progress(self, step: int, total: Optional[int], metrics: Dict[str, Any]) -> None:
        """Kept, to be written when it is time. Does not block."""
        self._progress = {"step": step, "total": total, "metrics": metrics}
        self._news = True

    def note_saved(self, step: int, seconds: Optional[float], size: int) -> None:
        """A checkpoint is complete on the channel, after ``seconds`` where that is known. Does not block."""
        self._saved = {"step": step, "seconds": None if seconds is None else round(seconds, 3), "bytes": size}
        self._news = True

    def write_progress(self) -> None:
        if not self._news:
            return
        self._news = False
        saved = {} if self._saved is None else {"saved": self._saved}
        body = {"v": VERSION, "life": self._life, **self._progress, **saved, "at": utc()}
        try:
            self._channel.replace(f"{self._root}/progress.json", to_json(body))
        except (OSError, ValueError) as error:
            self._report(f"progress could not be written: {error}")

    def seal_declared(self) -> None:
        """Give manifests to checkpoints that the program has called complete."""
        if self._sealing.acquire(blocking=False):  # a large one may take longer than the time between looks
            try:
                for name in declared(self._here, self._life):
                    self._seal(name)
                self._follow_rotation()
            finally:
                self._sealing.release()

    def finish(self, clean: bool) -> None:
        """All processes have ended. ``clean``: each with 0 or 75, so what a program wrote last is whole."""
        self.write_progress()
        with self._sealing:
            for name in declared(self._here, self._life):
                self._seal(name)
            self._follow_rotation()
            if clean:
                for name in unfinished(self._here, self._life)[-1:]:
                    self._seal(name)
        if self.result is not None:
            # As rank 0 gave it, without a wrapper: whoever is handed the file's URI finds the value.
            create_surely(
                self._channel, f"{self._root}/result.json", self.result.encode() + b"\n", self._report
            )

    def _follow_rotation(self) -> None:
        """A program removes its older checkpoints; where it cannot reach the channel's copy, that goes as well."""
        if self._channel.shared:
            return
        root = life_folder(self._life)
        there = self._here.names(root)
        if not any(step_in(name) is not None for name in there):
            return  # all are gone: it was somebody else who tidied up here
        for name in [name for name in self._sealed if name not in there]:
            self._channel.remove(f"{root}/{name}/{MANIFEST}")  # half of one must not look like a whole one
            self._channel.remove_tree(f"{root}/{name}")
            self._sealed.remove(name)

    def _seal(self, name: str) -> None:
        entries = None
        if self._collect is not None:
            entries = self._collect(f"{life_folder(self._life)}/{name}")
            if entries is None:
                return
        until = time.monotonic() + RETRY_SECONDS
        while True:
            try:
                manifest = seal(self._channel, self._life, name, self._job.world_size, entries)
                break
            except OSError as error:
                if time.monotonic() >= until:
                    self._report(f"CHECKPOINT {name} COULD NOT BE COMPLETED: {error}")
                    return
                time.sleep(RETRY_PAUSE)
        if manifest is not None:
            self._sealed.append(name)
            self.note_saved(manifest.step, None, sum(entry.size for entry in manifest.files))
            self._report(
                f"checkpoint {name} of step {manifest.step} is complete: {len(manifest.files)} files"
            )
