"""What Airflow does around a gang: tries, workers, triggerers, and people who press buttons.

Purpose: one task instance. The worker runs the real ``GangOperator``'s way to
the deferral, a triggerer runs the real ``GangTrigger``; who is killed is
followed by whom Airflow would send. The facts are those measured on Airflow 3.3
(a new task-instance id with each try and each Clear; ``on_kill`` about 2 s
after a person's action, when the new try has begun already; ``on_kill`` also at
a hand-over; SIGKILL 5 s after SIGTERM).

What it does not do: schedule, or keep more than one task instance.

Limits: a sweep runs at the end only, when something is left. A person's kill
that no process lived to carry out is made good by it, and the invariants say
when that may have been needed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from contextvars import Context
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

from airflow_gpu.compat import AirflowFailException
from airflow_gpu.gang.spec import Gang
from airflow_gpu.operators.gang import GangFailed, GangOperator
from airflow_gpu.triggers.gang import GangTrigger
from tests.faults.seam import ACTOR, STEP, Actor, Seam

_QUIET = logging.getLogger("tests.faults.quiet")
_QUIET.disabled = True


class QuietOperator(GangOperator):
    """The operator, without its lines in the log: there are tens of thousands of runs."""

    log = _QUIET  # type: ignore[assignment]
    given: Gang | None = None

    def request(self) -> Gang:
        """Rendered and checked once for all runs of a scenario."""
        return self.given or super().request()


class QuietTrigger(GangTrigger):
    log = _QUIET  # type: ignore[assignment]


WORKER_MISSED = 20.0
"""Seconds until the executor reports that a worker's process is gone."""

ZOMBIE = 300.0
"""Seconds without a heartbeat after which a task has failed."""

TRIGGERER_MISSED = 35.0
HEARTBEAT = 4.0
"""Seconds until a worker hears that its task is not its any more."""

KILL_HEARD = 2.0
"""Seconds until a triggerer hears that a trigger is not its any more."""

SIGKILL_AFTER = 5.0
WORKER_STALL, TRIGGERER_STALL = 400.0, 200.0
RETRY_DELAY = 10.0
FINAL = ("success", "failed")


@dataclass
class TaskInstance:
    """A row of Airflow's table: one try."""

    id: str
    try_number: int
    max_tries: int
    state: str = "running"
    map_index: int = -1
    dag_id: str = "dag"
    run_id: str = "run"
    task_id: str = "fit"
    start_date: Any = None

    def xcom_push(self, key: str, value: Any) -> None:
        pass


@dataclass
class Told:
    """How a try ended for Airflow."""

    try_number: int
    state: str
    why: str
    event: dict[str, Any] = field(default_factory=dict)
    error: BaseException | None = None


@dataclass
class Row:
    """A trigger in Airflow's table."""

    ti: TaskInstance
    kwargs: dict[str, Any]
    actor: Actor | None = None
    task: asyncio.Task[None] | None = None


