"""Extra links of a gang's task: its logs, its target, its checkpoints.

Purpose: the buttons on the task's page. They lead to this package's own pages
in the API server (:mod:`airflow_gpu.plugin`), which read the run directory.

Limits: an address is made on the worker and travels in an XCom; it is there
once the task has started.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from airflow_gpu.compat import BaseOperatorLink

if TYPE_CHECKING:
    from airflow_gpu.gang.identity import RunKey

ROOT = "/gpu"
"""Where the plugin's pages are mounted."""


class _GangLink(BaseOperatorLink):
    def get_link(self, operator, *, ti_key) -> str:  # type: ignore[no-untyped-def]
        """The address that the worker left in XCom."""
        from airflow.sdk.execution_time.xcom import XCom

        return XCom.get_value(key=self.xcom_key, ti_key=ti_key) or ""


class LogsLink(_GangLink):
    """Full logs of all ranks."""

    name = "Rank logs"
    xcom_key = "gang_logs_url"


class TargetLink(_GangLink):
    """Attempts, lives, and where they run."""

    name = "Gang"
    xcom_key = "gang_target_url"


class CheckpointLink(_GangLink):
    """Checkpoints of the run."""

    name = "Checkpoints"
    xcom_key = "gang_checkpoint_url"


def base_path() -> str:
    """The path under which Airflow's UI is served: "" or, behind a proxy, something like ``/airflow``."""
    from airflow.sdk.configuration import conf

    return urlsplit(conf.get("api", "base_url", fallback=None) or "").path.rstrip("/")


def addresses(key: RunKey) -> dict[str, str]:
    """XCom key to address, for the run of this task instance."""
    page = f"{base_path()}{ROOT}/{quote(key.dag_id, safe='')}/{quote(key.run_id, safe='')}/{quote(key.task_id, safe='')}/{key.map_index}"
    return {
        LogsLink.xcom_key: f"{page}#logs",
        TargetLink.xcom_key: page,
        CheckpointLink.xcom_key: f"{page}#checkpoints",
    }
