"""Who is who: the identity of a node, and what frameworks read on a rank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from airflow_gpu.runtime.environment import Place, devices, node_environment, rank_environment
from airflow_gpu.runtime.job import Job, Node, Unusable, own_address
from tests.runtime.bed import Bed
from tests.runtime.test_claim import a_job

START = {
    "master_addr": "10.0.0.1",
    "master_port": 20001,
    "jax_port": 20002,
    "nodes": [{"addr": "10.0.0.1", "host": "a"}, {"addr": "10.0.0.2", "host": "b"}],
    "restore": {"life": 1, "step": 7, "dir": "checkpoints/0001/step-000000007", "verified": True},
}


def environment(tmp_path: Path, base: dict[str, str], local: int = 1, **fields: Any) -> dict[str, str]:
    job = a_job(tmp_path, **{"nodes": 2, "ranks_per_node": 4, **fields})
    node = Node.of(job, {"GANG_NODE_RANK": "1", "GANG_JOB_ID": "j", "GANG_NODE_ADDR": "10.0.0.2", **base})
    there = str(tmp_path / "checkpoints/0001/step-000000007")
    place = Place(
        job,
        node,
        3,
        "10.0.0.1:1",
        "t",
        START,
        str(tmp_path),
        str(tmp_path / "c"),
        "/r.pyz",
        restore=there,
        verified=True,
    )
    return rank_environment(place, node_environment(place, base, {"SECRET": "s"}), local)


def test_identity_comes_from_the_platform(tmp_path: Path) -> None:
    job = a_job(tmp_path, nodes=4)
    given = Node.of(
        job, {"SLURM_NODEID": "2", "SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "3", "SLURM_JOB_GPUS": "0,1"}
    )
    assert (given.rank, given.job_id, given.restart, given.gpus) == (2, "77", 3, ("0", "1"))
    given = Node.of(
        job, {"JOB_COMPLETION_INDEX": "1", "GANG_JOB_ID": "uid", "GANG_GPUS": "", "SLURM_NODEID": ""}
    )
    assert (given.rank, given.job_id, given.restart, given.gpus) == (1, "uid", 0, None)
    for env, words in (
        ({}, "GANG_NODE_RANK"),
        ({"GANG_NODE_RANK": "0"}, "GANG_JOB_ID"),
        ({"GANG_NODE_RANK": "x"}, "no number"),
    ):
        with pytest.raises(Unusable, match=words):
            Node.of(job, env)
    alone = Node.of(a_job(tmp_path), {})
    assert (alone.rank, alone.address) == (0, "127.0.0.1")
    assert alone.job_id != Node.of(a_job(tmp_path), {}).job_id


def test_own_address_is_one_that_others_can_reach() -> None:
    assert own_address("localhost", alone=False) not in ("", "localhost")


def test_gpus_are_divided(tmp_path: Path) -> None:
    eight = tuple(map(str, range(8)))
    assert [devices(8, 8, r) for r in range(8)] == [(d,) for d in eight]
    assert [devices(8, 2, r) for r in range(2)] == [eight[:4], eight[4:]]
    assert [devices(2, 4, r) for r in range(4)] == [("0",), ("0",), ("1",), ("1",)]
    assert devices(8, 3, 1) == eight
    assert devices(0, 4, 0) is None
    env = environment(tmp_path, {"GANG_GPUS": "GPU-a,GPU-b,GPU-c,GPU-d,GPU-e,GPU-f,GPU-g,GPU-h"}, local=1)
    assert (env["CUDA_VISIBLE_DEVICES"], env["JAX_LOCAL_DEVICE_IDS"]) == (
        "GPU-a,GPU-b,GPU-c,GPU-d,GPU-e,GPU-f,GPU-g,GPU-h",
        "2,3",
    )
    env = environment(tmp_path, {"GANG_GPUS": "0,1,2,3"}, env={"CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    assert env["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"  # the user has the last word
    assert "JAX_LOCAL_DEVICE_IDS" not in env


def test_slurms_variables_speak_of_ranks(tmp_path: Path) -> None:
    # Slurm starts one task a node, the agent.
    base = {
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_TASKS_PER_NODE": "1(x2)",
        "SLURM_NNODES": "2",
    }
    env = environment(tmp_path, base, local=3)
    assert (env["SLURM_PROCID"], env["SLURM_LOCALID"], env["SLURM_NTASKS"]) == ("7", "3", "8")
    assert (env["SLURM_TASKS_PER_NODE"], env["SLURM_NNODES"]) == ("4(x2)", "2")
    assert "SLURM_PROCID" not in environment(tmp_path, {})


def test_what_is_told_of_the_gang(tmp_path: Path) -> None:
    env = environment(
        tmp_path, {"PYTHONPATH": "/mine"}, env={"A": "1"}, checkpoint={"interval": 60, "keep": 1}
    )
    assert env["A"] == "1"
    assert env["SECRET"] == "s"
    assert env["PYTHONPATH"] == "/r.pyz:/mine"
    assert env["PYTHONUNBUFFERED"] == "1"
    assert env["GANG_RESTORE_DIR"] == f"{tmp_path}/checkpoints/0001/step-000000007"
    assert (env["GANG_RESTORE_STEP"], env["GANG_RESTORE_VERIFIED"]) == ("7", "1")
    assert float(env["GANG_CHECKPOINT_INTERVAL"]) == 60
    assert env["GANG_NODES"] == "10.0.0.1,10.0.0.2"
    assert env["TORCHELASTIC_USE_AGENT_STORE"] == "False"
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("10.0.0.1", "20001")
    assert (env["JAX_COORDINATOR_ADDRESS"], env["JAX_NUM_PROCESSES"], env["JAX_PROCESS_ID"]) == (
        "10.0.0.1:20002",
        "8",
        "5",
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"launch": "none"}, "launch is 'none'"),
        ({"nodes": 0}, "at least 1"),
        ({"command": []}, "not empty"),
        ({"nodes": "x"}, "wrong kind"),
        ({"v": 7}, "version 7"),
    ],
)
def test_payload_that_cannot_be_used(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(Unusable, match=words):
        a_job(tmp_path, **change)


def test_payload_folder_in_the_command(tmp_path: Path) -> None:
    job = Job.of({**BODY, "command": ["sh", "<payload>/x.sh", "a<payload>/b"]}, "/p")
    assert job.command == ("sh", "/p/x.sh", "a<payload>/b")


BODY = {"v": 1, "attempt": 1, "channel": "/c", "nodes": 2, "ranks_per_node": 4, "command": ["x"]}


@pytest.mark.parametrize(("launch", "processes"), [("rank", [4, 4]), ("node", [1, 1]), ("head", [1, 0])])
def test_processes(launch: str, processes: list[int]) -> None:
    job = Job.of({**BODY, "launch": launch}, "/p")
    assert [job.processes_on(node) for node in range(2)] == processes
    assert job.processes == sum(processes)
    assert job.world_size == 8


def test_jax_meets_without_arguments_under_slurm(bed: Bed) -> None:
    """A real jax.distributed over two agents; its Slurm detection must not be misled by the agents' own variables."""
    pytest.importorskip("jax")
    job = bed.payload(
        ranks_per_node=1,
        env={"JAX_PLATFORMS": "cpu"},
        script="""
        import jax, jax.numpy
        from airflow_gpu.runtime import gang
        with gang() as g:
            jax.distributed.initialize(initialization_timeout=50)
            assert (jax.process_index(), jax.process_count()) == (g.rank, g.world_size)
            g.result([jax.process_count(), jax.device_count()])
        """,
    )
    slurm = {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NODELIST": "nowhere",
        "SLURM_NTASKS": "9",
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "0",
    }
    assert sys.executable == bed.python
    assert bed.run(job, **slurm) == [0, 0], bed.log(0)
    assert bed.read("lives/0001/result.json") == [2, 2]
