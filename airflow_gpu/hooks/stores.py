"""Which credentials a store is opened with: the one place that everything on Airflow's side asks.

Purpose: workers, triggerers, the API server and the commands open the same
stores. ``[gpu] store_conn_ids`` maps URI prefixes to connections; here it is read,
and a store gets its options from the connection when it is first used, and again
every few minutes.

What it does not do: import Airflow. How a connection is found is given to it.

Limits: where no connection is named, obstore looks for credentials in the environment of
the process. These are never sent to a job.

Example::

    credentials = Credentials({"s3://gangs": "aws_gangs"}, find)
    store = credentials.open("s3://gangs/prod")  # nothing is asked yet
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from airflow_gpu.hooks.store_options import public_options, store_options
from airflow_gpu.rundir.store import Store, StoreError
from airflow_gpu.targets.base import NotConfigured, Target, TargetError

S = TypeVar("S", bound=Store)

SETTING: Final = "[gpu] store_conn_ids"
EXAMPLE: Final = '{"s3://gangs": "aws_gangs", "gs://": "google_cloud_default"}'

_SCHEMES: Final = ("s3", "gs", "az", "abfs", "abfss")
_NAMED: Final = (*_SCHEMES, "sftp")
"""Of these a connection may be named."""


_AMBIENT: Final = {
    "s3": ("aws", "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
    "gs": ("google_cloud_platform", "GOOGLE_APPLICATION_CREDENTIALS"),
    "az": ("wasb", "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"),
    "sftp": ("ssh", "a key that ssh finds (~/.ssh, or an agent) and the host in its known_hosts"),
}
"""For each scheme: the type of connection, and the variables, that would do."""


_KINDS: Final = {
    "s3": ("aws",),
    "gs": ("google_cloud_platform",),
    "az": ("wasb", "adls"),
    "sftp": ("ssh", "sftp"),
}
"""For each scheme the types of connections that are for it. Others are taken by obstore's names, unless they are
for another scheme or for a target."""


class NoSuchConnection(Exception):
    """Airflow answered that there is no such connection, which is something else than no answer."""


class NoConnection(StoreError):
    """A connection that the settings name for a store is not there: waiting would not help.

    :param conn_id: its id.
    :param kinds: types of connections that would do; empty for a folder.
    """

    def __init__(self, message: str, conn_id: str, kinds: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.conn_id = conn_id
        self.kinds = kinds


class WrongConnection(NoConnection):
    """It is there, and of a type that is for something else."""


def conn_ids(text: str | None) -> dict[str, str]:
    """The setting ``store_conn_ids``: URI prefix -> connection id; an empty id: the credentials of the environment.

    :raises ValueError: it is wrong; the message says what would be right.
    """
    if not text or not text.strip():
        return {}
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise ValueError(
            f"{SETTING} must be a JSON object of URI prefix and connection id, such as {EXAMPLE}"
        )
    for prefix, conn_id in given.items():
        scheme, mark, rest = prefix.partition("://")
        user = scheme == "sftp" and ":" not in rest.partition("@")[0]  # a password would be before the @
        if scheme not in _NAMED or not mark or any(sign in rest for sign in ("?#" if user else "?#@")):
            raise ValueError(
                f"{SETTING}: {prefix!r} is no prefix of a store's URI; known are "
                f"{', '.join(f'{known}://' for known in _NAMED)}, as in {EXAMPLE}"
            )
        if conn_id is not None and not isinstance(conn_id, str):
            raise ValueError(f"{SETTING}: the connection of {prefix!r} must be the id of one")
    return {prefix: conn_id or "" for prefix, conn_id in given.items()}


def with_state(given: Mapping[str, str], state_uri: str, state_conn_id: str | None) -> dict[str, str]:
    """``store_conn_ids`` with what ``state_conn_id`` says: it counts for the state URI, and for the rest of its
    bucket where no other is named."""
    if not state_conn_id:
        return dict(given)
    if not is_object_store(state_uri):  # a folder needs none, but one that is named must be there
        return {**given, state_uri: state_conn_id}
    parts = urlsplit(state_uri)
    bucket = f"{parts.scheme}://{parts.netloc}"
    known = {_segments(prefix) for prefix in given}
    rest = {} if _segments(bucket) in known else {bucket: state_conn_id}
    return {
        **{prefix: conn_id for prefix, conn_id in given.items() if _segments(prefix) != _segments(state_uri)},
        **rest,
        state_uri: state_conn_id,
    }


def is_object_store(uri: str) -> bool:
    """Whether it is the URI of a store that may need credentials: no folder, no memory."""
    return uri.partition("://")[0] in _SCHEMES and "://" in uri


def _named(uri: str) -> bool:
    return uri.partition("://")[0] in _NAMED and "://" in uri


def _segments(uri: str) -> tuple[str, ...]:
    """Scheme, bucket (or host) and folders. ``abfs`` is another word for ``az``."""
    scheme, _, rest = uri.partition("://")
    scheme = "az" if scheme.startswith("abfs") else scheme
    names = [name for name in rest.split("/") if name]
    if scheme == "sftp" and names:
        names[0] = names[0].rpartition("@")[2].partition(":")[0]  # whoever logs in there, at whatever port
    return (scheme, *names)


class Credentials:
    """Opens stores, each with the connection of the longest prefix that its URI begins with.

    :param given: URI prefix -> connection id, see :func:`conn_ids` and :func:`with_state`.
    :param find: the connection of an id, asked in the event loop; raises NoSuchConnection where there is none.
    """

    def __init__(self, given: Mapping[str, str], find: Callable[[str], Awaitable[Any]]) -> None:
        self._exact = dict(given)
        self._given = [(_segments(prefix), conn_id) for prefix, conn_id in given.items() if _named(prefix)]
        self._find = find

    def conn_id(self, uri: str) -> str:
        """The connection for a URI; empty where the credentials of the environment count."""
        if not _named(uri):
            return self._exact.get(uri, "")
        mine = _segments(uri)
        fitting = [(len(prefix), conn_id) for prefix, conn_id in self._given if mine[: len(prefix)] == prefix]
        return max(fitting)[1] if fitting else ""

    async def options(self, uri: str) -> dict[str, Any]:
        """What a store at this URI is opened with, secrets among it.

        :raises StoreError: the connection is not there, cannot be read now, or cannot be used.
        """
        conn_id = self.conn_id(uri)
        if not conn_id:
            return {}
        try:
            conn = await self._find(conn_id)
        except NoSuchConnection:
            kind = f" with the type {advised(uri)[0]!r}" if _named(uri) else ""
            raise NoConnection(
                f"{uri}: there is no connection {conn_id!r}, which {SETTING} or [gpu] state_conn_id names. Create it "
                f"in Airflow{kind}, or set AIRFLOW_CONN_{conn_id.upper()}",
                conn_id,
                kinds_for(uri),
            ) from None
        except Exception as error:
            # Of what it says only the kind: a backend's error may hold what it was asked with.
            raise StoreError(
                f"{uri}: the connection {conn_id!r} cannot be read now: {type(error).__name__}"
            ) from None
        _fits(uri, conn)
        return store_options(conn)

    async def public(self, uri: str) -> dict[str, str | bool]:
        """Those of the options that a job may be told."""
        return public_options(await self.options(uri))

    def open(self, uri: str, kind: type[S] = Store) -> S:  # type: ignore[assignment]
        """A store there. Its connection is read when it is first used, and again after a while.

        :raises StoreError: for a URI that cannot be used.
        """
        if not self.conn_id(uri):
            return kind(uri)
        return kind(uri, lambda: self.options(uri))

    def words(self, uri: str) -> str:
        """Where the credentials for a URI come from, for people."""
        conn_id = self.conn_id(uri)
        return f"connection {conn_id!r}" if conn_id else "the environment of this process"

    def advice(self, uri: str) -> str:
        """What to do when the store at a URI does not let us in; empty for a folder."""
        if not _named(uri):
            return ""
        kind, variables = advised(uri)
        conn_id = self.conn_id(uri)
        if conn_id:
            return f"the connection {conn_id!r} must have the right to read, write, list and delete at {uri}"
        bucket = "/".join(uri.split("/")[:3])
        return (
            f'no connection is named for {uri}: set AIRFLOW__GPU__STORE_CONN_IDS=\'{{"{bucket}": "ID"}}\' to one of '
            f"type {kind!r}, or give this process {variables}, or the identity of its machine or pod"
        )


async def tell_jobs(target: Target, credentials: Credentials) -> None:
    """Fill in what the target's jobs are told of its channel's store.

    :raises TargetError: the connection of the channel cannot be read or used; NotConfigured: it is not there.
    """
    for folder in getattr(target, "folders", ()):
        folder.use(credentials)
    if not is_object_store(target.channel):
        return
    try:
        target.job_store = await credentials.public(target.channel)
    except NoConnection as error:
        raise NotConfigured(f"the channel of {target.name}: {error}") from error
    except StoreError as error:
        raise TargetError(f"the channel of {target.name}: {error}") from None


def kinds_for(uri: str) -> tuple[str, ...]:
    """The types of connections that are for a store at this URI; empty for a folder."""
    return _KINDS[_segments(uri)[0]] if _named(uri) else ()


def _fits(uri: str, conn: Any) -> None:
    kind, right = str(conn.conn_type or ""), kinds_for(uri)
    others = {one for kinds in _KINDS.values() for one in kinds}
    if right and kind not in right and (kind in others or kind.startswith("gpu_")):
        raise WrongConnection(
            f"{uri}: the connection {conn.conn_id!r} has the type {kind!r}, and such a store takes one of type "
            f"{' or '.join(map(repr, right))}",
            str(conn.conn_id),
            right,
        )


def advised(uri: str) -> tuple[str, str]:
    """The type of connection, and the variables of the environment, that would do for a URI."""
    return _AMBIENT[_segments(uri)[0]]
