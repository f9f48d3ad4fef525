"""From an attempt to a batch job: what is asked of Slurm, and how secrets reach the nodes.

Purpose: puts together what the gang wants and what the connection says. Pure but for the files with
secrets; what is rendered is in :mod:`.batch`.

Limits: a wish that the cluster can never fill is found by Slurm at the submit, or by an offer before.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import Final, Protocol

from airflow_gpu.targets.base import PAYLOAD, Job, NotConfigured, Rejected
from airflow_gpu.targets.slurm import shape
from airflow_gpu.targets.slurm.batch import Batch, packed, script
from airflow_gpu.targets.slurm.config import FOLDER, SlurmConfig
from airflow_gpu.targets.slurm.identity import to_comment

LIMIT_MARGIN: Final = 60
"""Seconds by which Slurm may send the warning of its time limit too early."""

MIB: Final = 1 << 20


class Files(Protocol):
    """A folder that Airflow and the nodes share, as Airflow reaches it. Paths are relative."""

    async def read(self, path: str, start: int, size: int) -> bytes:
        """A piece of a file; empty where it is not there. Raises TargetError."""
        ...

    async def put_private(self, path: str, data: bytes) -> None:
        """A file that only its owner can read, whole or not at all. Raises TargetError."""
        ...

    async def remove(self, path: str) -> None:
        """No error when it is not there. Raises TargetError."""
        ...


class Submission:
    """Makes jobs of one connection.

    :param secrets: where secrets are put for the jobs, and that folder as the nodes see it; None: gangs with secrets are refused.
    """

    def __init__(self, name: str, config: SlurmConfig, secrets: tuple[Files, str] | None) -> None:
        self.name = name
        self.config = config
        self._secrets = secrets

    def wanted(
        self, nodes: int, gpus: int, accelerator: str | None, cpus: float | None, memory: int | None
    ) -> shape.Wanted:
        """What each node must have, with the connection's defaults."""
        config = self.config
        return shape.Wanted(
            nodes=nodes,
            gpus=gpus,
            gpu_type=config.gpu_type(accelerator),
            gres=config.gres,
            cpus=math.ceil(cpus) if cpus else (config.cpus_per_gpu or 0) * gpus or None,
            memory=math.ceil(memory / MIB) if memory else (config.memory_per_gpu or 0) * gpus or None,
            exclusive=config.exclusive,
            partitions=config.partition,
        )

    def batch(self, job: Job, excluded: tuple[str, ...] = ()) -> Batch:
        config = self.config
        wanted = self.wanted(job.nodes, job.gpus_per_node, job.accelerator, job.cpus, job.memory)
        if job.image is not None and not config.container:
            raise Rejected(
                f"{self.name}: image {job.image!r} was asked for; set 'container' of the connection to how the cluster "
                "runs containers (pyxis, apptainer, oci)"
            )
        payload = _carried_to(job)
        placed = job.placed(payload) if job.files else job
        if PAYLOAD in placed.payload:
            raise Rejected(
                f"{self.name}: job {job.name!r} has neither a payload in a folder nor files to carry"
            )
        folder = job.payload if not job.files else ""
        if folder and not FOLDER.fullmatch(folder):
            raise Rejected(
                f"{self.name}: the run directory {folder!r} has signs in its path that sbatch would not take as they are"
            )
        environment = {"GANG_SECRETS_FILE": self._secrets_path(job)} if job.secrets else {}
        grace = math.ceil(job.stop_grace)
        return Batch(
            name=job.name,
            comment=to_comment(job.labels, job.digest, job.channel),
            nodes=job.nodes,
            minutes=max(1, math.ceil((job.time_limit + grace + LIMIT_MARGIN) / 60)),
            output=f"{folder}/slurm-%j.log" if folder else "/dev/null",
            folder=config.work_folder,
            script=script(
                self._argv(placed),
                nodes=job.nodes,
                job_name=job.name,
                login_shell=config.login_shell,
                modules=config.modules,
                prologue=config.prologue,
                srun_options=self._srun_options(job),
                mpi=config.mpi,
                output=f"{folder}/slurm-%j-%n.log" if folder else "",
                environment=environment,
                files=job.files,
                payload=payload,
                requeue=config.requeue,
            ),
            gpus=job.gpus_per_node,
            gres=config.gres,
            gpu_type=wanted.gpu_type,
            cpus=wanted.cpus,
            memory=wanted.memory,
            partitions=config.partition,
            account=config.account,
            qos=config.qos,
            reservation=config.reservation,
            constraint=config.constraint,
            switches=_switches(job.topology),
            exclusive=config.exclusive,
            requeue=config.requeue,
            nice=max(0, -job.priority),
            excluded=excluded,
            warning=("TERM", grace + LIMIT_MARGIN),
            options=config.sbatch_options,
            fields=tuple(config.rest_fields.items()),
        )

    def _argv(self, job: Job) -> tuple[str, ...]:
        if job.image is None or self.config.container != "apptainer":
            return job.argv
        binds = [f"--bind={mount}" for mount in self._mounts(job)]
        return ("apptainer", "exec", "--nv", *binds, job.image, *job.argv)

    def _srun_options(self, job: Job) -> tuple[str, ...]:
        options = list(self.config.srun_options)
        if job.image is not None and self.config.container == "pyxis":
            options += [f"--container-image={job.image}", f"--container-mounts={','.join(self._mounts(job))}"]
        elif job.image is not None and self.config.container == "oci":
            options.append(f"--container={job.image}")
        return tuple(options)

    def _mounts(self, job: Job) -> list[str]:
        mine = [
            folder
            for folder in (self.config.shared_folder, self._secrets[1] if self._secrets else None)
            if folder
        ]
        payload = [_carried_to(job)] if job.files else []
        return [f"{folder}:{folder}" for folder in dict.fromkeys([*mine, *payload])] + list(
            self.config.container_mounts
        )

    # -- secrets: a file of mode 0600 that the job's user owns, for as long as the attempt may start again

    async def put_secrets(self, job: Job) -> None:
        if not job.secrets:
            return
        if self._secrets is None:
            raise NotConfigured(
                f"{self.name}: the gang has secrets, and there is no folder through which they reach the nodes: set "
                "secrets_folder of the connection (sftp://user@login/home/user/secrets, with job_secrets_folder where "
                "the nodes see it elsewhere)"
            )
        await self._secrets[0].put_private(_secrets_name(job.name), json.dumps(dict(job.secrets)).encode())

    def _secrets_path(self, job: Job) -> str:
        return f"{self._secrets[1]}/{_secrets_name(job.name)}" if self._secrets is not None else ""

    async def remove_secrets(self, job: str) -> None:
        """No error when there are none."""
        if self._secrets is not None:
            await self._secrets[0].remove(_secrets_name(job))


def _switches(topology: str | None) -> int | None:
    """``switches=1``, or a bare number: at most so many leaf switches."""
    if topology is None:
        return None
    text = topology.removeprefix("switches=")
    if not text.isdecimal() or int(text) < 1:
        raise Rejected(
            f"topology {topology!r}: on Slurm it is 'switches=1', the most leaf switches that the nodes may span"
        )
    return int(text)


def _carried_to(job: Job) -> str:
    """The folder of a carried payload. In /tmp others write, too: nobody who does not know the run can guess its name."""
    return (
        f"/tmp/airflow-gpu-{job.name}-{hashlib.sha256(packed(job.files)).hexdigest()[:16]}"
        if job.files
        else ""
    )


def _secrets_name(job: str) -> str:
    return f".secrets-{job}.json"
