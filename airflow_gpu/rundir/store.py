"""Create-only files in one folder: of a local file system, behind SSH, on S3, Google Cloud Storage or Azure Blob.

**Purpose.** Everything that decides what becomes of a gang is a file that can be created once and is
never changed (`docs/run-directory.md`). This module is the one place that knows how each store does
that, so that everything above it can say `create` and believe the answer.

**How.** Reading, listing and deleting go through obstore. So does writing on object stores, where
`create` is a conditional request that the server decides: `If-None-Match: *` on S3 and Azure,
`x-goog-if-generation-match: 0` on Google Cloud Storage. On a local folder `create` writes a hidden
`.tmp-*` file, flushes it to the disk and hard-links it to its name: the same steps as the runtime
inside the job, with which it shares the files. obstore does not flush, and an empty journal entry after
a power cut would be worse than none. A folder behind SSH is written by the same steps
(:mod:`airflow_gpu.rundir.sftp`, which also says what an unusual server costs).

**Limits.**

- A store that ignores the condition would let two owners win. `Store.prove` finds that out. S3, Azure
  and Google Cloud Storage were raced as versitygw, Azurite and fake-gcs-server (the last one behind a
  front that translates Google's XML API), not as the clouds themselves: `prove` does that in your bucket.
- A local folder needs hard links: NFS, Lustre, GPFS, CephFS have them, most FUSE mounts have not.
- A create that was cut off (a time-out, a 5xx) is tried again; if the name is then taken, the file is
  read, and it is ours if the bytes are the same. **So what is created must be unique to its writer**:
  callers put a random writer id into it.
- A `create` that is cancelled, or that fails with another error than `Exists`, may still have taken
  effect: read before deciding anything.
- A process forked from one that has used a `Store` cannot use any: obstore's threads do not survive a
  fork, and it would wait for ever. It gets a `StoreError`. Spawned processes are fine.
- obstore is called synchronously, in threads of this module. Its own coroutines let its threads touch
  Python while the interpreter ends, which aborted about one short process in a hundred (exit by SIGABRT
  after all work was done; pyo3-async-runtimes issue 40).

**Example.**

    store = Store("s3://bucket/airflow", {"region": "eu-central-1"})
    try:
        await store.create("v1/prod/journal/000001.json", entry)
    except Exists:
        entry = await store.get("v1/prod/journal/000001.json")
"""

from __future__ import annotations

import asyncio
import os
import random
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from obstore import exceptions as obstore_errors
from obstore.store import LocalStore
from tenacity import (
    AsyncRetrying,
    retry_if_exception_type,
    stop_after_attempt,
    stop_after_delay,
    wait_random_exponential,
)

from airflow_gpu.rundir import _folder
from airflow_gpu.rundir._folder import HIDDEN
from airflow_gpu.rundir._opening import (
    advice,
    first_line,
    no_bucket,
    open_store,
    parse,
    passing,
    remove_all,
    secrets_of,
)
from airflow_gpu.rundir._options import Asked

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

T = TypeVar("T")

TRIES = 8
"""How often an operation is tried while the store answers with 5xx, 429 or not at all."""

TRY_FOR = 60.0
"""Seconds after which no further try is begun."""

FIRST_WAIT, LONGEST_WAIT = 0.2, 5.0
"""Seconds between tries: a random time below a bound that doubles from the first to the longest."""

SECRETS_KNOWN = 64
"""Option values that are looked for in errors: the newest, and those of earlier options."""

THREADS = 32
"""How many operations of one process are under way at once; further ones wait their turn."""

_SEGMENT = re.compile(r"[A-Za-z0-9._=+-]+")
_STAGED = re.compile(r"#\d+$")  # obstore's own unfinished files on a local folder


_QUERY = re.compile(r"\?[\w.%-]+=[^\s\"',)<>]*")


class StoreError(Exception):
    """The store could not do it; the message says which store, which path and why."""


class Exists(StoreError):
    """Somebody else created this path first."""


class Missing(StoreError):
    """There is no such file."""


class NoBucket(StoreError):
    """There is no such bucket or container: waiting makes none."""


class Away(StoreError):
    """The store did not answer, or not as it does else: the same may well succeed a moment later."""


@dataclass(frozen=True, order=True)
class Entry:
    """One file as a listing shows it.

    :param path: Path relative to the root of the store.
    :param size: Size in bytes at the time of the listing.
    """

    path: str
    size: int


