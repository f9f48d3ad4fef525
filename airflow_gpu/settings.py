"""The deployment's settings: who this installation is, and where its run directories are.

Purpose: one place that reads ``[gpu]`` of Airflow's configuration and says
what is missing and how to set it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from airflow_gpu.compat import AirflowFailException, conf_get

_NAME = re.compile(r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$")


@dataclass(frozen=True, slots=True)
class Settings:
    """``installation``: name of this Airflow. ``state_uri``: root of the journals. ``poll``: seconds between looks.

    ``state_conn_id``: connection for ``state_uri``. ``store_conn_ids``: those of other stores, by URI prefix.
    """

    installation: str
    state_uri: str
    state_conn_id: str | None
    poll: float
    store_conn_ids: Mapping[str, str] = field(default_factory=dict, hash=False)


def settings(*, named: bool = True) -> Settings:
    """Read the settings.

    :param named: the installation's name is needed; a trigger has it in its run directory.
    :raises AirflowFailException: one is missing or wrong; the message says which and what would be right.
    """
    installation = conf_get("installation")
    if not named:
        installation = installation or "unnamed"
    if not installation:
        raise AirflowFailException(
            "airflow-gpu does not know the name of this Airflow installation. Set AIRFLOW__GPU__INSTALLATION "
            "(or [gpu] installation) to a short name that no other Airflow on the same clusters has, such as "
            "'prod'. It is part of every job's identity: installations only ever touch jobs of their own."
        )
    if not _NAME.match(installation):
        raise AirflowFailException(
            f"[gpu] installation is {installation!r}; it must be 1 to 32 of a-z, 0-9 and '-', "
            "and start and end with a letter or digit"
        )
    home = os.environ.get("AIRFLOW_HOME", os.path.expanduser("~/airflow"))
    state_uri = conf_get("state_uri", f"file://{os.path.abspath(home)}/gangs")
    assert state_uri is not None
    poll = conf_get("poll_interval", "5")
    try:
        seconds = float(poll or "5")
    except ValueError:
        raise AirflowFailException(
            f"[gpu] poll_interval is {poll!r}; it must be a number of seconds"
        ) from None
    from airflow_gpu.hooks.stores import conn_ids  # not when a DAG is parsed: it imports obstore

    try:
        stores = conn_ids(conf_get("store_conn_ids"))
    except ValueError as error:
        raise AirflowFailException(str(error)) from None
    return Settings(installation, state_uri, conf_get("state_conn_id"), max(0.05, seconds), stores)
