"""What becomes of a gang: ``step(run, gang, observation, now, epoch) -> action``.

Purpose: the only place that decides. The trigger, the synchronous operator,
the conformance tests, the property tests and simulation all run this function
and differ only in who looks and who acts.

What it does not do: no I/O, no clock, no chance. Time comes in as ``now``;
jitter is drawn from the names of the attempts.

Known limits: it sees one attempt at a time, because only one may live.

The rules, in the order in which they are applied:

1. A verdict ends it; success is absorbing. An older owner decides nothing.
2. An attempt that every rank reports as succeeded has succeeded, whatever the
   platform says of it (a job that exits 0 within a preemption's grace is
   PREEMPTED and queued again on newer Slurms).
3. An attempt is closed when the platform says that its ranks have ended; the
   cause comes from the ranks' own records where there are some. "Succeeded"
   without a record from every rank is not success.
4. Every state has a limit; at the limit the attempt is stopped, with a notice.
5. What follows an end is a matter of budgets, one per cause.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from airflow_gpu.gang.budgets import delay, fruitless, moves, open_targets, refusal, spent, streak
from airflow_gpu.gang.run import (
    Attempt,
    Cause,
    Observation,
    Outcome,
    Run,
    State,
    Verdict,
)
from airflow_gpu.gang.spec import Gang
from airflow_gpu.runtime.words import EXIT_NO_CREDENTIALS

EVIDENCE_LIMIT = 120.0
"""Seconds that ranks' records may lag behind the platform's word that they ended."""

STOP_LIMIT = 900.0
"""Seconds after the grace within which the platform must confirm a stop."""

TIME_LIMIT_SLACK = 120.0
"""Seconds by which the platform's own time limit may be late before we stop the attempt ourselves."""

FINISH_LIMIT = 300.0
"""Seconds a platform may take to notice that every rank has ended well."""

VANISH_LIMIT = 30.0
"""Seconds beyond the grace for which ranks of a job that is not there any more may still say that they ended."""

FENCE_LIMIT = 300.0
"""Seconds after the grace within which ranks that were fenced should say that they ended."""

STOP_CAUSES: dict[str, Cause] = {
    "user": Cause.STOPPED,  # mark failed, mark success, Clear, run set to failed
    "cleared": Cause.STOPPED,  # the task was cleared while its worker had it; the next try goes on
    "superseded": Cause.STOPPED,  # a newer try of the task took over and starts again
    "deadline": Cause.STOPPED,
    "time_limit": Cause.TIMED_OUT,
    "queued_too_long": Cause.QUEUED_TOO_LONG,
    "not_started": Cause.NOT_STARTED,
    "fruitless": Cause.FRUITLESS,
    "preemptions": Cause.PREEMPTED,  # the platform requeued it more often than the budget allows
    "moved": Cause.MOVED,  # another target can start it, this one does not
    "unreachable": Cause.UNREACHABLE,  # the target cannot be read, and recovery.unreachable is "move"
    "finished": Cause.NO_EVIDENCE,  # every rank ended, the platform did not see it
}


@dataclass(frozen=True, slots=True)
class Start:
    """Journal attempt ``number`` and submit it."""

    number: int
    resume: bool


@dataclass(frozen=True, slots=True)
class Submit:
    """Submit a journalled attempt (again): create-if-absent, so this is safe."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Watch:
    """Look at the current attempt, at the latest when ``until`` is reached."""

    attempt: Attempt
    until: float | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing runs; go on at ``until``."""

    until: float
    why: str


@dataclass(frozen=True, slots=True)
class RequestStop:
    """Journal that the attempt is to end. The cancelling follows from that."""

    attempt: Attempt
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """Ask the target to end the attempt (again: replies get lost), then look."""

    attempt: Attempt
    until: float


@dataclass(frozen=True, slots=True)
class Close:
    """Fence the attempt, then journal that it is over."""

    attempt: Attempt
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Finish:
    """Journal the verdict."""

    outcome: str
    cause: Cause
    message: str


@dataclass(frozen=True, slots=True)
class Done:
    """There is a verdict."""

    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Superseded:
    """A newer owner has the run: this one leaves and touches nothing."""


Action = Start | Submit | Watch | Wait | RequestStop | Cancel | Close | Finish | Done | Superseded


