"""Launchers: one process on node 0 that starts the others (mpirun), or one on each node (torchrun)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.runtime.bed import NOTICE, Bed, alive, eventually
from tests.runtime.test_gang import pids

PROGRAM = r"""
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
int main(int argc, char **argv) {
    int rank, size, sum;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    printf("rank %d of %d on node %s, sum %d\n", rank, size, getenv("GANG_NODE_RANK"), sum);
    fflush(stdout);
    if (argc > 1 && rank == 3) exit(7);
    MPI_Finalize();
    return 0;
}
"""

# Two "nodes" on one machine must not take each other's shared memory for their own.
ONE_MACHINE = {"OMPI_MCA_btl": "tcp,self"}

needs_mpi = pytest.mark.skipif(
    shutil.which("mpirun") is None or shutil.which("mpicc") is None,
    reason="NO OPEN MPI HERE: apt-get install openmpi-bin libopenmpi-dev",
)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mpi")
    (folder / "sum.c").write_text(PROGRAM)
    subprocess.run(["mpicc", "-o", "sum", "sum.c"], cwd=folder, check=True)
    return folder / "sum"


@needs_mpi
def test_mpirun_over_two_nodes(bed: Bed, program: Path) -> None:
    job = bed.payload(launch="head", command=["mpirun", str(program)], env=ONE_MACHINE)
    assert bed.run(job) == [0, 0], bed.log(0)
    lines = sorted(line for line in bed.log(0).splitlines() if line.startswith("rank"))
    assert lines == [f"rank {rank} of 4 on node {rank // 2}, sum 6" for rank in range(4)]
    assert bed.read("lives/0001.json")["processes"] == 1
    assert bed.read("lives/0001.json")["world_size"] == 4
    assert bed.codes() == [0]
    assert bed.read("lives/0001/nodes/0001.json")["ranks"] == []


@needs_mpi
def test_an_mpi_rank_that_fails(bed: Bed, program: Path) -> None:
    job = bed.payload(launch="head", command=["mpirun", str(program), "fail"], env=ONE_MACHINE)
    codes = bed.run(job)
    assert codes == [7, 7]
    failure = bed.read("lives/0001/failure.json")
    assert (failure["rank"], failure["exit_code"]) == (0, 7)
    assert bed.read("lives/0001/nodes/0001.json")["ranks"] == []


@needs_mpi
def test_handle_under_mpirun(bed: Bed) -> None:
    job = bed.payload(
        launch="head",
        env=ONE_MACHINE,
        script="""
        import os, time
        from airflow_gpu.runtime import gang
        with gang() as g:
            print(f"rank {g.rank} of {g.world_size} on {g.node_rank}", flush=True)
            step = 0
            while True:
                step += 1
                time.sleep(0.01)
                due = g.checkpoint.due(step)
                open(f"asked-{g.rank}", "w").close()
                if due:
                    with g.checkpoint.save(step) as d:
                        (d / str(g.rank)).write_text(str(step))
        """,
    )
    import json

    body = json.loads(job.read_text())
    job.write_text(json.dumps({**body, "command": ["mpirun", *body["command"]]}))
    life = bed.start(job)
    eventually(lambda: len(list(bed.folder.glob("asked-*"))) == 4)
    life.signal(NOTICE)
    assert life.wait() == [75, 75]
    [(step, folder)] = bed.manifests().items()
    assert {name: (folder / name).read_text() for name in "0123"} == dict.fromkeys("0123", str(step))
    assert not (bed.channel / "lives/0001/failure.json").exists()


def test_commands_on_other_nodes(bed: Bed) -> None:
    """What mpirun uses, without mpirun."""
    job = bed.payload(
        launch="head",
        command=[
            "/bin/sh",
            "-c",
            '$GANG_RSH -x 127.0.0.2 echo \'"$GANG_NODE_RANK  is here"\' "; echo oops >&2; exit 5"; echo code $?;'
            "$GANG_RSH 127.0.0.9 true; echo code $?; cat $GANG_HOSTFILE",
        ],
    )
    assert bed.run(job) == [0, 0]
    assert bed.log(0).splitlines() == [
        *sorted(["1  is here", "oops"], key=bed.log(0).index),
        "code 5",
        "gang: 127.0.0.9 is no node of this gang (127.0.0.1, 127.0.0.2)",
        "code 255",
        "127.0.0.1 slots=2",
        "127.0.0.2 slots=2",
    ]


def test_what_was_started_elsewhere_dies_with_the_gang(bed: Bed) -> None:
    sleeper = "echo $$ > pid-$GANG_NODE_RANK; sleep 1000"
    job = bed.payload(
        launch="head",
        command=[
            "/bin/sh",
            "-c",
            f"$GANG_RSH 127.0.0.2 '({sleeper}) & {sleeper.replace('pid', 'pid-b')}' & {sleeper} & while [ ! -e go ]; do sleep 0.1; done; exit 3",
        ],
    )
    life = bed.start(job)
    started = pids(bed, 3)
    (bed.folder / "go").touch()
    assert life.wait() == [3, 3]
    assert not any(map(alive, started))


def test_launcher_on_each_node(bed: Bed) -> None:
    """As with torchrun: the workers have sessions of their own, and a worker's 75 makes the launcher end with 1."""
    job = bed.payload(
        launch="node",
        script="""
        import os, subprocess, sys
        worker = '''
        import time
        from airflow_gpu.runtime import gang
        with gang() as g:
            step = g.checkpoint.restore(lambda d: None)
            print("start", step, flush=True)
            while step < (10**6 if g.life == 1 else step + 1):
                step += 1
                time.sleep(0.01)
                due = g.checkpoint.due(step)
                open(f"asked-{g.rank}", "w").close()
                if due:
                    with g.checkpoint.save(step) as d:
                        (d / str(g.rank)).write_text("")
                if g.life == 2:
                    break
        '''
        import textwrap
        node, each, nodes = (int(os.environ[n]) for n in ("NODE_RANK", "NPROC_PER_NODE", "NNODES"))
        workers = [
            subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(worker)],
                start_new_session=True,
                env={**os.environ, "RANK": str(node * each + n), "WORLD_SIZE": str(nodes * each), "LOCAL_RANK": str(n)},
            )
            for n in range(each)
        ]
        sys.exit(1 if any([w.wait() for w in workers]) else 0)
        """,
    )
    life = bed.start(job)
    eventually(lambda: len(list(bed.folder.glob("asked-*"))) == 4)
    life.signal(NOTICE)
    assert life.wait() == [75, 75]
    assert bed.codes() == [1, 1]
    [step] = bed.manifests()
    assert bed.read("lives/0001.json")["processes"] == 2
    assert bed.run(job, restart=1) == [0, 0]
    assert bed.codes(2) == [0, 0]
    assert bed.log(0, life=2).splitlines() == [f"start {step}"] * 2
