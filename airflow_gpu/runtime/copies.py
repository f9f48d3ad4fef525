"""The first of two levels: quick copies of checkpoints on the nodes' own disks (or in their memory).

Purpose: where the channel is far or slow, most saves go to a folder of each node
and only some to the channel. A life starts from the nodes' copies when they are
further along its chain than the newest checkpoint of the channel, every node has
its part, and every byte is what was saved; else from the channel.

:class:`Levels` (node 0) says which saves go where. :class:`Copies` (each agent)
keeps the node's part: ``<local>/airflow-gpu-<run>/node-<rank>/<life>/<name>/``, with a
manifest of that part which is written last.

Limits: the same nodes must come back, under the same ranks. A copy is not
flushed to the disk: after a power cut its digests tell. Copies of a run are
removed when it has succeeded, those of runs that never come again by the next
agent of the same user, ``FORGOTTEN`` seconds later.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import time
from dataclasses import dataclass, fields
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from airflow_gpu.runtime.checkpoint import Start, in_order
from airflow_gpu.runtime.files import Folder, to_json
from airflow_gpu.runtime.interval import interval as best_interval
from airflow_gpu.runtime.manifest import (
    MANIFEST,
    BadManifest,
    Manifest,
    contents_differ,
    hash_files,
    listing,
    sizes_differ,
)

PREFIX = "airflow-gpu-"
MARK = ".copies"
"""In the folder of a run: that it is one, and when it was last in use."""

ADOPTED = "from-"
"""How the name of a copy begins that a life has started from."""

_RUN = re.compile(PREFIX + "[0-9a-f]{16}")

FORGOTTEN = 7 * 86400.0

SOON = 0.25
"""Of the interval: how long after a failed save to the channel the next one is tried."""

SMOOTHING = 0.2
"""Weight of the newest save in the mean cost of one that goes to the channel."""


class Levels:
    """Which saves go to the channel. ``interval``: seconds between those; None: only after a notice.

    With ``mtbf`` it is only the first one, and later ones follow from what such a save costs.
    """

    def __init__(self, interval: Optional[float], mtbf: Optional[float], now: float) -> None:
        self.interval = interval
        self.off = False  # the nodes' copies are of no use to this program
        self._mtbf = mtbf
        self._cost: Optional[float] = None
        self._at = now

    def to_channel(self, now: float) -> bool:
        """Whether a save that begins now goes there."""
        return self.interval is not None and now - self._at >= self.interval

    def failed(self, now: float) -> None:
        """One that went there came to nothing: copies are made meanwhile, and it is tried again soon."""
        if self.interval is not None:
            self._at = now - self.interval * (1 - SOON)

    def saved(self, begun: float, now: float) -> None:
        """Such a save is complete."""
        self._at = now
        if self._mtbf is not None:
            cost = now - begun
            self._cost = cost if self._cost is None else self._cost + SMOOTHING * (cost - self._cost)
            self.interval = best_interval(self._cost, self._mtbf)


@dataclass(frozen=True)
class Copy:
    """A node's part of a checkpoint: ``folder`` is the life below which it lies, ``life`` the one that saved it."""

    folder: int
    life: int
    name: str
    step: int
    world_size: int
    shape: str  # nodes x ranks of each

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Copy:
        """From a message, which may say more."""
        return cls(**{field.name: body[field.name] for field in fields(cls)})


def common(
    held: Sequence[Iterable[Copy]], lives: Iterable[int], start: Optional[Start], shape: str
) -> List[Copy]:
    """Checkpoints of which every node has its part, and that are further on the chain than ``start``; furthest first.

    ``held``: by node. ``lives``: below which copies count: the newest life whose ranks have begun, and those after it.
    ``shape``: of this gang; another one would find its ranks' files on other nodes.
    """
    allowed = set(lives)
    parts: Dict[Tuple[int, int], List[Copy]] = {}
    for copies in held:
        newest: Dict[Tuple[int, int], Copy] = {}
        for copy in copies:
            key = copy.life, copy.step
            if key not in newest or copy.folder > newest[key].folder:
                newest[key] = copy
        for key, copy in newest.items():
            parts.setdefault(key, []).append(copy)
    least = (-1, -1) if start is None or start.seed else (start.life, start.step)
    found = []
    for copies in parts.values():
        copy = max(copies, key=lambda one: one.folder)
        whole = len(copies) == len(held) and all(one.shape == shape for one in copies)
        further = copy.folder >= least[0] and copy.step > least[1]
        if whole and further and copy.folder in allowed:
            found.append(copy)
    return sorted(found, key=lambda one: (one.folder, one.step), reverse=True)


