"""The trigger that looks after what is left behind, whenever a triggerer starts.

Purpose: an action of a person reaches a gang through its trigger. While no
triggerer lived, it did not; the next one to start has this trigger among its
first, which sweeps at once and then every few minutes. For an
``AssetWatcher``: an event comes only when something was ended or needs a
person, so that a DAG run shows it.

What it does not do: hold anything that matters. It may be killed at any moment.

Known limits: Airflow runs the watchers of DAGs that are not paused. With
several triggerers it runs in one of them.

Example::

    left_behind = Asset("gangs_left_behind", watchers=[AssetWatcher("sweep", trigger=GangSweepTrigger())])
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from airflow.triggers.base import BaseEventTrigger, TriggerEvent

MOST = 50
"""Lines of each kind in an event, which is kept in Airflow's database."""


class GangSweepTrigger(BaseEventTrigger):
    """Sweeps when it starts and every ``minutes`` after.

    :param minutes: between two sweeps.
    :param targets: connection ids to ask beside those that journals and ``[gpu] targets`` name.
    """

    def __init__(self, minutes: float = 10, targets: list[str] | None = None, **_: Any) -> None:
        super().__init__()
        # Checked in run(): an exception here would stop the whole triggerer.
        self.minutes = minutes
        self.targets = targets

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Class path and arguments."""
        arguments: dict[str, Any] = {"minutes": self.minutes}
        if self.targets:
            arguments["targets"] = list(self.targets)
        return "airflow_gpu.triggers.sweep.GangSweepTrigger", arguments

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Yield an event for each sweep that ended something, or found other problems than the one before."""
        from airflow_gpu.hooks.sweeping import sweep_here
        from airflow_gpu.sweeping.looking import Known

        known = Known()
        problems: list[str] = []
        while True:
            try:
                report = await sweep_here(self.log.info, targets=self.targets, known=known)
            except Exception as error:  # a store or database that is away now must not end the watch
                self.log.warning("could not sweep, trying again in %s min: %r", self.minutes, error)
            else:
                if report.ended or report.problems != problems:
                    problems = report.problems
                    yield TriggerEvent(
                        {
                            "ended": [f"{item.run or item.job}: {item.words()}" for item in report.ended][
                                :MOST
                            ],
                            "problems": problems[:MOST],
                        }
                    )
            await asyncio.sleep(max(1.0, float(self.minutes) * 60))
