"""Whose run is it: how a start, a retry, a Clear, a crash and a re-created DAG run are told apart.

Purpose: pure; what a try of a task instance may do with what an earlier try
left behind. The facts it goes by, measured on Airflow 3.3:

- a task instance's id changes with every try and with every Clear; a task that
  is resumed from a deferral keeps it, and so does a try whose resume got lost
  (its ``try_number`` is one higher then);
- ``try_number`` only grows within one DAG run, and starts again at 1 when the
  DAG run is deleted and re-created under the same id;
- Clear changes ``max_tries`` (to the try plus the retries); of a task in a worker it does not always do so. But
  only a Clear makes such a task ``restarting``, and its worker, which is told to end, writes that down;
- a DAG run is told from another of the same name by its ``start_date`` and ``clear_number``. So a database that
  was restored from a backup, in which tries come a second time, is told from a DAG run that was made again.

What cannot be told apart is adopted: then nothing runs twice and nothing is
killed that somebody wanted.
"""

from __future__ import annotations

from dataclasses import dataclass

from airflow_gpu.gang.run import Run

CLEARED = "cleared"
"""Reason of a stop: the worker that owned the gang was told to end because its task had been cleared."""


@dataclass(frozen=True, slots=True)
class Try:
    """One try of a task instance, as Airflow's context shows it."""

    ti_id: str
    try_number: int
    max_tries: int
    dag_run: str = ""  # what tells its DAG run from another of the same name; empty: not known


@dataclass(frozen=True, slots=True)
class Claim:
    """What this try does with the slot of its task instance.

    ``action`` is ``new`` (a new incarnation), ``take`` (a new owner of the
    newest incarnation) or ``same`` (it already is the owner). ``stop`` says
    that what runs there is ended first, with a notice; ``resume`` that the
    first attempt may start from a checkpoint.
    """

    action: str
    reason: str
    resume: bool = True
    stop: bool = False
    doubtful: bool = (
        False  # the tries run backwards: this one may be a process that slept, and is given up by now
    )


def claim(run: Run | None, me: Try, on_clear: str) -> Claim:
    """Decide for the newest incarnation of the slot; None when there is none.

    :param on_clear: ``resume`` or ``fresh``, from ``Recovery``.
    """
    owner = run.owner if run is not None else None
    if run is None or owner is None:
        return Claim("new", "start")
    if owner.ti_id == me.ti_id and owner.try_number == me.try_number:
        return Claim("same", owner.reason)
    live = run.current is not None
    if _another_dag_run(run, me):
        # Deleted and made again: it must not inherit anything. What could still start or run there is ended first.
        return Claim("new", "start", stop=live or run.verdict is None, doubtful=True)
    if me.try_number <= owner.try_number:
        # The same DAG run as before, and its tries come again: the database is an older one than the journal.
        if run.verdict is not None and run.verdict.success:
            return Claim("same", "restored")
        return Claim("take", "restored", doubtful=True)
    cleared = me.max_tries != owner.max_tries or _told_of_a_clear(run)
    if run.verdict is not None and run.verdict.success:
        # After a Clear a resume would end at once with the old result. Without one, the worker that was to
        # tell Airflow of the success has died: it is told again, and nothing is computed again.
        # (max_tries stays when the retries were lowered; then the DAG run's own count of Clears tells.)
        again = cleared or _clears(me.dag_run) > _clears(owner.dag_run)
        return Claim("new", "clear", stop=live) if again else Claim("same", "retry")
    if cleared:
        return Claim("take", "clear", resume=on_clear == "resume", stop=live)
    if run.verdict is not None:
        return Claim("take", "retry")
    return Claim("take", "adopt")


def _told_of_a_clear(run: Run) -> bool:
    """The worker of the newest owner was ended because somebody had cleared its task, and had the time to say so."""
    stops = [run.stop, *(attempt.stop for attempt in run.attempts)]
    return any(stop is not None and stop.reason == CLEARED and stop.epoch == run.epoch for stop in stops)


def _another_dag_run(run: Run, me: Try) -> bool:
    """The try is of a DAG run that was made under the name of the one in the journal.

    Only a Clear changes the ``start_date`` of a DAG run, and each Clear raises its ``clear_number``.
    """
    owner = run.owner
    assert owner is not None
    if not me.dag_run or not owner.dag_run:
        return me.try_number <= owner.try_number  # an Airflow that does not say
    if any(me.dag_run == o.dag_run for o in run.owners):
        return False
    return _clears(me.dag_run) <= _clears(owner.dag_run)


def _clears(dag_run: str) -> int:
    """How often the DAG run had been cleared."""
    count, _, _ = dag_run.partition("/")
    return int(count) if count.isdigit() else 0
