"""What to do about a store or a connection that does not work: one sentence for each cause.

Purpose: the last column of ``airflow-gpu doctor``. A missing bucket, an
endpoint that is away and a connection that is not there or of another kind each
have a remedy of their own; what is left is a matter of rights.

What it does not do: look again. It goes by the error alone.

Example::

    todo = remedy(error, "[gpu] state_uri", usual="check the rights")
"""

from __future__ import annotations

from airflow_gpu.hooks.stores import NoConnection, WrongConnection
from airflow_gpu.hooks.target import KINDS
from airflow_gpu.rundir.store import Away, NoBucket
from airflow_gpu.runtime.objects import is_nobody


def remedy(error: BaseException, named_in: str, *, usual: str) -> str:
    """
    :param error: a StoreError, a TargetError that was raised from one, or a TimeoutError.
    :param named_in: where the address of the store is written, such as ``"[gpu] state_uri"``.
    :param usual: what to do about any other error.
    """
    cause = error.__cause__ if isinstance(error.__cause__, NoConnection) else error
    if isinstance(cause, WrongConnection):
        return f"give the connection {cause.conn_id!r} the type {_types(cause)}, or name another one for this store"
    if isinstance(cause, NoConnection):
        of = f" of type {_types(cause)}" if cause.kinds else ""
        return (
            f"create the connection {cause.conn_id!r}{of}, in Airflow or as AIRFLOW_CONN_{cause.conn_id.upper()}, or "
            "correct the id in [gpu] store_conn_ids or state_conn_id"
        )
    if isinstance(cause, NoBucket):
        return f"create the bucket or container, or correct its name in {named_in}"
    away = f"see whether the store is up and can be reached from here, and whether its endpoint and {named_in} are right"
    if isinstance(cause, TimeoutError):  # without credentials obstore waits long for the machine's own
        return f"{away}; if it is, {usual}"
    asked = "builder error" not in str(cause) and not is_nobody(str(cause))  # else the store was never asked
    return away if isinstance(cause, Away) and asked else usual


def target_remedy(error: BaseException, conn_id: str, conn_type: str | None) -> str:
    """Of a connection that should be a target: None as its type where it is not there."""
    if conn_type is None:
        return f"create the connection {conn_id!r} in Airflow, or set AIRFLOW_CONN_{conn_id.upper()}"
    if conn_type not in KINDS:
        kinds = " or ".join(map(repr, sorted(KINDS)))
        return f"name a connection of type {kinds}, or give {conn_id!r} that type"
    return remedy(
        error, f"the channel of the connection {conn_id!r}", usual=f"correct the connection {conn_id!r}"
    )


def _types(error: NoConnection) -> str:
    return " or ".join(map(repr, error.kinds))
