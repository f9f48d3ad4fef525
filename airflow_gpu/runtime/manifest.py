"""One checkpoint on disk: which files it has, whether they are what the manifest says.

Purpose: a checkpoint is a folder with a ``manifest.json`` that was created
last. This module lists, hashes and compares; which checkpoint to take is the
business of :mod:`airflow_gpu.runtime.checkpoint`.

Limits: regular files only. Symbolic links are not followed and not recorded:
what they point at may change after the commit. Nothing is ever unpickled. A
manifest may have been written by anybody: one that is too large, or names a
file outside of its folder, is refused (:class:`BadManifest`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
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

BLOCK = 1 << 20
"""Bytes hashed at a time."""

HASH_THREADS = 8
"""At most so many files at once; hashing releases the interpreter lock."""

MOST_BYTES = 64 << 20
"""A larger manifest is refused unread. About 400,000 files."""

MOST = 2**63 - 1
"""Of a step, a life, a size."""

_NOT_CONTENT = frozenset({MANIFEST, BAD, COMPLETE})
_DIGEST = re.compile(r"[0-9a-f]{64}")
_DIGITS_OF_MOST = 20


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
    at: str = ""  # when it was written, as its writer says; empty: now

    def to_dict(self) -> Dict[str, Any]:
        return {
            "v": VERSION,
            "life": self.life,
            "step": self.step,
            "world_size": self.world_size,
            "writer": self.writer,
            "files": [{"path": f.path, "size": f.size, "sha256": f.sha256} for f in self.files],
            "at": self.at or utc(),
        }

    @classmethod
    def load(cls, folder: str) -> Optional[Manifest]:
        """Of the checkpoint in ``folder``; None when it has none. Raises BadManifest, OSError."""
        try:
            # Not blocking: a pipe of this name would hold the reader up for ever.
            descriptor = os.open(os.path.join(folder, MANIFEST), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise BadManifest("is no regular file")
            with open(descriptor, "rb", closefd=False) as file:
                data = file.read(MOST_BYTES + 1)
        finally:
            os.close(descriptor)
        return cls.parse(data)

    @classmethod
    def parse(cls, data: bytes) -> Manifest:
        """From the bytes of a ``manifest.json``, which anybody may have written. Raises BadManifest, nothing else."""
        if len(data) > MOST_BYTES:
            raise BadManifest(f"is larger than {MOST_BYTES} bytes")
        try:
            body = json.loads(data.decode(), parse_int=_whole, parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            raise BadManifest(f"is no JSON: {error}") from None
        try:
            files = tuple(
                Entry(_safe(f["path"]), _count(f["size"], "size"), _hex(f["sha256"])) for f in body["files"]
            )
            paths = {entry.path for entry in files}
            if len(paths) != len(files):
                raise ValueError("files: one is listed twice")
            if any(above in paths or above in _NOT_CONTENT for path in paths for above in _above(path)):
                raise ValueError("files: one lies below another")
            return cls(
                life=_count(body["life"], "life"),
                step=_count(body["step"], "step"),
                world_size=_count(body.get("world_size", 0), "world_size"),
                files=files,
                writer=str(body.get("writer", "api"))[:_LONGEST_WORD],
                at=str(body.get("at", ""))[:_LONGEST_WORD],
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadManifest(f"lacks or garbles {error}") from None


_LONGEST_WORD = 64


def _whole(text: str) -> int:
    if len(text) > _DIGITS_OF_MOST:  # older Pythons take minutes over a million digits
        raise ValueError("a number is too large")
    return int(text)


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number")


def _count(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST:
        raise ValueError(f"{name} {str(value)[:_LONGEST_WORD]!r}")
    return value


def _hex(value: Any) -> str:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise ValueError(f"sha256 {str(value)[:_LONGEST_WORD]!r}")
    return value


def _above(path: str) -> List[str]:
    """The folders in which a file lies."""
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def _safe(path: Any) -> str:
    """A path that stays below its folder, and that a file system can have."""
    wrong = ValueError(f"path {str(path)[:_LONGEST_WORD]!r}")
    if not isinstance(path, str) or "\0" in path or path in _NOT_CONTENT:
        raise wrong
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or parts[-1].startswith(HIDDEN):
        raise wrong
    try:
        os.fsencode(path)
    except ValueError:
        raise wrong from None
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
    block = memoryview(
        bytearray(BLOCK)
    )  # one, for all of it: fresh memory for each read costs as much as the read
    with open(path, "rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while True:
            if deadline is not None and time.monotonic() >= deadline:
                raise OutOfTime(path)
            size = file.readinto(block)
            if not size:
                return total, hasher.hexdigest()
            total += size
            hasher.update(block[:size])


def flush_file(path: str) -> None:
    """Onto the disk, as a commit wants. Raises OSError when it is not there."""
    with open(path, "rb", buffering=0) as file:
        try:
            os.fsync(file.fileno())
        except OSError:
            pass  # a file system without it promises nothing more


def hash_files(folder: str, names: Sequence[str], flush: bool = True) -> List[Entry]:
    """Flush and hash these files of a checkpoint, both at once: one waits for the disk, the other computes.

    ``flush``: False where a power cut may take them. Raises OSError.
    """
    paths = [os.path.join(folder, *name.split("/")) for name in names]
    if not paths:
        return []
    with ThreadPoolExecutor(min(HASH_THREADS, len(paths))) as disk:
        flushed = [disk.submit(flush_file, path) for path in paths if flush]
        with ThreadPoolExecutor(min(HASH_THREADS, len(paths))) as pool:
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
    with ThreadPoolExecutor(max(1, min(HASH_THREADS, len(order)))) as pool:
        list(pool.map(look, order))
    return (wrong[0] if wrong else None), not unseen.is_set()
