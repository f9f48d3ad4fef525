"""What runs inside the job of a gang: the node agent, and the handle for programs.

Purpose: a program that runs in a gang needs one name from here::

    from airflow_gpu.runtime import gang

    with gang() as g:
        print(g.rank, g.world_size)

Limits: standard library only, Python 3.8 or later, and importing it costs next
to nothing: ``gang`` itself is loaded when it is asked for. The format of what
this package writes is ``docs/run-directory.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from airflow_gpu.runtime.api import Checkpoint, Gang, gang

__all__ = ["Checkpoint", "Gang", "gang"]


def __getattr__(name: str) -> Any:
    # Loaded late: the agent, mpirun's remote starts and the bundle import this
    # package too, and need none of the handle's modules.
    if name in __all__:
        from airflow_gpu.runtime import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
