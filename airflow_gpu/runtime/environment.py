"""The environment of a rank: torchrun's names, JAX's, Slurm's corrected, MPI's, and the gang's own.

Purpose: one place that knows which variable which framework reads.

- PyTorch: ``init_process_group("nccl")`` reads RANK, WORLD_SIZE, MASTER_ADDR
  and MASTER_PORT; with ``TORCHELASTIC_USE_AGENT_STORE=False`` rank 0 opens the
  store itself. TORCHELASTIC_RUN_ID makes libraries take these variables before
  Slurm's.
- JAX: ``jax.distributed.initialize()`` reads JAX_COORDINATOR_ADDRESS and
  JAX_LOCAL_DEVICE_IDS. JAX_NUM_PROCESSES and JAX_PROCESS_ID are read by programs
  only: pass ``num_processes=g.world_size, process_id=g.rank``. Under Slurm it
  takes both from SLURM_NTASKS and SLURM_PROCID.
- Slurm starts one agent a node, so its own variables speak of agents; ranks get
  them corrected.

Limits: a variable that the user's ``env`` sets is left alone where ranks can
work with it (CUDA_VISIBLE_DEVICES, OMPI_*, PYTHONUNBUFFERED); who is who and
where the gang meets is always the agent's to say.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Dict, List, Mapping, Optional, Tuple

from airflow_gpu.runtime.job import UNCOUNTED, Job, Node
from airflow_gpu.runtime.wire import Message

MAX_RESTARTS = "0"
"""For TORCHELASTIC_MAX_RESTARTS: a gang is restarted as a whole, from outside."""

ROOT_ALLOWED = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")


@dataclass(frozen=True)
class Place:
    """What is the same for all processes of a node. Paths are this node's; ``start`` is node 0's start message."""

    job: Job
    node: Node
    life: int
    control: str
    token: str
    start: Message
    channel: str
    checkpoints: str
    runtime: str
    hostfile: str = ""
    hydra_hostfile: str = ""
    rsh: str = ""
    restore: str = ""  # the checkpoint to start from, on this node
    verified: bool = False  # every byte of it
    local: str = ""  # this node's folder for quick copies


def node_environment(place: Place, base: Mapping[str, str], secrets: Mapping[str, str]) -> Dict[str, str]:
    """For every process on the node: what a launcher (torchrun, mpirun) needs to start ranks of its own."""
    job, start = place.job, place.start
    env = {**base, **job.env, **secrets}
    restore = start.get("restore")
    nodes: List[Message] = start["nodes"]
    path = env.get("PYTHONPATH")
    every = job.interval
    if place.local:  # node 0 decides which of the saves go further than to the nodes' disks
        every = job.local_interval if every is None else min(every, job.local_interval)
    env.update(
        {
            "NODE_RANK": str(place.node.rank),
            "NNODES": str(job.nodes),
            "NPROC_PER_NODE": str(job.ranks_per_node),
            "MASTER_ADDR": str(start["master_addr"]),
            "MASTER_PORT": str(start["master_port"]),
            # What torchrun takes for --nnodes, --nproc-per-node, --node-rank ... when they are not given.
            "PET_NNODES": str(job.nodes),
            "PET_NPROC_PER_NODE": str(job.ranks_per_node),
            "PET_NODE_RANK": str(place.node.rank),
            "PET_MASTER_ADDR": str(start["master_addr"]),
            "PET_MASTER_PORT": str(start["master_port"]),
            "GANG_RUN": job.run,
            "GANG_ATTEMPT": str(job.attempt),
            "GANG_LIFE": str(place.life),
            "GANG_CONTROL": place.control,
            "GANG_TOKEN": place.token,
            "GANG_DIR": place.channel,
            "GANG_PAYLOAD": job.payload,
            "GANG_JOB_ID": place.node.job_id,
            "GANG_RESTART": UNCOUNTED if place.node.restart is None else str(place.node.restart),
            "GANG_NODE_RANK": str(place.node.rank),
            "GANG_NODE_ADDR": place.node.address,
            "GANG_NODES": ",".join(str(node["addr"]) for node in nodes),
            "GANG_CHECKPOINT_DIR": place.checkpoints,
            "GANG_CHECKPOINT_INTERVAL": "" if every is None else repr(every),
            "GANG_MTBF": repr(float(start["mtbf"])) if start.get("mtbf") and not place.local else "",
            "GANG_LOCAL_DIR": place.local,
            "GANG_RESTORE_DIR": place.restore,
            "GANG_RESTORE_STEP": str(restore["step"]) if restore else "0",
            "GANG_RESTORE_WORLD_SIZE": str(restore.get("world_size") or "") if restore else "",
            "GANG_RESTORE_VERIFIED": "1" if place.verified else "0",
            "GANG_STOP_GRACE": repr(job.stop_grace),
            "GANG_HOSTFILE": place.hostfile,
            "GANG_RSH": place.rsh,
            "PYTHONPATH": place.runtime + (os.pathsep + path if path else ""),
        }
    )
    env.setdefault("PYTHONUNBUFFERED", "1")
    if place.node.gpus is not None and "CUDA_VISIBLE_DEVICES" not in job.env:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(place.node.gpus)
    return env


def rank_environment(place: Place, common: Mapping[str, str], local: int) -> Dict[str, str]:
    """For one rank, when the agent starts them all itself (``launch: rank``). ``common``: of :func:`node_environment`."""
    job, node, start = place.job, place.node, place.start
    rank = node.rank * job.ranks_per_node + local
    env = dict(common)
    env.update(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": str(job.world_size),
            "LOCAL_WORLD_SIZE": str(job.ranks_per_node),
            "GROUP_RANK": str(node.rank),
            "GROUP_WORLD_SIZE": str(job.nodes),
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(job.world_size),
            "ROLE_NAME": "default",
            "TORCHELASTIC_RUN_ID": f"{job.run} life {place.life}",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": MAX_RESTARTS,
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "JAX_COORDINATOR_ADDRESS": _coordinator(start),
            "JAX_NUM_PROCESSES": str(job.world_size),
            "JAX_PROCESS_ID": str(rank),
        }
    )
    # As under torchrun, a rank sees all devices of its node and takes the one of its LOCAL_RANK:
    # `torch.cuda.set_device(local_rank)` is in every script. JAX is told which are this rank's.
    count = len(node.gpus) if node.gpus is not None else job.gpus_per_node
    share = devices(count, job.ranks_per_node, local)
    if share is not None and "CUDA_VISIBLE_DEVICES" not in job.env:
        env.setdefault("JAX_LOCAL_DEVICE_IDS", ",".join(share))
    env.update(_slurm(common, job, rank, local))
    return env


def devices(count: int, ranks: int, local: int) -> Optional[Tuple[str, ...]]:
    """One rank's share of its node's devices, by their numbers on the node; None when there is nothing to divide.

    Contiguous equal shares. More ranks than devices share them evenly. A number
    that does not divide is left undivided: every rank has all.
    """
    all_devices = tuple(str(i) for i in range(count))
    if not all_devices:
        return None
    if len(all_devices) % ranks == 0:
        share = len(all_devices) // ranks
        return all_devices[local * share : (local + 1) * share]
    if ranks % len(all_devices) == 0:
        return (all_devices[local * len(all_devices) // ranks],)
    return all_devices


def _coordinator(start: Message) -> str:
    host = str(start["master_addr"])
    return f"[{host}]:{start['jax_port']}" if ":" in host else f"{host}:{start['jax_port']}"


def _slurm(env: Mapping[str, str], job: Job, rank: int, local: int) -> Dict[str, str]:
    values = {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local),
        "SLURM_NTASKS": str(job.world_size),
        "SLURM_NPROCS": str(job.world_size),
        "SLURM_STEP_NUM_TASKS": str(job.world_size),
        "SLURM_NTASKS_PER_NODE": str(job.ranks_per_node),
        "SLURM_TASKS_PER_NODE": f"{job.ranks_per_node}(x{job.nodes})"
        if job.nodes > 1
        else str(job.ranks_per_node),
        "SLURM_STEP_TASKS_PER_NODE": (
            f"{job.ranks_per_node}(x{job.nodes})" if job.nodes > 1 else str(job.ranks_per_node)
        ),
    }
    return {name: value for name, value in values.items() if name in env}


def mpi_environment(place: Place, env: Mapping[str, str]) -> Dict[str, str]:
    """How mpirun finds the nodes and starts its daemons there (``launch: head``).

    Open MPI 4 (ORTE) and 5 (PRRTE), MPICH and Intel MPI (Hydra). Inside a Slurm
    job they would start steps of their own, below the agent's: they are told not to.
    """
    wanted = {
        "OMPI_MCA_plm": "rsh",
        "OMPI_MCA_plm_rsh_agent": place.rsh,
        "OMPI_MCA_ras": "^slurm",
        "OMPI_MCA_orte_default_hostfile": place.hostfile,
        "PRTE_MCA_plm": "ssh",
        "PRTE_MCA_plm_ssh_agent": place.rsh,
        "PRTE_MCA_ras": "^slurm",
        "PRTE_MCA_prte_default_hostfile": place.hostfile,
        "HYDRA_LAUNCHER": "ssh",
        "HYDRA_LAUNCHER_EXEC": place.rsh,
        "HYDRA_RMK": "user",
        "HYDRA_HOST_FILE": place.hydra_hostfile,
        "I_MPI_HYDRA_BOOTSTRAP": "ssh",
        "I_MPI_HYDRA_BOOTSTRAP_EXEC": place.rsh,
        "I_MPI_HYDRA_RMK": "user",
        "I_MPI_HYDRA_HOST_FILE": place.hydra_hostfile,
    }
    if os.getuid() == 0:
        wanted.update(dict.fromkeys(ROOT_ALLOWED, "1"))
    return {name: value for name, value in wanted.items() if name not in place.job.env}
