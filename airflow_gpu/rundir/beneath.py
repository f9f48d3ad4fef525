"""Files of a local folder, opened so that no symbolic link leads out of it.

Purpose: the job's user may make anything in a run directory, also while it is
read. Each part of a path is opened below the one before, and none of them may
be a link; only the root itself, which is an administrator's, may lie behind one.

Limits: Linux. Errors are the operating system's.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from airflow_gpu.rundir._folder import HIDDEN, NO_LINKS

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@contextlib.contextmanager
def folder(root: Path, path: str, *, make: bool = False) -> Iterator[int]:
    """A descriptor of the folder ``path`` below ``root``; ``make``: it and all above it are made."""
    if make:
        os.makedirs(root, exist_ok=True)
    descriptor = os.open(root, _FOLDER)
    try:
        for part in filter(None, path.split("/")):
            if part in (".", ".."):
                raise OSError(errno.ENOENT, "no such folder", path)
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=descriptor)
            below = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def opened(root: Path, path: str) -> Iterator[int]:
    """A descriptor of the regular file ``path`` below ``root``, for reading. A pipe or a device is as if not there."""
    above, _, name = path.rpartition("/")
    with folder(root, above) as parent:
        # Not blocking: a pipe would hold the reader up for ever.
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.ENOENT, "no regular file", path)
        yield descriptor
    finally:
        os.close(descriptor)


def write(root: Path, path: str, blocks: Iterable[bytes], *, replace: bool) -> None:
    """Write a file whole: hidden, flushed, then given its name. Without ``replace`` a taken name is FileExistsError."""
    above, _, name = path.rpartition("/")
    with folder(root, above, make=True) as parent:
        staged = f"{HIDDEN}{secrets.token_hex(8)}"
        descriptor = os.open(
            staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=parent
        )
        try:
            with open(descriptor, "wb") as file:
                for block in blocks:
                    file.write(block)
                file.flush()
                os.fsync(descriptor)
            if replace:
                os.replace(staged, name, src_dir_fd=parent, dst_dir_fd=parent)
            else:
                _link(staged, name, parent)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(staged, dir_fd=parent)
        with contextlib.suppress(OSError):  # some file systems cannot flush a folder
            os.fsync(parent)


def _link(staged: str, name: str, parent: int) -> None:
    try:
        os.link(staged, name, src_dir_fd=parent, dst_dir_fd=parent, follow_symlinks=False)
    except OSError as error:
        if error.errno in NO_LINKS:
            raise OSError(
                error.errno, "this file system has no hard links, which create-only files need"
            ) from None
        raise


def remove(root: Path, path: str) -> None:
    """Remove one file, or the link of that name."""
    above, _, name = path.rpartition("/")
    with folder(root, above) as parent:
        os.unlink(name, dir_fd=parent)


def remove_tree(root: Path, path: str) -> None:
    """Remove a folder with all that is in it. What links in it point at stays."""
    above, _, name = path.rpartition("/")
    with folder(root, above) as parent:
        shutil.rmtree(name, dir_fd=parent)
