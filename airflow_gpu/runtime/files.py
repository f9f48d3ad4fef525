"""The channel as a folder: create-only writes that appear whole or not at all.

Purpose: everything that decides what becomes of a gang is a file that exactly
one writer can create. :class:`Channel` is the seam: :class:`Folder` is one, an
object store (:mod:`airflow_gpu.runtime.objects`) the other.

Limits: paths are relative, with ``/``, and come from this package, never from
outside. Programs read and write files below :attr:`Channel.root`; where the
channel is a folder, that is the channel itself.

Example::

    channel = Folder("/shared/gangs/v1/...")
    try:
        channel.create("lives/0001.json", b"{}")
    except Exists:
        ...                                # somebody else was first
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import time
from typing import Any, Dict, List, Protocol

HIDDEN = ".tmp-"
"""How the name of a file begins that is being written. Airflow's side uses the same."""

TORN_SECONDS = 5.0
"""How long a file that is no JSON is read again: without hard links it may still be being written."""

TORN_PAUSE = 0.1
"""Seconds between those readings."""

NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})
"""Errors with which a file system says that it has no hard links."""


class Exists(Exception):
    """Somebody else created this path first. ``args[0]`` is the path."""


class Missing(Exception):
    """There is no such file. ``args[0]`` is the path."""


class Torn(Exception):
    """The file is there, but no whole JSON object, and does not become one."""


class Channel(Protocol):
    """What a gang needs of the place where its half of the run directory is."""

    @property
    def root(self) -> str:
        """The folder of this node below which programs write and find files."""

    @property
    def shared(self) -> bool:
        """That folder is the channel itself, the same on every node. Else it is this node's, see ``objects.py``."""

    def path(self, name: str) -> str:
        """Where ``name`` is below ``root``."""

    def folder(self, name: str) -> str:
        """The same, and the folder is there afterwards."""

    def create(self, name: str, data: bytes, *, private: bool = False) -> None:
        """Create the file with this content; raises Exists. ``private``: readable by this user only."""

    def replace(self, name: str, data: bytes) -> None:
        """Write over. Only for what decides nothing."""

    def read(self, name: str) -> bytes:
        """The content; raises Missing."""

    def names(self, folder: str) -> List[str]:
        """Names in a folder, sorted; empty when there is no such folder. Unfinished files are left out."""

    def exists(self, name: str) -> bool:
        """Whether there is a file of this name."""

    def remove(self, name: str) -> None:
        """Remove a file. No error when it is not there, or stays."""

    def remove_tree(self, folder: str) -> bool:
        """Remove everything below; answers whether nothing is left."""


class Folder:
    """A :class:`Channel` below one folder, on a local disk or a shared file system."""

    shared = True

    def __init__(self, root: str) -> None:
        self.root = os.path.abspath(root)

    def path(self, name: str) -> str:
        """Where ``name`` is on this node."""
        return os.path.join(self.root, *name.split("/"))

    def folder(self, name: str) -> str:
        """The same, and the folder is there afterwards."""
        path = self.path(name)
        os.makedirs(path, exist_ok=True)
        return path

    def create(self, name: str, data: bytes, *, private: bool = False) -> None:
        """Create-only, with the whole content at once.

        A temporary file is flushed to the disk and hard-linked to its name,
        which fails if the name is taken. Where links are not to be had the
        name itself is opened exclusively: then readers may for a moment see
        half of it, which :func:`read_json` waits out.

        Raises Exists, OSError.
        """
        path = self.path(name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        mode = 0o600 if private else 0o666
        temporary = self._temporary(path, data, mode)
        try:
            os.link(temporary, path)
        except FileExistsError:
            # NFS: the first reply may have been lost, and this is the answer to the repetition.
            if os.stat(temporary).st_nlink > 1:
                return
            raise Exists(name) from None
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            try:
                _write(path, data, mode, os.O_EXCL)
            except FileExistsError:
                raise Exists(name) from None
        finally:
            _unlink(temporary)
        _flush_folder(os.path.dirname(path))

    def replace(self, name: str, data: bytes) -> None:
        """Write over, whole or not at all."""
        path = self.path(name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        temporary = self._temporary(path, data, 0o666)
        try:
            os.replace(temporary, path)
        except OSError:
            _unlink(temporary)
            raise

    def read(self, name: str) -> bytes:
        try:
            with open(self.path(name), "rb") as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            raise Missing(name) from None

    def names(self, folder: str) -> List[str]:
        try:
            return sorted(name for name in os.listdir(self.path(folder)) if not name.startswith(HIDDEN))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def exists(self, name: str) -> bool:
        return os.path.exists(self.path(name))

    def remove(self, name: str) -> None:
        _unlink(self.path(name))

    def remove_tree(self, folder: str) -> bool:
        path = self.path(folder)
        shutil.rmtree(path, ignore_errors=True)
        return not os.path.exists(path)

    def _temporary(self, path: str, data: bytes, mode: int) -> str:
        head, tail = os.path.split(path)
        temporary = os.path.join(head, f"{HIDDEN}{tail}-{secrets.token_hex(8)}")
        try:
            _write(temporary, data, mode, os.O_EXCL)
        except OSError:
            _unlink(temporary)
            raise
        return temporary


def _write(path: str, data: bytes, mode: int, flags: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | flags, mode)
    with open(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass


def _flush_folder(path: str) -> None:
    # The name must outlive a power cut too. Not every file system can do it; then it need not.
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)


def to_json(value: Dict[str, Any]) -> bytes:
    """As it is written to the channel: sorted, one line. ASCII, since file names may be no UTF-8."""
    return (json.dumps(value, sort_keys=True, allow_nan=False) + "\n").encode()


def read_json(channel: Channel, name: str, patience: float = TORN_SECONDS) -> Dict[str, Any]:
    """A JSON object. Raises Missing, or Torn when it is none for ``patience`` seconds."""
    until = time.monotonic() + patience
    while True:
        try:
            value = json.loads(channel.read(name).decode())
        except ValueError:
            value = None
        if isinstance(value, dict):
            return value
        if time.monotonic() >= until:
            raise Torn(name)
        time.sleep(TORN_PAUSE)
