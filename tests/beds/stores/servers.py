"""Install, start and stop the object stores. See the package for which and why.

with s3() as server:
    store = Store(server.uri, server.options)
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import fcntl
import hashlib
import hmac
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "airflow-gpu" / "stores"
INSTALL_FOR = 900.0
"""Seconds an install may take; about one minute each on two idle cores."""
START_FOR = 30.0

VERSITYGW = "github.com/versity/versitygw/cmd/versitygw@v1.8.0"
AZURITE = "azurite@3.37.0"
GCS = Path(__file__).parent / "gcs"  # pinned by its go.mod and go.sum

BUCKET = "bucket"
_GENTLE = ["nice", "-n", "10"]


class Unavailable(Exception):
    """The tool that installs this server is not on this machine."""


@dataclass
class Server:
    """A running store: `Store(server.uri, server.options)`."""

    name: str
    uri: str
    options: dict[str, Any] = field(repr=False)
    port: int
    pid: int

    def through(self, port: int) -> dict[str, Any]:
        """The same options by way of another port of this machine, where a `Wire` listens."""
        old, new = f"127.0.0.1:{self.port}", f"127.0.0.1:{port}"
        return {k: v.replace(old, new) if isinstance(v, str) else v for k, v in self.options.items()}


@contextlib.contextmanager
def s3(host: str = "127.0.0.1") -> Iterator[Server]:
    """Versity's S3 gateway over a temporary folder. ``host``: an address of this machine where it is to be reached."""
    binary = _installed(f"versitygw-{VERSITYGW.rpartition('@')[2]}", "go", _go_install) / "versitygw"
    access, secret = "tester", secrets.token_hex(16)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "root" / BUCKET).mkdir(parents=True)
        (Path(folder) / "side").mkdir()
        port = _free_port()
        command = [binary, "--quiet", "--keep-alive", "--port", f"{host}:{port}"]
        command += ["posix", "--sidecar", f"{folder}/side", f"{folder}/root"]
        environment = {"ROOT_ACCESS_KEY": access, "ROOT_SECRET_KEY": secret}
        with _running(command, port, environment, host) as pid:
            options = {
                "endpoint": f"http://{host}:{port}",
                "region": "us-east-1",
                "access_key_id": access,
                "secret_access_key": secret,
                "allow_http": True,
            }
            yield Server("s3", f"s3://{BUCKET}", options, port, pid)


@contextlib.contextmanager
def gcs() -> Iterator[Server]:
    """fake-gcs-server in memory, behind the front in `gcs/main.go`."""
    source = hashlib.sha256(b"".join((GCS / n).read_bytes() for n in ("main.go", "go.mod", "go.sum")))
    binary = _installed(f"gcs-{source.hexdigest()[:16]}", "go", _go_build) / "gcs"
    port = _free_port()
    with _running([binary, "-address", f"127.0.0.1:{port}", "-bucket", BUCKET], port) as pid:
        options = {"base_url": f"http://127.0.0.1:{port}", "bearer_token": "none-needed", "allow_http": True}
        yield Server("gcs", f"gs://{BUCKET}", options, port, pid)


@contextlib.contextmanager
def azure() -> Iterator[Server]:
    """Azurite's blob service in memory."""
    package = _installed(AZURITE.replace("@", "-"), "npm", _npm_install) / "node_modules" / "azurite"
    account, key = "tester", base64.b64encode(secrets.token_bytes(48)).decode()
    port = _free_port()
    command = ["node", package / "dist/src/blob/main.js", "--blobPort", str(port), "--inMemoryPersistence"]
    command += ["--silent", "--skipApiVersionCheck", "--disableTelemetry"]
    with _running(command, port, {"AZURITE_ACCOUNTS": f"{account}:{key}"}) as pid:
        _create_container(port, account, key)
        options = {
            "endpoint": f"http://127.0.0.1:{port}/{account}",
            "account_name": account,
            "account_key": key,
            "allow_http": True,
        }
        yield Server("azure", f"az://{BUCKET}", options, port, pid)


SERVERS: dict[str, Callable[[], contextlib.AbstractContextManager[Server]]] = {
    "s3": s3,
    "gcs": gcs,
    "azure": azure,
}


def _installed(name: str, tool: str, install: Callable[[Path], None]) -> Path:
    """The folder of an installed server; installs it on first use, once for all processes."""
    home = CACHE / name
    if home.is_dir():
        return home
    if shutil.which(tool) is None:
        raise Unavailable(f"{name} is not installed, and {tool}, which installs it, is not on this machine")
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not home.is_dir():
            print(f"installing {name} for the store tests, once", flush=True)
            fresh = Path(tempfile.mkdtemp(dir=CACHE, prefix=f".{name}-"))
            try:
                install(fresh)
                fresh.chmod(0o755)
                fresh.rename(home)
            finally:
                shutil.rmtree(fresh, ignore_errors=True)
    return home


def _go_install(folder: Path) -> None:
    _run(["go", "install", VERSITYGW], cwd=folder, env={"GOBIN": str(folder), "CGO_ENABLED": "0"})


def _go_build(folder: Path) -> None:
    _run(["go", "build", "-o", str(folder / "gcs"), "."], cwd=GCS, env={"CGO_ENABLED": "0"})


def _npm_install(folder: Path) -> None:
    _run(
        ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(folder), AZURITE],
        cwd=folder,
        env={},
    )


def _run(command: list[str], *, cwd: Path, env: dict[str, str]) -> None:
    done = subprocess.run(
        [*_GENTLE, *command],
        cwd=cwd,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=INSTALL_FOR,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with {done.returncode}:\n{done.stdout[-3000:]}")


@contextlib.contextmanager
def _running(
    command: list[Any], port: int, environment: dict[str, str] | None = None, host: str = "127.0.0.1"
) -> Iterator[int]:
    with tempfile.TemporaryFile() as log, tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=folder,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            _await_port(process, port, log, host)
            yield process.pid
        finally:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _await_port(process: subprocess.Popen[bytes], port: int, log: Any, host: str) -> None:
    until = time.monotonic() + START_FOR
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
            return
        time.sleep(0.05)
    log.seek(0)
    raise RuntimeError(f"{process.args!r} does not listen at {port}:\n{log.read().decode()[-3000:]}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _create_container(port: int, account: str, key: str) -> None:
    """The one request that obstore has no call for, signed with the account's key."""
    date = datetime.datetime.now(datetime.UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    headers = {"x-ms-date": date, "x-ms-version": "2021-08-06"}
    signed = "PUT" + "\n" * 12 + "".join(f"{k}:{v}\n" for k, v in headers.items())
    signed += f"/{account}/{account}/{BUCKET}\nrestype:container"
    digest = hmac.new(base64.b64decode(key), signed.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {account}:{base64.b64encode(digest).decode()}"
    url = f"http://127.0.0.1:{port}/{account}/{BUCKET}?restype=container"
    with urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers), timeout=10):
        pass
