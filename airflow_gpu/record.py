"""What a run leaves behind for people: the XCom record, and the lines in the log.

Purpose: one small, documented record per verdict. Its fields:

``outcome``, ``cause``, ``message``
    the verdict.
``result``
    what rank 0 handed back, up to ``RESULT_LIMIT`` bytes of JSON; None when
    there was nothing or it is larger.
``result_uri``
    where it is in the run directory; None when there was nothing.
``attempts``
    one per attempt: ``attempt, target, cause, detail, started, ended,
    restarts, checkpoint, lives``; a life has ``life, started, ended, from``.
``checkpoint``
    the newest complete one: ``life, step, uri``; None when there is none.
``cost``
    ``node_hours`` and ``gpu_hours`` that were held, ``usd`` at the offers' price.
``placement``
    the decision of the last attempt: chosen offer, others with their reasons.
``run_dir``, ``journal``
    where everything else is.
``failure``
    of a failed run: the first failing rank with ``host``, ``exit_code`` or
    ``signal``, and ``tail``, the end of its output.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from airflow_gpu.gang.entries import iso
from airflow_gpu.gang.run import (
    Attempt,
    Cause,
    Failure,
    Life,
    Observation,
    Run,
    State,
    Verdict,
)
from airflow_gpu.gang.spec import Gang
from airflow_gpu.rundir.channel import Channel, Evidence
from airflow_gpu.rundir.journal import Journal

RESULT_LIMIT = 32 * 1024
"""Bytes of a result that travel in XCom; a larger one is named by its URI."""


async def build_record(
    run: Run, gang: Gang, channel_of: Callable[[Attempt], Channel], journal: Journal
) -> dict[str, Any]:
    """The record of a run at its verdict, as JSON. ``channel_of`` answers the channel that an attempt has used."""
    lives: list[Life] = []
    ends: Ends = {}
    for channel in {attempt.channel: channel_of(attempt) for attempt in run.attempts}.values():
        for life in await channel.lives():
            if not life.fence:
                lives.append(life)
                ends[life.number] = await channel.ended_at(life)
    last = run.attempts[-1] if run.attempts else None
    newest = channel_of(last) if last is not None else None
    outcome = last.outcome if last else None
    result, result_uri = None, None
    if newest is not None and outcome is not None and outcome.cause is Cause.SUCCEEDED and outcome.life:
        data = await newest.result(outcome.life)
        if data is not None:
            result_uri = f"{newest.uri}/lives/{outcome.life:04d}/result.json"
            result = json.loads(data) if len(data) <= RESULT_LIMIT else None
    attempts = [_attempt(attempt, lives, ends) for attempt in run.attempts]
    where = await newest.locate(last) if newest is not None and last is not None else None
    return {
        "result": result,
        "result_uri": result_uri,
        "attempts": attempts,
        "checkpoint": None
        if where is None
        else {"life": where.life, "step": where.step, "uri": f"{where.channel}/checkpoints/{where.life:04d}"},
        "cost": _cost(run, gang, lives, ends),
        "placement": last.offer if last else None,
        "run_dir": newest.uri if newest else None,
        "journal": f"{journal.store.uri.rstrip('/')}/{journal.path}",
        "failure": asdict(outcome.failure) if outcome is not None and outcome.failure is not None else None,
    }


def clean(value: Any) -> Any:
    """The same JSON with text that every store and database takes: no lone surrogates (names of files that are not UTF-8), no NUL."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace").replace("\0", "\ufffd")
    if isinstance(value, dict):
        return {clean(name): clean(one) for name, one in value.items()}
    return [clean(one) for one in value] if isinstance(value, list | tuple) else value


Ends = dict[int, float | None]
"""When each life ended, by the records of its nodes; None where they do not say."""


def _lives_of(attempt: Attempt, lives: list[Life], ends: Ends) -> list[tuple[Life, float]]:
    """Lives of an attempt with their ends: by their own records, else the next one's start or the attempt's end."""
    mine = [life for life in lives if life.attempt == attempt.number]
    end = attempt.outcome.at if attempt.outcome else attempt.at
    found = []
    for i, life in enumerate(mine):
        until = mine[i + 1].at if i + 1 < len(mine) else end
        found.append((life, max(life.at, min(until, ends.get(life.number) or until))))
    return found


def _attempt(attempt: Attempt, lives: list[Life], ends: Ends) -> dict[str, Any]:
    outcome = attempt.outcome
    return {
        "attempt": attempt.number,
        "target": attempt.target,
        "cause": outcome.cause.value if outcome else None,
        "detail": outcome.detail if outcome else "",
        "started": iso(attempt.at),
        "ended": iso(outcome.at) if outcome else None,
        "restarts": outcome.restarts if outcome else 0,
        "checkpoint": asdict(outcome.checkpoint) if outcome and outcome.checkpoint else None,
        "lives": [
            {
                "life": life.number,
                "started": iso(life.at),
                "ended": iso(end),
                "from": asdict(life.start) if life.start else None,
            }
            for life, end in _lives_of(attempt, lives, ends)
        ],
    }


def _cost(run: Run, gang: Gang, lives: list[Life], ends: Ends) -> dict[str, Any]:
    node_hours = usd = 0.0
    for attempt in run.attempts:
        held = sum(end - life.at for life, end in _lives_of(attempt, lives, ends)) * gang.nodes / 3600
        node_hours += held
        usd += held * float(((attempt.offer.get("chosen") or {}).get("price_per_node_hour")) or 0.0)
    return {
        "node_hours": round(node_hours, 6),
        "gpu_hours": round(node_hours * gang.gpus_per_node, 6),
        "usd": round(usd, 4),
    }


# -- lines for people ----------------------------------------------------------------------------


def describe(attempt: Attempt, seen: Observation, evidence: Evidence) -> tuple[str, str]:
    """One line on where the attempt stands, and how far it is."""
    line = f"attempt {attempt.number} on {attempt.target}: {seen.state.value}"
    if seen.state is State.UNKNOWN or seen.ending:
        line += f" ({seen.native}{', ending' if seen.ending else ''})"
    if seen.life is not None:
        line += f", life {seen.life.number}{_start(seen.life, evidence)}"
    if seen.notice and not seen.state.ended:
        line += ", saving after the platform's notice"
    if seen.reason and seen.state is not State.RUNNING:
        line += f": {seen.reason}"
    if seen.state is not State.RUNNING or seen.step is None:
        return line, ""
    total = evidence.progress.get("total")
    return line, f", step {seen.step}" + (f" of {total}" if total else "")


def _start(life: Life, evidence: Evidence) -> str:
    """What it started from; nothing while the nodes may still find copies that are further."""
    if not evidence.started:
        return ""
    if evidence.copy is not None:
        return f" from the nodes' copies of step {evidence.copy}"
    return f" from step {life.start.step}" if life.start else " from the beginning"


def explain_failure(failure: Failure) -> str:
    """The first failing rank, where, how, and the end of its output."""
    if failure.cause == "node":
        head = f"node {failure.node} on {failure.host} was lost"
    elif failure.cause == "not_whole":
        head = "not every node came in time"
    else:
        how = f"signal {failure.signal}" if failure.signal else f"exit code {failure.exit_code}"
        head = f"rank {failure.rank} failed first: {how}, on {failure.host} (node {failure.node})"
    if failure.message and failure.cause != "rank":
        head += f": {failure.message}"
    if failure.tail:
        head += f"\n--- end of the output of rank {failure.rank} ---\n{failure.tail.rstrip()}\n---"
    return head


def event_of(verdict: Verdict) -> dict[str, Any]:
    """A verdict as it travels from the trigger to the worker.

    Through Airflow's database: a NUL in it, which PostgreSQL's JSON does not take, would end the whole triggerer.
    """
    event: dict[str, Any] = clean(
        {
            "outcome": verdict.outcome,
            "cause": verdict.cause.value,
            "message": verdict.message,
            "record": verdict.record,
        }
    )
    return event
