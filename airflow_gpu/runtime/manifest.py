"""One checkpoint on disk: which files it has, whether they are what the manifest says.

Purpose: a checkpoint is a folder with a ``manifest.json`` that was created
last. This module lists, hashes and compares; which checkpoint to take is the
business of :mod:`airflow_gpu.runtime.checkpoint`.

Limits: regular files only. Symbolic links are not followed and not recorded:
what they point at may change after the commit. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple

from airflow_gpu.runtime.files import HIDDEN
from airflow_gpu.runtime.words import VERSION, utc

MANIFEST = "manifest.json"
"""Created last; a folder without it is no checkpoint."""

BAD = "bad.json"
"""Beside a manifest: a rank found that the files are not what it says. Such a checkpoint is never taken."""

COMPLETE = ".complete"
"""A program that writes its own checkpoints creates this file in one when it is whole."""

BLOCK = 4 << 20
"""Bytes hashed at a time."""

HASH_THREADS = 8
"""At most so many files at once; hashing releases the interpreter lock."""

_NOT_CONTENT = frozenset({MANIFEST, BAD, COMPLETE})


class BadManifest(Exception):
    """It is there, but cannot be what the runtime wrote."""


class OutOfTime(Exception):
    """The time that the caller allowed for hashing is over."""


@dataclass(frozen=True)
class Entry:
    """One file: ``path`` relative to the checkpoint, with ``/``; ``size`` in bytes; ``sha256`` in hex."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What ``manifest.json`` says. ``writer``: ``api`` (saved through the handle) or ``program``."""

    life: int
    step: int
    world_size: int
    files: Tuple[Entry, ...]
    writer: str = "api"

    def to_dict(self) -> Dict[str, Any]:
        return {
            "v": VERSION,
            "life": self.life,
            "step": self.step,
            "world_size": self.world_size,
            "writer": self.writer,
            "files": [{"path": f.path, "size": f.size, "sha256": f.sha256} for f in self.files],
            "at": utc(),
        }

    @classmethod
    def load(cls, folder: str) -> Optional[Manifest]:
        """Of the checkpoint in ``folder``; None when it has none. Raises BadManifest, OSError."""
        try:
            with open(os.path.join(folder, MANIFEST), "rb") as file:
                body = json.loads(file.read().decode())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError as error:
            raise BadManifest(f"is no JSON: {error}") from None
        try:
            files = tuple(Entry(_safe(f["path"]), int(f["size"]), str(f["sha256"])) for f in body["files"])
            return cls(
                life=int(body["life"]),
                step=int(body["step"]),
                world_size=int(body.get("world_size", 0)),
                files=files,
                writer=str(body.get("writer", "api")),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise BadManifest(f"lacks or garbles {error}") from None


def _safe(path: Any) -> str:
    parts = str(path).split("/")
    if not isinstance(path, str) or not path or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"path {path!r}")
    return path


def listing(folder: str) -> List[str]:
    """Names of the files that make up the checkpoint, sorted; raises OSError when the folder is not there."""
    found: List[str] = []
    waiting = [""]
    while waiting:
        below = waiting.pop()
        with os.scandir(os.path.join(folder, below)) as entries:
            for entry in entries:
                name = f"{below}/{entry.name}" if below else entry.name
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(name)
                elif (
                    entry.is_file(follow_symlinks=False)
                    and name not in _NOT_CONTENT
                    and not entry.name.startswith(HIDDEN)
                ):
                    found.append(name)
    return sorted(found)


def digest_of(names: Iterable[str]) -> str:
    """One digest of a listing, to compare two views of a folder cheaply."""
    return hashlib.sha256("\0".join(names).encode("utf-8", "surrogateescape")).hexdigest()


def hash_file(path: str, *, deadline: Optional[float] = None) -> Tuple[int, str]:
    """Size and SHA-256. Raises OSError, and OutOfTime once ``deadline`` (of ``time.monotonic``) has passed."""
    total, hasher = 0, hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while True:
            if deadline is not None and time.monotonic() >= deadline:
                raise OutOfTime(path)
            block = file.read(BLOCK)
            if not block:
                return total, hasher.hexdigest()
            total += len(block)
            hasher.update(block)


def flush_file(path: str) -> None:
    """Onto the disk, as a commit wants. Raises OSError when it is not there."""
    with open(path, "rb", buffering=0) as file:
        try:
            os.fsync(file.fileno())
        except OSError:
            pass  # a file system without it promises nothing more


def hash_files(folder: str, names: Sequence[str]) -> List[Entry]:
    """Flush and hash these files of a checkpoint, both at once: one waits for the disk, the other computes.

    Raises OSError.
    """
    paths = [os.path.join(folder, *name.split("/")) for name in names]
    if not paths:
        return []
    with ThreadPoolExecutor(min(HASH_THREADS, len(paths))) as disk:
        flushed = [disk.submit(flush_file, path) for path in paths]
        with ThreadPoolExecutor(min(HASH_THREADS, len(paths), os.cpu_count() or 1)) as pool:
            hashed = list(pool.map(hash_file, paths))
        for done in flushed:
            done.result()
    return [Entry(name, size, digest) for name, (size, digest) in zip(names, hashed)]


def sizes_differ(folder: str, files: Sequence[Entry]) -> Optional[str]:
    """The first file that is missing or has another size, in words; None when all are as they should be."""
    for entry in files:
        try:
            size = os.stat(os.path.join(folder, *entry.path.split("/"))).st_size
        except OSError as error:
            return f"{entry.path}: {error.strerror}"
        if size != entry.size:
            return f"{entry.path} has {size} bytes instead of {entry.size}"
    return None


def contents_differ(
    folder: str, files: Sequence[Entry], seconds: Optional[float]
) -> Tuple[Optional[str], bool]:
    """Hash the files, for at most ``seconds`` (None: as long as it takes).

    Answers the first difference in words (None: none found), and whether every
    file was looked at. Small files come first, so that most of them are.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    wrong: List[str] = []
    unseen = threading.Event()

    def look(entry: Entry) -> None:
        if wrong or unseen.is_set():
            return
        try:
            _, digest = hash_file(os.path.join(folder, *entry.path.split("/")), deadline=deadline)
        except OutOfTime:
            unseen.set()
            return
        except OSError as error:
            wrong.append(f"{entry.path}: {error.strerror}")
            return
        if digest != entry.sha256:
            wrong.append(f"{entry.path} has other content than was saved")

    order = sorted(files, key=lambda entry: entry.size)
    with ThreadPoolExecutor(max(1, min(HASH_THREADS, len(order), os.cpu_count() or 1))) as pool:
        list(pool.map(look, order))
    return (wrong[0] if wrong else None), not unseen.is_set()
