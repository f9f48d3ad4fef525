"""The gang's pages in Airflow: what Airflow loads, and nothing more.

Purpose: :class:`GangPlugin` mounts the pages of :mod:`airflow_gpu.plugin.app`
at ``/gpu`` in the API server, and shows them as the tab "Gang" of every task
instance.

Limits: this module is imported in every component, so it imports nothing of
its own; the pages are loaded when the first of them is asked for. The tab is
there for tasks that are no gangs, too: Airflow has no condition for tabs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from airflow.plugins_manager import AirflowPlugin

MOUNT = "/gpu"
"""Where the pages are, see also :mod:`airflow_gpu.links.gang`."""

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Scope]]
_Send = Callable[[_Scope], Awaitable[None]]


class LazyPages:
    """The pages as an ASGI application that is imported by its first request, in a thread."""

    def __init__(self) -> None:
        self._app: Any = None

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        if self._app is None:
            self._app = await asyncio.to_thread(_load)
        await self._app(scope, receive, send)


def _load() -> Any:
    from airflow_gpu.plugin.app import app

    return app


class GangPlugin(AirflowPlugin):
    """Pages and tab of a gang."""

    name = "airflow_gpu"
    fastapi_apps: list[Any] = [  # noqa: RUF012 - Airflow's own way
        {"app": LazyPages(), "url_prefix": MOUNT, "name": "GPU gangs"},
    ]
    external_views: list[Any] = [  # noqa: RUF012
        {
            "name": "Gang",
            # Relative: the UI's base address may have a path ([api] base_url). Without a map index Airflow
            # leaves the last placeholder as it is; the page takes that for "not mapped".
            "href": f"{MOUNT[1:]}/{{DAG_ID}}/{{RUN_ID}}/{{TASK_ID}}/{{MAP_INDEX}}",
            "destination": "task_instance",
            "url_route": "gang",
        }
    ]
