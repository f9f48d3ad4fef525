"""What must hold after every run, whatever was spoilt in it. Judged by the platform's truth, never by what was told.

============  =====================================================================
``twice``     two lives of one task instance never compute at the same moment
``again``     nothing computes after every rank of the same run has succeeded, unless
              a person asked for a start from nothing since
``orphan``    when the world is quiet, no job is alive and none is queued
``success``   success is told only when every rank of a life has ended well, and
              it is told when that was so and nobody had asked for an end
``cause``     every end and every failure that is told is one that has happened
``attempts``  no more attempts than what happened to them explains
``resume``    a life goes on from the newest checkpoint of the one before it
``stop``      what a person has ended computes no longer than a bound, and only a
              process that was killed or stood still leaves that to a sweep
``journal``   it can be folded from its first entry, and names each attempt once
``surface``   Airflow sees only errors that the documentation names
``tries``     a retry is spent only on what spends one
``end``       every run tells Airflow an end, within bounds of time and calls, and
              it is one that the scenario allows
============  =====================================================================
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from airflow_gpu.gang.entries import JournalError, fold
from airflow_gpu.gang.identity import slot_path
from airflow_gpu.gang.run import Cause, Run
from tests.faults.airflow import documented
from tests.faults.clock import BEGINNING
from tests.faults.platform import LifeTruth
from tests.faults.seam import Fault
from tests.faults.world import KEY, Result

STOP_BOUND = 420.0
"""Seconds in which a person's wish to end a gang has come true, when the processes live."""

SWEPT_BOUND = 2400.0
"""The same when the process that was to do it was killed."""

HURTS = ("kill-before", "kill-after", "stall")
"""Faults after which a process cannot be asked to do what it was about to."""

ALLOWED_CAUSES = {
    Cause.PREEMPTED: {"preempted"},
    Cause.NODE_LOST: {"node_lost", "gone"},
    Cause.APPLICATION: {"application"},
    Cause.NO_EVIDENCE: {"no_evidence"},
    Cause.TIMED_OUT: {"timed_out"},
    Cause.GONE: {"gone"},
    Cause.NOT_STARTED: {"left", "superseded"},  # its job had to leave: a twin, or fenced
}
"""Of an attempt that ended by itself: what must have happened to it."""


def check(result: Result) -> list[str]:
    """Every invariant that does not hold, as ``name: what``."""
    if result.problem:
        return [f"end: {result.problem}"]
    runs = dict(_runs(result))
    broken = [f"journal: {run}" for run in runs.values() if isinstance(run, str)]
    folded = {name: run for name, run in runs.items() if isinstance(run, Run)}
    for part in (_lives, _orphans, _stops, _surface):
        broken += part(result)
    for name, run in folded.items():
        broken += _run(result, name, run)
    broken += _told(result)
    return broken


def _runs(result: Result) -> Iterator[tuple[str, Run | str]]:
    """Every incarnation's journal, folded from the files; or why it cannot be."""
    slot = slot_path(KEY)
    names = {path.split("/")[6] for path in result.state.files if path.startswith(f"{slot}/")}
    for name in sorted(names - {"incarnations"}):
        files = sorted(p for p in result.state.files if p.startswith(f"{slot}/{name}/journal/"))
        if not files:
            continue
        run = Run()
        try:
            for path in files:
                run = fold(run, json.loads(result.state.files[path]))
        except JournalError as error:
            yield name, f"{name}: {error}"
            continue
        if len({a.name for a in run.attempts}) != len(run.attempts):
            yield name, f"{name}: two attempts of one name"
            continue
        yield name, run


def _lives(result: Result) -> list[str]:
    broken = []
    lives = sorted(result.truth.lives, key=lambda life: life.begin)
    for i, life in enumerate(lives):
        for before in lives[:i]:
            if _end(before) > life.begin:
                broken.append(f"twice: life {life.number} began while life {before.number} computed")
            asked = [*result.airflow.begun_anew, *result.airflow.may_begin_anew]
            # What was submitted before a person asked counts for nothing, also when it begins after that.
            anew = any(_asked_for(result, before) < at <= life.begin for at in asked)
            if before.ok and before.incarnation == life.incarnation and not anew:
                broken.append(f"again: life {life.number} began after every rank had succeeded")
    return broken


def _asked_for(result: Result, life: LifeTruth) -> float:
    """When the attempt of a life was journalled."""
    for name, run in _runs(result):
        if name == life.incarnation and isinstance(run, Run):
            return next(a.at - BEGINNING for a in run.attempts if a.number == life.attempt)
    return life.begin


def _end(life: LifeTruth) -> float:
    return float("inf") if life.end is None else life.end


def _orphans(result: Result) -> list[str]:
    left = [job for job in result.jobs if not job.state.ended and not job.forgotten]
    return [f"orphan: {job.id} of attempt {job.job.attempt} is {job.state.value}" for job in left]


def _stops(result: Result) -> list[str]:
    airflow = result.airflow
    hurt = any(fault.kind in HURTS or _too_late(result, fault) for fault in result.faults)
    broken = []
    if airflow.swept and not hurt:
        broken.append("stop: a gang was left to the sweep, though every process lived")
    if airflow.stopped_at is None:
        return broken
    until = airflow.stopped_at + (SWEPT_BOUND if hurt else STOP_BOUND)
    late = [life for life in result.truth.lives if _end(life) > until]
    if late:
        broken.append(
            f"stop: life {late[0].number} computed {_end(late[0]) - airflow.stopped_at:.0f} s longer"
        )
    return broken


