"""Obstore stores from a URI and options, and what their errors mean.

Purpose: keeps obstore's particulars (which option goes where, what panics, how
a passing error is worded) out of :mod:`airflow_gpu.rundir.store`.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast
from urllib.parse import SplitResult, quote, unquote, urlsplit

import obstore
from obstore import exceptions as obstore_errors
from obstore.store import MemoryStore, from_url

from airflow_gpu import ssh
from airflow_gpu.rundir.sftp import Sftp, open_sftp
from airflow_gpu.runtime.objects import is_nobody

OBJECT_SCHEMES = ("s3", "gs", "az", "abfs", "abfss")
"""Schemes of object stores, each raced in `tests/rundir/test_store.py` against a server of its kind."""

_STATUS = re.compile(r"status code: (\d{3})\b")
_TOOK = re.compile(
    r" in [\d.]+(?:ns|µs|ms|s)\b|, after \d+ retries, max_retries: \d+, retry_timeout: [\d.]+s ?"
)
_OS_ERROR = re.compile(r"\(os error (\d+)\)")

# Client errors that another try can cure; every other 4xx is final.
_RETRIED_STATUS = frozenset({408, 409, 425, 429})
_RETRIED_ERRNO = frozenset({errno.EAGAIN, errno.EINTR, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET})

# Options of the HTTP client, which obstore takes apart from those of the store.
_CLIENT_OPTIONS = frozenset(
    {
        "allow_http",
        "allow_invalid_certificates",
        "connect_timeout",
        "default_content_type",
        "default_headers",
        "http1_only",
        "http2_keep_alive_interval",
        "http2_keep_alive_timeout",
        "http2_keep_alive_while_idle",
        "http2_only",
        "pool_idle_timeout",
        "pool_max_idle_per_host",
        "proxy_url",
        "proxy_ca_certificate",
        "proxy_excludes",
        "root_certificate",
        "randomize_addresses",
        "read_timeout",
        "timeout",
        "user_agent",
    }
)

# `memory://name` is one store in the whole process, as a folder would be.
_memories: dict[str, MemoryStore] = {}


def parse(uri: str) -> tuple[str, Path | None]:
    """The URI in its one spelling, and the folder if it is a local one.

    :raises ValueError: it is no URI of a store.
    """
    if uri.startswith("/"):
        uri = "file://" + quote(uri)
    parts = urlsplit(uri)
    known = "file:///folder, s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, abfs://..., "
    known += "sftp://user@host/folder"
    if parts.password is not None or parts.query or parts.fragment:
        raise ValueError("a store URI has no password, query or fragment; credentials are options")
    if parts.scheme == "memory":
        return f"memory://{parts.netloc}{parts.path}".rstrip("/") if parts.netloc else "memory://", None
    if parts.scheme == "file":
        folder = Path(os.path.normpath(unquote(parts.path))) if parts.path.startswith("/") else None
        if parts.netloc or folder is None or folder == Path("/"):
            raise ValueError(f"{uri!r}: a local store is file:///folder, an absolute path below /")
        folder = Path("/", *folder.parts[1:])  # normpath keeps a leading "//"
        return "file://" + quote(str(folder)), folder
    if parts.scheme == "sftp":
        return _sftp(uri, parts), None
    if parts.scheme not in OBJECT_SCHEMES:
        raise ValueError(f"unknown scheme {parts.scheme!r} of a store; known are {known}")
    if not parts.netloc:
        raise ValueError(f"{uri!r}: the bucket or container is missing, as in {known}")
    prefix = parts.path.strip("/")
    return f"{parts.scheme}://{parts.netloc}" + (f"/{prefix}" if prefix else ""), None


def _sftp(uri: str, parts: SplitResult) -> str:
    path = parts.path.rstrip("/")
    if not (parts.hostname and path):
        raise ValueError(f"{uri!r}: a store behind SSH is sftp://user@host:22/folder, a path below /")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    user = f"{parts.username}@" if parts.username else ""
    return f"sftp://{user}{host}" + (f":{parts.port}" if parts.port not in (None, 22) else "") + path


def open_store(uri: str, options: dict[str, Any]) -> Any:
    """The obstore store of a URI that is not a local folder, or what stands for one behind SSH.

    :raises ValueError: the options cannot be used; the message may hold their values.
    """
    scheme = urlsplit(uri).scheme
    if scheme == "sftp":
        try:
            return open_sftp(uri, options)
        except ImportError:
            raise ValueError(f"{uri}: {ssh.MISSING}") from None
        except ValueError as error:
            raise ValueError(f"{uri}: {first_line(error)}") from None
    if scheme == "memory":
        if options:
            raise ValueError(f"{uri}: memory takes no options, not {sorted(options)}")
        name = uri.removeprefix("memory://")
        return _memories.setdefault(name, MemoryStore()) if name else MemoryStore()
    client = {key: options.pop(key) for key in sorted(_CLIENT_OPTIONS & options.keys())}
    kwargs: dict[str, Any] = {}
    if "credential_provider" in options:
        kwargs["credential_provider"] = options.pop("credential_provider")
    if scheme == "s3":
        for key in ("conditional_put", "aws_conditional_put"):
            if options.pop(key, "etag") != "etag":
                raise ValueError(f"{uri}: {key} must be 'etag', for create-only writes")
        options["conditional_put"] = "etag"  # also against AWS_CONDITIONAL_PUT in the environment
    try:
        # No retries inside obstore: it would hide that a create may have taken effect already.
        return from_url(
            uri,
            config=cast(Any, options),
            client_options=cast(Any, client),
            retry_config={"max_retries": 0},
            **kwargs,
        )
    except (obstore_errors.BaseError, ValueError, TypeError) as error:
        raise ValueError(f"{uri}: cannot be opened: {first_line(error)}") from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # obstore panics on options it half knows
            raise
        raise ValueError(f"{uri}: obstore cannot use these options: {sorted({*options, *client})}") from None


def secrets_of(uri: str, options: Mapping[str, Any]) -> list[str]:
    """The option values that could be recognised in a message; `true` or a port number are no secrets."""
    known = options if not uri.startswith("sftp:") else {k: options[k] for k in ssh.SECRET & options.keys()}
    return [v for v in map(str, known.values()) if len(v) >= 6 and not v.startswith(("http:", "https:"))]


def open_writer(store: Any, path: str, *, part: int) -> Any:
    """A large file as a context with ``write(block)``; sent in parts of so many bytes."""
    if isinstance(store, Sftp):
        return store.open_writer(path)
    return obstore.open_writer(store, path, buffer_size=part, max_concurrency=2)


def remove_all(store: Any, prefix: str) -> None:
    """Remove everything below a folder, page by page."""
    if isinstance(store, Sftp):  # which has folders, and links
        store.remove_tree(prefix)
        return
    for batch in store.list(prefix, chunk_size=1000):
        store.delete([meta["path"] for meta in batch])


def first_line(error: BaseException) -> str:
    """Obstore's message without its debug part, and without how long it took: the same trouble reads the same."""
    return _TOOK.sub("", str(error).split("\n", 1)[0])


