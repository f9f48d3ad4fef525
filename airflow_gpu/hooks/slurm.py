"""The connection type ``slurm``: a cluster, through slurmrestd, a login node or commands here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from airflow_gpu.compat import BaseHook
from airflow_gpu.targets.base import TargetError

if TYPE_CHECKING:
    from airflow.sdk import Connection

    from airflow_gpu.targets.slurm.access import Access
    from airflow_gpu.targets.slurm.config import SlurmConfig
    from airflow_gpu.targets.slurm.target import SlurmTarget

_SSH = (
    "key_file",
    "private_key",
    "private_key_passphrase",
    "host_key",
    "known_hosts",
    "no_host_key_check",
    "ssh_config",
    "timeout",
)
"""Of the extra: how to log in at ``ssh://``, ``token_ssh`` and an ``sftp://`` channel."""


class SlurmGangHook(BaseHook):
    """Makes a :class:`~airflow_gpu.targets.slurm.target.SlurmTarget` of a connection.

    :param conn_id: the connection.
    """

    conn_name_attr = "conn_id"
    default_conn_name = "slurm_default"
    conn_type = "slurm"
    hook_name = "GPU gangs: Slurm"

    def __init__(self, conn_id: str = default_conn_name, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.conn_id = conn_id

    def get_conn(self) -> SlurmTarget:
        """The target that the connection names."""
        return self.target_of(self.get_connection(self.conn_id))

    def test_connection(self) -> tuple[bool, str]:
        """For the Test button: whether Slurm answers, and with which nodes."""
        import asyncio

        async def ask() -> str:
            target = self.get_conn()
            try:
                return await target.describe()
            finally:
                await target.close()

        try:
            return True, asyncio.run(ask())
        except Exception as error:
            return False, str(error)

    @staticmethod
    def target_of(conn: Connection) -> SlurmTarget:
        """
        :raises TargetError: a field of the connection is wrong.
        """
        from airflow_gpu.targets.slurm.config import ConfigError, SlurmConfig

        try:
            config = SlurmConfig.from_mapping(fields_of(conn))
        except (ConfigError, TypeError, ValueError) as error:
            raise TargetError(f"connection {conn.conn_id!r}: {error}") from None
        return make_target(conn.conn_id, config)


def fields_of(conn: Any) -> dict[str, Any]:
    """A connection's fields by the names of :class:`SlurmConfig`."""
    given = dict(conn.extra_dejson or {})
    ssh = {name: given.pop(name) for name in _SSH if given.get(name)}
    url = str(given.get("url") or conn.host or "local")
    if "://" not in url and url != "local":
        url = f"{conn.schema or 'https'}://{url}"
    if conn.port and urlsplit(url).port is None and "://" in url and not url.startswith("unix:"):
        url = f"{url.rstrip('/')}:{conn.port}"
    if url.startswith("ssh:"):
        if conn.login and "@" not in url:
            url = url.replace("://", f"://{conn.login}@", 1)
        if conn.password:
            ssh["password"] = conn.password
    else:
        given |= {name: value for name, value in (("user", conn.login), ("token", conn.password)) if value}
    if given.get("ca_file") is None and "verify" in given:
        given["verify"] = str(given["verify"]).lower() not in ("false", "0", "no")
    return {**given, "url": url, "ssh": ssh}


def make_target(name: str, config: SlurmConfig) -> SlurmTarget:
    """The target of a cluster."""
    from airflow_gpu.hooks.folders import Folder
    from airflow_gpu.targets.slurm.target import SlurmTarget

    folder = config.shared_folder
    files = Folder(config.channel_uri, config.ssh) if folder is not None else None
    secrets = (files, folder) if files is not None and folder is not None else None
    if config.secrets_folder is not None:
        uri = config.secrets_folder if "://" in config.secrets_folder else f"file://{config.secrets_folder}"
        theirs = config.job_secrets_folder or urlsplit(uri).path
        secrets = (Folder(uri.rstrip("/"), config.ssh), theirs.rstrip("/"))
    target = SlurmTarget(name, config, make_access(name, config), files, secrets)
    target.folders = tuple(item for item in (files, secrets[0] if secrets else None) if item is not None)
    return target


def make_access(name: str, config: SlurmConfig) -> Access:
    """The way to Slurm that the URL names."""
    from airflow_gpu.targets.slurm.commands import Commands, Here
    from airflow_gpu.targets.slurm.login import Login
    from airflow_gpu.targets.slurm.rest import Rest
    from airflow_gpu.targets.slurm.tokens import Tokens

    if config.scheme == "ssh":
        return Commands(name, Login(name, config.url, config.ssh))
    if config.scheme == "local":
        return Commands(name, Here(name, config.command_prefix))
    given = config.token.get_secret_value() if config.token else None
    return Rest(name, config, Tokens(name, given, _fetcher(name, config)))


def _fetcher(name: str, config: SlurmConfig) -> Callable[[], Awaitable[str]] | None:
    from airflow_gpu.targets.slurm.access import AccessError
    from airflow_gpu.targets.slurm.commands import Here, Runner
    from airflow_gpu.targets.slurm.login import Login
    from airflow_gpu.targets.slurm.tokens import last_line

    runner: Runner
    if config.token_command:
        runner, argv = Here(name), list(config.token_command)
    elif config.token_ssh:
        runner = Login(name, config.token_ssh, config.ssh)
        argv = ["scontrol", "token", f"lifespan={config.token_lifespan}"]
    else:
        return None

    async def fetch() -> str:
        code, out, _ = await runner.run(argv)
        if code != 0:  # what it printed may hold a secret
            raise AccessError(f"{name}: the command for a new token ({argv[0]}) ended with {code}")
        return last_line(out)

    return fetch
