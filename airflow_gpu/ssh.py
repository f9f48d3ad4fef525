"""One SSH connection, for files and commands, called from any thread, opened anew when it breaks.

Purpose: keeps asyncssh's particulars (its event loop, its options, what its
errors mean) out of :mod:`airflow_gpu.rundir.sftp` and :mod:`airflow_gpu.targets.slurm.login`.

What it does not do: try again. An error that may pass is an ``OSError`` with
``ECONNRESET``, which :func:`airflow_gpu.rundir._opening.passing` knows.

Limits: asyncssh runs in one event loop of its own, in a thread of this module,
so that stores of several event loops share a connection. All stores of a
process with the same user, host, port and options share one; requests of many
threads are under way on its one channel at once, and the server answers them
in their order: one that hangs there holds up the others until it times out.

Example::

    session = shared(Where("cluster", 22, "me"), {"key_file": "/home/me/.ssh/id_ed25519"})
    session.run(lambda client: client.realpath("."))
    code, out, err = await session.command("squeue --me")
"""

from __future__ import annotations

import asyncio
import atexit
import base64
import contextlib
import errno
import logging
import socket
import struct
import threading
import weakref
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

TIMEOUT = 30.0
"""Seconds for one question to the server, or for the log-in, unless the options say otherwise."""

KEEPALIVE, KEEPALIVES = 15.0, 3
"""Seconds of silence after which the server is asked whether it is there, and how often before it counts as gone."""

OPTIONS = frozenset(
    {
        "username",
        "port",
        "password",
        "key_file",
        "private_key",
        "private_key_passphrase",
        "host_key",
        "known_hosts",
        "no_host_key_check",
        "ssh_config",
        "timeout",
    }
)

SECRET = frozenset({"password", "private_key", "private_key_passphrase"})
"""Options whose values appear in no message."""

MISSING = (
    "the Python package 'asyncssh' is missing, which ssh:// and sftp:// need: pip install 'airflow-gpu[sftp]'"
)


@dataclass(frozen=True)
class Where:
    """A server, and who logs in; without ``user`` whoever this process runs as, or what ~/.ssh/config says."""

    host: str
    port: int | None
    user: str | None


