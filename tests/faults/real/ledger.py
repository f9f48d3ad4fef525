"""What became of runs on the real target, judged by what ranks, kernel and target say.

Purpose: three numbers that must be 0. *Duplicates*: two lives of one rank that
computed at the same moment (the second one did not get the lock of the first),
or a life that began after one had done all the work. *Orphans*: jobs that the
target still holds or queues, and processes of gangs on this machine. *False
ends*: what was told, to Airflow or in the journal, and was not so.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from airflow_gpu.gang.entries import JournalError, fold
from airflow_gpu.gang.run import Run
from airflow_gpu.targets.local.processes import read_marker, read_process
from tests.faults.real.stories import Played, Stage, slot_of


@dataclass
class Counts:
    """What a number of runs came to."""

    runs: int = 0
    hit: Counter[str] = field(default_factory=Counter)  # kinds of faults that found their call
    killed: int = 0
    stalled: int = 0
    processes: int = 0
    lives: int = 0
    duplicates: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    false_ends: list[str] = field(default_factory=list)

    def text(self) -> str:
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(self.hit.items()))
        return (
            f"{self.runs} runs on the local target, {self.processes} driver processes "
            f"({self.killed} killed, {self.stalled} stood still), {self.lives} lives; faults: {kinds}\n"
            f"duplicates {len(self.duplicates)}, orphans {len(self.orphans)}, false ends {len(self.false_ends)}"
        )


def judge(stage: Stage, runs: list[Played]) -> Counts:
    """Judge runs that have all come to their end."""
    counts = Counts(runs=len(runs))
    for played in runs:
        name = f"{played.plan}"
        marks = stage.root / "marks" / played.plan.run
        hit = marks / "hit"
        counts.hit[hit.read_text() if hit.exists() else "none"] += 1
        counts.killed += played.killed
        counts.stalled += played.stalled
        counts.processes += played.processes
        truth = [line.split() for line in _lines(marks / "truth")]
        counts.lives += sum(line[0] == "begin" and line[2] == "0" for line in truth)
        counts.duplicates += [f"{name}: {what}" for what in _duplicates(truth)]
        counts.false_ends += [f"{name}: {what}" for what in _false_ends(stage, played, truth)]
    counts.orphans = _orphans(stage)
    return counts


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _duplicates(truth: list[list[str]]) -> list[str]:
    found = [
        f"rank {rank} of life {life} computed beside another"
        for what, life, rank, *_ in truth
        if what == "twice"
    ]
    done: Counter[str] = Counter()
    ranks = {line[2] for line in truth}
    for what, life, *_ in truth:
        if what == "done":
            done[life] += 1
        elif what == "begin" and any(count == len(ranks) for count in done.values()):
            found.append(f"life {life} began after all work was done")
    return found


def _false_ends(stage: Stage, played: Played, truth: list[list[str]]) -> list[str]:
    story = played.plan.story
    if not played.ended:
        return [f"no end: {played.trouble}; {played.told}"]
    found = [f"an error that no user is told of: {told['error']}" for told in played.told if "error" in told]
    done = Counter(life for what, life, *_ in truth if what == "done")
    whole = any(count == story.nodes for count in done.values())
    runs = list(_journals(stage, played))
    found += [run for run in runs if isinstance(run, str)]
    folded = [run for run in runs if isinstance(run, Run)]
    last = folded[-1] if folded else Run()
    outcomes = [told.get("outcome") for told in played.told]
    if "success" in outcomes and not whole:
        found.append("success was told, not every rank had done its work")
    if story.event == "mark":
        if whole:
            found.append("what was marked failed ran to its end")
        if last.verdict is not None and last.verdict.outcome != "cancelled":
            found.append(f"the verdict after mark failed is {last.verdict.outcome}")
        return found
    if last.verdict is None or not last.verdict.success or not whole:
        found.append(
            f"the end is {last.verdict and last.verdict.message}, all done is {whole}; told {played.told}"
        )
    failures = [told.get("cause") for told in played.told if told.get("outcome") == "failed"]
    if failures and not (story.fails and set(failures) == {"application"}):
        found.append(f"told as failed: {failures}")
    return found


def _journals(stage: Stage, played: Played) -> Any:
    """The journal of each incarnation, folded from its files, oldest first; or why it cannot be."""
    slot = stage.root / "state" / slot_of(played.plan)
    for path in sorted(slot.glob("incarnations/*.json")):
        run = Run()
        try:
            for file in sorted(
                (slot / json.loads(path.read_text())["incarnation"] / "journal").glob("*.json")
            ):
                run = fold(run, json.loads(file.read_text()))
        except (JournalError, ValueError) as error:
            yield f"the journal: {error}"
        else:
            yield run


def _orphans(stage: Stage) -> list[str]:
    rows = stage.admin.status()["jobs"]
    found = [f"{name} is {row['native']}" for name, row in rows.items() if row.get("held") or _waits(row)]
    ids = {row["id"] for row in rows.values()}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (process := read_process(int(entry))) and not process.dead:
            mark = read_marker(process.ident.pid)
            if mark is not None and mark.job in ids:
                found.append(f"process {entry} of job {mark.job}")
    return found


def _waits(row: dict[str, Any]) -> bool:
    return row["native"] in ("PENDING", "REQUEUED")
