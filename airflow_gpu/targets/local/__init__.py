"""The local target: this machine as a small cluster, for a workstation and for every test.

Purpose: gangs with real processes, a queue with priorities, preemption with a
notice, nodes that can be lost, and a scheduler that outlives Airflow's
processes. ``docs`` of the parts are in the modules; :mod:`.target` is what
Airflow's side uses, :mod:`.daemon` runs the gangs, :mod:`.admin` is for the
machine's operator.

What it does not do: containers, limits by cgroups, more than one machine,
anything but Linux.

Names are loaded lazily: the daemon imports this package too, and needs only
the standard library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from airflow_gpu.targets.local.admin import Admin, AdminError
    from airflow_gpu.targets.local.config import ConfigError, LocalConfig
    from airflow_gpu.targets.local.target import LocalTarget

__all__ = ["Admin", "AdminError", "ConfigError", "LocalConfig", "LocalTarget"]

_HOMES = {
    "Admin": "admin",
    "AdminError": "admin",
    "ConfigError": "config",
    "LocalConfig": "config",
    "LocalTarget": "target",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
