"""The journal's entries: how each is written as JSON, and how a run is folded from them.

Purpose: the one place that knows the format of ``journal/<n>.json``
(``docs/run-directory.md``) and that refuses an order of events which must not
be. Pure: :mod:`airflow_gpu.rundir.journal` reads and writes the files.

Limits: fields that a newer version added are ignored; an entry of a kind that
is not known here raises :class:`JournalError`, because skipping a decision
could let something run twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

from airflow_gpu.gang.run import (
    Attempt,
    Cause,
    CheckpointRef,
    Failure,
    Outcome,
    Owner,
    Run,
    Seed,
    Stop,
    Verdict,
)

VERSION = 1

Entry = dict[str, Any]


class JournalError(Exception):
    """The journal says something that cannot have been: nothing may be started on its account."""


def iso(at: float) -> str:
    """Seconds since the epoch as ISO 8601 in UTC, milliseconds, with a Z."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def seconds(text: str) -> float:
    """The reverse of :func:`iso`."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


# -- writing: the content of an entry, without seq, at and epoch, which the journal adds ---------------


def owner_entry(
    *,
    ti_id: str,
    try_number: int,
    max_tries: int,
    reason: str,
    resume: bool,
    deadline: float | None,
    gang: Mapping[str, Any],
    digest: str,
    note: str = "",
    dag_run: str = "",
    seed: Seed | None = None,
) -> Entry:
    return {
        "kind": "owner",
        "ti_id": ti_id,
        "try_number": try_number,
        "max_tries": max_tries,
        "reason": reason,
        "resume": resume,
        "deadline": None if deadline is None else iso(deadline),
        "gang": dict(gang),
        "digest": digest,
        **({"note": note} if note else {}),
        **({"dag_run": dag_run} if dag_run else {}),
        **({"seed": asdict(seed)} if seed is not None else {}),
    }


def attempt_entry(
    *,
    attempt: int,
    name: str,
    target: str,
    channel: str,
    offer: Mapping[str, Any],
    resume: bool,
    first_life: int,
    digest: str,
    seed: Seed | None = None,
    since: int = 0,
) -> Entry:
    return {
        "kind": "attempt",
        "attempt": attempt,
        "name": name,
        "target": target,
        "channel": channel,
        "offer": dict(offer),
        "resume": resume,
        "first_life": first_life,
        "digest": digest,
        **({"since": since} if since else {}),
        **({"seed": asdict(seed)} if seed is not None else {}),
    }


def submitted_entry(attempt: int, platform_id: str) -> Entry:
    return {"kind": "submitted", "attempt": attempt, "platform_id": platform_id}


def stop_entry(attempt: int, reason: str, detail: str) -> Entry:
    """``attempt`` 0: nothing runs, and this owner is to start nothing more."""
    return {"kind": "stop", "attempt": attempt, "reason": reason, "detail": detail}


def over_entry(attempt: int, outcome: Outcome) -> Entry:
    failure = outcome.failure
    return {
        "kind": "over",
        "attempt": attempt,
        "cause": outcome.cause.value,
        "detail": outcome.detail,
        "life": outcome.life,
        "restarts": outcome.restarts,
        "blamed": list(outcome.blamed),
        "checkpoint": None if outcome.checkpoint is None else asdict(outcome.checkpoint),
        "failure": None if failure is None else asdict(failure),
        **({} if outcome.copy is None else {"copy": outcome.copy}),
    }


def verdict_entry(outcome: str, cause: Cause, message: str, record: Mapping[str, Any]) -> Entry:
    return {
        "kind": "verdict",
        "outcome": outcome,
        "cause": cause.value,
        "message": message,
        "record": dict(record),
    }


# -- reading -------------------------------------------------------------------------------------


def fold(run: Run, entry: Mapping[str, Any]) -> Run:
    """The run after one more entry.

    :raises JournalError: the entry is malformed, of an unknown kind, or out of order.
    """
    try:
        seq, kind = int(entry["seq"]), str(entry["kind"])
        at, epoch = seconds(entry["at"]), int(entry["epoch"])
        if seq != run.seq + 1:
            raise JournalError(f"entry {seq} follows entry {run.seq}")
        after = _FOLDS[kind](run, entry, at, epoch)
    except JournalError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise JournalError(f"entry {entry.get('seq')!r} of kind {entry.get('kind')!r}: {error!r}") from error
    return replace(after, seq=seq)


def _owner(run: Run, entry: Mapping[str, Any], at: float, epoch: int) -> Run:
    if run.verdict is not None and run.verdict.success:
        raise JournalError("an owner after a verdict of success")
    if epoch != run.epoch + 1:
        raise JournalError(f"owner {epoch} follows owner {run.epoch}")
    owner = Owner(
        epoch=epoch,
        ti_id=str(entry["ti_id"]),
        try_number=int(entry["try_number"]),
        at=at,
        max_tries=int(entry.get("max_tries", 0)),
        reason=str(entry.get("reason", "start")),
        resume=bool(entry.get("resume", True)),
        deadline=None if entry.get("deadline") is None else seconds(entry["deadline"]),
        note=str(entry.get("note", "")),
        dag_run=str(entry.get("dag_run", "")),
        seed=_seed(entry),
    )
    return replace(run, owners=(*run.owners, owner), verdict=None, stop=None)


def _decided_by_owner(run: Run, epoch: int) -> None:
    if epoch != run.epoch:
        raise JournalError(f"owner {epoch} wrote after owner {run.epoch} had taken over")
    if run.verdict is not None:
        raise JournalError("an entry after the verdict")


def _attempt(run: Run, entry: Mapping[str, Any], at: float, epoch: int) -> Run:
    _decided_by_owner(run, epoch)
    number = int(entry["attempt"])
    if run.stop is not None:
        raise JournalError(f"attempt {number} after the owner was told to end")
    if run.current is not None:
        raise JournalError(f"attempt {number} while attempt {run.current.number} is not over")
    if number != len(run.attempts) + 1:
        raise JournalError(f"attempt {number} follows attempt {len(run.attempts)}")
    return run.with_attempt(
        Attempt(
            number=number,
            name=str(entry["name"]),
            target=str(entry["target"]),
            at=at,
            epoch=epoch,
            channel=str(entry["channel"]),
            resume=bool(entry.get("resume", True)),
            first_life=int(entry.get("first_life", 1)),
            digest=str(entry.get("digest", "")),
            offer=dict(entry.get("offer") or {}),
            seed=_seed(entry),
            since=int(entry.get("since", 0)),
        )
    )


def _seed(entry: Mapping[str, Any]) -> Seed | None:
    body = entry.get("seed")
    if not body:
        return None
    return Seed(str(body["channel"]), int(body["life"]), int(body["step"]), str(body.get("run", "")))


def _current(run: Run, entry: Mapping[str, Any]) -> Attempt:
    current = run.current
    if current is None or current.number != int(entry["attempt"]):
        raise JournalError(f"{entry['kind']} for attempt {entry['attempt']}, which is not the current one")
    return current


def _submitted(run: Run, entry: Mapping[str, Any], at: float, epoch: int) -> Run:
    _decided_by_owner(run, epoch)
    return run.with_attempt(
        replace(_current(run, entry), platform_id=str(entry["platform_id"]), submitted_at=at)
    )


def _stop(run: Run, entry: Mapping[str, Any], at: float, epoch: int) -> Run:
    _decided_by_owner(run, epoch)
    stop = Stop(reason=str(entry["reason"]), at=at, epoch=epoch, detail=str(entry.get("detail", "")))
    if entry["attempt"] == 0:
        if run.current is not None:
            raise JournalError("the owner is told to end while an attempt runs: that one is to be stopped")
        return replace(run, stop=stop)
    current = _current(run, entry)
    if current.stop is not None:
        if not _outranks(stop, current.stop):
            return run  # the first reason stands
        stop = replace(stop, at=current.stop.at)  # and the grace runs on
    return run.with_attempt(replace(current, stop=stop))


def _outranks(new: Stop, old: Stop) -> bool:
    """A person's wish to end it all stands above whatever lets it start again: a reason of ours, an older owner's stop."""
    return new.reason == "user" and (old.reason != "user" or old.epoch < new.epoch)


def _over(run: Run, entry: Mapping[str, Any], at: float, epoch: int) -> Run:
    _decided_by_owner(run, epoch)
    failure, checkpoint = entry.get("failure"), entry.get("checkpoint")
    known = {k: v for k, v in (failure or {}).items() if k in Failure.__dataclass_fields__}
    outcome = Outcome(
        cause=Cause(entry["cause"]),
        at=at,
        detail=str(entry.get("detail", "")),
        failure=Failure(**known) if failure else None,
        life=entry.get("life"),
        checkpoint=CheckpointRef(int(checkpoint["life"]), int(checkpoint["step"])) if checkpoint else None,
        copy=int(entry["copy"]) if entry.get("copy") is not None else None,
        restarts=int(entry.get("restarts", 0)),
        blamed=tuple(str(host) for host in entry.get("blamed") or ()),
        epoch=epoch,
    )
    return run.with_attempt(replace(_current(run, entry), outcome=outcome))


def _verdict(run: Run, entry: Mapping[str, Any], at: float, epoch: int) -> Run:
    _decided_by_owner(run, epoch)
    outcome, cause = str(entry["outcome"]), Cause(entry["cause"])
    last = run.attempts[-1] if run.attempts else None
    if outcome == "success" and not (last and last.outcome and last.outcome.cause is Cause.SUCCEEDED):
        raise JournalError("a verdict of success without an attempt that succeeded")
    verdict = Verdict(
        outcome=outcome,
        cause=cause,
        at=at,
        epoch=epoch,
        message=str(entry.get("message", "")),
        record=dict(entry.get("record") or {}),
    )
    return replace(run, verdict=verdict)


_FOLDS = {
    "owner": _owner,
    "attempt": _attempt,
    "submitted": _submitted,
    "stop": _stop,
    "over": _over,
    "verdict": _verdict,
}