class Session:
    """A connection to ``where``, made when it is first used."""

    def __init__(self, where: Where, options: Mapping[str, Any]) -> None:
        import asyncssh

        # It tells of every connection, which at the level of INFO is all that a triggerer's log would say.
        if (log := logging.getLogger("asyncssh")).level == logging.NOTSET:
            log.setLevel(logging.WARNING)
        self.where = where
        self.timeout = float(options.get("timeout") or TIMEOUT)
        self._ssh = asyncssh
        self._arguments = _arguments(asyncssh, where, options)
        self._key_file = (options.get("key_file"), options.get("private_key_passphrase"))
        self._open: tuple[Any, Any] | None = None  # connection, and SFTP client once one was wanted
        self._links: tuple[Any, bool] | None = None  # of a client
        self._opening: asyncio.Lock | None = None  # made in the loop that it is used in
        self._connections: list[Any] = []  # for the end, when this object is gone
        weakref.finalize(self, _close, self._connections)

    def run(self, work: Callable[[Any], Awaitable[T]], client: Any = None) -> T:
        """What ``work(SFTP client)`` answers; from any thread but the connection's own.

        :param client: the one that it needs, for work on a file that was opened with it.
        :raises OSError: with the errno that says what it was; ``ECONNRESET`` where the connection was lost or
            did not answer in time: the work may then have been done or not.
        """
        return asyncio.run_coroutine_threadsafe(self._run(work, client), _loop()).result()

    def links(self) -> bool:
        """Whether the server has ``hardlink@openssh.com``."""

        async def asked(client: Any) -> bool:
            if self._links is None or self._links[0] is not client:
                try:
                    await client.link("/.airflow-gpu/not/there", "/.airflow-gpu/not/there/either")
                except self._ssh.SFTPOpUnsupported:
                    self._links = client, False
                except self._ssh.SFTPNoSuchFile:
                    self._links = client, True
            return self._links is None or self._links[1]

        # Known is known, until the connection is another: then the server may be.
        known, current = self._links, self._open
        if known is not None and current is not None and known[0] is current[1]:
            return known[1]
        return self.run(asked)

    async def command(
        self, line: str, stdin: bytes = b"", timeout: float | None = None
    ) -> tuple[int, str, str]:
        """Exit code, output and errors of a command, from whatever event loop; 255 for one that ended by a signal.

        :raises OSError: as of :meth:`run`; with ``ECONNRESET`` the command may have been run or not.
        """

        async def run(connection: Any) -> tuple[int, str, str]:
            done = await connection.run(line, input=stdin, encoding=None, check=False)
            code = done.exit_status if done.exit_status is not None else 255
            return code, _text(done.stdout), _text(done.stderr)

        future = asyncio.run_coroutine_threadsafe(self._run(run, None, timeout, files=False), _loop())
        return await asyncio.wrap_future(future)

    async def _run(
        self,
        work: Callable[[Any], Awaitable[T]],
        client: Any,
        timeout: float | None = None,
        files: bool = True,
    ) -> T:
        used, limit = None, timeout or self.timeout
        try:
            used = await self._opened(files) if client is None else self._open
            if used is None or client not in (None, used[1]):
                raise _lost("the connection was lost")
            return await asyncio.wait_for(_awaited(work, used[1] if files else used[0]), limit)
        except TimeoutError:
            self._drop(used)
            raise _lost(f"no answer within {limit:g} s") from None
        except self._ssh.SFTPError as error:
            if isinstance(error, (self._ssh.SFTPConnectionLost, self._ssh.SFTPNoConnection)):
                self._drop(used)
            raise self._explained(error) from None
        except (self._ssh.DisconnectError, self._ssh.ChannelOpenError) as error:
            self._drop(used)
            raise self._refused(error) from None

    async def _opened(self, files: bool) -> tuple[Any, Any]:
        if self._opening is None:
            self._opening = asyncio.Lock()
        async with self._opening:
            if self._open is None:
                self._open = await asyncio.wait_for(self._connect(), self.timeout), None
            if files and self._open[1] is None:
                # Names are bytes there; what is no UTF-8 keeps its bytes.
                client = self._open[0].start_sftp_client(path_errors="surrogateescape")
                try:
                    self._open = self._open[0], await asyncio.wait_for(client, self.timeout)
                except BaseException:
                    self._drop(self._open)
                    raise
            return self._open

    async def _connect(self) -> Any:
        arguments = dict(self._arguments)
        try:
            if self._key_file[0]:
                arguments["client_keys"] = [
                    self._ssh.read_private_key(str(self._key_file[0]), self._key_file[1])
                ]
        except (OSError, ValueError) as error:
            raise OSError(errno.EACCES, f"the key_file cannot be used: {_words(error)}") from None
        try:
            connection = await self._ssh.connect(self.where.host, **arguments)
        except socket.gaierror as error:
            code = errno.ECONNRESET if error.errno == socket.EAI_AGAIN else errno.EADDRNOTAVAIL
            raise OSError(code, f"the host name is not known: {error.strerror}") from None
        except OSError as error:
            raise _lost(f"no connection: {error.strerror or error}") from None
        except ValueError as error:  # known_hosts, ~/.ssh/config or a default key
            raise OSError(errno.EINVAL, f"cannot log in: {_words(error)}") from None
        self._connections[:] = [connection]
        return connection

    def _drop(self, used: tuple[Any, Any] | None) -> None:
        """Have the next caller connect anew; those that still wait on this connection hear of it at once."""
        if used is not None:
            used[0].abort()
            if self._open is not None and self._open[0] is used[0]:
                self._open = None

    def _refused(self, error: Any) -> OSError:
        ssh = self._ssh
        if isinstance(error, ssh.HostKeyNotVerifiable):
            return OSError(
                errno.EACCES,
                f"the server's host key is not the one that is known ({error.reason}): put it into known_hosts, or "
                "into the option host_key",
            )
        if isinstance(error, ssh.PermissionDenied):
            return OSError(errno.EACCES, f"the server refuses the log-in: {error.reason}")
        final = (ssh.KeyExchangeFailed, ssh.ProtocolNotSupported, ssh.IllegalUserName)
        if isinstance(error, final):
            return OSError(errno.EPROTO, f"cannot log in: {error.reason}")
        return _lost(error.reason or "the connection was lost")

    def _explained(self, error: Any) -> OSError:
        ssh = self._ssh
        if isinstance(error, (ssh.SFTPConnectionLost, ssh.SFTPNoConnection)):
            return _lost("the connection was lost")
        for kinds, code, words in (
            ((ssh.SFTPNoSuchFile, ssh.SFTPNoSuchPath), errno.ENOENT, "no such file"),
            ((ssh.SFTPFileAlreadyExists,), errno.EEXIST, "exists"),
            ((ssh.SFTPPermissionDenied, ssh.SFTPWriteProtect), errno.EACCES, "permission denied"),
            ((ssh.SFTPOpUnsupported,), errno.ENOTSUP, "the server cannot do that"),
            ((ssh.SFTPNoSpaceOnFilesystem,), errno.ENOSPC, "no space left"),
            ((ssh.SFTPQuotaExceeded,), errno.EDQUOT, "the quota is used up"),
        ):
            if isinstance(error, kinds):
                return OSError(code, words)
        # Of most errors SFTP says nothing but "Failure".
        return OSError(
            errno.EIO, f"the server says {error.reason!r}: disk full, quota, or not what it should be"
        )


