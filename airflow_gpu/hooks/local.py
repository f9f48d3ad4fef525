"""The connection type ``gpu_local``: this machine as a small cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow_gpu.compat import BaseHook
from airflow_gpu.targets.base import TargetError

if TYPE_CHECKING:
    from airflow.sdk import Connection

    from airflow_gpu.targets.local.target import LocalTarget


class LocalGangHook(BaseHook):
    """Makes a :class:`~airflow_gpu.targets.local.target.LocalTarget` of a connection.

    :param conn_id: the connection.
    """

    conn_name_attr = "conn_id"
    default_conn_name = "gpu_default"
    conn_type = "gpu_local"
    hook_name = "GPU gangs: this machine"

    def __init__(self, conn_id: str = default_conn_name, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.conn_id = conn_id

    def get_conn(self) -> LocalTarget:
        """The target that the connection names."""
        return self.target_of(self.get_connection(self.conn_id))

    def test_connection(self) -> tuple[bool, str]:
        """For the Test button: whether the fields make sense."""
        try:
            target = self.get_conn()
        except Exception as error:
            return False, str(error)
        return True, f"gangs run below {target.channel}"

    @staticmethod
    def target_of(conn: Connection) -> LocalTarget:
        """
        :raises TargetError: a field of the connection is wrong.
        """
        from airflow_gpu.targets.local.config import LocalConfig
        from airflow_gpu.targets.local.target import LocalTarget

        try:
            return LocalTarget(conn.conn_id, LocalConfig.from_mapping(conn.extra_dejson or {}))
        except (TypeError, ValueError) as error:
            raise TargetError(f"connection {conn.conn_id!r}: {error}") from error
