"""GangCheckpointSensor: wait until a gang has saved a step.

Purpose: a task that needs a model of at least so many steps (an evaluation, an
early release) waits for it while the gang goes on. In the triggerer (default)
or in a worker; both look the same way.

What it does not do: verify the files, or keep the checkpoint from being pruned
later: a consumer that takes long copies it first, or the gang keeps it
(``Checkpointing(every=...)``).

Known limits: the gang is of this installation, with the same state store. One
task instance is waited for, not several dates.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from airflow_gpu.compat import AirflowFailException, BaseSensorOperator, default_deferrable
from airflow_gpu.hooks.checkpoint import Seen, Wanted, look

if TYPE_CHECKING:
    from airflow.sdk import Context


class CheckpointOutOfReach(AirflowFailException):
    """The gang has ended without such a checkpoint."""


def _may_be_step(step: object) -> bool:
    if isinstance(step, str):
        return "{{" in step or step.strip().isdigit()
    # An argument that another task answers is no value yet.
    return not isinstance(step, (bool, float, type(None))) and not (isinstance(step, int) and step < 0)


class GangCheckpointSensor(BaseSensorOperator):
    """Wait for a complete checkpoint of at least ``step`` of another DAG's gang, or of one in this DAG.

    :param external_dag_id: its DAG. (templated)
    :param external_task_id: its task, with its groups. (templated)
    :param step: completed steps, at least. (templated)
    :param external_run_id: its DAG run; then the dates below say nothing. (templated)
    :param map_index: of a mapped task; -1 (default): it is not mapped.
    :param execution_delta: its logical date is so much before this task's, as in ``ExternalTaskSensor``.
        Default: the same date. A run without a logical date counts by its ``run_after``.
    :param execution_date_fn: answers its logical date for this task's context and date, instead.
    :param fail_on_end: fail as soon as the gang's task has ended (failed, succeeded, skipped, removed) without
        such a checkpoint, without a retry. Default False, as in ``ExternalTaskSensor``: wait on, since a person
        may clear it; ``timeout`` bounds that.
    :param deferrable: wait in the triggerer (default) or by ``mode`` in a worker.

    The XCom is the newest checkpoint, see :mod:`airflow_gpu.hooks.checkpoint`.

    Example::

        GangCheckpointSensor(
            task_id="enough", external_dag_id="train_model", external_task_id="fit", step=20_000, timeout=86400
        )
    """

    template_fields: Sequence[str] = ("external_dag_id", "external_task_id", "external_run_id", "step")
    ui_color = "#a5d46a"

    def __init__(
        self,
        *,
        external_dag_id: str,
        external_task_id: str,
        step: int | str,
        external_run_id: str | None = None,
        map_index: int = -1,
        execution_delta: timedelta | None = None,
        execution_date_fn: Callable[..., datetime] | None = None,
        fail_on_end: bool = False,
        deferrable: bool | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if execution_delta is not None and execution_date_fn is not None:
            raise ValueError("give execution_delta or execution_date_fn, not both")
        if external_run_id is not None and (execution_delta is not None or execution_date_fn is not None):
            raise ValueError("external_run_id names the run: leave execution_delta and execution_date_fn out")
        if execution_delta is not None and not isinstance(execution_delta, timedelta):
            raise ValueError(f"execution_delta must be a timedelta, got {execution_delta!r}")
        if execution_date_fn is not None and not callable(execution_date_fn):
            raise ValueError(f"execution_date_fn must be a function, got {execution_date_fn!r}")
        if not _may_be_step(step):
            raise ValueError(f"step must be a whole number, at least 0, or a template, got {step!r}")
        self.external_dag_id = external_dag_id
        self.external_task_id = external_task_id
        self.external_run_id = external_run_id
        self.step = step
        self.map_index = map_index
        self.execution_delta = execution_delta
        self.execution_date_fn = execution_date_fn
        self.fail_on_end = fail_on_end
        self.deferrable = default_deferrable() if deferrable is None else deferrable

    def wanted(self, context: Context) -> Wanted:
        """What is waited for, from the fields as rendered.

        :raises AirflowFailException: ``step`` is no number, or there is no date to go by.
        """
        try:
            step = int(self.step)
        except (TypeError, ValueError):
            raise AirflowFailException(f"step must be a whole number, got {self.step!r}") from None
        wanted = Wanted(self.external_dag_id, self.external_task_id, step, self.map_index)
        if self.external_run_id:
            return replace(wanted, run_id=self.external_run_id)
        return replace(wanted, logical_date=self._date(context).isoformat())

    def _date(self, context: Context) -> datetime:
        run = context.get("dag_run")
        date = context.get("logical_date") or getattr(run, "run_after", None)
        if date is None:
            raise AirflowFailException("this run has no date; give external_run_id")
        if self.execution_date_fn is not None:
            return _called(self.execution_date_fn, date, context)
        return date - (self.execution_delta or timedelta(0))

    def execute(self, context: Context) -> Any:
        """Look once, then defer; or poke as any sensor."""
        if not self.deferrable:
            return super().execute(context)
        given = self._settings()
        wanted = self.wanted(context)
        seen = asyncio.run(look(given, wanted))
        if seen.reached or (self.fail_on_end and seen.over):
            return self._answer(seen.reached, seen.newest, seen.words)
        self.log.info("%s; waiting for step %d", seen.words, wanted.step)
        from airflow_gpu.triggers.checkpoint import GangCheckpointTrigger

        self.defer(
            trigger=GangCheckpointTrigger(
                state_uri=given.state_uri,
                wanted=asdict(wanted),
                interval=float(self.poke_interval),
                fail_on_end=self.fail_on_end,
                state_conn_id=given.state_conn_id,
            ),
            method_name="execute_complete",
            timeout=timedelta(seconds=self.timeout),
        )

    def poke(self, context: Context) -> Any:
        """One look; the newest checkpoint once it is far enough."""
        from airflow.sdk import PokeReturnValue

        seen: Seen = asyncio.run(look(self._settings(), self.wanted(context)))
        self.log.info("%s", seen.words)
        if seen.reached or (self.fail_on_end and seen.over):
            return PokeReturnValue(True, self._answer(seen.reached, seen.newest, seen.words))
        return False

    def execute_complete(self, context: Context, event: dict[str, Any]) -> Any:
        """What the trigger found."""
        return self._answer(bool(event.get("reached")), event.get("newest"), str(event.get("words")))

    def _settings(self) -> Any:
        from airflow_gpu.settings import settings

        return settings()

    def _answer(self, reached: bool, newest: Mapping[str, Any] | None, words: str) -> dict[str, Any]:
        if reached:
            self.log.info("%s", words)
            return dict(newest or {})
        if self.soft_fail:
            from airflow.sdk.exceptions import AirflowSkipException

            raise AirflowSkipException(f"{words}: step {self.step} is out of reach")
        raise CheckpointOutOfReach(f"{words}: step {self.step} is out of reach unless it is cleared")


def _called(function: Callable[..., Any], date: datetime, context: Context) -> datetime:
    """Its answer. It gets the date, and of the context what it has arguments for."""
    import inspect

    takes = inspect.signature(function).parameters
    every = any(one.kind is one.VAR_KEYWORD for one in takes.values())
    more = {name: value for name, value in context.items() if every or name in list(takes)[1:]}
    answer = function(date, **{name: value for name, value in more.items() if name != "logical_date"})
    if not isinstance(answer, datetime):
        raise AirflowFailException(f"execution_date_fn must answer one date, got {answer!r}")
    return answer
