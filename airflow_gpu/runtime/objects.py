"""The channel as an object store: s3://, gs://, az://, abfs://.

Purpose: where a gang's nodes share no folder, what decides is created on the
store itself (If-None-Match: exactly one writer wins), and programs write into a
folder of their node, from which the agent uploads: logs as they grow, and a
checkpoint's files before its manifest is created. What a life starts from is
downloaded to each node before its ranks start.

Limits: the job's Python needs ``obstore``. Credentials are the job's own: what
obstore finds in the environment (AWS_*, GOOGLE_*, AZURE_*), or the identity
that the platform gives. There is no rename: files of a checkpoint lie under
their names before it is complete, and only its manifest makes it one. A node
that is killed in the middle of a large file leaves an unfinished multipart
upload; let a rule of the bucket abort those after some days.

Example::

    channel = Objects("s3://bucket/gangs/v1/...", {"region": "eu-west-1"}, "/tmp/gang-mirror")
    channel.create("lives/0001.json", b"{}")
    entries = channel.upload("checkpoints/0001/step-000000100", ["rank-0.pt"])
"""

from __future__ import annotations

import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, TypeVar

from airflow_gpu.runtime.files import HIDDEN, Exists, Folder, Missing
from airflow_gpu.runtime.manifest import MOST_BYTES, Entry, hash_file

SCHEMES = ("s3", "gs", "az", "abfs", "abfss")

PART = 32 << 20
"""Bytes of one part of an upload or download."""

AT_ONCE = 16
"""Parts that are under way at a time, over all files."""

TRIES = 3
"""Of a file whose content was not what the manifest says: the second and third time it may be."""

COLLIDED_PAUSE = 0.1
"""S3 answers 409 when two creates collide and neither has taken effect: look, and try again."""

COLLISIONS = 100

AWAY_SECONDS = 60.0
"""So long a store may be away before anything fails. Obstore's own ten tries are over after seconds."""

RETRY = {
    "max_retries": 100,
    "retry_timeout": timedelta(seconds=AWAY_SECONDS),
    "backoff": {
        "init_backoff": timedelta(seconds=0.1),
        "max_backoff": timedelta(seconds=5),
        "base": 2.0,
    },
}

_QUERY = re.compile(r"\?[^\s\"')]*")  # a shared access signature travels there
_CLIENT = frozenset(
    {"allow_http", "allow_invalid_certificates", "connect_timeout", "timeout", "read_timeout", "proxy_url"}
    | {"root_certificate", "user_agent", "http1_only", "http2_only", "pool_idle_timeout"}
)

_NOBODY = (
    "169.254.169.254",
    "metadata.google.internal",
    "Missing SecretAccessKey",
    "Missing AccessKey",
    "redential",
)
_WORDS = {"true": True, "false": False}

T = TypeVar("T")


class NoClient(Exception):
    """The job's Python cannot talk to object stores. The message says what it needs."""


def is_uri(where: str) -> bool:
    """A store, and no path of a folder."""
    return "://" in where