def advice(text: str) -> str:
    """What would help, where the store did not get to know who asks."""
    if not is_nobody(text):
        return ""
    return (
        ". THIS PROCESS HAS NO CREDENTIALS for it: name a connection in [gpu] store_conn_ids "
        '(AIRFLOW__GPU__STORE_CONN_IDS=\'{"s3://bucket": "ID"}\'), or give it an identity; `airflow-gpu doctor` proves it'
    )


def no_bucket(error: Exception) -> bool:
    """Whether the store says that there is no such bucket or container. A 404 alone may be a wrong endpoint's."""
    return any(f"<Code>{code}</Code>" in str(error) for code in ("NoSuchBucket", "ContainerNotFound"))


def passing(error: Exception) -> bool:
    """Whether another try may succeed: no answer, 5xx, 429, a stale file handle."""
    code = error.errno if isinstance(error, OSError) else None
    text = str(error)
    if code is None and (match := _OS_ERROR.search(first_line(error))):
        code = int(match[1])
    if code is not None:
        return code in _RETRIED_ERRNO
    if isinstance(error, obstore_errors.AlreadyExistsError):  # 409 to an overwriting put: a collision
        return True
    if type(error) is not obstore_errors.GenericError:
        return False
    if match := _STATUS.search(text):
        return int(match[1]) >= 500 or int(match[1]) in _RETRIED_STATUS
    if "redirect" in text:  # the wrong region or endpoint
        return False
    return "HTTP error" in text or "RetryError" in text
