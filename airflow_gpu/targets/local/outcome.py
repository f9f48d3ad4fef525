"""How a gang ended: from the ends of its nodes and what was done to it, one word and one sentence.

Purpose: pure, so that the rules can be read and tested in one place.

* every node ended with 0: DONE, whatever was asked of it meanwhile;
* otherwise the first cause decides: a node that ended badly or was lost, a
  preemption, a cancel, the time limit;
* after a node ended badly: NODE_LOST when that node was lost, OUT_OF_MEMORY
  with the kernel's word that it killed one of its processes, else FAILED.

What it does not do: look at the ranks' records; the driver puts both together.

Limits: after a preemption's notice every end but 0 counts as the preemption's,
since launchers end with many codes when they are told to.
"""

from __future__ import annotations

from dataclasses import dataclass

from airflow_gpu.targets.local.launch import signal_name
from airflow_gpu.targets.local.records import Cause, JobState, Place, Spec
from airflow_gpu.targets.local.words import Word

CODES = {
    75: "ended after a notice",
    76: "the start was not claimed: a twin, or fenced",
    77: "the gang was not whole in time",
    78: "the job has no credentials for its channel",
    126: "the interpreter could not be run",
    127: "the interpreter was not found",
}
"""What the runtime and the shim mean by some exit codes."""

RESTARTED = "was running when the machine was restarted"
"""The reason of a lost node for which no node is to blame."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The word and sentence for an ended life. ``again``: it goes back to the queue."""

    word: Word
    reason: str
    blamed: tuple[str, ...] = ()
    again: bool = False


def first_bad(state: JobState) -> Place | None:
    """The node that ended badly first."""
    bad = [place for place in state.places if place.bad]
    return min(bad, key=lambda place: (place.ended_at or 0.0, place.rank), default=None)


def conclude(spec: Spec, state: JobState, out_of_memory: frozenset[int] = frozenset()) -> Ending:
    """What became of a gang whose nodes are all over.

    :param out_of_memory: ranks of nodes of which the kernel killed a process for want of memory.
    """
    if all(place.exit == 0 for place in state.places):
        return Ending(Word.DONE, "")
    blamed = tuple(
        f"node-{place.node}"
        for place in state.places
        if place.exit is None and place.lost and place.lost != RESTARTED
    )
    stop = state.stop
    first = first_bad(state)
    assert first is not None
    others = sum(place.bad for place in state.places) - 1
    ends = describe(first) + (f", and {others} more not with 0" if others else "")
    if stop is None or stop.cause is Cause.NODE_ENDED:
        if first.lost and first.exit is None:
            return Ending(Word.NODE_LOST, describe(first), blamed)
        if first.rank in out_of_memory:
            return Ending(
                Word.OUT_OF_MEMORY, f"the kernel ran out of memory and killed it: {describe(first)}", blamed
            )
        return Ending(Word.FAILED, describe(first), blamed)
    why = f"{stop.detail}: {ends}" if stop.detail else ends
    if stop.cause is Cause.TIME_LIMIT:
        return Ending(Word.TIMEOUT, why, blamed)
    if stop.cancelled:
        return Ending(Word.CANCELLED, why, blamed)
    if spec.requeue:
        return Ending(Word.REQUEUED, why, again=True)
    return Ending(Word.PREEMPTED, why, blamed)


def describe(place: Place) -> str:
    """How one node ended, in words."""
    who = f"node {place.rank} of the gang (node-{place.node})"
    if place.exit is None:
        return f"{who} {place.lost}" if place.lost else f"{who} was killed"
    meaning = CODES.get(place.exit) or signal_name(place.exit)
    return f"{who} ended with exit code {place.exit}" + (f" ({meaning})" if meaning else "")