class Copies:
    """One node's copies of one run. ``channel`` tells runs apart. Raises OSError where the folder cannot be made."""

    def __init__(self, local: str, channel: str, node: int, shape: str) -> None:
        run = hashlib.sha256(channel.encode()).hexdigest()[:16]
        self._run = os.path.join(local, f"{PREFIX}{run}")
        os.makedirs(local, exist_ok=True)
        _sweep(local)
        _own(self._run)
        self._here = Folder(os.path.join(self._run, f"node-{node:04d}"))
        self._here.folder("")
        self._shape = shape
        self._touch()

    @property
    def root(self) -> str:
        return self._here.root

    def path(self, life: int, name: str = "") -> str:
        """Where ranks of a life write, or what they start from."""
        return self._here.folder(f"{life:04d}/{name}" if name else f"{life:04d}")

    def held(self) -> List[Copy]:
        """All that have a manifest. What they contain is not looked at yet."""
        found = []
        for life in self._here.names(""):
            for name in self._here.names(life) if life.isdigit() else ():
                manifest = self._manifest(life, name)
                if manifest is not None:
                    about = manifest.life, name, manifest.step, manifest.world_size, manifest.writer
                    found.append(Copy(int(life), *about))
        return sorted(found, key=lambda one: (one.folder, one.step), reverse=True)

    def keep(self, life: int, name: str, step: int, world_size: int) -> Tuple[int, int]:
        """This node's part has been written: hash it, and write its manifest. Answers its files and bytes.

        A part without files gets no manifest. Raises OSError.
        """
        folder = self._here.path(f"{life:04d}/{name}")
        entries = tuple(hash_files(folder, listing(folder), flush=False))
        if not entries:
            return 0, 0
        manifest = Manifest(life, step, world_size, entries, writer=self._shape)
        self._here.replace(f"{life:04d}/{name}/{MANIFEST}", to_json(manifest.to_dict()))
        self._touch()
        return len(entries), sum(entry.size for entry in entries)

    def kept(self, life: int, name: str) -> None:
        """A checkpoint of this name is complete, here or on the channel: what is older is of no use."""
        for other in self._here.names(""):
            if other.isdigit() and int(other) < life:
                self._here.remove_tree(other)
        for older in self._here.names(f"{life:04d}"):
            if in_order(older) < in_order(name):
                self.undo(life, older)

    def undo(self, life: int, name: str) -> None:
        """Some other node has not got its part of it."""
        self._here.remove(f"{life:04d}/{name}/{MANIFEST}")
        self._here.remove_tree(f"{life:04d}/{name}")

    def distrust(self, life: int) -> None:
        """This life has failed: what it started from is not offered again, unless it has got further by itself."""
        for name in self._here.names(f"{life:04d}"):
            if name.startswith(ADOPTED):
                self.undo(life, name)

    def wrong(self, copy: Copy) -> Optional[str]:
        """What is wrong with this node's part, in words; None: nothing."""
        mine = self._mine(copy)
        if mine is None:
            return "it is not there"
        manifest = self._manifest(f"{mine.folder:04d}", mine.name)
        if manifest is None:
            return "it has lost its manifest"
        folder = self._here.path(f"{mine.folder:04d}/{mine.name}")
        return sizes_differ(folder, manifest.files) or contents_differ(folder, manifest.files, None)[0]

    def adopt(self, life: int, copy: Copy) -> str:
        """Life ``life`` starts from it: it is that life's from now on. Answers where it is. Raises OSError."""
        mine = self._mine(copy)
        if mine is None:
            raise FileNotFoundError(f"no copy of step {copy.step}")
        # Not where this life would save the same step.
        name = mine.name if mine.name.startswith(ADOPTED) else f"{ADOPTED}{mine.name}"
        there = self._here.path(f"{life:04d}/{name}")
        if mine.folder != life:
            self.path(life)
            os.rename(self._here.path(f"{mine.folder:04d}/{mine.name}"), there)
        return there

    def forget(self) -> None:
        """The run has succeeded."""
        # Of other nodes too: on one machine, or when ranks have moved.
        shutil.rmtree(self._run, ignore_errors=True)

    def _touch(self) -> None:
        with open(os.path.join(self._run, MARK), "wb"):
            pass

    def _mine(self, copy: Copy) -> Optional[Copy]:
        same = [one for one in self.held() if (one.life, one.step) == (copy.life, copy.step)]
        return max(same, key=lambda one: one.folder, default=None)

    def _manifest(self, life: str, name: str) -> Optional[Manifest]:
        try:
            return Manifest.load(self._here.path(f"{life}/{name}"))
        except (BadManifest, OSError):
            return None


def _own(path: str) -> None:
    """Make a folder that nobody else can enter, or see that it is one: what lies there is loaded by programs.

    Raises OSError.
    """
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        found = os.lstat(path)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise PermissionError(f"{path} is there, and others can write to it") from None


def _sweep(local: str) -> None:
    """Copies of runs that have not come again."""
    for name in os.listdir(local):
        path = os.path.join(local, name)
        try:
            found = os.lstat(os.path.join(path, MARK))
        except OSError:
            continue
        if _RUN.fullmatch(name) and found.st_uid == os.getuid() and time.time() - found.st_mtime > FORGOTTEN:
            shutil.rmtree(path, ignore_errors=True)