class Airflow:
    """One task instance and the processes that work for it."""

    def __init__(
        self,
        loop: Any,
        seam: Seam,
        operator: Callable[[], GangOperator],
        settings: Any,
        retries: int,
        sweep: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        self.loop, self.seam, self.operator, self.settings, self.retries = (
            loop,
            seam,
            operator,
            settings,
            retries,
        )
        self._sweep = sweep
        self.ti: TaskInstance | None = None
        self.dag_run = namespace(
            start_date=datetime.fromtimestamp(loop.clock(), UTC), clear_number=0, run_type="manual"
        )
        self.row: Row | None = None
        self.told: list[Told] = []
        self.stopped_at: float | None = None  # when a person last wanted an end, and nothing since has begun
        self.cleared: list[float] = []
        self.may_begin_anew: list[float] = []  # a Clear that the worker may be killed too soon to write down
        self.killed: list[str] = []  # workers that were told to end and had to be killed
        self.begun_anew: list[float] = []  # moments from which earlier successes do not count
        self.wished: list[float] = []  # moments at which a person ended what there was
        self.swept = 0
        self.settled = asyncio.Event()
        self._actors = 0
        self._worker: tuple[Actor, TaskInstance, GangOperator] | None = None
        self._terminating: list[Actor] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        seam.on_stall = self._stall
        seam.on_people = self.person

    def _spawn(self, coroutine: Coroutine[Any, Any, Any], actor: Actor | None = None) -> asyncio.Task[Any]:
        """A task of the process ``actor``, or of Airflow itself."""
        context = Context()
        if actor is not None:
            context.run(ACTOR.set, actor)
        task = self.loop.create_task(coroutine, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task  # type: ignore[no-any-return]

    def _later(self, seconds: float, what: Callable[..., Any], *args: Any) -> None:
        self.loop.call_later(seconds, what, *args)

    def actor(self, role: str) -> Actor:
        self._actors += 1
        return Actor(self.seam, f"{role}-{self._actors}", role)

    # -- tries -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """The DAG run begins."""
        self._begin(1, self.retries)

    def _begin(self, try_number: int, max_tries: int) -> None:
        self.settled.clear()
        self.ti = TaskInstance(f"ti-{self._actors}-{try_number}", try_number, max_tries)
        self.execute(self.ti)

    def execute(self, ti: TaskInstance) -> None:
        """A worker for this try. (Two for one try only where a scenario wants that.)"""
        actor = self.actor("worker")
        operator = self.operator()
        self._worker = (actor, ti, operator)
        self._spawn(self._execute(actor, ti, operator), actor)
        self._spawn(self._worker_watch(actor, ti))

    async def _execute(self, actor: Actor, ti: TaskInstance, operator: GangOperator) -> None:
        context: Any = {"ti": ti, "dag_run": self.dag_run}
        try:
            held = await operator._begin(context, self.settings, operator.request())
            if isinstance(held, dict):
                await self._complete(actor, ti, operator, held)
                return
        except Exception as found:
            error = found
            await self._step(actor, "airflow.failed", lambda: self._end(ti, "failed", "", error=error))
            return
        trigger = QuietTrigger(
            state_uri=held.journal.store.uri, path=held.journal.path, epoch=held.epoch, digest="d"
        )
        await self._step(actor, "airflow.defer", lambda: self._defer(ti, trigger.serialize()[1]))

    async def _complete(
        self, actor: Actor, ti: TaskInstance, operator: GangOperator, event: dict[str, Any]
    ) -> None:
        """``execute_complete`` in a worker: tell Airflow the verdict."""
        try:
            operator.execute_complete({"ti": ti}, event)  # type: ignore[typeddict-item]
        except Exception as found:
            error = found
            await self._step(
                actor, "airflow.failed", lambda: self._end(ti, "failed", "", event=event, error=error)
            )
        else:
            await self._step(actor, "airflow.success", lambda: self._end(ti, "success", "", event=event))

    async def _step(self, actor: Actor, op: str, effect: Callable[[], Any]) -> None:
        """Something that the process tells Airflow. The supervisor sees to it that an answer comes."""
        await self.seam.call(actor, op, "", effect, kinds=STEP, error=RuntimeError, latency=0.05)

    def _end(
        self,
        ti: TaskInstance,
        state: str,
        why: str,
        *,
        event: dict[str, Any] | None = None,
        error: BaseException | None = None,
    ) -> None:
        if ti is not self.ti or ti.state not in ("running", "deferred", "resuming", "restarting"):
            return  # the API server answers 409: this try is not to be heard any more
        restarting = ti.state == "restarting"
        ti.state = state
        self.row = None
        self.told.append(
            Told(ti.try_number, "restarted" if restarting else state, why or repr(error), event or {}, error)
        )
        if restarting:
            self._later(0.5, self._begin, ti.try_number + 1, ti.max_tries)
        elif (
            state == "failed"
            and ti.try_number <= ti.max_tries
            and not isinstance(error, AirflowFailException)
        ):
            ti.state = "up_for_retry"
            self._later(RETRY_DELAY, self._retry, ti)
        else:
            self.settled.set()

    def _retry(self, ti: TaskInstance) -> None:
        if ti is self.ti and ti.state == "up_for_retry":
            self._begin(ti.try_number + 1, ti.max_tries)

    async def _worker_watch(self, actor: Actor, ti: TaskInstance) -> None:
        await actor.died.wait()
        await asyncio.sleep(WORKER_MISSED)
        if ti.state in ("running", "resuming", "restarting"):
            self._end(ti, "failed", f"{actor.name} died")

    # -- triggers --------------------------------------------------------------------------------------

    def _defer(self, ti: TaskInstance, kwargs: dict[str, Any]) -> None:
        if ti is self.ti and ti.state == "running":
            ti.state = "deferred"
            self.row = Row(ti, kwargs)
            self.assign(self.row)

    def assign(self, row: Row) -> None:
        """A triggerer takes the trigger."""
        row.actor = self.actor("triggerer")
        row.task = self._spawn(self._trigger(row.actor, row), row.actor)
        self._spawn(self._triggerer_watch(row.actor, row))

    async def _triggerer_watch(self, actor: Actor, row: Row) -> None:
        await actor.died.wait()
        await asyncio.sleep(TRIGGERER_MISSED)
        if row is self.row and row.actor is actor:
            self.assign(row)

    async def _trigger(self, actor: Actor, row: Row) -> None:
        trigger = QuietTrigger(**row.kwargs)
        trigger.task_instance = row.ti  # type: ignore[assignment]
        try:
            async with aclosing(trigger.run()) as events:  # type: ignore[type-var]
                event = await anext(events)
            await self._step(actor, "airflow.event", lambda: self._event(row, event.payload, None))
        except asyncio.CancelledError as error:
            if error.args and error.args[0] == "user action" and not self.seam.closed:
                try:
                    await asyncio.wait_for(trigger.on_kill(), 30.0)
                except (TimeoutError, asyncio.CancelledError):
                    pass
            raise
        except Exception as error:
            found = error
            await self._step(actor, "airflow.event", lambda: self._event(row, {}, found))

    def _event(self, row: Row, payload: dict[str, Any], error: Exception | None) -> None:
        """The triggerer's word arrives: a worker resumes the task."""
        if row is not self.row or row.ti.state != "deferred":
            return
        self.row = None
        row.ti.state = "resuming"
        actor = self.actor("worker")
        self._spawn(self._resume(actor, row.ti, payload, error), actor)
        self._spawn(self._worker_watch(actor, row.ti))

    async def _resume(
        self, actor: Actor, ti: TaskInstance, payload: dict[str, Any], error: Exception | None
    ) -> None:
        operator = self.operator()
        if error is None:
            await self._complete(actor, ti, operator, payload)
            return
        # As in GangOperator.resume_execution, whose asyncio.run cannot be nested here.
        if ti.try_number > ti.max_tries:
            try:
                await operator._end({"ti": ti}, f"the trigger ended without a verdict: {error}")  # type: ignore[typeddict-item]
            except Exception as second:
                error = second
        await self._step(actor, "airflow.failed", lambda: self._end(ti, "failed", "trigger", error=error))

    def _cancel(self, row: Row, actor: Actor | None, task: asyncio.Task[None] | None) -> None:
        """The triggerer hears that the trigger is not its any more, and cancels it anew every second."""
        if actor is None or task is None or task.done() or not actor.alive or self.seam.closed:
            return
        if actor.frozen_until > self.loop.now:
            self._later(actor.frozen_until - self.loop.now + 0.5, self._cancel, row, actor, task)
            return
        task.cancel("user action")
        self._later(1.0, self._cancel, row, actor, task)

    def hand_over(self, *, both_for: float = 5.0) -> None:
        """The trigger moves to another triggerer, while the one that has it lives on for a while."""
        row = self.row
        if row is None:
            return
        self._later(both_for, self._cancel, row, row.actor, row.task)
        self.assign(row)

    def _stall(self, actor: Actor) -> float:
        """A whole process stands still; answers for how long. Airflow does not wait."""
        if actor.role != "triggerer":
            worker, ti = self._worker[:2] if self._worker is not None else (None, None)
            if worker is actor and ti is not None:
                self._later(ZOMBIE, self._end, ti, "failed", "no heartbeat")
                self._later(WORKER_STALL + HEARTBEAT, actor.die)
            return WORKER_STALL
        row = self.row
        if row is not None and row.actor is actor:
            old = row.task
            self._later(TRIGGERER_MISSED, self._replace, row, actor)
            self._later(TRIGGERER_STALL + KILL_HEARD, self._cancel, row, actor, old)
        return TRIGGERER_STALL

    def _replace(self, row: Row, actor: Actor) -> None:
        if row is self.row and row.actor is actor:
            self.assign(row)

    # -- people ----------------------------------------------------------------------------------------

    def person(self, kind: str) -> None:
        {"moved": self.hand_over, "cleared": self.clear, "marked": self.mark, "deleted": self.recreate}[
            kind
        ]()

    def mark(self, state: str = "failed") -> None:
        """Mark failed (or success)."""
        ti, row = self.ti, self.row
        if ti is None or ti.state in FINAL:
            return
        before, ti.state = ti.state, state
        self.row = None
        self.wished.append(self.loop.now)
        self.stopped_at = self.loop.now
        self.told.append(Told(ti.try_number, state, "a person"))
        self._tell_processes(before, row)
        self.settled.set()

    def clear(self) -> None:
        """Clear: of a running task ``max_tries`` stays, only its worker can tell; else it changes."""
        ti, row = self.ti, self.row
        if ti is None:
            return
        self.cleared.append(self.loop.now)
        self.wished.append(self.loop.now)
        self.stopped_at = None
        self.settled.clear()
        before = ti.state
        if before in FINAL:
            self.dag_run.clear_number += 1  # of a DAG run that was over
        fresh = self.operator().request().recovery.on_clear == "fresh"
        if before in ("running", "resuming", "restarting"):
            ti.state = "restarting"
            if fresh:
                self.may_begin_anew.append(self.loop.now)
            self._tell_processes(before, row)
            return
        if before == "success" or fresh:
            self.begun_anew.append(self.loop.now)
        self.row = None
        ti.state = "cleared"
        self._later(0.5, self._begin, ti.try_number + 1, ti.try_number + self.retries)
        self._tell_processes(before, row)

    def recreate(self) -> None:
        """The DAG run is deleted, and made again under the same id."""
        ti, row = self.ti, self.row
        if ti is None:
            return
        self.cleared.append(self.loop.now)
        self.wished.append(self.loop.now)
        self.stopped_at = None
        self.settled.clear()
        self.begun_anew.append(self.loop.now)
        before, ti.state, self.row = ti.state, "deleted", None
        self.dag_run = namespace(
            start_date=datetime.fromtimestamp(self.loop.clock(), UTC), clear_number=0, run_type="manual"
        )
        self._later(0.5, self._begin, 1, self.retries)
        self._tell_processes(before, row)

    def _tell_processes(self, before: str, row: Row | None) -> None:
        """Whoever works for the try hears of it, in its time."""
        if row is not None:
            self._later(KILL_HEARD, self._cancel, row, row.actor, row.task)
        elif before in ("running", "resuming", "restarting") and self._worker is not None:
            actor, _, operator = self._worker
            self._later(HEARTBEAT, self._sigterm, actor, operator)

    def _sigterm(self, actor: Actor, operator: GangOperator) -> None:
        self._terminating.append(actor)
        operator.on_kill()
        self._later(SIGKILL_AFTER, self._sigkill, actor)

    def _sigkill(self, actor: Actor) -> None:
        if actor.alive:
            self.killed.append(actor.name)
        actor.die()

    def state(self) -> str | None:
        """What ``get_task_states`` answers now."""
        if self.ti is None or self.ti.state in ("deleted", "cleared"):
            return None
        return "running" if self.ti.state == "resuming" else self.ti.state

    def terminate(self) -> None:
        """A worker that was told to end has ended itself (SystemExit)."""
        for actor in self._terminating:
            actor.die()

    def sweep(self) -> asyncio.Task[Any]:
        """Somebody looks for gangs that no task wants any more, as the sweep does."""
        self.swept += 1
        return self._spawn(self._sweep(), self.actor("sweep"))


def documented(error: BaseException | None) -> bool:
    """An error that a DAG author is told of in the documentation."""
    return error is None or isinstance(error, (GangFailed, AirflowFailException))


def namespace(**values: Any) -> SimpleNamespace:
    """A stand-in for a module, such as ``time``."""
    return SimpleNamespace(**values)