class Store:
    """One folder on a local file system or in a bucket, with create-only files.

    :param uri: `file:///folder` or `/folder`; `s3://bucket/prefix`; `gs://bucket/prefix`;
        `az://container/prefix` or `abfs://container/prefix` with the option `account_name`;
        `sftp://user@host:22/folder`, with the extra `airflow-gpu[sftp]`;
        `memory://name`, shared within one process, for tests.
    :param options: Credentials, endpoint and HTTP client options by obstore's names (`access_key_id`,
        `endpoint`, `allow_http`, ...). What is absent is read from the environment, as obstore does.
        Of sftp: `username`, `password`, `key_file`, `private_key`, `private_key_passphrase`, `host_key`,
        `known_hosts` (a file), `no_host_key_check`, `ssh_config` (a file), `timeout`; what is absent is as `ssh` has it.
        They appear in no error and no repr. Or an async callable that answers them, asked when the store
        is first used and again after five minutes; while it fails, the older ones serve.
    :raises StoreError: for a URI or options that cannot be used. Nothing is contacted yet.

    Paths are relative, of segments of `A-Za-z0-9._=+-` joined by `/`; in this alphabet no store and no
    layer of obstore escapes anything, so that a path is the same name everywhere.

    A local folder is made by the first write. Folders get mode 0777 and files 0666, less the umask: where
    the job runs as another user than Airflow, use a setgid folder and a umask of 0007; else 0077.

    Example: `Store("/shared/airflow-gpu")`, `Store("s3://bucket/gangs", {"region": "eu-west-1"})`.
    """

    uri: str
    folder: Path | None
    """Of a store on a local file system, else None."""

    def __init__(
        self,
        uri: str,
        options: Mapping[str, Any] | Callable[[], Awaitable[Mapping[str, Any]]] | None = None,
    ) -> None:
        try:
            self.uri, self.folder = parse(uri)
            if self.folder is None:
                _check(urlsplit(self.uri).path.strip("/"), folder=True)
        except ValueError as error:
            raise StoreError(str(error)) from None
        except StoreError as error:
            raise StoreError(f"{uri!r}: {error}") from None
        self._secrets: list[str] = []
        self._cached: Any = None
        self._asked = Asked(options) if callable(options) else None
        self._opened_with: dict[str, Any] | None = None  # of what was asked for
        if not callable(options):
            self._open(dict(options or {}))

    def _open(self, options: dict[str, Any]) -> None:
        if self.folder is not None:  # opened by its first reader
            if options:
                raise StoreError(f"{self.uri}: a local folder takes no options, not {sorted(options)}")
            return
        # The older secrets too: what was begun with them may still fail.
        self._secrets = list(dict.fromkeys([*secrets_of(self.uri, options), *self._secrets]))[:SECRETS_KNOWN]
        try:
            self._cached = open_store(self.uri, options)
        except ValueError as error:
            raise StoreError(self._redact(str(error))) from None

    async def ready(self) -> None:
        """Ask for the options now, if nobody has yet: raises what asking for them raises. Nothing else is contacted."""
        await self._renew()

    async def _renew(self) -> None:
        """Open the store anew when its options are others by now."""
        if self._asked is None:
            return
        options = await self._asked.current()
        if options is self._opened_with:
            return
        if self._cached is None:
            self._open(dict(options))
        else:
            try:
                self._open(dict(options))
            except StoreError:
                pass  # a connection that was spoilt: the older options serve until the store refuses them
        self._opened_with = options

    def __repr__(self) -> str:
        return f"Store({self.uri!r})"

    # -- writing

    async def create(self, path: str, data: bytes) -> None:
        """Create a file with all of its content, unless the name is taken.

        :raises Exists: if it is taken by another content.
        :raises StoreError: if the store did not answer as it should. The file may then be there or not.

        Limits: a try whose answer was lost is told from another writer's by comparing bytes, so `data`
        must be unique to the writer. Meant for small files: it is sent as one request.
        """
        _check(path, writing=True)
        uncertain = False  # whether an earlier try may have taken effect without our knowing

        def once() -> None:
            nonlocal uncertain
            if self.folder is not None:
                self._create_local(self.folder / path, path, data)
                return
            try:
                self._reader().put(path, data, mode="create", use_multipart=False)
            except obstore_errors.AlreadyExistsError:
                # S3 also answers 409 when two requests collide and neither has taken effect yet,
                # which obstore reports just the same: so look.
                try:
                    found = self._get(path, 0, None)
                except Missing:
                    raise Away(f"{self.uri}: {path} is being written or removed by another") from None
                if not (uncertain and found == data):
                    raise Exists(f"{self.uri}: {path} exists") from None
            except FileNotFoundError:
                raise self._no_bucket() from None
            except (obstore_errors.BaseError, OSError) as error:
                uncertain = uncertain or passing(error)
                raise

        await self._retry(once, path)

    async def put(self, path: str, data: bytes) -> None:
        """Write a file whether or not it is there; a reader sees the old content or the new one.

        Only for what decides nothing, such as progress: it is not flushed to the disk.

        :raises StoreError: if it could not be written.
        """
        _check(path, writing=True)

        def once() -> None:
            if self.folder is not None:
                _folder.replace(self.folder / path, data)
                return
            try:
                self._reader().put(path, data, use_multipart=False)
            except FileNotFoundError:
                raise self._no_bucket() from None

        await self._retry(once, path)

    # -- reading

    async def get(self, path: str, start: int = 0, limit: int | None = None) -> bytes:
        """Read a file, or `limit` bytes of it from byte `start`; what lies beyond its end is `b""`.

        :raises Missing: if there is no such file.
        :raises StoreError: if it could not be read.
        """
        _check(path)
        if start < 0 or (limit is not None and limit < 0):
            raise ValueError(f"a range begins at 0 or later, and has no negative length: {start}, {limit}")
        return await self._retry(lambda: self._get(path, start, limit), path)

    async def exists(self, path: str) -> bool:
        """Whether there is a file of this path; a folder is not one."""
        _check(path)

        def once() -> bool:
            try:
                self._reader().head(path)
            except FileNotFoundError:
                return False
            return True

        return await self._retry(once, path)

    async def names(self, prefix: str = "") -> list[str]:
        """The names directly below the folder `prefix`, of files and of folders, sorted.

        Only a local folder can have empty folders.
        """
        _check(prefix, folder=True)

        def once() -> list[str]:
            try:
                found = self._reader().list_with_delimiter(prefix or None)
            except FileNotFoundError:
                if self.folder is None:
                    raise self._no_bucket() from None
                return []
            paths = [*found["common_prefixes"], *(m["path"] for m in found["objects"] if _shown(m["path"]))]
            return sorted({path.rstrip("/").rpartition("/")[2] for path in paths})

        return await self._retry(once, prefix)

    async def list(self, prefix: str = "", after: str = "") -> list[Entry]:
        """All files below the folder `prefix`, at any depth, sorted by path; only those beyond the path `after`.

        A folder is whole segments: `list("lives/0001")` has nothing of `lives/00012/`. Files that are
        still being written are left out. A folder that is not there is empty.
        """
        _check(prefix, folder=True)
        _check(after, folder=True)

        def once() -> list[Entry]:
            try:
                found = self._reader().list(prefix or None, offset=after or None).collect()
            except FileNotFoundError:
                if self.folder is None:
                    raise self._no_bucket() from None
                return []
            # A store may ignore where to begin, as fake-gcs-server does.
            entries = (Entry(meta["path"], meta["size"]) for meta in found if _shown(meta["path"]))
            return sorted(entry for entry in entries if entry.path > after)

        return await self._retry(once, prefix)

    # -- removing

    async def delete(self, path: str) -> None:
        """Remove a file; it is no error if there is none."""
        _check(path)

        def once() -> None:
            try:
                self._reader().delete(path)
            except FileNotFoundError:
                pass

        await self._retry(once, path)

    async def delete_tree(self, prefix: str) -> None:
        """Remove everything below the folder `prefix`, unfinished files too. Not atomic; can be repeated.

        :raises StoreError: for the root itself, which is never removed.
        """
        _check(prefix)

        def once() -> None:
            if self.folder is not None:
                _folder.remove_tree(self.folder / prefix)
                return
            remove_all(self._reader(), prefix)

        await self._retry(once, prefix)

    # -- proof

    async def prove(self) -> None:
        """Find out whether this store keeps the promise of `create`, by writing to it.

        It creates a file, tries to create it again with another content, and lets several writers race
        for a second one; then removes both. For a doctor command and for tests.

        :raises StoreError: if a second writer was accepted, or if it cannot be written at all.

        Limits: a store that checks first and writes later can pass by luck when it is fast. The schemes
        accepted here were raced much harder, against the servers in `tests/beds/stores`.
        """
        from airflow_gpu.rundir.prove import prove

        await prove(self)

    async def ask(self, once: Callable[[Any], T], path: str) -> T:
        """What ``once(obstore store)`` answers, asked as everything here is: in a thread, and again while the store is away.

        For questions that have no method of their own. ``path`` is for errors.
        """
        return await self._retry(lambda: once(self._reader()), path)

    async def work(self, once: Callable[[], T], path: str) -> T:
        """The same for work on a local folder's own files, which need no obstore; the folder need not be there."""
        return await self._retry(once, path)

    # -- how

    def _reader(self) -> Any:
        """The obstore store to read from.

        :raises FileNotFoundError: while the local folder does not exist.
        """
        if self._cached is None and self.folder is not None:
            os.stat(self.folder)
            self._cached = LocalStore(prefix=self.folder)
        return self._cached

    def _get(self, path: str, start: int, limit: int | None) -> bytes:
        try:
            store = self._reader()
            if limit == 0:
                store.head(path)
                return b""
            if start == 0 and limit is None:
                return bytes(store.get(path).bytes())
            if limit is None:
                return bytes(store.get(path, options={"range": {"offset": start}}).bytes())
            return bytes(store.get(path, options={"range": (start, start + limit)}).bytes())
        except FileNotFoundError:
            raise Missing(f"{self.uri}: no {path}") from None
        except obstore_errors.GenericError as error:
            # Each store words "beyond the end" in its own way; the size is the same everywhere.
            if (start or limit is not None) and not passing(error):
                size = store.head(path)["size"]
                if start >= size:
                    return b""
            raise

    async def _retry(self, once: Callable[[], T], path: str) -> T:
        """Run `once` in a thread until it does not fail for a passing reason, within `TRIES` and `TRY_FOR`."""
        await self._renew()
        # The first try without tenacity, which leaves dozens of objects in cycles for each call, good or bad:
        # a triggerer that watches a thousand gangs stood still for a second every few seconds to collect them.
        try:
            return await self._once(once, path)
        except Away:
            await asyncio.sleep(random.uniform(0, FIRST_WAIT))
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(Away),
            stop=stop_after_attempt(TRIES - 1) | stop_after_delay(TRY_FOR),
            wait=wait_random_exponential(multiplier=2 * FIRST_WAIT, max=LONGEST_WAIT),
            reraise=True,
        ):
            with attempt:
                return await self._once(once, path)
        raise AssertionError("tenacity ends with a result or an error")

    async def _once(self, once: Callable[[], T], path: str) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(_threads(), once)
        except (obstore_errors.BaseError, OSError) as error:
            raise self._explain(error, path) from None

    def _explain(self, error: Exception, path: str) -> StoreError:
        """The `StoreError` for an error of obstore or the operating system, without any secret."""
        if no_bucket(error):
            return self._no_bucket()
        text = f"{self.uri}: {path}: {first_line(error)}" if path else f"{self.uri}: {first_line(error)}"
        kind = Away if passing(error) else StoreError
        return kind(self._redact(text) + advice(text))

    def _no_bucket(self) -> StoreError:
        return NoBucket(f"{self.uri}: the bucket or container does not exist")

    def _create_local(self, target: Path, path: str, data: bytes) -> None:
        try:
            _folder.create(target, data)
        except FileExistsError:
            raise Exists(f"{self.uri}: {path} exists") from None
        except OSError as error:
            if error.errno in _folder.NO_LINKS:
                raise StoreError(
                    f"{self.uri}: this file system has no hard links ({error.strerror}), which "
                    "create-only files need; use a folder on another one, or an object store"
                ) from None
            raise

    def _redact(self, text: str) -> str:
        text = _QUERY.sub("?...", text)  # a shared access signature travels in the query
        for value in self._secrets:
            text = text.replace(value, "***")
        return text


