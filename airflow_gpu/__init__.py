"""Gang-scheduled multi-node GPU steps for Apache Airflow.

Public names are loaded when they are first used: importing this package in a
DAG file costs next to nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as typing's, whose import would cost more than all of this file

__version__ = "0.1.0"

_NAMES = {
    "Gang": "airflow_gpu.gang.spec",
    "Placement": "airflow_gpu.gang.spec",
    "Checkpointing": "airflow_gpu.gang.spec",
    "Recovery": "airflow_gpu.gang.spec",
    "GangError": "airflow_gpu.gang.spec",
    "GangOperator": "airflow_gpu.operators.gang",
    "GangFailed": "airflow_gpu.operators.gang",
}

__all__ = [*_NAMES, "__version__"]

if TYPE_CHECKING:
    from airflow_gpu.gang.spec import Checkpointing, Gang, GangError, Placement, Recovery
    from airflow_gpu.operators.gang import GangFailed, GangOperator


def __getattr__(name: str) -> object:
    module = _NAMES.get(name)
    if module is None:
        raise AttributeError(f"module 'airflow_gpu' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
