"""``airflow-gpu sweep``."""

from __future__ import annotations

from typing import Any

from airflow_gpu.cli.place import Place
from airflow_gpu.cli.show import ago, cell, out, print_json, say, table
from airflow_gpu.sweeping.decide import Case, Do
from airflow_gpu.sweeping.report import Report
from airflow_gpu.sweeping.sweep import Options, sweep


async def sweep_now(
    place: Place, asks: Any, *, dry_run: bool, lost: bool, days: float, wait: float, as_json: bool
) -> int:
    """Sweep once, show the report; 3 when a person has to look."""
    report = await sweep(
        place.store(),
        place.installation,
        place.world(say),
        asks,
        names=place.names(),
        options=Options(dry_run=dry_run, lost=lost, window=days * 86400, limit=wait),
        say=say,
    )
    if as_json:
        print_json(report.json())
    else:
        show(report)
    return 3 if report.problems else 0


def show(report: Report) -> None:
    """The report for people."""
    console = out()
    rows = [item for item in report.items if item.do is not Do.LEAVE or item.case is Case.WANTED]
    if rows:
        found = table("GANG", "CASE", "TARGET", "JOB", "STATE", "TASK", "SINCE", "WHAT IS DONE")
        for item in rows:
            done = item.done or (
                "would be ended" if report.dry_run and item.do in (Do.END, Do.CANCEL, Do.CLOSE) else ""
            )
            found.add_row(
                cell(item.run),
                f"[{'red' if item.problem else 'yellow' if item.do is not Do.LEAVE else 'green'}]{item.case.value}[/]",
                cell(item.target),
                cell(item.job),
                cell(item.state),
                cell(item.task),
                ago(item.since),
                cell(done or ("left alone" if item.case is Case.WANTED else "nothing")),
            )
        console.print(found)
    for line in report.problems:
        console.print(f"[red]![/] {cell(line)}", soft_wrap=True)
    if report.airflow_trouble:
        console.print(f"[red]![/] Airflow: {cell(report.airflow_trouble)}", soft_wrap=True)
    wanted = sum(item.case is Case.WANTED for item in report.items)
    asked = sum(not why for why in report.targets.values())
    console.print(
        f"{len(report.ended)} {'would be ' if report.dry_run else ''}ended, {wanted} wanted and left alone, "
        f"{len(report.problems)} to look at; {report.listed} run directories, {asked} of {len(report.targets)} "
        f"targets answered, Airflow {report.airflow}",
        soft_wrap=True,
        highlight=False,
    )
