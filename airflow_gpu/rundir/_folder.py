"""Files of a local or shared folder: created whole and for ever, or replaced; the same as the runtime does in the job.

Purpose: the one thing that plain POSIX calls do better than obstore, which
flushes nothing: an empty journal entry after a power cut would be worse than
none.

Limits: needs hard links. Errors are the operating system's.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from pathlib import Path

HIDDEN = ".tmp-"
"""How the name of a file begins that is being written. The runtime in the job uses the same."""

NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
"""How a file system says that it has no hard links."""


def create(target: Path, data: bytes) -> None:
    """Create a file with all of its content: hidden, flushed, then linked to its name.

    :raises FileExistsError: the name is taken.
    :raises OSError: with an errno of ``NO_LINKS`` where there are no hard links.
    """
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, "exists", str(target))
    staged = _stage(target, data, flush=True)
    try:
        os.link(staged, target)
    except OSError:
        # Over NFS the answer to a link can be lost and the request repeated: the count of names of our own
        # file is the truth.
        if os.stat(staged).st_nlink < 2:
            raise
    finally:
        os.unlink(staged)
    _flush_folder(target.parent)


def replace(target: Path, data: bytes) -> None:
    """Write a file whether or not it is there; not flushed."""
    staged = _stage(target, data, flush=False)
    try:
        os.replace(staged, target)
    except OSError:
        os.unlink(staged)
        raise


def remove_tree(folder: Path) -> None:
    """Remove a folder with everything below it, if it is there."""
    if folder.is_dir():
        shutil.rmtree(folder)


def _stage(target: Path, data: bytes, *, flush: bool) -> Path:
    """Write `data` to a hidden file beside `target`, making its folder."""
    staged = target.parent / f"{HIDDEN}{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        descriptor = os.open(staged, flags, 0o666)
    except FileNotFoundError:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(staged, flags, 0o666)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            if flush:
                os.fsync(file.fileno())
    except BaseException:
        os.unlink(staged)
        raise
    return staged


def _flush_folder(folder: Path) -> None:
    """Make a new name last. Some file systems cannot flush a folder: their names last as they can."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)
