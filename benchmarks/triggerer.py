"""How many gangs one triggerer process can watch, beside triggers that poll for their own job, in one run.

A real ``airflow triggerer`` on a real database, with N deferred task instances
whose gangs are really submitted to a local target's daemon. Measured inside of
the triggerer process (``benchmarks/watch/probe.py``): what it asks of the target
and of the run directories, how late its event loop is, its processor time and
memory. Cases, for 10, 100, 1,000 and 5,000 gangs:

* start-up: from the first trigger of the process until every gang has been looked at;
* waiting: all gangs wait in the platform's queue;
* running: as many run as the machine bears (``--slots``), the others wait;
* the same number of gangs on two targets;
* the peer: one trigger a job that asks the same target for that job each poll
  interval, as the job triggers of today's providers do, and reads nothing else.

Limits: a gang that runs is two Python processes here, so thousands of running
ones are not measured. Neither is a store over a network.

    python -m benchmarks.triggerer [--quick] [--json FILE] [--docs FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.watch.gangs import DAG_ID, INSTALLATION, Gangs
from tests.beds.airflow import AirflowBed
from tests.beds.postgres import NoPostgres, Postgres

SIZES = (10, 100, 1000, 5000)
POLL = 5.0
SETTLE = 30.0
WATCHED_LIMIT = 900.0
BEGIN, END = "<!-- triggerer: begin -->", "<!-- triggerer: end -->"

DAG = f"""
from airflow.sdk import DAG, BaseOperator
from airflow_gpu import Gang, GangOperator

with DAG({DAG_ID!r}, schedule=None):
    BaseOperator(task_id="probe")
    GangOperator.partial(task_id="train", gang=Gang(gpus_per_node=1, command=["sleep", "86400"])).expand(
        overrides=[{{}}]
    )
