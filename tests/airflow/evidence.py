"""What really ran, by the target's own journal and the ranks' own ledger.

Purpose: for one task instance, over all its incarnations: the jobs that the
local target has known (``jobs/<name>/`` of the cluster folder), the lives in
the run directories with the ends of their ranks, and the lines of the ledger
that the ranks of ``dags/steady.py`` write. :meth:`History.check` holds all of
it against the promise: at most one live life at any time, and nothing left.

What it does not do: ask Airflow, or the journal that our driver writes.

Limits: one machine, so one clock.
"""

from __future__ import annotations

import functools
import itertools
import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from airflow_gpu.gang.identity import LABEL_PREFIX, RunKey, labels, slot_path
from airflow_gpu.targets.local.words import HOLDING, WAITING

GRAIN = 0.05
"""Seconds by which two moments may be off that were written by two processes: a file's time is coarse."""


@dataclass(frozen=True)
class Job:
    """One submission, as the target knows it."""

    name: str
    incarnation: str
    attempt: int
    word: str
    submitted: float
    started: float | None  # first agent
    ended: float | None

    @property
    def over(self) -> bool:
        return self.word not in WAITING | HOLDING


@dataclass(frozen=True)
class Lived:
    """One life: from its claim to the end of its last rank (or of its job, if a node could not say)."""

    incarnation: str
    attempt: int
    number: int
    start: int | None  # step of the checkpoint that it began from
    began: float
    ended: float | None
    step: int | None  # last reported


@dataclass(frozen=True)
class History:
    """All that ran for one task instance, in the order in which it began."""

    jobs: list[Job]
    lives: list[Lived]
    ledger: list[dict[str, Any]]

    @property
    def over(self) -> bool:
        return all(job.over for job in self.jobs)

    @property
    def starts(self) -> list[int]:
        """The step at which each life began: 0 is the beginning."""
        return [life.start or 0 for life in self.lives]

    @property
    def incarnations(self) -> list[str]:
        return list(dict.fromkeys(life.incarnation for life in self.lives))

    @property
    def attempts(self) -> list[tuple[str, int]]:
        """Attempts that were submitted: (incarnation, number), as often as there were submissions."""
        return [(job.incarnation, job.attempt) for job in self.jobs]

    def told(self, what: str, rank: int = 0) -> list[dict[str, Any]]:
        return [line for line in self.ledger if line["what"] == what and line["rank"] == rank]

    def check(self) -> History:
        """Assert what must hold after every accident."""
        alive = [job.name for job in self.jobs if not job.over]
        assert not alive, f"left behind: {alive}"
        assert len(set(self.attempts)) == len(self.attempts), f"an attempt was submitted twice: {self.jobs}"
        for job in self.jobs:
            lives = [
                life
                for life in self.lives
                if (life.incarnation, life.attempt) == (job.incarnation, job.attempt)
            ]
            assert len(lives) <= 1, f"{job.name} has {len(lives)} lives, and this target restarts nothing"
        _apart([(life.began, life.ended, str(life)) for life in self.lives])
        _apart([(job.started, job.ended, job.name) for job in self.jobs if job.started is not None])
        wrong = [line for line in self.ledger if line["what"] in ("overlap", "mixed")]
        assert not wrong, f"the ranks met one another: {wrong}"
        began = {(line["attempt"], line["life"]) for line in self.ledger if line["what"] == "start"}
        known = {(life.attempt, life.number) for life in self.lives}
        assert began <= known, f"ranks ran that no life stands for: {began - known}"
        return self


def _apart(spans: list[tuple[float, float | None, str]]) -> None:
    for (_, end, one), (begin, _, other) in itertools.pairwise(sorted(spans)):
        assert end is not None, f"no end of {one} is known, and {other} began"
        assert end <= begin + GRAIN, f"{one} had not ended when {other} began"


def history(cluster: Path, ledger: Path, key: RunKey) -> History:
    """Read it all for the task instance ``key``."""
    jobs = sorted(_jobs(cluster, key), key=lambda job: job.submitted)
    lives = sorted(_lives(cluster / "runs" / slot_path(key), jobs), key=lambda life: life.began)
    file = ledger / f"{ledger_name(key)}.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return History(jobs, lives, lines)


def ledger_name(key: RunKey) -> str:
    """As ``GANG_RUN`` in the ranks."""
    return str(key).replace("/", "~")


def _jobs(cluster: Path, key: RunKey) -> list[Job]:
    wanted = labels(key, "any", 1, "")
    names = [LABEL_PREFIX + name for name in ("installation", "dag", "run", "task", "map-index")]
    found = []
    for folder in (cluster / "jobs").glob("[!.]*"):
        spec = _spec(folder)
        if any(spec["labels"].get(name) != wanted[name] for name in names):
            continue
        state = _read(folder / "state.json") or {}
        claims = [
            path.stat().st_mtime
            for path in folder.glob("start-*/node-*.claim")
            if path.read_text().strip() != "0"
        ]
        found.append(
            Job(
                name=folder.name,
                incarnation=spec["labels"][LABEL_PREFIX + "incarnation"],
                attempt=int(spec["attempt"]),
                word=str(state.get("word", "PENDING")),
                submitted=float(spec["submitted_at"]),
                started=min(claims, default=None),
                ended=state.get("ended_at"),
            )
        )
    return found


@functools.cache
def _spec(folder: Path) -> dict[str, Any]:
    """It is written before the folder gets its name, and never again."""
    body: dict[str, Any] = json.loads((folder / "job.json").read_text())
    return body


def _lives(slot: Path, jobs: list[Job]) -> list[Lived]:
    found = []
    for path in slot.glob("*/lives/*.json"):
        body = _read(path) or {}
        if body.get("kind") != "life":
            continue
        incarnation, attempt = path.parent.parent.name, int(body["attempt"])
        records = [_read(node) for node in (path.parent / path.stem / "nodes").glob("*.json")]
        ends = [datetime.fromisoformat(record["at"]).timestamp() for record in records if record is not None]
        of = [job.ended for job in jobs if (job.incarnation, job.attempt) == (incarnation, attempt)]
        start = body.get("from")
        found.append(
            Lived(
                incarnation=incarnation,
                attempt=attempt,
                number=int(body["life"]),
                start=int(start["step"]) if start else None,
                began=datetime.fromisoformat(body["at"]).timestamp(),
                ended=max(ends) if len(ends) == int(body["nodes"]) else (of[0] if of else None),
                step=(_read(path.parent / path.stem / "progress.json") or {}).get("step"),
            )
        )
    return found


def _read(path: Path) -> dict[str, Any] | None:
    """None where it is not there, or is being written."""
    try:
        body = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return body if isinstance(body, dict) else None