class Objects:
    """A channel on an object store, and ``root``: the folder of this node that goes with it.

    Raises NoClient, and OSError where the options cannot be used; nothing is contacted yet.
    """

    shared = False

    def __init__(self, uri: str, options: Mapping[str, Any], root: str) -> None:
        self.uri = uri.rstrip("/")
        self.root = os.path.abspath(root)
        self.here = Folder(root)
        self._api, self._store = _open(self.uri, options)

    # -- files that decide ---------------------------------------------------------------------------

    def create(self, name: str, data: bytes, *, private: bool = False) -> None:
        """Create-only. What we have written ourselves before its answer was lost, is found to be ours by its bytes.

        ``private`` changes nothing: who may read the bucket may read it.
        """
        for _ in range(COLLISIONS):
            try:
                self._ask(lambda: self._api.put(self._store, name, data, mode="create", use_multipart=False))
                return
            except _Taken:
                try:
                    found = self.read(name)
                except Missing:
                    time.sleep(COLLIDED_PAUSE)
                    continue
                if found == data:
                    return
                raise Exists(name) from None
        raise OSError(f"{self.uri}/{name}: its creation always collides with another")

    def replace(self, name: str, data: bytes) -> None:
        self._ask(lambda: self._api.put(self._store, name, data, use_multipart=False))

    def read(self, name: str) -> bytes:
        def once() -> bytes:
            found = self._api.get(self._store, name)
            if found.meta["size"] > MOST_BYTES:
                raise OSError(f"{name} is larger than {MOST_BYTES} bytes")
            return bytes(found.bytes())

        try:
            return self._ask(once)
        except FileNotFoundError:
            raise Missing(name) from None

    def names(self, folder: str) -> List[str]:
        found = self._ask(lambda: self._api.list_with_delimiter(self._store, folder or None))
        paths = [*found["common_prefixes"], *(meta["path"] for meta in found["objects"])]
        names = {path.rstrip("/").rpartition("/")[2] for path in paths}
        return sorted(name for name in names if not name.startswith(HIDDEN))

    def exists(self, name: str) -> bool:
        try:
            self._ask(lambda: self._api.head(self._store, name))
        except FileNotFoundError:
            return False
        return True

    def remove(self, name: str) -> None:
        try:
            self._ask(lambda: self._api.delete(self._store, name))
        except OSError:
            pass

    def remove_tree(self, folder: str) -> bool:
        try:
            paths = [f"{folder}/{path}" for path in self.sizes(folder)]
            if paths:
                self._ask(lambda: self._api.delete(self._store, paths))
        except OSError:
            return False
        self.here.remove_tree(folder)
        return True

    def sizes(self, folder: str) -> Dict[str, int]:
        """All files below a folder of the store, with their bytes."""
        found = self._ask(lambda: self._api.list(self._store, folder).collect())
        return {meta["path"][len(folder) + 1 :]: int(meta["size"]) for meta in found}

    # -- files of programs ------------------------------------------------------------------------------

    def path(self, name: str) -> str:
        return self.here.path(name)

    def folder(self, name: str) -> str:
        return self.here.folder(name)

    def upload(self, folder: str, names: Sequence[str]) -> List[Entry]:
        """Files of this node's ``folder`` to the same place on the store; hashed beside it. Raises OSError."""
        if not names:
            return []

        def one(name: str) -> Entry:
            path = self.path(f"{folder}/{name}")
            size, digest = hash_file(path)
            there = f"{folder}/{name}"
            share = max(1, AT_ONCE // min(len(names), AT_ONCE))
            self._ask(
                lambda: self._api.put(self._store, there, Path(path), chunk_size=PART, max_concurrency=share)
            )
            arrived = self._ask(lambda: self._api.head(self._store, there))["size"]
            if arrived != size:
                raise OSError(f"{name}: {arrived} bytes arrived of {size}; was it changed meanwhile?")
            return Entry(name, size, digest)

        with ThreadPoolExecutor(min(AT_ONCE, len(names))) as pool:
            return list(pool.map(one, names))

    def append(self, name: str, start: int, data: bytes) -> int:
        """A piece of a growing file, which begins at byte ``start`` of it; answers how much of it is there now.

        A piece is never written again, since somebody may have read it: one
        that came through although its answer was lost stays as it is. Raises OSError.
        """
        piece = f"{name}/{start:015d}"
        try:
            self.create(piece, data)
        except Exists:
            return int(self._ask(lambda: self._api.head(self._store, piece))["size"])
        return len(data)

    def fetch(
        self, folder: str, files: Sequence[Entry], seconds: Optional[float]
    ) -> Tuple[Optional[str], bool]:
        """Bring files of a checkpoint to this node, each compared with its digest; those that are here already, too.

        For at most ``seconds`` (None: as long as it takes). Answers the first
        that is not what it should be, in words, and whether all are here.
        Raises OSError when the store does not answer.
        """
        until = None if seconds is None else time.monotonic() + seconds
        wrong: List[str] = []
        late = threading.Event()

        def over() -> bool:
            if until is not None and time.monotonic() >= until:
                late.set()
            return late.is_set() or bool(wrong)

        parts = ThreadPoolExecutor(AT_ONCE)

        def one(entry: Entry) -> None:
            path = self.path(f"{folder}/{entry.path}")
            for _ in range(TRIES):
                if over():
                    return
                if _is(path, entry):
                    return
                try:
                    self._download(f"{folder}/{entry.path}", path, entry.size, parts, over)
                except FileNotFoundError:
                    wrong.append(f"{entry.path} is not there")
                    return
            if not over() and not _is(path, entry):
                wrong.append(f"{entry.path} has other content than was saved")

        try:
            with ThreadPoolExecutor(max(1, min(4, len(files)))) as pool:
                list(pool.map(one, sorted(files, key=lambda entry: entry.size)))
        finally:
            parts.shutdown()
        return (wrong[0] if wrong else None), not late.is_set()

    def _download(
        self, name: str, path: str, size: int, parts: ThreadPoolExecutor, over: Callable[[], bool]
    ) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        temporary = f"{os.path.dirname(path)}/{HIDDEN}{os.path.basename(path)}"
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:

            def part(start: int) -> None:
                if not over():
                    length = min(PART, size - start)
                    data = self._ask(
                        lambda: self._api.get_range(self._store, name, start=start, length=length)
                    )
                    view = memoryview(data)
                    while view:
                        written = os.pwrite(descriptor, view, start)
                        view, start = view[written:], start + written

            if size == 0:
                self._ask(lambda: self._api.head(self._store, name))
            under_way = [parts.submit(part, at) for at in range(0, size, PART)]
            wait(under_way)  # all of them, before the descriptor goes
            for one in under_way:
                one.result()
        finally:
            os.close(descriptor)
        if not over():
            os.replace(temporary, path)

    def _ask(self, once: Callable[[], T]) -> T:
        """What ``once`` answers; errors of obstore as OSError, without what may be secret in an address."""
        errors = self._api.exceptions
        try:
            return once()
        except errors.AlreadyExistsError:
            raise _Taken(f"{self.uri}: a name is taken, or somebody else was writing it") from None
        except FileNotFoundError:
            raise
        except (errors.BaseError, PermissionError) as error:
            said = _QUERY.sub("?...", str(error).split("\n", 1)[0])
            raise Away(f"{self.uri}: {said}{_advice(said)}") from None


def is_nobody(said: str) -> bool:
    """By its error: the client looked for credentials of this process or an identity of this machine, and found none."""
    return any(sign in said for sign in _NOBODY)


def _advice(said: str) -> str:
    """What would help, where the store did not get to know who asks."""
    if not is_nobody(said):
        return ""
    return (
        ". THIS JOB HAS NO CREDENTIALS for it; none are sent by Airflow's side. Give it some by "
        'Gang(secrets={"AWS_ACCESS_KEY_ID": "conn:ID#login", "AWS_SECRET_ACCESS_KEY": "conn:ID#password"}), '
        "or let its nodes or pods have an identity"
    )


class Away(OSError):
    """The store did not answer as it should; nothing of this node is to blame."""

    @property
    def nobody(self) -> bool:
        """This job has no credentials for it."""
        return is_nobody(str(self))


class _Taken(Away):
    pass


def _is(path: str, entry: Entry) -> bool:
    """The file on this node is the one that was saved."""
    try:
        if os.lstat(path).st_size != entry.size:
            return False
        return hash_file(path)[1] == entry.sha256
    except FileNotFoundError:
        return False


def _open(uri: str, options: Mapping[str, Any]) -> Tuple[Any, Any]:
    scheme = uri.partition("://")[0]
    if scheme not in SCHEMES:
        raise OSError(f"{uri}: no store that a gang can use; known are {', '.join(SCHEMES)}")
    try:
        import obstore
        from obstore.store import from_url
    except ImportError:
        raise NoClient(
            f"the channel is {uri}, and the job's Python has no 'obstore': add it to the image (pip install obstore), "
            "or give the target a folder that all nodes see"
        ) from None
    config = {name: value for name, value in options.items() if name not in _CLIENT}
    # As people have typed them into a connection: "true" is a word there.
    client = {
        name: _WORDS.get(str(value).lower(), value) for name, value in options.items() if name in _CLIENT
    }
    if scheme == "s3":
        config["conditional_put"] = "etag"
    try:
        return obstore, from_url(uri, config=config, client_options=client, retry_config=RETRY)  # type: ignore[call-overload]
    except Exception as error:
        said = str(error).splitlines()[0]
        kind = Away if is_nobody(said) else OSError
        raise kind(f"{uri}: cannot be opened: {said}{_advice(said)}") from None
