"""Slurm's commands on a login node, over one SSH connection that is kept.

Purpose: the :class:`~.commands.Runner` for ``ssh://user@login``, and where ``token_ssh`` gets its
tokens. Connection and log-in are shared with the channel's ``sftp://`` store of the same server.

Limits: the commands are run without a login shell; Slurm's must be in the PATH that sshd gives.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

from airflow_gpu.ssh import MISSING, Session, Where, shared
from airflow_gpu.targets.base import TargetError
from airflow_gpu.targets.slurm.access import AccessError
from airflow_gpu.targets.slurm.commands import TIMEOUT, quoted


class Login:
    """A login node.

    :param url: ``ssh://user@host:22``.
    :param options: of :mod:`airflow_gpu.ssh` (``key_file``, ``private_key``, ``known_hosts``, ...).
    """

    def __init__(self, name: str, url: str, options: Mapping[str, Any]) -> None:
        self._name = name
        self._url = url
        self._options = dict(options)
        self._session: Session | None = None

    async def run(self, argv: Sequence[str], stdin: bytes = b"") -> tuple[int, str, str]:
        try:
            return await self._opened().command(quoted(argv), stdin, TIMEOUT)
        except OSError as error:
            words = f"{self._name}: {urlsplit(self._url).hostname}: {error.strerror or error}"
            if error.errno in (errno.EACCES, errno.EPROTO, errno.EINVAL):
                raise AccessError(words) from None
            raise TargetError(words) from None

    async def close(self) -> None:
        """The connection ends with the last that uses it."""
        self._session = None

    def _opened(self) -> Session:
        if self._session is None:
            parts = urlsplit(self._url)
            where = Where(
                str(parts.hostname), parts.port, unquote(parts.username) if parts.username else None
            )
            try:
                self._session = shared(where, self._options)
            except ImportError:
                raise AccessError(f"{self._name}: {MISSING}") from None
            except ValueError as error:
                raise AccessError(f"{self._name}: {error}") from None
        return self._session
