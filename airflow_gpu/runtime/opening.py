"""Which channel a payload names: a folder that all nodes see, or an object store with a folder of this node.

Purpose: the one place that makes a :class:`~airflow_gpu.runtime.files.Channel`,
and the node's scratch folder for one on an object store.

Limits: the scratch folder lies below GANG_SCRATCH, else below TMPDIR; it needs
room for this node's part of a checkpoint, and for the whole of the one that a
life starts from, and must be this node's own: locks are not to be had everywhere. What a killed agent has left there is removed by the next
agent of the same user on that node: a lock that the kernel lets go of tells.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from typing import Any, Mapping, Optional

from airflow_gpu.runtime.files import Channel, Folder
from airflow_gpu.runtime.objects import Objects, is_uri

PREFIX = "gang-node-"
LOCK = ".lock"

CREDENTIALS = ("AWS_", "GOOGLE_", "AZURE_")
"""How the names of those secrets begin that are for object stores as well."""


class Scratch:
    """A folder of this agent on this node, made when it is first needed."""

    def __init__(self, below: Optional[str] = None) -> None:
        self._below = below or os.environ.get("GANG_SCRATCH") or tempfile.gettempdir()
        self._path = ""
        self._lock = -1

    def folder(self, name: str) -> str:
        """A folder in it. Raises OSError."""
        if not self._path:
            os.makedirs(self._below, exist_ok=True)
            _sweep(self._below)
            while not self._path:
                path = tempfile.mkdtemp(prefix=PREFIX, dir=self._below)
                lock = os.open(os.path.join(path, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                fcntl.flock(lock, fcntl.LOCK_EX)
                if os.fstat(lock).st_nlink:
                    self._path, self._lock = path, lock
                else:  # another agent took it for a dead one's, before it was locked
                    os.close(lock)
        path = os.path.join(self._path, name)
        os.makedirs(path, exist_ok=True)
        return path

    def remove(self) -> None:
        if self._path:
            shutil.rmtree(self._path, ignore_errors=True)
            os.close(self._lock)
            self._path = ""


def open_channel(where: str, options: Mapping[str, Any], scratch: Scratch, name: str) -> Channel:
    """The channel at a path or URI; ``name`` of its folder in ``scratch``, if it needs one.

    Raises OSError, :class:`~airflow_gpu.runtime.objects.NoClient`. Nothing is contacted yet.
    """
    return Objects(where, options, scratch.folder(name)) if is_uri(where) else Folder(where)


def take_credentials(secrets: Mapping[str, str]) -> None:
    """Secrets that are for object stores, where this process's client looks for them."""
    for name, value in secrets.items():
        if name.startswith(CREDENTIALS):
            os.environ[name] = value


def _sweep(below: str) -> None:
    """Remove what agents have left here that are dead."""
    for name in os.listdir(below):
        path = os.path.join(below, name)
        if not name.startswith(PREFIX):
            continue
        try:
            if os.lstat(path).st_uid != os.getuid():
                continue
            descriptor = os.open(os.path.join(path, LOCK), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # another user's, or one that is being made
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except OSError:
            pass  # its agent lives
        finally:
            os.close(descriptor)
