"""``make demo``: the example DAG in a real Airflow, preempted in the middle, told as it goes.

Starts Airflow (API server, scheduler, dag processor, triggerer; SQLite) in
``.demo/``, with this machine as a cluster of 2 nodes x 2 pretended GPUs, runs
``gang_training``, lets an urgent gang preempt it, and shows what happened.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from airflow_gpu.gang.entries import seconds
from airflow_gpu.gang.identity import RunKey, run_path
from airflow_gpu.gang.run import Life, Run
from airflow_gpu.rundir.channel import Channel
from airflow_gpu.rundir.journal import Journal
from airflow_gpu.rundir.slot import newest
from airflow_gpu.rundir.store import Store
from airflow_gpu.targets.local.admin import Admin, AdminError
from tests.beds.airflow import AirflowBed

ROOT = Path(__file__).resolve().parents[2]
DAG, GANG_TASK = "gang_training", "train"
STEPS = 400
LIMIT = 420.0
console = Console(highlight=False)


class Watcher:
    """Reads the run directory, as any tool could, and tells what is new."""

    def __init__(self, state: str, channel: str, key: RunKey) -> None:
        self.key = key
        self.store = Store(state)
        self.channel_store = Store(channel)
        self.journal: Journal | None = None
        self.told = 0
        self.step: int | None = None
        self.run = Run()
        self.lives: list[Life] = []
        self.began = time.time()

    def say(self, at: float, text: str) -> None:
        console.print(f"[dim]{max(0.0, at - self.began):6.1f} s[/]  {text}")

    async def look(self) -> None:
        found = await newest(self.store, self.key)
        if found is None:
            return
        path = run_path(self.key, found[1])
        if self.journal is None or self.journal.path != path:
            self.journal, self.told = Journal(self.store, path), 0
            self.channel = Channel(self.channel_store, path)
        self.run = await self.journal.refresh()
        for life in (await self.channel.lives())[len(self.lives) :]:
            self.lives.append(life)
            if not life.fence:
                start = f"from checkpoint step {life.start.step}" if life.start else "from the beginning"
                self.say(
                    life.at,
                    f"[bold]life {life.number}[/]: {life.world_size} ranks on {life.nodes} nodes start {start}",
                )
        for entry in self.journal.entries[self.told :]:
            self.say(seconds(entry["at"]), _line(entry))
        self.told = len(self.journal.entries)
        if self.run.current is not None:
            evidence = await self.channel.evidence(self.run.current.number, ended=False)
            if evidence.step is not None and (self.step is None or abs(evidence.step - self.step) >= 40):
                self.step = evidence.step
                self.say(
                    time.time(),
                    f"step {evidence.step} of {evidence.progress.get('total')}, loss {(evidence.progress.get('metrics') or {}).get('loss')}",
                )


def _line(entry: dict[str, Any]) -> str:
    kind = entry["kind"]
    if kind == "owner":
        return f"try {entry['try_number']} of the task owns the run ({entry['reason']})"
    if kind == "attempt":
        return f"[bold]attempt {entry['attempt']}[/] placed on {entry['target']}"
    if kind == "submitted":
        return f"attempt {entry['attempt']} submitted as {entry['platform_id']}"
    if kind == "over":
        color = {"succeeded": "green", "preempted": "yellow"}.get(entry["cause"], "red")
        kept = f"; newest checkpoint: step {entry['checkpoint']['step']}" if entry.get("checkpoint") else ""
        kept = "" if entry["cause"] == "succeeded" else kept  # nothing goes on from there
        return f"attempt {entry['attempt']} is over: [{color}]{entry['cause']}[/]{kept}"
    if kind == "verdict":
        return f"verdict: [bold]{entry['outcome']}[/]"
    return f"{kind}: {entry.get('reason', '')}"


def timeline(run: Run, lives: list[Life], width: int = 64) -> None:
    """Attempts and their lives as bars over time."""
    start = run.owners[0].at
    end = max([a.outcome.at for a in run.attempts if a.outcome] + [start + 1])
    scale = width / (end - start)
    console.print()
    for attempt in run.attempts:
        row = [" "] * (width + 1)
        over = attempt.outcome.at if attempt.outcome else end
        for i in range(int((attempt.at - start) * scale), int((over - start) * scale) + 1):
            row[i] = "·"
        mine = [life for life in lives if life.attempt == attempt.number and not life.fence]
        for n, life in enumerate(mine):
            until = mine[n + 1].at if n + 1 < len(mine) else over
            for i in range(int((life.at - start) * scale), int((until - start) * scale) + 1):
                row[i] = "█"
        cause = attempt.outcome.cause.value if attempt.outcome else "?"
        color = {"succeeded": "green", "preempted": "yellow"}.get(cause, "red")
        console.print(f"  attempt {attempt.number} [{color}]{''.join(row)}[/] {cause}")
    console.print(f"            0 s{'':{width - 10}}{end - start:5.0f} s   · waiting  █ running")


def tables(
    run: Run, lives: list[Life], result: dict[str, Any], accuracy: dict[str, Any], task: dict[str, Any]
) -> None:
    table = Table(title="Attempts and lives", title_justify="left")
    for name in ("attempt", "target", "life", "from step", "ended as", "checkpoint left"):
        table.add_column(name)
    for attempt in run.attempts:
        mine = [life for life in lives if life.attempt == attempt.number and not life.fence] or [None]
        for life in mine:
            left = attempt.outcome.checkpoint if attempt.outcome else None
            table.add_row(
                str(attempt.number),
                attempt.target,
                str(life.number) if life else "-",
                str(life.start.step) if life and life.start else "beginning",
                attempt.outcome.cause.value if attempt.outcome else "-",
                f"step {left.step} of life {left.life}" if left else "-",
            )
    console.print()
    console.print(table)
    console.print(
        "[dim]A life is an entry of the run directory's lives/; the numbers between are fences, which close attempts.[/]"
    )
    spent = task["try_number"] - 1
    console.print(f"Airflow retries spent: [bold]{spent}[/] of {task['max_tries']}")
    console.print(
        f"resumed from step [bold]{result['resumed_from']}[/], finished at step {result['steps']}, loss {result['losses'][-1]:.4f}"
    )
    console.print(f"accuracy on unseen images: [bold green]{accuracy['accuracy']:.1%}[/]")


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave Airflow up and say where")
    parser.add_argument("--home", type=Path, default=ROOT / ".demo")
    arguments = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # also when SIGINT was inherited as ignored
        signal.signal(number, _interrupt)
    home: Path = arguments.home.resolve()
    stop_cluster(home / "cluster")
    shutil.rmtree(home, ignore_errors=True)
    connection = {
        "conn_type": "gpu_local",
        "extra": {
            "path": str(home / "cluster"),
            "nodes": 2,
            "gpus_per_node": 2,
            "grace": 15,
            "accelerator": "pretend",
        },
    }
    bed = AirflowBed(
        home / "airflow",
        ROOT / "dags",
        {
            "AIRFLOW__GPU__INSTALLATION": "demo",
            "AIRFLOW__GPU__STATE_URI": f"file://{home}/state",
            "AIRFLOW__GPU__POLL_INTERVAL": "0.5",
            "AIRFLOW_CONN_GPU_DEFAULT": json.dumps(connection),
            "DEMO_DATA": str(home / "data"),
        },
    )
    console.print(
        "[bold]airflow-gpu demo[/]: starting a real Airflow (API server, scheduler, dag processor, triggerer) ..."
    )
    began = time.monotonic()
    try:
        bed.up()
        console.print(f"Airflow is healthy after {time.monotonic() - began:.0f} s at {bed.url}\n")
        code = story(bed, home)
    except KeyboardInterrupt:
        console.print("interrupted: ending everything that was started")
        code, arguments.keep = 130, False
    except BaseException:
        bed.down()
        stop_cluster(home / "cluster")
        raise
    if arguments.keep:
        console.print(f"\nAirflow stays up: [bold]{bed.url}[/]  user admin, password {bed.password}")
        console.print(
            f"press Ctrl-C to end it; the run directories are below {home}/state and {home}/cluster"
        )
        try:
            while True:
                time.sleep(3600)
        except KeyboardInterrupt:
            pass
    bed.down()
    stop_cluster(home / "cluster")
    return code


def story(bed: AirflowBed, home: Path) -> int:
    bed.wait_dag("urgent_gang")
    run_id = bed.trigger(DAG, {"steps": STEPS})
    console.print(
        f"[bold]{DAG}[/] triggered: a data step, then a gang of 2 nodes x 2 ranks, {STEPS} steps, then an evaluation"
    )
    watcher = Watcher(
        f"file://{home}/state", f"file://{home}/cluster/runs", RunKey("demo", DAG, run_id, GANG_TASK, -1)
    )
    urgent: str | None = None
    end = time.monotonic() + LIMIT
    while True:
        asyncio.run(watcher.look())
        if urgent is None and watcher.step is not None and watcher.step >= STEPS // 4:
            urgent = bed.trigger("urgent_gang")
            watcher.say(
                time.time(), "[bold yellow]an urgent gang of higher priority wants the whole cluster[/]"
            )
        state = bed.run_state(DAG, run_id)
        if state in ("success", "failed") or time.monotonic() > end:
            break
        time.sleep(0.5)
    asyncio.run(watcher.look())
    if state != "success":
        console.print(f"[red]the DAG run is {state}[/]")
        for (task_id, _), ti in bed.tasks(DAG, run_id).items():
            console.print(f"  {task_id}: {ti['state']}")
            if ti["state"] == "failed":
                console.print(bed.log(DAG, run_id, task_id, ti["try_number"])[-4000:], markup=False)
        return 1
    timeline(watcher.run, watcher.lives)
    tables(
        watcher.run,
        watcher.lives,
        bed.xcom(DAG, run_id, GANG_TASK),
        bed.xcom(DAG, run_id, "evaluate"),
        bed.task(DAG, run_id, GANG_TASK),
    )
    whole = len([life for life in watcher.lives if not life.fence]) >= 2
    return 0 if whole else 1


def stop_cluster(path: Path) -> None:
    """End the local cluster: what still runs there, and its daemon."""
    if path.exists():
        with contextlib.suppress(AdminError):
            Admin(path).stop(gangs=True)


if __name__ == "__main__":
    sys.exit(main())
