"""``airflow-gpu gangs``: what lives, how far it is, and what nobody wants any more."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from airflow_gpu.cli.place import Place
from airflow_gpu.cli.show import ago, cell, out, print_json, table
from airflow_gpu.gang.entries import iso
from airflow_gpu.gang.identity import run_path
from airflow_gpu.gang.run import Attempt
from airflow_gpu.rundir.channel import Evidence
from airflow_gpu.rundir.store import StoreError
from airflow_gpu.sweeping.decide import TABLE, Case, Do, case_of_run
from airflow_gpu.sweeping.looking import Look, SeenRun, look
from airflow_gpu.sweeping.sweep import items_of_jobs

AT_ONCE = 16
"""Channels that are read at once."""

MARKED = frozenset({Case.UNWANTED, Case.ENDING, Case.EARLIER, Case.BROKEN})


async def list_gangs(place: Place, asks: Any, *, every: bool, days: float, as_json: bool) -> int:
    """List them; 3 when a target could not be asked, so that what it runs is not known."""
    store = place.store()
    seen = await look(
        store,
        place.installation,
        place.target,
        asks,
        names=place.names(),
        since=time.time() - days * 86400 if days else 0.0,
        whole=every,
    )
    turn = asyncio.Semaphore(AT_ONCE)

    async def row(found: SeenRun) -> dict[str, Any]:
        async with turn:
            return await _row(place, found, seen)

    wanted = [found for found in seen.runs if every or found.open or found.trouble]
    rows: list[dict[str, Any]] = list(
        await asyncio.gather(*(row(found) for found in wanted if _is_one(found)))
    )
    rows += _jobs(seen, place.installation)
    away = {name: why for name, why in seen.targets.items() if why and name not in seen.unimportant}
    if as_json:
        print_json(
            {
                "ok": not away,
                "installation": place.installation,
                "state_uri": store.uri,
                "gangs": rows,
                "targets": seen.targets,
                "airflow": {"asked": asks.who, "trouble": seen.airflow},
            }
        )
    else:
        _show(rows, away, len(seen.over), every)
        if not seen.listed:
            where = (
                f"there is no run directory of {place.installation!r} in {store.uri}; is that where they are?"
            )
            out().print(f"[red]![/] {cell(where)}", soft_wrap=True)
    return 3 if away else 0


def _is_one(found: SeenRun) -> bool:
    """Not a run directory that two processes began at once, of which one was not needed."""
    return bool(found.trouble) or (found.run is not None and bool(found.run.owners))


async def _row(place: Place, found: SeenRun, seen: Look) -> dict[str, Any]:
    run, case = found.run, case_of_run(found.run, newest=found.newest, answer=found.answer)
    body: dict[str, Any] = {"gang": found.name, "path": found.dir.path, "mark": "", "why": found.trouble}
    if run is None or not run.owners:
        return {**body, "state": "broken", "mark": case.value}
    attempt = run.attempts[-1] if run.attempts else None
    evidence, known = await _evidence(place, found, attempt)
    listed = next((j for j in found.jobs if attempt is not None and j.listed.ref.name == attempt.name), None)
    asked = attempt is not None and seen.targets.get(attempt.target) == ""
    state, since = _state(found, attempt, asked)
    if listed is not None and run.current is not None:
        state = (
            "stopping"
            if attempt is not None and attempt.stop is not None
            else listed.listed.sighting.state.value
        )
        since = listed.listed.sighting.since or since
    life, checkpoint = evidence.life, evidence.checkpoint
    if checkpoint is None and attempt is not None and attempt.outcome is not None:
        checkpoint = attempt.outcome.checkpoint
    owner = run.owners[-1]
    return {
        **body,
        "state": state,
        "target": attempt.target if attempt is not None else None,
        "job": attempt.name if attempt is not None else None,
        "attempt": attempt.number if attempt is not None else None,
        "life": life.number if life is not None else None,
        "since": iso(since) if since else None,
        "step": evidence.step,
        "total": evidence.progress.get("total"),
        "checkpoint": checkpoint.step if checkpoint is not None else None,
        "try": owner.try_number,
        "task": found.answer.state if found.open and case is not Case.UNDECIDED else None,
        "mark": case.value if case in MARKED else "",
        "why": TABLE[case].words if case in MARKED else ("" if known else "its channel cannot be read"),
    }


def _state(found: SeenRun, attempt: Attempt | None, asked: bool) -> tuple[str, float]:
    """The journal's word, for what no target lists."""
    run = found.run
    assert run is not None
    if run.current is None:
        if run.verdict is not None:
            return run.verdict.outcome, run.verdict.at
        outcome = attempt.outcome if attempt is not None else None
        return "between attempts", outcome.at if outcome is not None else run.owners[-1].at
    assert attempt is not None
    if not asked:
        return "not known", attempt.at
    return ("submitted" if attempt.submitted_at else "to be submitted"), attempt.submitted_at or attempt.at


async def _evidence(place: Place, found: SeenRun, attempt: Attempt | None) -> tuple[Evidence, bool]:
    """What its newest attempt has written, and whether that could be read."""
    if attempt is None or found.key is None:
        return Evidence(), True
    try:
        path = run_path(found.key, found.dir.incarnation)
        channel = place.channel(attempt.channel, path)
        return await channel.evidence(attempt.number, ended=False), True
    except (StoreError, OSError):
        return Evidence(), False


def _jobs(seen: Look, installation: str) -> list[dict[str, Any]]:
    """Living jobs that are not the current attempt of a run: orphans, lost ones, strange ones."""
    rows = []
    for _, item in items_of_jobs(seen, installation):
        if item.do is Do.LEAVE:
            continue
        rows.append(
            {
                "gang": item.run or item.job,
                "path": item.path,
                "state": item.state,
                "target": item.target,
                "job": item.job,
                "attempt": item.attempt,
                "since": iso(item.since) if item.since else None,
                "mark": item.case.value,
                "why": TABLE[item.case].words,
            }
        )
    return rows


def _show(rows: list[dict[str, Any]], away: dict[str, str], over: int, every: bool) -> None:
    from airflow_gpu.gang.entries import seconds

    console = out()
    if rows:
        found = table(
            "GANG", "STATE", "TARGET", "ATTEMPT", "LIFE", "SINCE", "STEP", "CHECKPOINT", "TRY", "MARK"
        )
        for row in sorted(rows, key=lambda row: (row["gang"], row.get("attempt") or 0)):
            step = row.get("step")
            far = f"{step}/{row['total']}" if step is not None and row.get("total") else step
            found.add_row(
                cell(row["gang"]),
                cell(row["state"]),
                cell(row.get("target")),
                cell(row.get("attempt")),
                cell(row.get("life")),
                ago(seconds(row["since"]) if row.get("since") else None),
                cell(far),
                cell(row.get("checkpoint")),
                cell(row.get("try")),
                f"[red]{row['mark']}[/]" if row["mark"] else "",
            )
        console.print(found)
    for row in rows:
        if row["mark"]:
            name = row.get("job") if row["mark"] in ("orphan", "lost", "strange", "held") else row["gang"]
            task = f" (the task is {row['task']})" if row.get("task") else ""
            console.print(
                f"[red]![/] {cell(name)}: {row['mark']}, {cell(row['why'])}{cell(task) if task else ''}",
                soft_wrap=True,
            )
    for name, why in sorted(away.items()):
        console.print(f"[red]![/] target {cell(name)} could not be asked: {cell(why)}", soft_wrap=True)
    if not rows:
        console.print("no gangs" if every else "no gangs live", highlight=False)
    if over and not every:
        console.print(f"{over} are over; --all shows them", highlight=False)
