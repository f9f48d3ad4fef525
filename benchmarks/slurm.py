"""What a gang on Slurm costs: its submit beside bare sbatch, and watching many beside a client that polls each job.

On a cluster that this script brings up (tests/beds/slurm: 24.11, two nodes, on this machine), in one run:

- *submit*: in turn, bare ``sbatch`` on the login node, a plain POST to slurmrestd, and our target through
  REST, SSH and commands, which looks for the job's name before it submits;
- *watch*: 10, 100 and 1,000 gangs in the queue, watched for a while at an interval of 5 s: requests a minute, CPU, and
  how late the event loop is. Beside it ``SlurmAPIClient.get_job`` of ``airflow-provider-slurm`` (PyPI),
  which asks for each job by itself; it is fetched with pip for this run, and left out where that fails.

Example::

    python -m benchmarks.slurm --gangs 10 100 1000 --seconds 30
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.table import Table

from airflow_gpu.targets.base import Job, JobRef
from airflow_gpu.targets.watch import Watcher
from tests.beds.slurm.cluster import Cluster, cluster
from tests.conformance.slurm_bed import SlurmBed

INTERVAL = 5.0
PEER = "airflow-provider-slurm"

LOOP = """
for i in $(seq %d); do
  a=$(date +%%s%%N); sbatch --parsable -J bare -N1 --gres=gpu:1 --export=NIL -o /dev/null -D /tmp --wrap 'sleep 1' >/dev/null; b=$(date +%%s%%N)
  echo $(( (b - a) / 1000 ))
done
"""


def job(number: int) -> Job:
    folder = f"/shared/gangs/bench/{number:05d}"
    return Job(
        name=f"bench-{number:05d}",
        labels={
            "airflow-gpu/installation": "bench",
            "airflow-gpu/incarnation": "abcdefghij",
            "airflow-gpu/attempt": "1",
        },
        attempt=1,
        digest="sha256:" + "ab" * 32,
        nodes=2,
        gpus_per_node=8,
        ranks_per_node=8,
        payload=f"{folder}/payload/0001",
        channel=folder,
        time_limit=600.0,
        argv=("sleep", "600"),
    )


def ref(given: Job, number: str) -> JobRef:
    return JobRef(given.name, given.labels, given.attempt, given.digest, number)


async def submits(made: Cluster, count: int) -> tuple[dict[str, list[float]], list[JobRef]]:
    """Milliseconds of each submit, by way."""
    took: dict[str, list[float]] = {}
    out = await asyncio.to_thread(made.run, "bash", "-c", LOOP % count, user="alice")
    took["sbatch"] = [int(line) / 1000 for line in out.split()]
    refs: list[JobRef] = []
    number = 0
    beds = {
        way: SlurmBed(made, way, exclusive=False, work_folder="/tmp") for way in ("rest", "ssh", "command")
    }
    rest: Any = beds["rest"].target._access
    await rest.version()

    async def plain(given: Job) -> str:
        return str(await rest.submit(beds["rest"].target._submission.batch(given)))

    ways: dict[str, Callable[[Job], Awaitable[str]]] = {
        "POST to slurmrestd": plain,
        **{f"ours, {way}": bed.target.submit for way, bed in beds.items()},
    }
    for submit in ways.values():  # connections and versions are known before
        number += 1
        await submit(job(number))
    for _ in range(count):
        for way, submit in ways.items():
            number += 1
            given = job(number)
            begun = time.perf_counter()
            found = await submit(given)
            took.setdefault(way, []).append((time.perf_counter() - begun) * 1000)
            refs.append(ref(given, found))
    return took, refs


async def more(made: Cluster, refs: list[JobRef], wanted: int) -> None:
    target = SlurmBed(made, "rest", exclusive=False, work_folder="/tmp").target
    while len(refs) < wanted:
        given = job(10_000 + len(refs))
        refs.append(ref(given, await target.submit(given)))


class Lag:
    """How late the event loop wakes who sleeps 10 ms."""

    def __init__(self) -> None:
        self.late: list[float] = []
        self._task = asyncio.create_task(self._probe())

    async def _probe(self) -> None:
        while True:
            due = time.perf_counter() + 0.01
            await asyncio.sleep(0.01)
            self.late.append((time.perf_counter() - due) * 1000)

    def end(self) -> tuple[float, float]:
        self._task.cancel()
        ordered = sorted(self.late)
        return ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)]


async def measured(seconds: float, count: Callable[[], int]) -> tuple[float, float, float, float]:
    """Requests a minute, CPU %, lag p50 and p99."""
    lag, before, cpu, begun = Lag(), count(), time.process_time(), time.perf_counter()
    await asyncio.sleep(seconds)
    wall = time.perf_counter() - begun
    used = (time.process_time() - cpu) / wall * 100
    middle, worst = lag.end()
    return (count() - before) / wall * 60, used, middle, worst


async def ours(made: Cluster, refs: list[JobRef], seconds: float) -> tuple[float, float, float, float]:
    target = SlurmBed(made, "rest", exclusive=False).target
    access: Any = target._access
    request, asked = access._request, 0

    async def counted(*args: Any, **given: Any) -> Any:
        nonlocal asked
        asked += 1
        return await request(*args, **given)

    access._request = counted
    watcher = Watcher(target, INTERVAL)

    async def gang(one: JobRef) -> None:
        known = await watcher.sighting(one)
        while True:
            known = await watcher.sighting(one, known=known, within=60.0)

    tasks = [asyncio.create_task(gang(one)) for one in refs]
    await asyncio.sleep(INTERVAL * 2)  # the first look reads each job
    try:
        return await measured(seconds, lambda: asked)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await target.close()


async def theirs(client: Any, refs: list[JobRef], seconds: float) -> tuple[float, float, float, float]:
    asked = 0
    pool = ThreadPoolExecutor(8)

    async def gang(one: JobRef) -> None:
        nonlocal asked
        loop = asyncio.get_running_loop()
        while True:
            found = await loop.run_in_executor(pool, client.get_job, one.platform_id)
            assert found["name"] == one.name
            asked += 1
            await asyncio.sleep(INTERVAL)

    tasks = [asyncio.create_task(gang(one)) for one in refs]
    await asyncio.sleep(INTERVAL * 2)
    try:
        return await measured(seconds, lambda: asked)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        pool.shutdown()


def peer(made: Cluster, folder: str) -> Any:
    """The peer's client, or None."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, PEER],
        capture_output=True,
    )
    if done.returncode:
        return None
    sys.path.insert(0, folder)
    import logging
    import types

    package = types.ModuleType(
        "airflow_slurm_executor"
    )  # without its __init__, which wants an executor's Airflow
    package.__path__ = [f"{folder}/airflow_slurm_executor"]
    sys.modules[package.__name__] = package
    module = importlib.import_module("airflow_slurm_executor.slurm_api_client")
    logging.getLogger("airflow_slurm_executor").setLevel(logging.ERROR)

    class Token:
        def __init__(self) -> None:
            self._token = made.token("alice", 7200)

        def get_token(self) -> str:
            return self._token

    return module.SlurmAPIClient(base_url=made.rest, token_manager=Token(), api_version="v0.0.42")