def step(run: Run, gang: Gang, seen: Observation | None, now: float, epoch: int) -> Action:
    """Decide what the owner ``epoch`` of the run does next.

    :param run: the journal, folded.
    :param gang: the request of this owner.
    :param seen: the newest look at the current attempt, None if there was none yet.
    :param now: seconds since the epoch.
    :param epoch: the owner for whom the caller acts.
    """
    if run.verdict is not None and (run.verdict.success or run.verdict.epoch == run.epoch):
        return Done(run.verdict)
    if epoch != run.epoch:
        return Superseded()
    attempt = run.current
    if attempt is None:
        return _next(run, gang, now, epoch)
    if _inherited(run, attempt) and attempt.stop is None:
        return RequestStop(attempt, "superseded", "the task was cleared")
    if seen is None or seen.attempt != attempt.number:
        if attempt.submitted_at is None and attempt.stop is None:
            return Submit(attempt)
        return Watch(attempt)
    return _judge(run, gang, attempt, seen, now)


def _begun_again(run: Run, attempt: Attempt) -> bool:
    """A Clear that begins from nothing came after the attempt: its success is that of something else."""
    return any(o.reason == "clear" and not o.resume and o.epoch > attempt.epoch for o in run.owners)


def _inherited(run: Run, attempt: Attempt) -> bool:
    """The attempt is from before a Clear: it is ended, and another one goes on from its checkpoint."""
    return any(owner.reason == "clear" and owner.epoch > attempt.epoch for owner in run.owners)


# -- while an attempt lives ----------------------------------------------------------------------


def _judge(run: Run, gang: Gang, attempt: Attempt, seen: Observation, now: float) -> Action:
    if seen.whole_success:
        return _finished(gang, attempt, seen, now)
    if seen.state.ended:
        return _ended(gang, attempt, seen, now)
    if attempt.stop is not None:
        return _stopping(gang, attempt, seen, now)
    end = deadline(run, gang)
    if end is not None and now >= end:
        return RequestStop(attempt, "deadline", f"the deadline passed while the gang was {seen.state.value}")
    if seen.state is State.UNKNOWN:
        # A retry or a Clear has the whole time anew, however long it was out of sight before.
        limit = max(seen.since, run.owners[-1].at) + gang.recovery.unknown_limit
        if now >= limit:
            lost = (
                f"{attempt.target} shows attempt {attempt.number} as {seen.native or 'nothing'!r} since "
                f"{_span(now - seen.since)}: {seen.reason or 'not a state we know'}"
            )
            if gang.recovery.unreachable == "move" and _others(gang, attempt):
                return RequestStop(attempt, "unreachable", lost)
            return Finish(
                "failed",
                Cause.LOST_SIGHT,
                f"{lost}. It may still run; nothing was started in its place.",
            )
        return Watch(attempt, _soonest(limit, end))
    return _limits(run, gang, attempt, seen, now, end)


def _finished(gang: Gang, attempt: Attempt, seen: Observation, now: float) -> Action:
    """Every rank reports success: only the platform may still have to notice."""
    assert seen.life is not None
    if seen.state.ended:
        return Close(attempt, _outcome(Cause.SUCCEEDED, seen, now, ""))
    if attempt.stop is not None:
        if seen.asked is not None and now >= seen.asked + gang.stop_grace + FINISH_LIMIT:
            # Its ranks are over by their own word and the fence lets no other life begin.
            return Close(
                attempt, _outcome(Cause.SUCCEEDED, seen, now, "the platform did not confirm the end")
            )
        return Cancel(attempt, now + gang.stop_grace)
    if seen.requeued:
        return RequestStop(
            attempt, "finished", "every rank succeeded, but the platform queued the gang again"
        )
    limit = seen.seen_since + (gang.recovery.unknown_limit if seen.state is State.UNKNOWN else FINISH_LIMIT)
    if now >= limit:
        return RequestStop(attempt, "finished", "every rank succeeded, but the platform still holds the gang")
    return Watch(attempt, limit)


