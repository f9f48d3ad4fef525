"""Gangs that count until they are told where to stop, and keep a ledger of their own.

The ledger (folder ``LEDGER``) is what the tests believe: every rank holds a
lock of the kernel for as long as it lives, so two lives of one task instance
at one time leave an ``overlap`` there, whatever anybody else says; a
checkpoint that belongs to another task instance leaves a ``mixed``.

Files below ``LEDGER``, by the gang's name with ``/`` as ``~``: ``NAME.total``: the step to stop
at; ``NAME.crash``: the step at which rank 1 fails, once.
"""

from __future__ import annotations

import os
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path

from airflow.sdk import dag

from airflow_gpu import Gang, GangOperator

PROGRAM = """
import fcntl, json, os, sys, time
from airflow_gpu.runtime import gang

folder, me, pause = os.environ["LEDGER"], os.environ["GANG_RUN"], float(os.environ["PAUSE"])
name = os.path.join(folder, me.replace("/", "~"))

def read(kind):
    try:
        return int(open(f"{name}.{kind}").read())
    except (FileNotFoundError, ValueError):
        return 10**9

with gang() as g:
    def tell(what, **more):
        line = {"what": what, "at": time.time(), "rank": g.rank, "life": g.life, "attempt": g.attempt, **more}
        with open(f"{name}.jsonl", "a") as file:
            file.write(json.dumps(line) + "\\n")

    lock = open(f"{name}.rank-{g.rank}", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        tell("overlap")
        fcntl.flock(lock, fcntl.LOCK_EX)
    state = {"of": me, "sum": 0}

    def load(directory):
        state.update(json.loads((directory / f"rank-{g.rank}.json").read_text()))
        if state["of"] != me:
            tell("mixed", of=state["of"])

    start = step = g.checkpoint.restore(load)
    tell("start", step=start)
    while step < read("total"):
        time.sleep(pause)
        if g.rank == 1 and step >= read("crash"):
            os.unlink(f"{name}.crash")
            tell("crash", step=step)
            print("the loss is not a number", file=sys.stderr, flush=True)
            raise SystemExit(3)
        state["sum"] += step
        step += 1
        g.progress(step)
        if g.checkpoint.due(step):
            with g.checkpoint.save(step) as directory:
                (directory / f"rank-{g.rank}.json").write_text(json.dumps(state))
    tell("done", step=step)
    g.result({"start": start, "steps": step, "sum": state["sum"]})
"""


def steady(**more) -> Gang:
    recovery = {"backoff": 0.2, **more.pop("recovery", {})}
    return Gang(
        nodes=2,
        gpus_per_node=1,
        command=["python3", "-c", PROGRAM],
        env={"LEDGER": os.environ["LEDGER"], "PAUSE": "0.1"},
        checkpointing={"interval": 1},
        time_limit="5m",
        stop_grace=10,
        recovery=recovery,
        **more,
    )


RETRIES = {"retries": 2, "retry_delay": timedelta(seconds=1)}


class DyingOperator(GangOperator):
    """Its worker is killed once, where a file ``NAME.die`` says: before_submit, after_submit, before_defer."""

    def _die(self, point: str) -> None:
        key = self._key
        file = Path(os.environ["LEDGER"]) / f"{key.dag_id}~{key.run_id}~{key.task_id}.die"
        try:
            if file.read_text() != point:
                return
        except FileNotFoundError:
            return
        file.unlink()
        os.kill(os.getpid(), signal.SIGKILL)

    def _driver(self, held, given, gang):
        driver = super()._driver(held, given, gang)
        self._key = held.key
        submit, submitted = driver._submit, driver._submitted

        async def dying_before(attempt):
            self._die("before_submit")
            await submit(attempt)

        async def dying_after(attempt, platform_id):
            self._die("after_submit")
            await submitted(attempt, platform_id)

        driver._submit, driver._submitted = dying_before, dying_after
        return driver

    def defer(self, **kwargs):
        self._die("before_defer")
        super().defer(**kwargs)


class AlarmedOperator(GangOperator):
    """The gang has no deadline of its own: Airflow's alarm comes first."""

    async def _take(self, *given):
        self.execution_timeout = None
        return await super()._take(*given)


def build(
    name: str, operator=GangOperator, mapped: bool = False, schedule=None, dag_options=None, gang=None, **more
):
    @dag(dag_id=name, schedule=schedule, **(dag_options or {}))
    def made():
        if mapped:
            operator.partial(task_id="count", gang=steady(**(gang or {})), **more).expand(
                overrides=[{"env": {"INDEX": str(index)}} for index in range(3)]
            )
        else:
            operator(task_id="count", gang=steady(**(gang or {})), **more)

    made()


FRESH = {"recovery": {"on_clear": "fresh"}}

build("steady", **RETRIES)
build("steady_in_worker", deferrable=False, **RETRIES)
# Airflow tries again also while its API server is away, and each such try is lost.
build("steady_in_worker_patient", deferrable=False, retries=3, retry_delay=timedelta(seconds=40))
build("steady_fresh", gang=FRESH, **RETRIES)
build("steady_in_worker_fresh", gang=FRESH, deferrable=False, **RETRIES)
build("steady_once")
build("steady_once_fresh", gang=FRESH)
build("steady_deleted", **RETRIES)
limited = {"execution_timeout": timedelta(seconds=25), "retries": 1, "retry_delay": timedelta(seconds=1)}
build("steady_limited", **limited)
build("steady_in_worker_limited", deferrable=False, **limited)
build("steady_in_worker_alarmed", operator=AlarmedOperator, deferrable=False, **limited)
build("steady_mapped", mapped=True, gang=FRESH, **RETRIES)
build("steady_dying", operator=DyingOperator, **RETRIES)
build("steady_dying_in_worker", operator=DyingOperator, deferrable=False, **RETRIES)
build(
    "steady_daily",
    schedule="@daily",
    dag_options={"start_date": datetime(2026, 1, 1, tzinfo=UTC), "catchup": False},
    **RETRIES,
)
