"""What a sweep does in which case: pure, one table.

Purpose: :func:`case_of_run` and :func:`case_of_job` say which case something
is, :data:`TABLE` what is done then. Nothing here reads or writes.

What it does not do: decide about a gang that somebody wants. That is the
driver's business, and a sweep leaves it alone.

Limits: it sees what was read: first the journal, then Airflow's answer. That
the journal has not moved since is for the writer of the stop to see to.

Example::

    case = case_of_run(run, newest=True, answer=answer_of("failed"))
    TABLE[case].do  # Do.END
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from airflow_gpu.gang.identity import LABEL_PREFIX, RunKey, attempt_name, labels
from airflow_gpu.gang.run import Run
from airflow_gpu.targets.base import Listed


class Wanted(StrEnum):
    """Whether a try of the task instance has the gang, or one may still come that adopts it."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Answer:
    """What Airflow says of a task instance. ``state`` is its word, for people."""

    wanted: Wanted
    state: str = ""


ENDED: Final = frozenset({"success", "failed", "skipped", "upstream_failed", "removed"})
"""States of a task instance that nothing but a person's Clear leaves, and a Clear makes a new owner."""

COMING: Final = frozenset(
    {
        "none",  # cleared, and the new try has not begun
        "scheduled",
        "queued",
        "running",
        "restarting",
        "deferred",
        "awaiting_input",
        "up_for_retry",
        "up_for_reschedule",
    }
)
"""States in which a try has the gang, or one will come and adopt it."""

ABSENT: Final = "not there"

DOCTOR: Final = "airflow-gpu-doctor"
"""DAG id of the gangs that ``airflow-gpu doctor --job`` runs, of which Airflow knows nothing."""

DOCTOR_LIMIT: Final = 3600.0
"""Seconds for which such a gang is wanted. One whose command was killed is left behind like any other."""


def answer_of(state: str | None, *, exists: bool = True, trusted: bool = True) -> Answer:
    """Airflow's answer for one task instance.

    :param state: its state; None when it has none yet.
    :param exists: there is such a task instance.
    :param trusted: it is certain that this is the Airflow that the gang belongs to. Another one's
        "there is no such task instance" says nothing.
    """
    if not exists:
        return Answer(Wanted.NO if trusted else Wanted.UNKNOWN, ABSENT)
    word = state or "none"
    if word in ENDED:
        return Answer(Wanted.NO, word)
    if word in COMING:
        return Answer(Wanted.YES, word)
    return Answer(Wanted.UNKNOWN, word)  # a state of a newer Airflow


def unasked(why: str) -> Answer:
    """Airflow could not be asked, because of ``why``."""
    return Answer(Wanted.UNKNOWN, f"not known: {why}")


class Do(StrEnum):
    """What a sweep does."""

    LEAVE = "leave"
    END = "end"
    CANCEL = "cancel"
    CLOSE = "close"
    REPORT = "report"


class Case(StrEnum):
    """What a run directory or a job on a target turns out to be."""

    # run directories
    WANTED = "wanted"
    UNWANTED = "unwanted"
    ENDING = "ending"
    EARLIER = "earlier"
    OPEN = "open"
    OVER = "over"
    EMPTY = "empty"
    UNDECIDED = "undecided"
    BROKEN = "broken"
    # jobs on a target
    PART = "part"
    ENDED = "ended"
    ORPHAN = "orphan"
    LOST = "lost"
    STRANGE = "strange"
    HELD = "held"
    FOREIGN = "foreign"


@dataclass(frozen=True, slots=True)
class Row:
    """``do`` is done; ``problem`` says that a person has to look when it stays so; ``words`` is why."""

    do: Do
    problem: bool
    words: str


TABLE: Final[Mapping[Case, Row]] = {
    Case.WANTED: Row(Do.LEAVE, False, "its task has it, or will take it over"),
    Case.UNWANTED: Row(Do.END, False, "its task has ended without it"),
    Case.ENDING: Row(Do.END, False, "its task has ended, and it was told to end already"),
    Case.EARLIER: Row(Do.END, False, "it is of an earlier DAG run of this name, or of before a Clear"),
    Case.OPEN: Row(Do.CLOSE, False, "its task has ended and nothing of it runs; only the verdict is missing"),
    Case.OVER: Row(Do.LEAVE, False, "over"),
    Case.EMPTY: Row(Do.LEAVE, False, "nobody has begun it"),
    Case.UNDECIDED: Row(
        Do.REPORT, True, "whether its task still wants it is not known, so it was left alone"
    ),
    Case.BROKEN: Row(Do.REPORT, True, "its journal cannot be understood, so it was left alone"),
    Case.PART: Row(Do.LEAVE, False, "the current attempt of its run"),
    Case.ENDED: Row(Do.LEAVE, False, "ended"),
    Case.ORPHAN: Row(Do.CANCEL, False, "its attempt is over, and it still holds nodes"),
    Case.LOST: Row(
        Do.REPORT,
        True,
        "it runs, and there is no run directory of it. If state_uri is wrong, every gang looks like this; "
        "--lost ends it",
    ),
    Case.STRANGE: Row(
        Do.REPORT, True, "its labels name a run whose journal knows nothing of it, so it was left alone"
    ),
    Case.HELD: Row(Do.REPORT, True, "the journal of its run cannot be understood, so it was left alone"),
    Case.FOREIGN: Row(Do.LEAVE, False, "another installation's"),
}


def case_of_run(run: Run | None, *, newest: bool, answer: Answer) -> Case:
    """What a run directory is.

    :param run: its journal; None when that cannot be understood.
    :param newest: it is the newest incarnation of its slot. What an older one still runs, no try will adopt.
    :param answer: what Airflow says of its task instance.
    """
    if run is None:
        return Case.BROKEN
    if not run.owners:
        return Case.EMPTY
    if run.current is None and run.verdict is not None:
        return Case.OVER
    # From here on something runs (also behind a verdict that had lost sight of it), or might start.
    if not newest:
        return Case.EARLIER if run.current is not None else Case.OPEN
    if answer.wanted is Wanted.YES:
        return Case.WANTED
    if answer.wanted is Wanted.UNKNOWN:
        return Case.UNDECIDED
    if run.current is None:
        return Case.OPEN
    stop = run.current.stop
    told = stop is not None and stop.reason == "user" and run.verdict is None
    return Case.ENDING if told else Case.UNWANTED


def case_of_job(listed: Listed, installation: str, found: tuple[RunKey, str, Run | None] | None) -> Case:
    """What a job on a target is.

    :param installation: of whom this is the sweep.
    :param found: key, incarnation and journal of its run, read after the job was seen; None when there is
        no such run directory.
    """
    if listed.ref.labels.get(LABEL_PREFIX + "installation") != installation_label(installation):
        return Case.FOREIGN
    if listed.sighting.state.ended:
        return Case.ENDED
    if found is None:
        return Case.LOST
    key, incarnation, run = found
    if run is None:
        return Case.HELD
    number = listed.ref.attempt
    if not 1 <= number <= len(run.attempts) or attempt_name(key, incarnation, number) != listed.ref.name:
        return Case.STRANGE
    return Case.ORPHAN if run.attempts[number - 1].over else Case.PART


def installation_label(installation: str) -> str:
    """The value of the label ``airflow-gpu/installation``, by which a target lists this installation's jobs."""
    return labels(RunKey(installation, "-", "-", "-"), "-", 1, "")[LABEL_PREFIX + "installation"]