"""

console = Console(width=150)


class Bench:
    """One Airflow: a migrated database and the DAG in it. Each case has a triggerer of its own."""

    def __init__(self, home: Path, database: Postgres | None) -> None:
        self.home = home
        dags = home / "dags"
        dags.mkdir()
        (dags / "gangs.py").write_text(DAG)
        root = str(Path(__file__).resolve().parent.parent)
        env = {
            "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
            "AIRFLOW__TRIGGERER__CAPACITY": str(max(SIZES) + 100),
            "AIRFLOW__GPU__INSTALLATION": INSTALLATION,
            "AIRFLOW__GPU__POLL_INTERVAL": str(POLL),
        }
        if database is not None:
            database.create("airflow")
            for option, driver in (("", "postgresql+psycopg2"), ("_ASYNC", "postgresql+asyncpg")):
                env[f"AIRFLOW__DATABASE__SQL_ALCHEMY_CONN{option}"] = database.url("airflow", driver)
        self.airflow = AirflowBed(home / "airflow", dags, env)
        self.say = self.airflow.home / "bench.log"
        self._run("airflow", "db", "migrate")
        self._run("airflow", "dags", "reserialize")
        self.number = 0

    def _run(self, module: str, *arguments: str) -> None:
        with self.say.open("ab") as out:
            done = subprocess.run(
                [sys.executable, "-m", module, *arguments],
                env=self.airflow.env,
                stdout=out,
                stderr=subprocess.STDOUT,
                check=False,
            )
        if done.returncode != 0:
            raise RuntimeError(f"{module} {' '.join(arguments)} failed:\n{self.say.read_text()[-3000:]}")

    @contextlib.contextmanager
    def watching(self, gangs: Gangs, kind: str) -> Iterator[Case]:
        """A triggerer that has just been started with a trigger of that kind for each of the gangs."""
        self.number += 1
        report = self.home / f"report-{self.number}.jsonl"
        case = {
            "kind": kind,
            "poll": POLL,
            "report": str(report),
            "state_uri": gangs.state_uri,
            "gangs": [asdict(deferred) for deferred in gangs.deferred],
        }
        path = self.home / "case.json"
        path.write_text(json.dumps(case))
        self._run("benchmarks.watch.rows", str(path))
        self.airflow.env.update(gangs.connections)
        began = time.time()
        self.airflow.start("triggerer")
        try:
            yield Case(self.airflow, report, began, len(gangs.deferred))
        finally:
            self.airflow.stop("triggerer", limit=30.0)


class Case:
    """One triggerer, seen through the report of its probe."""

    def __init__(self, airflow: AirflowBed, report: Path, began: float, gangs: int) -> None:
        self.airflow, self.report, self.began, self.gangs = airflow, report, began, gangs

    def lines(self) -> list[dict[str, Any]]:
        if not self.report.exists():
            return []
        whole = self.report.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def start_up(self) -> dict[str, float]:
        """Until every gang is watched."""
        end = time.monotonic() + WATCHED_LIMIT
        while True:
            self.airflow.check()
            lines = self.lines()
            there = next((line for line in lines if line["watched"] >= self.gangs), None)
            if there is not None:
                late = [ms for line in lines if line["at"] <= there["at"] for ms in line["late_ms"]]
                return {
                    # Airflow itself: until the first trigger of the process runs, which is the probe.
                    "airflow_s": lines[0]["at"] - self.began,
                    "seconds": there["at"] - lines[0]["at"],
                    "cpu_s": there["cpu_s"],
                    "reads": float(there["counts"].get("reads", 0)),
                    "late_p99_ms": percentile(late, 99),
                }
            if time.monotonic() > end:
                seen = lines[-1]["watched"] if lines else 0
                raise TimeoutError(f"{seen} of {self.gangs} watched:\n{self.airflow.tail('triggerer')}")
            time.sleep(1)

    def measure(self, seconds: float) -> dict[str, float]:
        """What the process does in that time, by the minute."""
        time.sleep(SETTLE)
        begin = self.lines()[-1]["at"]
        time.sleep(seconds)
        lines = [line for line in self.lines() if line["at"] >= begin]
        first, last = lines[0], lines[-1]
        took = last["at"] - first["at"]
        late = [ms for line in lines[1:] for ms in line["late_ms"]]

        def rate(name: str) -> float:
            return (last["counts"].get(name, 0) - first["counts"].get(name, 0)) / took * 60

        return {
            "seconds": took,
            "watched": last["watched"],
            "target_reads": rate("observe"),
            "directory_reads": rate("reads"),
            "writes": rate("writes"),
            "cpu": (last["cpu_s"] - first["cpu_s"]) / took * 100,
            "supervisor_cpu": (last["supervisor_cpu_s"] - first["supervisor_cpu_s"]) / took * 100,
            "rss_mb": last["rss"] / 1e6,
            "late_p50_ms": percentile(late, 50),
            "late_p99_ms": percentile(late, 99),
            "load": os.getloadavg()[0],
        }


def percentile(values: list[float], which: int) -> float:
    return statistics.quantiles(values, n=100)[which - 1] if len(values) > 1 else 0.0


def measured(bench: Bench, size: int, slots: int, window: float, folder: Path) -> dict[str, Any]:
    """All cases for one number of gangs."""
    found: dict[str, Any] = {"gangs": size}
    with made(folder / "one", size, 1, slots) as gangs:
        found["submit_s"] = gangs.took
        with bench.watching(gangs, "gang") as case:
            found["start_up"] = case.start_up()
            console.log(f"{size}: watched after {found['start_up']['seconds']:.0f} s")
            found["waiting"] = case.measure(window)
            gangs.let_run()
            found["running"] = case.measure(window)
            found["lives"] = gangs.lives()
            console.log(f"{size}: waiting and running measured, {found['lives']} run")
        with bench.watching(gangs, "polling") as case:
            found["peer_start_up"] = case.start_up()
            found["peer"] = case.measure(window / 2)
            console.log(f"{size}: peer measured")
    with made(folder / "two", size, 2, slots) as gangs:
        with bench.watching(gangs, "gang") as case:
            case.start_up()
            found["two_targets"] = case.measure(window / 2)
            console.log(f"{size}: two targets measured")
    return found


@contextlib.contextmanager
def made(folder: Path, size: int, targets: int, slots: int) -> Iterator[Gangs]:
    gangs = Gangs(folder, size, targets, slots)
    try:
        gangs.submit()
        console.log(f"{size} gangs on {targets} target{'s' * (targets > 1)} submitted in {gangs.took:.0f} s")
        yield gangs
    finally:
        gangs.end()
        shutil.rmtree(folder, ignore_errors=True)


# -- what is shown -------------------------------------------------------------------------------

COLUMNS = (
    "gangs", "case", "target reads / min", "directory reads / min", "CPU %", "RSS MB",
    "loop late p50 / p99 ms", "start-up s",
)  # fmt: skip


def rows(results: dict[str, Any]) -> list[tuple[str, ...]]:
    def row(gangs: int, case: str, found: dict[str, float], start_up: str = "") -> tuple[str, ...]:
        return (
            f"{gangs:,}",
            case,
            f"{found['target_reads']:,.0f}",
            f"{found['directory_reads']:,.0f}",
            f"{found['cpu']:.1f}",
            f"{found['rss_mb']:.0f}",
            f"{found['late_p50_ms']:.1f} / {found['late_p99_ms']:.1f}",
            start_up,
        )

    lines = [row(0, "nothing but the probe", results["empty"])]
    for found in results["sizes"]:
        size, running = found["gangs"], found["lives"]
        others = f", {size - running:,} wait" if size > running else ""
        lines += [
            row(size, "all wait in the queue", found["waiting"], f"{found['start_up']['seconds']:.0f}"),
            row(size, f"{running:,} run{others}", found["running"]),
            row(size, "all wait, on two targets", found["two_targets"]),
            row(
                size, "peer: a trigger a job polls", found["peer"], f"{found['peer_start_up']['seconds']:.0f}"
            ),
        ]
    return lines


def show(results: dict[str, Any]) -> None:
    table = Table(title=f"One triggerer, {results['machine']}, {results['database']}")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "case" else "right")
    for row in rows(results):
        table.add_row(*row, end_section=row[1].startswith(("peer", "nothing")))
    console.print(table)


def markdown(results: dict[str, Any]) -> str:
    head = f"Measured {results['date']} on {results['machine']}; database: {results['database']}; "
    head += f"one-minute load average {results['load'][0]:.1f} to {results['load'][1]:.1f}.\n"
    lines = [
        head,
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "|".join("---" if name == "case" else "---:" for name in COLUMNS) + "|",
    ]
    lines += ["| " + " | ".join(row) + " |" for row in rows(results)]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="10 and 100 gangs, short windows")
    parser.add_argument("--sizes", type=int, nargs="+", help="numbers of gangs")
    parser.add_argument("--slots", type=int, default=100, help="gangs that run at a time, at most")
    parser.add_argument("--window", type=float, help="seconds of each measurement")
    parser.add_argument("--json", type=Path, help="where the results go as JSON")
    parser.add_argument("--docs", type=Path, help="a page with the markers of this table in it")
    given = parser.parse_args()
    sizes = given.sizes or (SIZES[:2] if given.quick else SIZES)
    window = given.window or (30.0 if given.quick else 120.0)
    # A trigger that has logged keeps a file open in the triggerer.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gangs-bench-")))
        try:
            server: Postgres | None = stack.enter_context(Postgres())
            database = "PostgreSQL"
        except NoPostgres as error:
            server, database = None, "SQLite"
            console.log(f"on SQLite: {error}")
        bench = Bench(home, server)
        loads = [os.getloadavg()[0]]
        with bench.watching(Gangs(home / "none", 0, 1, 1), "gang") as case:
            case.start_up()
            empty = case.measure(window)
        found = []
        for size in sizes:
            found.append(measured(bench, size, given.slots, window, home / f"gangs-{size}"))
            loads += [found[-1][case]["load"] for case in ("waiting", "running", "peer", "two_targets")]
    results = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": machine(),
        "database": database,
        "python": platform.python_version(),
        "poll_s": POLL,
        "window_s": window,
        "load": [min(loads), max(loads)],
        "empty": empty,
        "sizes": found,
    }
    show(results)
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")
    if given.docs:
        text = given.docs.read_text()
        table = f"{BEGIN}\n{markdown(results)}\n{END}"
        given.docs.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: table, text, flags=re.DOTALL))


def machine() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores, {memory:.0f} GiB of memory"


if __name__ == "__main__":
    main()