def _ended(gang: Gang, attempt: Attempt, seen: Observation, now: float) -> Action:
    if seen.state is State.GONE and attempt.submitted_at is None:
        if attempt.stop is None:
            return Submit(attempt)
        # Never acknowledged, not there: it cannot start any more once it is fenced.
        return Close(
            attempt,
            _outcome(STOP_CAUSES.get(attempt.stop.reason, Cause.STOPPED), seen, now, attempt.stop.detail),
        )
    if seen.state is State.GONE and seen.ending is None and seen.life is not None and not seen.all_ended:
        # Nobody has seen it end. Perhaps its connection points elsewhere by now: its ranks are told by their run
        # directory, and have the time to say that they ended.
        limit = seen.seen_since + gang.stop_grace + VANISH_LIMIT
        if now < limit:
            return Cancel(attempt, limit)
    cause, detail = _cause(attempt, seen)
    if cause is None and seen.fenced in _LOST:
        cause = Cause(seen.fenced)  # as which it was to be closed when another life was claimed
    if cause is None:
        if now < seen.seen_since + EVIDENCE_LIMIT:
            return Watch(attempt, seen.seen_since + EVIDENCE_LIMIT)
        cause = Cause.NO_EVIDENCE if seen.state is State.SUCCEEDED else Cause.NODE_LOST
    return Close(attempt, _outcome(cause, seen, now, detail))


def _cause(attempt: Attempt, seen: Observation) -> tuple[Cause | None, str]:
    """Why it ended; None while a record that must come is still missing."""
    reason = seen.reason or seen.native
    if attempt.stop is not None:
        return STOP_CAUSES.get(attempt.stop.reason, Cause.STOPPED), attempt.stop.detail
    match seen.state:
        case State.SUCCEEDED:
            got = f"{seen.ranks_ok} of {seen.world_size} ranks" if seen.life else "no rank"
            return None, f"the platform says success, but {got} left a record of success"
        case State.PREEMPTED:
            return Cause.PREEMPTED, reason
        case State.NODE_LOST:
            return Cause.NODE_LOST, reason
        case State.TIMED_OUT:
            return Cause.TIMED_OUT, reason
        case State.OUT_OF_MEMORY:
            return Cause.OUT_OF_MEMORY, reason
        case State.CANCELLED:
            return Cause.CANCELLED, reason or "ended by someone outside of Airflow"
        case State.REJECTED:
            return Cause.REJECTED, reason
    # FAILED, or GONE after it was submitted: what it was ending as, and the ranks' own records, say more.
    told = _TOLD.get(seen.ending) if seen.ending is not None else None
    if told is not None:
        return told, reason
    current = (
        seen.life is not None and seen.life.restart >= seen.restart
    )  # an older life's records prove nothing
    if seen.notice and current:
        if seen.notice_cause == "time_limit":
            return Cause.TIMED_OUT, "ended after the notice before its time limit"
        return Cause.PREEMPTED, "ended after the platform's notice"
    if seen.failure is not None and current:
        by = {"node": Cause.NODE_LOST, "not_whole": Cause.NOT_WHOLE}.get(
            seen.failure.cause, Cause.APPLICATION
        )
        return by, seen.failure.message
    if seen.state is State.GONE:
        return Cause.GONE, reason or "its object vanished from the target"
    if not current and seen.exit_code == EXIT_NO_CREDENTIALS:
        return Cause.APPLICATION, f"{NO_CREDENTIALS} ({reason})"  # it would find none the next time either
    if not current:
        return Cause.NOT_STARTED, f"the runtime never started: {reason}"
    return None, f"a node ended without a word: {reason}"


NO_CREDENTIALS = "the job has no credentials for its channel: give it some by Gang(secrets=...), or let its nodes or pods have an identity"

_LOST = frozenset({Cause.PREEMPTED.value, Cause.NODE_LOST.value, Cause.GONE.value})

_TOLD = {
    State.PREEMPTED: Cause.PREEMPTED,
    State.NODE_LOST: Cause.NODE_LOST,
    State.TIMED_OUT: Cause.TIMED_OUT,
    State.OUT_OF_MEMORY: Cause.OUT_OF_MEMORY,
    State.CANCELLED: Cause.CANCELLED,
}


