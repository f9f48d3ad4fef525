"""What one DAG run has to do with another: which one it is, and which came before it.

Purpose: the two questions about DAG runs that only Airflow can answer. Used by
the worker, before the run is taken over.

What it does not do: compare programs (:mod:`airflow_gpu.gang.lineage`) or wait.
A run that goes on from the one before it usually wants ``depends_on_past=True``.

Limits: "before" is by logical date, as in Airflow; a run without one (a manual
run with ``logical_date=None``) has nothing before it.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from airflow_gpu.gang.identity import RunKey, run_path
from airflow_gpu.gang.lineage import changes
from airflow_gpu.gang.run import Seed
from airflow_gpu.gang.spec import Gang
from airflow_gpu.hooks.world import channel_store
from airflow_gpu.rundir.channel import Channel
from airflow_gpu.rundir.journal import Journal
from airflow_gpu.rundir.slot import newest
from airflow_gpu.rundir.store import Store


def dag_run_identity(dag_run: Any) -> str:
    """What tells a DAG run from another that is made under the same id later; empty when Airflow does not say."""
    started = getattr(dag_run, "start_date", None)
    if started is None:
        return ""
    return f"{getattr(dag_run, 'clear_number', 0) or 0}/{started.isoformat()}"


async def previous_checkpoint(store: Store, key: RunKey, gang: Gang, ti: Any) -> tuple[Seed | None, str]:
    """The newest checkpoint of the same task and mapped index in the DAG run before this one, and a sentence about it."""
    before = await asyncio.to_thread(ti.get_previous_dagrun)
    if before is None:
        return None, "There is no DAG run before this one to continue from: it begins from nothing."
    theirs = replace(key, run_id=before.run_id)
    found = await newest(store, theirs)
    if found is None:
        return None, f"The run before this one ({before.run_id}) has no gang here: it begins from nothing."
    journal = Journal(store, run_path(theirs, found[1]))
    run = await journal.refresh()
    for attempt in run.attempts[-1:]:  # it knows of what those before it have left
        changed = changes(_code(journal.gang_of(attempt.epoch)), _code(gang.to_dict()))
        if changed and gang.checkpointing.on_change == "fresh":
            return None, (
                f"{', '.join(changed)} changed since the run before this one ({before.run_id}): IT BEGINS FROM "
                "NOTHING. checkpointing.on_change='resume' would go on from there."
            )
        path = run_path(theirs, found[1])
        channel = Channel(channel_store(attempt.channel.removesuffix(f"/{path}")), path)
        where = await channel.locate(attempt)
        if where is not None:
            seed = replace(where, run=where.run or str(theirs))
            return seed, f"It continues from step {seed.step} of {seed.run}."
    return None, f"The run before this one ({before.run_id}) has no checkpoint: it begins from nothing."


def _code(gang: dict[str, Any]) -> dict[str, Any]:
    """What of the program should be the same on every date: arguments are usually not."""
    function = gang.get("function")
    return {"function": {"source": function["source"]} if function else None, "image": gang.get("image")}
