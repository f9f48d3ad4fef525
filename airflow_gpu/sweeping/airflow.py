"""Who asks Airflow what became of a task instance.

Purpose: the small protocol between a sweep and Airflow. There is one
implementation for each place a sweep runs in (:mod:`airflow_gpu.hooks.asking`),
and :class:`Nobody`.

What it does not do: judge. "There is no such task instance" is an answer;
"I could not ask" is :class:`CannotAsk`, and nothing is ended because of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from airflow_gpu.gang.identity import RunKey


class CannotAsk(Exception):
    """Airflow did not answer, or may not tell. Says nothing about the task instance."""


class AsksAirflow(Protocol):
    """Asks for the states of task instances."""

    who: str
    """By which way, for the report."""

    own: bool
    """It surely is the Airflow that the gangs belong to. One that was merely configured may be another,
    whose "there is no such task instance" must not end anything."""

    async def states(self, keys: Collection[RunKey]) -> Mapping[RunKey, str | None]:
        """The state of each task instance that exists (None: it has none yet), all of them of one DAG.

        :raises CannotAsk: it is not known.
        """
        ...


class Nobody:
    """Airflow is not asked."""

    own = False

    def __init__(self, who: str = "not asked") -> None:
        self.who = who

    async def states(self, keys: Collection[RunKey]) -> Mapping[RunKey, str | None]:
        raise CannotAsk("Airflow was not asked")