def _stopping(gang: Gang, attempt: Attempt, seen: Observation, now: float) -> Action:
    """Ask until the platform says that it is over; each driver gives it the whole time anew."""
    assert attempt.stop is not None
    if seen.asked is None:
        return Cancel(attempt, now + gang.stop_grace)
    if seen.state is State.UNKNOWN and seen.all_ended:
        # By their own word, and closing fences: no other life can begin.
        return Close(
            attempt, _outcome(STOP_CAUSES.get(attempt.stop.reason, Cause.STOPPED), seen, now, _why(attempt))
        )
    if attempt.stop.reason == "unreachable" and seen.state is State.UNKNOWN:
        limit = seen.asked + gang.stop_grace + FENCE_LIMIT
        if seen.life is None:
            return Close(
                attempt, _outcome(Cause.UNREACHABLE, seen, now, f"{_why(attempt)}. It had not started")
            )
        if now >= limit:
            why = f"{_why(attempt)}. Its ranks have not said that they ended; whatever they still do counts for nothing"
            return Close(attempt, _outcome(Cause.UNREACHABLE, seen, now, why))
        return Cancel(attempt, min(limit, now + gang.stop_grace))
    limit = seen.asked + gang.stop_grace + STOP_LIMIT
    if now < limit:
        return Cancel(attempt, min(limit, now + gang.stop_grace))
    return Finish(
        "failed",
        Cause.LOST_SIGHT,
        f"attempt {attempt.number} was told to end ({attempt.stop.reason}) {_span(now - attempt.stop.at)} ago, "
        f"but {attempt.target} still shows it as {seen.native or seen.state.value!r}. It may still run.",
    )


def _limits(
    run: Run, gang: Gang, attempt: Attempt, seen: Observation, now: float, end: float | None
) -> Action:
    """Every wait is bounded: stop at the limit of the state, else look again by then."""
    recovery = gang.recovery
    allowed = 0 if recovery.mode == "never" else recovery.preemptions
    before = spent(run, recovery, run.epoch, "preemptions")
    if allowed is not None and seen.restart and before + seen.restart > allowed:
        return RequestStop(
            attempt,
            "preemptions",
            f"preempted {before + seen.restart} times, {allowed} allowed by recovery.preemptions",
        )
    if seen.fruitless >= recovery.fruitless:
        return RequestStop(attempt, "fruitless", fruitless(seen.fruitless, recovery))
    move_at = None
    if seen.state is State.QUEUED and not seen.begun:
        limit = _waiting_since(run, attempt, seen) + gang.placement.max_wait
        move_at = _move_at(run, gang, attempt, seen)
        if move_at is not None and now >= move_at:
            why = seen.blocked or f"it waited {_span(now - seen.since)}"
            return RequestStop(attempt, "moved", f"{why}; {seen.elsewhere} can start it now")
        reason, detail = (
            "queued_too_long",
            f"waited longer than placement.max_wait ({_span(gang.placement.max_wait)})",
        )
    elif (
        seen.life is None
        or seen.life.restart < seen.restart
        or (seen.state is State.STARTING and not seen.begun)
    ):
        limit = seen.seen_since + gang.placement.start_timeout
        reason = "not_started"
        detail = f"did not start within placement.start_timeout ({_span(gang.placement.start_timeout)})"
    else:
        limit = max(seen.life.at, seen.since) + gang.time_limit + TIME_LIMIT_SLACK
        reason, detail = "time_limit", f"ran longer than time_limit ({_span(gang.time_limit)})"
    if now >= limit:
        return RequestStop(attempt, reason, detail)
    return Watch(attempt, _soonest(limit, end, move_at))


def _moves(run: Run) -> list[Attempt]:
    """The attempts in a row, up to the current one, that waited and went elsewhere without a start."""
    found: list[Attempt] = []
    for attempt in reversed(run.attempts):
        if attempt.over and (
            attempt.outcome is None or attempt.outcome.life or attempt.outcome.cause is not Cause.MOVED
        ):
            break
        if attempt.over:
            found.append(attempt)
    return found


def _waiting_since(run: Run, attempt: Attempt, seen: Observation) -> float:
    """Since when it waits in queues: a move takes nothing from max_wait."""
    return min([seen.since, *(a.at for a in _moves(run) if a.epoch == attempt.epoch)])


def _move_at(run: Run, gang: Gang, attempt: Attempt, seen: Observation) -> float | None:
    """When a gang that waits here goes elsewhere; None while there is no place that would start it.

    It never goes back to where it has just waited in vain: what looks free there may not be free for it.
    """
    if not seen.elsewhere or gang.placement.move_after is None or not _others(gang, attempt):
        return None
    if any(a.target == seen.elsewhere for a in _moves(run)):
        return None
    return seen.since if seen.blocked else seen.since + gang.placement.move_after


def _others(gang: Gang, attempt: Attempt) -> bool:
    """There is a target of the list that the attempt does not run on."""
    return any(target != attempt.target for target in gang.targets)


