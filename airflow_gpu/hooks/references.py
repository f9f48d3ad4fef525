"""Values of ``Gang.secrets``: what ``conn:<id>#<field>`` and ``var:<name>`` refer to.

Purpose: one reading of references for workers, triggerers and the commands,
which differ in where connections and variables come from.

What it does not do: import Airflow, keep a value, or put one into an error.

Example::

    await resolve({"HF_TOKEN": "conn:huggingface#password"}, find_connection, find_variable)
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from airflow_gpu.hooks.stores import NoSuchConnection
from airflow_gpu.targets.base import NotConfigured, TargetError


async def resolve(
    references: Mapping[str, str],
    connection: Callable[[str], Awaitable[Any]],
    variable: Callable[[str], Awaitable[str | None]],
) -> dict[str, str]:
    """
    :param connection: the connection of an id; raises NoSuchConnection where there is none.
    :param variable: the value of a variable; None where there is none.
    :raises NotConfigured: there is no such connection or variable.
    :raises TargetError: it cannot be read, or the connection has no such field. Neither says a value.
    """
    values: dict[str, str] = {}
    for name, reference in references.items():
        kind, _, rest = reference.partition(":")
        conn_id, _, field = rest.partition("#")
        try:
            found = await variable(rest) if kind == "var" else _field(await connection(conn_id), field)
        except NoSuchConnection:
            raise NotConfigured(f"secret {name}: there is no connection {conn_id!r}") from None
        except Exception as error:
            raise TargetError(f"secret {name} ({reference}) cannot be read: {type(error).__name__}") from None
        if found is None and kind == "var":
            raise NotConfigured(f"secret {name}: there is no Variable {rest!r}")
        if found is None:
            raise TargetError(f"secret {name}: connection {conn_id!r} has no {field!r}")
        values[name] = str(found)
    return values


def _field(conn: Any, field: str) -> Any:
    if field.startswith("extra."):
        return (conn.extra_dejson or {}).get(field[len("extra.") :])
    return getattr(conn, field, None)
