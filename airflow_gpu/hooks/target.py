"""From an Airflow connection to a target: which system it names, with which credentials.

Purpose: the only place where connections and targets meet. A target never
imports Airflow; it gets what it needs from here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from airflow_gpu.targets.base import Target, TargetError

if TYPE_CHECKING:
    from airflow.sdk import Connection

KINDS: dict[str, str] = {
    "gpu_local": "airflow_gpu.hooks.local:LocalGangHook",
    "slurm": "airflow_gpu.hooks.slurm:SlurmGangHook",
}
"""Connection types, and the hook that makes a target of one."""


def build_target(conn: Connection) -> Target:
    """The target that this connection names.

    :raises TargetError: its type is not one of ours, or its fields are wrong.
    """
    path = KINDS.get(conn.conn_type or "")
    if path is None:
        raise TargetError(
            f"connection {conn.conn_id!r} has type {conn.conn_type!r}, which is not a target of gangs; "
            f"use one of: {', '.join(sorted(KINDS))}"
        )
    module, name = path.split(":")
    hook: Any = getattr(importlib.import_module(module), name)
    target: Target = hook.target_of(conn)
    return target