def is_plain(name: str) -> bool:
    """Whether a store takes this name of a file or folder; other names are for :mod:`airflow_gpu.rundir.contents`."""
    return _SEGMENT.fullmatch(name) is not None and name not in (".", "..")


def _check(path: str, *, writing: bool = False, folder: bool = False) -> None:
    """Refuse a path that some store would spell differently, or that would leave the root."""
    if folder and path == "":
        return
    segments = path.split("/")
    if not all(map(is_plain, segments)):
        raise StoreError(f"{path!r}: a path is segments of A-Z a-z 0-9 . _ = + - joined by single slashes")
    if writing and segments[-1].startswith(HIDDEN):
        raise StoreError(f"{path!r}: names that begin with {HIDDEN} are for unfinished files")


def _shown(path: str) -> bool:
    name = path.rpartition("/")[2]
    return not (name.startswith(HIDDEN) or _STAGED.search(name))


_pool: ThreadPoolExecutor | None = None
_forked_after_use = False


def _threads() -> ThreadPoolExecutor:
    """The threads of this process in which obstore and the file system are called.

    A pool of its own, so that a store that hangs holds up no other user of the loop's default threads.
    """
    global _pool
    if _forked_after_use:
        raise StoreError("this process was forked from one that had used a store; start it by spawn instead")
    if _pool is None:
        _pool = ThreadPoolExecutor(THREADS, thread_name_prefix="airflow-gpu-store")
    return _pool


def _after_fork() -> None:
    global _forked_after_use
    _forked_after_use = _pool is not None


os.register_at_fork(after_in_child=_after_fork)