def _too_late(result: Result, fault: Fault) -> bool:
    """What nobody can mend but a sweep, though no fault killed a process."""
    call = result.hit.get(fault.k)
    if call is None:
        return False
    if fault.kind in ("delay", "drop") and call.actor in result.airflow.killed:
        return True  # a worker that was told to end waited for an answer, and was killed
    if fault.kind == "late" and call.op == "target.submit":
        return True  # the job arrives when the attempt is closed; it cannot compute
    return (
        fault.kind == "marked" and call.op == "airflow.defer"
    )  # the worker has asked already, no trigger is there yet


def _surface(result: Result) -> list[str]:
    lost = [context.get("exception") for context in result.complaints]
    return [f"surface: nobody took {error!r}" for error in lost if error is not None] + [
        f"surface: try {told.try_number} ended with {told.error!r}"
        for told in result.airflow.told
        if not documented(told.error)
    ]


def _run(result: Result, name: str, run: Run) -> list[str]:
    """What the journal of one incarnation says, against what has happened."""
    truth, broken = result.truth, []
    lives = [life for life in truth.lives if life.incarnation == name]
    whole = next((life for life in lives if life.ok), None)
    for attempt in run.attempts:
        outcome = attempt.outcome
        if outcome is None:
            continue
        happened = truth.happened.get((name, attempt.number), set())
        mine = [life for life in lives if life.attempt == attempt.number]
        if outcome.cause is Cause.SUCCEEDED and not any(life.ok for life in mine):
            broken.append(f"success: attempt {attempt.number} is called a success, no life of it was")
        elif any(life.ok for life in mine) and outcome.cause is not Cause.SUCCEEDED:
            broken.append(f"success: attempt {attempt.number} succeeded and is called {outcome.cause}")
        allowed = ALLOWED_CAUSES.get(outcome.cause)
        if allowed is not None and attempt.stop is None and not allowed & happened:
            told = ", ".join(sorted(happened)) or "nothing"
            broken.append(
                f"cause: attempt {attempt.number} ended as {outcome.cause}; what happened is {told}"
            )
    if len(run.attempts) > result.scenario.attempts + len(result.airflow.cleared):
        broken.append(f"attempts: {len(run.attempts)} in {name}")
    verdict = run.verdict
    if verdict is not None and verdict.success and whole is None:
        broken.append("success: a verdict of success, and no life succeeded")
    if verdict is not None and not verdict.success:
        stops = [a.stop for a in run.attempts if a.stop is not None] + ([run.stop] if run.stop else [])
        wanted = [stop.at - BEGINNING for stop in stops]
        if whole is not None and not any(at <= _end(whole) + 60 for at in wanted):
            broken.append(f"success: every rank of life {whole.number} succeeded, told is {verdict.cause}")
        wished = verdict.cause is Cause.STOPPED and _wished(result, run, verdict.epoch)
        if verdict.cause.value not in result.scenario.verdicts and not wished:
            broken.append(f"cause: the verdict is {verdict.outcome} ({verdict.cause}): {verdict.message}")
    for attempt in run.attempts:
        stop = attempt.stop
        if stop is not None and stop.reason == "user" and not _wished(result, run, stop.epoch):
            broken.append(
                f"stop: attempt {attempt.number} of owner {stop.epoch} was ended, and no person wanted it"
            )
    broken += _resumed(lives, run)
    return broken


def _wished(result: Result, run: Run, epoch: int) -> bool:
    """A person has ended or cleared the task since this owner had it, or Airflow has given its last try up."""
    began = run.owners[epoch - 1].at - BEGINNING
    if result.airflow.told and result.airflow.told[-1].state == "failed" and epoch == run.epoch:
        return True  # Airflow has given up on the last try: nobody wants it any more
    return any(at >= began for at in result.airflow.wished)


def _resumed(lives: list[LifeTruth], run: Run) -> list[str]:
    """Every life goes on where the one before had saved, unless a start from nothing was asked for."""
    broken = []
    for before, life in zip(lives, lives[1:], strict=False):
        resume = next((a.resume for a in run.attempts if a.number == life.attempt), True)
        furthest = before.from_step if before.saved is None else before.saved
        if (resume or life.attempt == before.attempt) and life.from_step != furthest:
            broken.append(f"resume: life {life.number} began at {life.from_step}, {furthest} was saved")
    return broken


def _told(result: Result) -> list[str]:
    airflow, scenario = result.airflow, result.scenario
    broken = []
    final = airflow.told[-1]
    marked = any(fault.kind == "marked" for fault in result.faults)
    if final.state not in scenario.told and not marked:
        broken.append(f"end: told {final.state} ({final.why})")
    if final.state == "success" and final.why != "a person":
        # After a success that was cleared, the old one is none.
        since = max(airflow.begun_anew, default=0.0)
        if not any(life.ok and life.begin >= since for life in result.truth.lives):
            broken.append("success: Airflow was told of a success that was none")
    # A worker that stood still costs its own try; when it wakes it may take the run from the next one, once.
    hurt = sum((fault.kind in HURTS) + (fault.kind == "stall") for fault in result.faults)
    failed = [told for told in airflow.told if told.state == "failed" and told.why != "a person"]
    spent = [told for told in failed if told.event.get("outcome") not in ("failed", "cancelled")]
    if len(spent) > hurt:
        broken.append(f"tries: {len(spent)} tries failed without a verdict: {spent[0].why}")
    return broken