# -- between attempts ----------------------------------------------------------------------------


def _next(run: Run, gang: Gang, now: float, epoch: int) -> Action:
    owner = run.owner
    assert owner is not None
    last = run.attempts[-1] if run.attempts else None
    succeeded = last is not None and last.outcome is not None and last.outcome.cause is Cause.SUCCEEDED
    if last is not None and succeeded and not _begun_again(run, last):
        return Finish("success", Cause.SUCCEEDED, "")
    mine = run.of_epoch(epoch)
    if run.stop is not None:
        return Finish("cancelled", Cause.STOPPED, run.stop.detail or f"stopped: {run.stop.reason}")
    # Once a start from nothing was asked for, everything is one until a life of it has begun.
    fresh = max((o.epoch for o in run.owners if not o.resume), default=0)
    resume = not fresh or any(a.epoch >= fresh and a.outcome and a.outcome.life for a in run.attempts)
    end = deadline(run, gang)
    if last is None or not mine:
        if end is not None and now >= end:
            return Finish("failed", Cause.STOPPED, "the deadline had passed before the gang could start")
        return Start(len(run.attempts) + 1, resume)
    outcome = last.outcome
    assert outcome is not None
    if succeeded:
        return Start(len(run.attempts) + 1, resume)
    stop = last.stop
    if stop is not None and (stop.epoch < epoch or stop.reason == "superseded"):
        # An older owner's stop, or ours of its attempt, is a lost attempt and not a verdict.
        return Start(len(run.attempts) + 1, resume)
    if stop is not None and stop.reason in ("user", "deadline", "cleared"):
        # Whatever it ended as in the meantime: it was to end.
        kind = "failed" if stop.reason == "deadline" else "cancelled"
        return Finish(kind, Cause.STOPPED, stop.detail or f"stopped: {stop.reason}")
    refused = refusal(run, gang.recovery, outcome, epoch)
    if outcome.cause in (Cause.MOVED, Cause.UNREACHABLE) or (
        outcome.cause in (Cause.QUEUED_TOO_LONG, Cause.REJECTED) and open_targets(run, gang, epoch)
    ):
        refused = None  # it says something of that target, and there are others
    if refused is not None:
        return Finish("failed", outcome.cause, refused)
    if end is not None and now >= end:
        return Finish(
            "failed", Cause.STOPPED, f"the deadline passed; the last attempt ended as {outcome.cause}"
        )
    count = streak(mine)
    if count >= gang.recovery.fruitless:
        return Finish("failed", Cause.FRUITLESS, fruitless(count, gang.recovery))
    pause = delay(gang.recovery, outcome.cause, max(count, moves(mine) - 1), last.name)
    at = outcome.at + pause
    if now < at <= now + pause:  # else the clock of who wrote the end was wrong
        return Wait(at if end is None else min(at, end), f"attempt {last.number} ended as {outcome.cause}")
    return Start(len(run.attempts) + 1, resume)


# -- helpers -------------------------------------------------------------------------------------


def deadline(run: Run, gang: Gang) -> float | None:
    """The moment by which this owner must be done: Airflow's limit, or ``placement.deadline``.

    The latter counts from the run's start, retries included; a person who
    clears the task starts it anew.
    """
    owner = run.owner
    ends = []
    if owner is not None and owner.deadline is not None:
        ends.append(owner.deadline)
    if gang.placement.deadline is not None and run.owners:
        began = max(o.at for o in run.owners if o.epoch == 1 or o.reason in ("start", "clear"))
        ends.append(began + gang.placement.deadline)
    return min(ends) if ends else None


def _outcome(cause: Cause, seen: Observation, now: float, detail: str) -> Outcome:
    return Outcome(
        cause=cause,
        at=now,
        detail=detail,
        failure=None if cause is Cause.SUCCEEDED else seen.failure,
        life=seen.life.number if seen.life else None,
        checkpoint=seen.checkpoint,
        copy=seen.copy,
        restarts=seen.restart,
        blamed=seen.blamed,
    )


def _why(attempt: Attempt) -> str:
    return attempt.stop.detail if attempt.stop is not None else ""


def _soonest(*times: float | None) -> float | None:
    known = [t for t in times if t is not None]
    return min(known) if known else None


def _span(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


StepFunction = Callable[[Run, Gang, Observation | None, float, int], Action]
