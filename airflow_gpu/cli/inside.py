"""``airflow-gpu doctor --job``: what the side of a job sees, found out by a gang of one node like any other.

Purpose: runs it, and says whether a job can write to the channel, with which
Python, and how its clock stands. What it leaves is removed when all is well.

What it does not do: check anything from here; it is run when that went well.

Limits: references to secrets are journalled as those of any gang are; their
values are read when the job is submitted, and shown nowhere.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Mapping
from secrets import token_hex
from typing import Any

import click

from airflow_gpu.cli.checks import FAIL, OK, Check, clock, off
from airflow_gpu.cli.place import Place
from airflow_gpu.cli.show import say
from airflow_gpu.driver import Driver
from airflow_gpu.gang.function import FunctionSource
from airflow_gpu.gang.identity import RunKey, run_path, slot_path
from airflow_gpu.gang.lifecycle import NO_CREDENTIALS
from airflow_gpu.gang.ownership import Try
from airflow_gpu.gang.run import Verdict
from airflow_gpu.gang.spec import Gang, GangError
from airflow_gpu.rundir.slot import take
from airflow_gpu.rundir.store import StoreError
from airflow_gpu.sweeping.decide import DOCTOR
from airflow_gpu.targets.base import TargetError


def probe(gang=None):  # type: ignore[no-untyped-def]
    """Runs in the job: who it is there, and whether a checkpoint can be written and read back."""
    import platform
    import sys
    import time

    begun = time.time()
    with gang.checkpoint.save(1) as folder:
        (folder / f"rank-{gang.rank}").write_text("written by the job")
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "host": platform.node(),
        "time": begun,
    }


def references(given: Iterable[str]) -> dict[str, str]:
    """``NAME=REFERENCE`` of the command line.

    :raises click.UsageError: one is none. It could be a secret, so it is not repeated.
    """
    found: dict[str, str] = {}
    for text in given:
        name, equals, reference = text.partition("=")
        if not equals or not name.isidentifier():
            raise click.UsageError("--secret must be NAME=REFERENCE, as in --secret TOKEN=conn:ID#password")
        found[name] = reference
    try:
        small_gang("any", 0, secrets=found)
    except GangError as error:
        problems = "; ".join(problem.removeprefix("secrets.") for problem in error.problems)
        raise click.UsageError(f"--secret must be NAME=REFERENCE: {problems}") from None
    return found


def small_gang(name: str, gpus: int, wait: float = 300.0, secrets: Mapping[str, str] | None = None) -> Gang:
    """
    :raises GangError: a reference to a secret is none; it is not repeated.
    """
    return Gang(
        function=FunctionSource.of(probe, (), {}),
        nodes=1,
        gpus_per_node=gpus,
        targets=name,
        time_limit=max(60.0, wait),
        secrets=secrets or {},
        stop_grace=5,
        placement={"max_wait": max(1.0, wait), "start_timeout": max(1.0, wait)},
        checkpointing={"interval": None},
        recovery={"mode": "never", "unknown_limit": max(1.0, wait)},
    )


async def in_a_job(place: Place, name: str, gang: Gang, wait: float) -> list[Check]:
    """Run a gang of one node there, as any gang is run, and look at what it left."""
    try:
        await place.secrets(gang.secrets)  # before anything is written
    except TargetError as error:
        return [Check(name, "job", FAIL, str(error), "correct the --secret, or what it refers to")]
    store = place.store()
    key = RunKey(place.installation, DOCTOR, f"{time.strftime('%Y%m%dT%H%M%S')}-{token_hex(3)}", name)
    gang = small_gang(name, gang.gpus_per_node, wait, gang.secrets)
    held = await take(
        store,
        key,
        Try(f"doctor-{token_hex(4)}", 1, 0),
        on_clear="resume",
        gang=json.loads(gang.to_json()),
        digest=gang.digest(),
        deadline=time.time() + wait,
        now=time.time(),
    )
    world = place.world(lambda line: say(f"{name}: {line}"))
    before = time.time()
    driver = Driver(held.journal, key, held.incarnation, gang, epoch=held.epoch, world=world)
    path = run_path(key, held.incarnation)
    try:
        async with asyncio.timeout(wait + 60):
            verdict = await driver.run()
    except (TimeoutError, StoreError, TargetError) as error:
        await driver.stop("user", "the doctor does not wait any longer")
        why = str(error) or f"no verdict after {wait:.0f} s"
        return [Check(name, "job", FAIL, why, f"airflow-gpu logs {path}; airflow-gpu sweep ends it")]
    assert verdict is not None
    if not verdict.success:
        return [_no_job(name, verdict, path)]
    checks = _inside(name, verdict, before, time.time())
    for attempt in held.journal.run.attempts:
        await place.channel(attempt.channel, path).store.delete_tree(slot_path(key))
    await store.delete_tree(slot_path(key))
    return checks


def _no_job(name: str, verdict: Verdict, path: str) -> Check:
    failure = verdict.record.get("failure") or {}
    tail = str(failure.get("tail") or "").strip().splitlines()[-1:]
    found = " ".join([f"{verdict.cause}: {verdict.message}", *tail]).strip()
    todos = {
        "stopped": "no node was free in time; try again with a longer --wait",
        "queued_too_long": "no node was free in time; try again with a longer --wait",
        "not_started": "the runtime never started: is there a Python 3.8 or later, and does the node see the channel?",
        "no_evidence": "the ranks left no records: the node cannot write to the channel, or sees it at another path",
        "rejected": "the target refuses the job, see the reason",
    }
    todo = todos.get(verdict.cause.value, "read its output")
    if NO_CREDENTIALS in verdict.message:
        todo = "give it some by --secret NAME=conn:ID#field, as Gang(secrets=...) does, or let its nodes have an identity"
    return Check(name, "job", FAIL, found, f"{todo}. Output: airflow-gpu logs {path}")


def _inside(name: str, verdict: Verdict, before: float, after: float) -> list[Check]:
    told: dict[str, Any] = verdict.record.get("result") or {}
    checkpoint = verdict.record.get("checkpoint")
    checks = [
        Check(name, "job", OK, f"ran on {told.get('host')} in {after - before:.1f} s"),
        Check(name, "job: Python", OK, f"{told.get('python')} ({told.get('executable')})"),
        Check(name, "job: reads and writes the channel", OK, f"a checkpoint at step {checkpoint['step']}")
        if checkpoint
        else Check(
            name,
            "job: reads and writes the channel",
            FAIL,
            "its checkpoint was not saved",
            "the node must be able to write to the channel",
        ),
    ]
    if isinstance(told.get("time"), float):
        checks.append(clock(name, off(told["time"], before, after), "the nodes"))
    return checks
