"""A real PostgreSQL server below a temporary folder, on a free loopback port.

Purpose: Airflow's metadata database as in production, for tests; with dumps,
so that a test can put an older backup back.

What it does not do: keep anything. ``fsync`` is off, and the folder is removed
at the end.

Limits: the programs are looked for in PATH, ``/usr/lib/postgresql/*/bin`` and
``/usr/local/bin``; without them they are installed where this is root on a
machine with apt, else :class:`NoPostgres` says what is missing. The server
refuses to run as root, and then runs as ``postgres`` or ``nobody``.

Example::

    with Postgres() as server:
        server.create("airflow")
        backup = server.dump("airflow")
        server.restore("airflow", backup)
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tests.beds.ports import free_port

NEEDED = ("initdb", "postgres", "pg_dump", "pg_restore", "psql")
SYSTEM = (Path("/usr/lib/postgresql"), Path("/usr/local/bin"))
USER = "airflow"
START_LIMIT = 60.0


class NoPostgres(Exception):
    """There is no PostgreSQL here and none can be installed. The message says why."""


def programs() -> Path:
    """The folder with the server's programs, installed if need be.

    :raises NoPostgres: with the reason.
    """
    found = _find()
    if found is not None:
        return found
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise NoPostgres(
            f"no PostgreSQL ({', '.join(NEEDED)}) is installed, and it can only be installed by root with apt"
        )
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "-y", "--no-install-recommends", "postgresql"]):
        done = subprocess.run(
            ["apt-get", "-qq", *command], env=quiet, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise NoPostgres(f"apt-get {command[0]} failed: {done.stderr.strip()[-500:]}")
    found = _find()
    if found is None:
        raise NoPostgres("apt installed postgresql, but its programs are not where they are expected")
    return found


def _find() -> Path | None:
    folders = []
    if (there := shutil.which("initdb")) is not None:
        folders.append(Path(there).resolve().parent)
    versions = [path for path in SYSTEM[0].glob("*/bin") if path.parent.name.isdigit()]
    folders += sorted(versions, key=lambda path: int(path.parent.name), reverse=True)
    folders.append(SYSTEM[1])
    return next((f for f in folders if all(os.access(f / name, os.X_OK) for name in NEEDED)), None)


def _who() -> pwd.struct_passwd | None:
    """Who runs the server; None: this user."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise NoPostgres("PostgreSQL does not run as root, and there is no user postgres or nobody")


class Postgres:
    """One server. Databases belong to the user ``airflow``, who may do everything."""

    def __init__(self) -> None:
        self.port = 0
        self.password = secrets.token_hex(12)
        self.home: Path | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Postgres:
        try:
            self.up()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    # -- the server --------------------------------------------------------------------------------

    def up(self) -> None:
        self.bin = programs()
        self._user = _who()
        # Not below the caller's folder: those of pytest are closed to other users.
        self.home = Path(tempfile.mkdtemp(prefix="postgres-"))
        password = self.home / "password"
        password.write_text(self.password)
        if self._user is not None:
            for path in (self.home, password):
                os.chown(path, self._user.pw_uid, self._user.pw_gid)
        self._as_user(
            "initdb", "--pgdata", str(self.home / "data"), "--username", USER, "--pwfile", str(password),
            "--auth", "scram-sha-256", "--encoding", "UTF8", "--locale", "C", "--no-sync",
        )  # fmt: skip
        self.port = free_port()
        # Safe against nothing but the end of its processes, and so much faster.
        options = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": "",
            "max_connections": 300,
            "shared_buffers": "64MB",
            "fsync": "off",
            "full_page_writes": "off",
            "synchronous_commit": "off",
        }
        arguments = [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
        log = os.open(self.home / "server.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        try:
            self.process = subprocess.Popen(
                [str(self.bin / "postgres"), "-D", str(self.home / "data"), *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=self.home,
                **self._identity(),
            )
        finally:
            os.close(log)
        end = time.monotonic() + START_LIMIT
        while True:
            try:
                self.sql("postgres", "SELECT 1")
                return
            except subprocess.CalledProcessError as error:
                if self.process.poll() is not None or time.monotonic() > end:
                    told = (self.home / "server.log").read_text(errors="replace")[-2000:]
                    raise RuntimeError(f"PostgreSQL does not start: {error.stderr}\n{told}") from error
            time.sleep(0.1)

    def down(self) -> None:
        process, self.process = self.process, None
        if process is not None and process.poll() is None:
            for wanted in (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL):  # fast, immediate, hard
                process.send_signal(wanted)
                try:
                    process.wait(15)
                    break
                except subprocess.TimeoutExpired:
                    continue
        if self.home is not None:
            shutil.rmtree(self.home, ignore_errors=True)

    def _identity(self) -> dict[str, Any]:
        if self._user is None:
            return {}
        return {"user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": []}

    def _as_user(self, program: str, *arguments: str) -> None:
        assert self.home is not None
        done = subprocess.run(
            [str(self.bin / program), *arguments],
            cwd=self.home,
            capture_output=True,
            text=True,
            check=False,
            **self._identity(),
        )
        if done.returncode != 0:
            raise RuntimeError(f"{program} failed: {done.stderr.strip()}")

    # -- databases ---------------------------------------------------------------------------------

    def url(self, database: str, driver: str = "postgresql+psycopg2") -> str:
        return f"{driver}://{USER}:{quote(self.password)}@127.0.0.1:{self.port}/{database}"

    def sql(self, database: str, statement: str) -> list[list[str]]:
        """Run one statement; the rows, as text."""
        text = self._client(
            "psql", database, "-X", "-q", "-A", "-t", "-F", "\t", "-v", "ON_ERROR_STOP=1", "-c", statement
        )
        return [line.split("\t") for line in text.splitlines()]

    def has(self, database: str) -> bool:
        return bool(self.sql("postgres", f"SELECT 1 FROM pg_database WHERE datname = '{database}'"))

    def create(self, database: str, template: str = "template0") -> None:
        """A database, empty or as a copy of another one that nobody uses now."""
        self.sql("postgres", f'CREATE DATABASE "{database}" TEMPLATE "{template}"')

    def drop(self, database: str) -> None:
        """Away with it, whoever is connected."""
        self.sql("postgres", f'DROP DATABASE IF EXISTS "{database}" WITH (FORCE)')

    def dump(self, database: str) -> Path:
        """A backup as of this moment; the database may be in use."""
        assert self.home is not None
        path = self.home / f"{database}-{secrets.token_hex(4)}.dump"
        self._client("pg_dump", database, "--format", "custom", "--compress", "0", "--file", str(path))
        return path

    def restore(self, database: str, backup: Path) -> None:
        """Put the backup in place of the database. Whoever uses it loses the connection."""
        self.drop(database)
        self.create(database)
        self._client("pg_restore", database, "--exit-on-error", str(backup))

    def _client(self, program: str, database: str, *arguments: str) -> str:
        where: Sequence[str] = ("-h", "127.0.0.1", "-p", str(self.port), "-U", USER, "-d", database, "-w")
        done = subprocess.run(
            [str(self.bin / program), *where, *arguments],
            env={**os.environ, "PGPASSWORD": self.password},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout
