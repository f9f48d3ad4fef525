"""What people see of one life: when and how it ended, its ranks, its progress.

Purpose: a part of :mod:`airflow_gpu.plugin.view`. Pure.

Limits: ranks and platforms write what they like, so every value is checked for
what it is; one that is not is shown as unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from airflow_gpu.gang.entries import iso, seconds
from airflow_gpu.gang.run import Attempt, Cause
from airflow_gpu.plugin.collect import LAST_TIME, LifeFacts

RANKS_SHOWN = 1024
"""Ranks of a life that are listed before their nodes have reported."""

METRICS_SHOWN = 6

SAVED = 75
"""Exit code of a rank that ended after a notice, to be resumed."""

ENDED_BY_RUNTIME = ("SIGTERM", "SIGKILL")
"""How ranks end that the runtime ends: after the first failure, or when the grace of a notice is over."""

TONES: dict[Cause, str] = {
    Cause.SUCCEEDED: "good",
    Cause.APPLICATION: "bad",
    Cause.OUT_OF_MEMORY: "bad",
    Cause.PREEMPTED: "infra",
    Cause.NODE_LOST: "infra",
    Cause.NOT_WHOLE: "infra",
    Cause.NOT_STARTED: "infra",
    Cause.GONE: "infra",
    Cause.NO_EVIDENCE: "bad",
    Cause.TIMED_OUT: "bad",
    Cause.REJECTED: "bad",
    Cause.QUEUED_TOO_LONG: "infra",
    Cause.MOVED: "infra",
    Cause.UNREACHABLE: "infra",
    Cause.FRUITLESS: "bad",
    Cause.LOST_SIGHT: "bad",
    Cause.CANCELLED: "stop",
    Cause.STOPPED: "stop",
}


def view_life(
    attempt: Attempt, found: LifeFacts, after: LifeFacts | None, *, now: float, logs: bool
) -> dict[str, Any]:
    """One life as JSON.

    :param after: the next life of the same attempt, if the platform started it again.
    """
    life = found.life
    ended, tone, word = _end(attempt, found, after)
    progress = found.progress or {}
    return {
        "life": life.number,
        "attempt": attempt.number,
        "job": life.job,
        "restart": life.restart,
        "nodes": life.nodes,
        "processes": life.world_size,
        "from": asdict(life.start) if life.start else None,
        "started": iso(life.at),
        "ended": None if ended is None else iso(max(ended, life.at)),
        "seen": iso(max(now, life.at)),
        "tone": tone,
        "word": word,
        "notice": time_of(found.notice.get("at")) if found.notice else None,
        "noticed": found.notice is not None,
        "notice_source": str((found.notice or {}).get("source") or "")[:200],
        "progress": {
            "step": whole(progress.get("step")),
            "total": whole(progress.get("total")),
            "at": time_of(progress.get("at")),
            "metrics": _metrics(progress.get("metrics")),
        }
        if progress
        else None,
        "checkpoints": [{**one, "at": time_of(one["at"])} for one in found.checkpoints],
        "ranks_read": found.ranks_read,
        "ranks": _ranks(found, logs) if found.ranks_read else [],
        "left_out": max(0, life.world_size - RANKS_SHOWN) if found.ranks_read else life.world_size,
    }


def _metrics(told: Any) -> dict[str, float]:
    """Numbers that rank 0 reports beside its step."""
    numbers = told.items() if isinstance(told, dict) else ()
    found = [(str(name)[:40], value) for name, value in numbers if isinstance(value, (int, float))]
    return {name: float(value) for name, value in found[:METRICS_SHOWN] if abs(value) < 1e100}  # and no NaN


def _end(attempt: Attempt, found: LifeFacts, after: LifeFacts | None) -> tuple[float | None, str, str]:
    """When a life ended (None: it has not), the tone and the word of how."""
    ranks = [rank for node in found.nodes for rank in _listed(node)]
    complete = (
        len({number for node in found.nodes if (number := whole(node.get("node"))) is not None})
        == found.life.nodes
        > 0
    )
    last = max((at for rank in ranks if (at := seconds_of(rank.get("ended"))) is not None), default=None)
    failure = found.failure or {}
    bad = seconds_of(failure.get("at"))
    if complete and ranks and all(rank.get("exit_code") == 0 for rank in ranks):
        return last, "good", "succeeded"
    if after is not None:  # the platform started the attempt again
        until = last or bad or after.life.at
        if failure.get("cause") == "node":
            return until, "infra", "node lost"
        if failure.get("cause") == "not_whole":
            return until, "infra", "not whole"
        if failure and not found.notice:
            return until, "bad", "a rank failed"
        return until, "infra", "preempted"
    if attempt.outcome is not None:
        cause = attempt.outcome.cause
        return last or bad or attempt.outcome.at, TONES.get(cause, "idle"), words(cause)
    if complete:
        return last, "idle", "every rank has ended"
    if failure:
        return None, "bad", "failing"
    if found.notice:
        return None, "infra", "saving after a notice"
    return None, "run", "running"


def _ranks(found: LifeFacts, logs: bool) -> list[dict[str, Any]]:
    """The ranks by node: as their nodes have reported them, or as they must be."""
    nodes: dict[int, dict[str, Any]] = {}
    for record in found.nodes:
        number = whole(record.get("node"))
        if number is None:
            continue
        ranks = [_rank(rank, found, logs) for rank in _listed(record)]
        nodes[number] = {
            "node": number,
            "host": str(record.get("host") or ""),
            "reported": True,
            "ranks": ranks,
        }
    count = max(found.life.nodes, 1)
    each = max(1, -(-found.life.world_size // count))
    seen = {rank["rank"] for node in nodes.values() for rank in node["ranks"]}
    for number in range(min(found.life.world_size, RANKS_SHOWN)):
        if number not in seen:
            node = nodes.setdefault(
                number // each, {"node": number // each, "host": "", "reported": False, "ranks": []}
            )
            if not node["reported"]:
                node["ranks"].append(_rank({"rank": number}, found, logs))
    return [nodes[number] for number in sorted(nodes)]


def _listed(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The ranks in the record of a node."""
    ranks = record.get("ranks")
    listed = ranks if isinstance(ranks, list) else []
    return [one for one in listed if isinstance(one, dict) and whole(one.get("rank")) is not None]


def _rank(rank: Mapping[str, Any], found: LifeFacts, logs: bool) -> dict[str, Any]:
    number = int(rank["rank"])
    code, signal = whole(rank.get("exit_code")), rank.get("signal")
    first = found.failure is not None and found.failure.get("rank") == number
    if code is None and not signal:
        tone = "idle"
    elif code == 0:
        tone = "good"
    elif first or not (code == SAVED or signal in ENDED_BY_RUNTIME):
        tone = "bad"
    else:
        tone = "idle" if found.failure else "infra"
    return {
        "rank": number,
        "local_rank": whole(rank.get("local_rank")),
        "exit_code": code,
        "signal": str(signal) if signal else None,
        "started": time_of(rank.get("started")),
        "ended": time_of(rank.get("ended")),
        "tone": tone,
        "first_failure": first,
        "log": logs and number in found.logs,
        "log_size": found.logs.get(number) if logs else None,
    }


# -- words and values ----------------------------------------------------------------------------------


def words(cause: Cause) -> str:
    """A cause as people read it."""
    return "application error" if cause is Cause.APPLICATION else cause.value.replace("_", " ")


def whole(value: Any) -> int | None:
    """A whole number of a sane size; None for what is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53 else None


def seconds_of(value: Any) -> float | None:
    """A time that a rank wrote, as seconds; None for what is none."""
    try:
        if isinstance(value, str):
            at = seconds(value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            at = float(value)
        else:
            return None
    except (ValueError, OverflowError):
        return None
    return at if 0 < at < LAST_TIME else None


def time_of(value: Any) -> str | None:
    """A time that a rank wrote, in the one spelling."""
    at = seconds_of(value)
    return None if at is None else iso(at)