async def _awaited(work: Callable[[Any], Awaitable[T]], client: Any) -> T:
    return await work(client)


def _text(data: Any) -> str:
    return bytes(data or b"").decode("utf-8", "replace")


def _lost(why: str) -> OSError:
    return OSError(errno.ECONNRESET, why)


def _words(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error)).split("\n", 1)[0]


# -- options


def _arguments(asyncssh: Any, where: Where, options: Mapping[str, Any]) -> dict[str, Any]:
    """Of ``asyncssh.connect``. Raises ValueError, without any value that is secret."""
    if unknown := sorted(options.keys() - OPTIONS):
        raise ValueError(f"unknown options {unknown}; known are {sorted(OPTIONS)}")
    arguments: dict[str, Any] = {
        "keepalive_interval": KEEPALIVE,
        "keepalive_count_max": KEEPALIVES,
        "login_timeout": float(options.get("timeout") or TIMEOUT),
    }
    port = where.port or options.get("port")
    if port:
        arguments["port"] = int(port)
    if user := where.user or options.get("username"):
        arguments["username"] = user
    if options.get("password"):
        arguments["password"] = str(options["password"])
    if options.get("ssh_config") is not None:
        arguments["config"] = [options["ssh_config"]] if options["ssh_config"] else None
    if options.get("private_key"):
        try:
            key = asyncssh.import_private_key(
                str(options["private_key"]), options.get("private_key_passphrase")
            )
        except ValueError as error:
            raise ValueError(f"the private_key cannot be used: {_words(error)}") from None
        arguments["client_keys"] = [key]
    if str(options.get("no_host_key_check", "")).lower() in ("true", "1"):
        arguments["known_hosts"] = None
    elif options.get("host_key"):
        arguments["known_hosts"] = ([_host_key(asyncssh, str(options["host_key"]))], [], [])
    elif options.get("known_hosts"):
        arguments["known_hosts"] = str(options["known_hosts"])
    return arguments


def _host_key(asyncssh: Any, text: str) -> Any:
    """A key as in known_hosts, with or without its type in front."""
    words = text.split()
    try:
        if len(words) == 1:
            blob = base64.b64decode(words[0], validate=True)
            (length,) = struct.unpack(">I", blob[:4])
            words.insert(0, blob[4 : 4 + length].decode("ascii"))
        return asyncssh.import_public_key(" ".join(words[:2]))
    except (ValueError, struct.error) as error:
        raise ValueError(f"the host_key is no key as in known_hosts: {_words(error)}") from None


# -- sharing

_lock = threading.Lock()
_sessions: weakref.WeakValueDictionary[Any, Session] = weakref.WeakValueDictionary()
_running: asyncio.AbstractEventLoop | None = None


def shared(where: Where, options: Mapping[str, Any]) -> Session:
    """The one session of this process; it is closed when the last store that has it is gone.

    :raises ValueError: options that cannot be used.
    :raises ImportError: asyncssh is not there.
    """
    name = (where, tuple(sorted((key, str(value)) for key, value in options.items())))
    with _lock:
        session = _sessions.get(name)
        if session is None:
            session = _sessions[name] = Session(where, options)
        return session


def _loop() -> asyncio.AbstractEventLoop:
    global _running
    with _lock:
        if _running is None:
            _running = asyncio.new_event_loop()
            threading.Thread(target=_running.run_forever, name="airflow-gpu-ssh", daemon=True).start()
        return _running


def _close(connections: list[Any]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended
        if _running is not None and connections:
            _running.call_soon_threadsafe(connections[0].close)


@atexit.register
def _end() -> None:
    """Take leave, so that the server's log has no broken connections of every short process."""
    if _running is None:
        return

    async def leave() -> None:
        for session in list(_sessions.values()):
            for connection in session._connections:
                connection.close()
        await asyncio.sleep(0)  # what was written goes out

    with contextlib.suppress(Exception):
        asyncio.run_coroutine_threadsafe(leave(), _running).result(1)
