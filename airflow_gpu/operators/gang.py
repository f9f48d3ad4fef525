"""GangOperator: one task that is a gang.

Purpose: takes a :class:`~airflow_gpu.gang.spec.Gang`, makes this try of the
task the owner of its run, and lets the driver bring it to a verdict, in the
trigger (default) or in the worker. Both run the same driver.

What it does not do: hold the run. Everything that matters is in the run
directory, so a worker or triggerer that dies loses nothing.

Known limits: with ``deferrable=False``, a SIGTERM may be a person's kill or a
worker that is drained. The gang is ended only when Airflow says that the task
is no longer running; when it does not answer, the gang goes on and the next
try adopts it.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from airflow_gpu.compat import (
    NEXT_TRY,
    AirflowException,
    AirflowFailException,
    AirflowTaskTimeout,
    BaseOperator,
    default_deferrable,
    task_state,
)
from airflow_gpu.gang.spec import Gang, GangError
from airflow_gpu.links.gang import CheckpointLink, LogsLink, TargetLink

if TYPE_CHECKING:
    from airflow.sdk import Asset, Context

    from airflow_gpu.driver import Driver
    from airflow_gpu.rundir.slot import Held
    from airflow_gpu.settings import Settings

KILL_ANSWER_LIMIT = 3.0
"""Seconds for which a killed worker waits to hear why; the supervisor kills it hard soon after."""


END_LIMIT = 60.0
"""Seconds beyond the grace for which a worker waits for the end of a gang whose trigger has failed."""


ZOMBIE_LIMIT = 15.0
"""Seconds within which the supervisor of a task that Airflow has given up ends it: three of its heartbeats."""


class GangFailed(AirflowException):
    """The gang failed. ``record`` is the record of the run, as the XCom of a success would be."""

    def __init__(self, message: str, record: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.record = dict(record or {})


def _check_arguments(operator: str, gang: object, given: Mapping[str, Any]) -> None:
    """Fields of the gang that were handed to the operator itself are named, with their place."""
    fields = [name for name in given if name in Gang.model_fields]
    if fields and gang is not None:  # rare: a signature is not looked up for each operator of a DAG
        known = inspect.signature(BaseOperator.__init__).parameters
        fields = [name for name in fields if name not in known]
    if gang is None or fields:
        inner = ", ".join(
            f"{name}=..." for name in fields or ("nodes", "gpus_per_node", "command", "targets")
        )
        said = f"{', '.join(fields)} belong to the gang" if fields else "gang is missing"
        raise GangError(operator, f"{said}: {operator}(task_id=..., gang=Gang({inner}))")
    if not isinstance(gang, (Gang, Mapping)):
        raise GangError(operator, f"gang must be a Gang, or a dict of its fields, got {gang!r:.100}")


class GangOperator(BaseOperator):
    """Run a gang: N nodes x M GPUs that start together or not at all, survive preemption, and are one task.

    :param gang: what to run; a :class:`Gang`, or a dict of its fields. Every
        text in it may be a Jinja template. (templated)
    :param overrides: fields of the gang to set over ``gang``; mappings such as
        ``env`` are merged. This is what to ``expand`` for mapped tasks. (templated)
    :param deferrable: drive the gang in the triggerer (default) or in the
        worker.
    :param checkpoint_asset: an asset that gets an event when the task succeeds, with the newest checkpoint as
        its ``extra``, see :mod:`airflow_gpu.hooks.checkpoint`. For events while the gang runs, see
        :class:`airflow_gpu.triggers.checkpoint.GangCheckpointsTrigger`.

    The XCom is a small record: ``result`` (what rank 0 handed back),
    ``attempts``, ``checkpoint``, ``cost``, ``placement``; see
    :mod:`airflow_gpu.record`.

    ``execution_timeout`` counts from the start of the try and holds while
    deferred too. Preemptions and lost nodes have budgets of their own
    (:class:`Recovery`) and spend no Airflow retry; ``retries`` are for errors of
    the user's code, limits that were reached and budgets that are spent.

    Example::

        GangOperator(
            task_id="train",
            gang=Gang(nodes=2, gpus_per_node=8, command="python train.py", targets="slurm_h100"),
        )
    """

    template_fields: Sequence[str] = ("gang", "overrides")
    template_fields_renderers: ClassVar[dict[str, str]] = {"gang": "json", "overrides": "json"}
    operator_extra_links = (LogsLink(), TargetLink(), CheckpointLink())
    ui_color = "#76b900"
    ui_fgcolor = "#000000"

    def __init__(
        self,
        *,
        gang: Gang | Mapping[str, Any] | None = None,
        overrides: Mapping[str, Any] | None = None,
        deferrable: bool | None = None,
        checkpoint_asset: Asset | None = None,
        **kwargs: Any,
    ) -> None:
        _check_arguments(type(self).__name__, gang, kwargs)
        super().__init__(**kwargs)
        self.checkpoint_asset = checkpoint_asset
        if checkpoint_asset is not None:
            from airflow.sdk import Asset

            if not isinstance(checkpoint_asset, Asset):
                said = f'checkpoint_asset must be an Asset, such as Asset("model"), got {checkpoint_asset!r}'
                raise ValueError(said[:200])
        if checkpoint_asset is not None and checkpoint_asset not in self.outlets:
            self.outlets = [*self.outlets, checkpoint_asset]
        # Plain fields: Airflow renders nested objects by setattr, and a request is frozen.
        made = gang if isinstance(gang, Gang) else Gang.from_fields(dict(gang or {}), rendered=False)
        self.gang = made.fields()
        self.overrides = overrides
        if isinstance(overrides, Mapping):
            Gang.from_fields(
                _merge(self.gang, overrides), rendered=False
            )  # wrong fields are told when the DAG is parsed
        self.deferrable = default_deferrable() if deferrable is None else deferrable
        self._killed = False

    # -- the request -----------------------------------------------------------------------------

    def request(self) -> Gang:
        """The gang as rendered, validated again, in a new object."""
        try:
            return Gang.from_fields(_merge(self.gang, self.overrides or {}))
        except GangError as error:
            raise AirflowFailException(f"after rendering, {error}") from error

    # -- execution -------------------------------------------------------------------------------

    def execute(self, context: Context) -> Any:
        """Own the run, start it, then defer or drive it to the end here."""
        from airflow_gpu.settings import settings

        given = settings()
        gang = self.request()
        if _is_backfill(context):
            gang = gang.for_backfill()
        try:
            held = asyncio.run(self._begin(context, given, gang))
        except AirflowTaskTimeout as error:
            # Airflow's alarm came before the gang's own deadline, which is the same moment.
            self.log.error("execution_timeout is over; ending the gang")
            asyncio.run(self._end(context, f"execution_timeout: {error}", "deadline"))
            raise
        if isinstance(held, dict):
            return self.execute_complete(context, held)
        from airflow_gpu.triggers.gang import GangTrigger

        self.defer(
            trigger=GangTrigger(
                state_uri=held.journal.store.uri,
                path=held.journal.path,
                epoch=held.epoch,
                digest=gang.digest(),
                state_conn_id=given.state_conn_id,
            ),
            method_name="execute_complete",
        )

    async def _begin(self, context: Context, given: Settings, gang: Gang) -> Held | dict[str, Any]:
        """Become the owner; submit, and with ``deferrable=False`` go on to the end.

        Answers the run to defer for, or the event of its verdict.
        """
        from airflow_gpu.driver import SupersededError
        from airflow_gpu.record import event_of

        held = await self._take(context, given, gang)
        driver = self._driver(held, given, gang)
        self._links(context, held)
        watch = asyncio.create_task(self._watch_kill(context, driver))
        try:
            verdict = await driver.run(until_submitted=self.deferrable)
            if verdict is None and (state := await self._ended_by_a_person(context)):
                # There is no trigger yet that would hear of it, and this process is about to be ended.
                await driver.stop("user", f"the task was ended by a user's action (it is {state} now)")
                return {"outcome": "cancelled", "cause": "stopped", "message": f"the task is {state}"}
        except SupersededError as error:
            return {"outcome": "superseded", "message": str(error)}
        finally:
            watch.cancel()
        return held if verdict is None else event_of(verdict)

    async def _ended_by_a_person(self, context: Context) -> str:
        """The state into which somebody has put the task while it started; empty while it is ours, or that is not known."""
        ti = context["ti"]
        map_index = -1 if ti.map_index is None else ti.map_index
        try:
            state = await asyncio.to_thread(task_state, ti.dag_id, ti.run_id, ti.task_id, map_index)
        except Exception as error:
            self.log.info("Airflow does not say whether the task is still wanted: %r", error)
            return ""
        return state if state is not None and state not in NEXT_TRY else ""

    async def _take(self, context: Context, given: Settings, gang: Gang) -> Held:
        from airflow_gpu.gang.identity import RunKey
        from airflow_gpu.gang.ownership import Try
        from airflow_gpu.gang.run import Seed
        from airflow_gpu.hooks.world import airflow_world, state_store
        from airflow_gpu.lineage import dag_run_identity, previous_checkpoint
        from airflow_gpu.patience import patiently
        from airflow_gpu.rundir.slot import take
        from airflow_gpu.sweeping.ending import end_run

        ti = context["ti"]
        key = RunKey(
            given.installation, ti.dag_id, ti.run_id, ti.task_id, -1 if ti.map_index is None else ti.map_index
        )
        me = Try(str(ti.id), ti.try_number, ti.max_tries or 0, dag_run_identity(context.get("dag_run")))
        deadline = None
        if self.execution_timeout is not None:
            started = ti.start_date.timestamp() if ti.start_date else time.time()
            deadline = started + self.execution_timeout.total_seconds()
        store = await patiently(lambda: state_store(given), sleep=asyncio.sleep, say=self.log.warning)

        loop = asyncio.get_running_loop()
        give_up = loop.time() + gang.recovery.unknown_limit

        async def doubt() -> None:
            self.log.warning(
                "the run directory knows a later try than this one; if Airflow has given this process up, it ends it "
                "within %.0f s, and else goes on",
                ZOMBIE_LIMIT,
            )
            await asyncio.sleep(ZOMBIE_LIMIT)

        async def previous() -> tuple[Seed | None, str]:
            return await previous_checkpoint(store, key, gang, ti)

        while True:
            held = await patiently(
                lambda: take(
                    store,
                    key,
                    me,
                    on_clear=gang.recovery.on_clear,
                    gang=json.loads(gang.to_json()),
                    digest=gang.digest(),
                    deadline=deadline,
                    now=time.time(),
                    doubt=doubt,
                    seed=previous if gang.checkpointing.continue_previous else None,
                ),
                sleep=asyncio.sleep,
                say=self.log.warning,
            )
            if not (held.claim.action == "new" and held.claim.stop):
                self.log.info(
                    "%s: %s, owner %d of %s",
                    held.claim.reason,
                    held.claim.action,
                    held.epoch,
                    held.journal.path,
                )
                if held.claim.action == "take" and held.claim.reason == "clear":
                    self.log.warning("the task was cleared%s", _after_clear(held))
                elif held.note:
                    self.log.warning("%s", held.note)
                return held
            self.log.info("an earlier DAG run of this name still has a gang; ending it first")
            world = airflow_world(given, self.log.info, self.log.info)
            why = "its DAG run was deleted and made again"
            ended = await end_run(
                held.journal, held.key, held.incarnation, world, why, limit=gang.recovery.unknown_limit
            )
            if not ended.ok and loop.time() < give_up:
                self.log.warning("an earlier gang of this name could not be ended yet: %s", ended.words)
                await asyncio.sleep(given.poll)
            elif not ended.ok:
                raise GangFailed(
                    f"the gang of an earlier DAG run of this name is not known to be over: {ended.words}"
                )

    def _driver(self, held: Held, given: Settings, gang: Gang) -> Driver:
        from airflow_gpu.driver import Driver
        from airflow_gpu.hooks.world import airflow_world

        world = airflow_world(given, self.log.info, self.log.info)
        return Driver(held.journal, held.key, held.incarnation, gang, epoch=held.epoch, world=world)

    def _links(self, context: Context, held: Held) -> None:
        """What the extra links point to; they are computed here, because links are read from XCom."""
        from airflow_gpu.links.gang import addresses

        for key, address in addresses(held.key).items():
            context["ti"].xcom_push(key=key, value=address)

    # -- the end ---------------------------------------------------------------------------------

    def execute_complete(self, context: Context, event: dict[str, Any]) -> Any:
        """Answer Airflow with the verdict: the record as XCom, or an error that says what happened."""
        if event.get("record"):
            context["ti"].xcom_push(key="gang", value=event["record"])
        record = answer(event)
        if self.checkpoint_asset is not None:
            self._tell_of_checkpoint(context, self.checkpoint_asset, record)
        return record

    def _tell_of_checkpoint(self, context: Context, asset: Asset, record: Mapping[str, Any]) -> None:
        """Airflow makes the event when the task has succeeded; here is what it says."""
        from airflow_gpu.gang.identity import RunKey
        from airflow_gpu.hooks.checkpoint import found_or_recorded
        from airflow_gpu.settings import settings

        given, ti = settings(), context["ti"]
        index = -1 if ti.map_index is None else ti.map_index
        key = RunKey(given.installation, ti.dag_id, ti.run_id, ti.task_id, index)
        context["outlet_events"][asset].extra = asyncio.run(found_or_recorded(given, key, record))

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        """As in Airflow; a trigger that failed or timed out does not leave its gang behind."""
        from airflow.sdk.exceptions import TaskDeferralError, TaskDeferralTimeout

        try:
            return super().resume_execution(next_method, next_kwargs, context)
        except (TaskDeferralError, TaskDeferralTimeout) as error:
            ti = context["ti"]
            if isinstance(error, TaskDeferralError) and ti.try_number <= (ti.max_tries or 0):
                # Trouble in the triggerer says nothing about the gang: it goes on until the next try adopts it.
                self.log.error(
                    "the trigger ended without a verdict (%s); the next try adopts the gang", error
                )
                raise
            self.log.error("the trigger ended without a verdict (%s); ending the gang", error)
            asyncio.run(self._end(context, f"the trigger ended without a verdict: {error}"))
            raise

    async def _end(self, context: Context, why: str, reason: str = "user") -> None:
        from airflow_gpu.settings import settings

        given = settings()
        held = await self._take(context, given, self.request())
        driver = self._driver(held, given, self.request())
        if await driver.stop(reason, why):
            limit = self.request().stop_grace + END_LIMIT
            try:
                await asyncio.wait_for(driver.run(), limit)
            except TimeoutError:
                self.log.warning(
                    "the gang has not ended within %.0f s; the next try or a sweep sees to it", limit
                )

    def on_kill(self) -> None:
        """A SIGTERM came. Called within a signal handler, where asking Airflow could deadlock: only a flag is set."""
        self._killed = True

    async def _watch_kill(self, context: Context, driver: Driver) -> None:
        """After a SIGTERM: end the gang if a person ended or cleared the task; leave it when that cannot be found out."""
        from airflow_gpu.gang.ownership import CLEARED

        while not self._killed:
            await asyncio.sleep(0.2)
        ti = context["ti"]
        map_index = -1 if ti.map_index is None else ti.map_index
        try:
            state = await asyncio.wait_for(
                asyncio.to_thread(task_state, ti.dag_id, ti.run_id, ti.task_id, map_index), KILL_ANSWER_LIMIT
            )
        except Exception as error:
            self.log.warning("SIGTERM, and Airflow does not say why (%r): the gang goes on", error)
            raise SystemExit(143) from None
        if state == "restarting":
            await driver.stop(CLEARED, "the task was cleared")
        elif state in NEXT_TRY:
            self.log.info(
                "SIGTERM, and the task is %s: the gang goes on, and the next try decides what becomes of it",
                state,
            )
        else:
            await driver.stop(
                "user", f"the task was ended by a user's action (it is {state or 'cleared'} now)"
            )
        raise SystemExit(143)


def _is_backfill(context: Context) -> bool:
    run_type = getattr(context.get("dag_run"), "run_type", "")
    return str(getattr(run_type, "value", run_type)) == "backfill"


def _after_clear(held: Held) -> str:
    if held.note:
        return f". {held.note}"
    return ": the gang goes on from its newest checkpoint (recovery.on_clear='fresh' would begin again)"


def _merge(fields: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """``fields`` with ``overrides`` over them; mappings (``env``, ``recovery`` ...) are merged, the rest replaced."""
    merged = {**fields, **overrides}
    for name, value in overrides.items():
        if isinstance(value, Mapping) and isinstance(fields.get(name), Mapping):
            merged[name] = {**fields[name], **value}
    programs = ("command", "script", "function")
    if any(overrides.get(name) for name in programs):
        merged.update({name: None for name in programs if not overrides.get(name)})
    return merged


def answer(event: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a successful run.

    :raises AirflowFailException: no retry could help (the request was rejected).
    :raises GangFailed: anything else; Airflow's retries apply.
    """
    from airflow_gpu.gang.run import Failure
    from airflow_gpu.record import explain_failure

    record = dict(event.get("record") or {})
    outcome = event.get("outcome")
    if outcome == "success":
        return record
    if outcome == "superseded":
        raise GangFailed(f"this try no longer has the run: {event.get('message')}")
    lines = [
        f"the gang {outcome or 'ended without a verdict'} ({event.get('cause')}): {event.get('message')}"
    ]
    attempts = record.get("attempts") or []
    for item in attempts:
        lives = ", ".join(
            f"life {life['life']} "
            + (f"from step {life['from']['step']}" if life.get("from") else "from the beginning")
            for life in item.get("lives", [])
        )
        lines.append(
            f"  attempt {item['attempt']} on {item['target']}: {item['cause'] or 'not over'}; {lives or 'never started'}"
        )
    if record.get("checkpoint"):
        lines.append(f"  newest checkpoint: step {record['checkpoint']['step']}; a retry resumes from it")
    if record.get("run_dir"):
        lines.append(f"  full logs of all ranks: {record['run_dir']}/lives")
    failure = record.get("failure")
    if failure:
        known = {name: value for name, value in failure.items() if name in Failure.__dataclass_fields__}
        lines.append(explain_failure(Failure(**known)))
    message = "\n".join(lines)
    if event.get("cause") == "rejected":
        raise AirflowFailException(message)
    raise GangFailed(message, record)
