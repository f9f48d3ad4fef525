"""What a sweep found and did, for people and for machines.

Purpose: :class:`Report`, with :meth:`Report.json` and :meth:`Report.lines`. The
operator returns the former, the task log and the command show the latter.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from airflow_gpu.gang.entries import iso
from airflow_gpu.sweeping.decide import TABLE, Case, Do


@dataclass(slots=True)
class Item:
    """A run or a job, what it turned out to be, and what was done.

    ``done`` is what came of it, in words; empty when nothing was done.
    ``problem`` says that a person has to look.
    """

    case: Case
    run: str  # dag/run/task[map], or the path where the key is not known
    path: str = ""
    target: str = ""
    job: str = ""
    attempt: int | None = None
    state: str = ""  # of the job, by its target
    task: str = ""  # state of the task instance, by Airflow
    since: float | None = None
    detail: str = ""
    done: str = ""
    problem: bool = False
    checkpoint: int | None = None

    @property
    def do(self) -> Do:
        return TABLE[self.case].do

    def words(self) -> str:
        """One sentence: why, and what came of it."""
        why = TABLE[self.case].words + (f": {self.detail}" if self.detail else "")
        return f"{why}. {self.done[:1].upper()}{self.done[1:]}" if self.done else why

    def json(self) -> dict[str, Any]:
        body = {**asdict(self), "case": self.case.value, "do": self.do.value, "why": TABLE[self.case].words}
        body["since"] = iso(self.since) if self.since is not None else None
        return body


@dataclass(slots=True)
class Report:
    """``targets`` maps each target that was asked to "" or to why it could not be asked."""

    installation: str
    state_uri: str
    at: float
    dry_run: bool
    items: list[Item] = field(default_factory=list)
    targets: dict[str, str] = field(default_factory=dict)
    unimportant: frozenset[str] = frozenset()
    airflow: str = ""  # who was asked
    airflow_trouble: str = ""
    listed: int = 0
    seconds: float = 0.0

    @property
    def shown(self) -> list[Item]:
        """What somebody should know of: everything but what is wanted, over or another's."""
        return [item for item in self.items if item.do is not Do.LEAVE]

    @property
    def ended(self) -> list[Item]:
        """What was (or would be) ended because nobody else did."""
        return [
            item
            for item in self.items
            if item.case in (Case.UNWANTED, Case.EARLIER, Case.ORPHAN)
            or (item.case is Case.LOST and item.done)
        ]

    @property
    def problems(self) -> list[str]:
        """What was not found out or not done; empty when a person has nothing to do."""
        found = [
            f"target {name} could not be asked: {why}"
            for name, why in sorted(self.targets.items())
            if why and name not in self.unimportant
        ]
        found += [f"{item.job or item.run}: {item.words()}" for item in self.items if item.problem]
        return found

    def lines(self) -> list[str]:
        """For the log of a task."""
        told = [
            f"{self.listed} run directories at {self.state_uri}; asked {len(self.targets)} targets, Airflow {self.airflow}"
        ]
        told += [
            f"{item.job or item.run} on {item.target or '-'}: {item.words()}"
            for item in self.shown
            if not item.problem
        ]
        told += self.problems
        if self.airflow_trouble:
            told.append(f"Airflow did not answer: {self.airflow_trouble}")
        wanted = sum(item.case is Case.WANTED for item in self.items)
        told.append(
            f"{len(self.ended)} {'would be ' if self.dry_run else ''}ended, {wanted} wanted and left alone, "
            f"{len(self.problems)} for a person to look at"
        )
        return told

    def json(self) -> dict[str, Any]:
        """As JSON; ``ok`` says that nothing is left for a person."""
        return {
            "ok": not self.problems,
            "installation": self.installation,
            "state_uri": self.state_uri,
            "at": iso(self.at),
            "dry_run": self.dry_run,
            "seconds": round(self.seconds, 3),
            "run_directories": self.listed,
            "airflow": {"asked": self.airflow, "trouble": self.airflow_trouble},
            "targets": self.targets,
            "items": [
                item.json() for item in self.items if item.case not in (Case.OVER, Case.PART, Case.EMPTY)
            ],
            "problems": self.problems,
        }