async def run(made: Cluster, given: argparse.Namespace) -> None:
    console = Console(width=110)
    when = f"{datetime.now(UTC):%Y-%m-%d}"
    took, refs = await submits(made, given.submits)
    table = Table(title=f"Submit, {given.submits} each, milliseconds, {when}")
    for head in ("", "p50", "p95", "beside sbatch (p50)"):
        table.add_column(head, justify="left" if not head else "right")
    bare = statistics.median(took["sbatch"])
    for way, each in took.items():
        p95 = sorted(each)[int(len(each) * 0.95)]
        table.add_row(
            way, f"{statistics.median(each):.1f}", f"{p95:.1f}", f"{statistics.median(each) / bare:.2f}"
        )
    console.print(table)
    table = Table(title=f"Watch, every {INTERVAL:.0f} s, for {given.seconds:.0f} s, {when}")
    for head in ("gangs", "who", "requests / min", "CPU %", "loop late p50 / p99 ms"):
        table.add_column(head, justify="left" if head == "who" else "right")
    with tempfile.TemporaryDirectory() as folder:
        client = peer(made, folder)
        if client is None:
            console.print(f"{PEER} could not be fetched: without a peer")
        for gangs in given.gangs:
            await more(made, refs, gangs)
            rows = {"ours": await ours(made, refs[:gangs], given.seconds)}
            if client is not None:
                rows[f"{PEER}, a poll a job"] = await theirs(client, refs[:gangs], given.seconds)
            for who, (rate, cpu, middle, worst) in rows.items():
                table.add_row(f"{gangs:,}", who, f"{rate:,.0f}", f"{cpu:.1f}", f"{middle:.1f} / {worst:.1f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--submits", type=int, default=50)
    parser.add_argument("--gangs", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--seconds", type=float, default=30.0)
    given = parser.parse_args()
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(cluster("24.11", nodes=2))
        asyncio.run(run(made, given))


if __name__ == "__main__":
    main()
