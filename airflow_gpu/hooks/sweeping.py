"""A sweep with what Airflow knows: its settings, its connections, its word on task instances.

Purpose: what the operator and the trigger share. Connections and Airflow's
answers come through the supervisor, so a sweep has the rights of the task or
triggerer it runs in, and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from airflow_gpu.compat import conf_get
from airflow_gpu.hooks.asking import SupervisorAirflow
from airflow_gpu.hooks.world import airflow_world, state_store
from airflow_gpu.settings import settings
from airflow_gpu.sweeping.looking import Known
from airflow_gpu.sweeping.report import Report
from airflow_gpu.sweeping.sweep import Options, sweep


def names_of(text: str | Iterable[str] | None) -> list[str]:
    """Connection ids, from a list or from text with commas."""
    parts = text.replace(",", " ").split() if isinstance(text, str) else list(text or ())
    return list(dict.fromkeys(str(part) for part in parts))


async def sweep_here(
    say: Callable[[str], None],
    *,
    targets: str | Iterable[str] | None = None,
    options: Options | None = None,
    known: Known | None = None,
) -> Report:
    """One sweep in a task or a trigger.

    :param targets: connection ids to ask beside those that journals and ``[gpu] targets`` name.
    :raises StoreError: the state store cannot be listed.
    :raises AirflowFailException: a setting is missing.
    """
    given = settings()
    report = await sweep(
        await state_store(given),
        given.installation,
        airflow_world(given, say, lambda _: None),
        SupervisorAirflow(),
        names=[*names_of(conf_get("targets")), *names_of(targets)],
        options=options,
        known=known,
        say=say,
    )
    for line in report.lines():
        say(line)
    return report
