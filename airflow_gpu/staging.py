"""What an attempt is given: the payload in the run directory, and the job for the target.

Purpose: everything the ranks need is on the channel before the submit, so that
neither the trigger nor the job ever needs the DAG file. Where the ranks do not see
the channel as a folder, the target carries the payload, and what it carries is read back from
the channel: so every driver submits what was staged first.

What it does not do: secrets. They travel by the target's own route, never
through the payload.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote

from airflow_gpu.gang._fields import AUTO
from airflow_gpu.gang.identity import RunKey, labels
from airflow_gpu.gang.run import Attempt, Seed
from airflow_gpu.gang.spec import Gang
from airflow_gpu.rundir.channel import Channel
from airflow_gpu.rundir.store import Exists, StoreError
from airflow_gpu.runtime.bundle import build
from airflow_gpu.runtime.interval import FIRST, expected_mtbf
from airflow_gpu.targets.base import PAYLOAD, Job, JobRef, Rejected, Target

PAYLOAD_VERSION = 1

MOST_CARRIED = 16 << 20
"""Bytes of one file of a payload."""


def payload_folder(attempt: int) -> str:
    return f"payload/{attempt:04d}"


def carries(target: Target) -> bool:
    """Whether the target carries the payload, since its ranks do not see the channel as a folder."""
    return "://" in target.job_channel


def _in_job(target: Target, channel: Channel) -> str:
    """The channel half as the ranks see it."""
    return f"{target.job_channel.rstrip('/')}/{channel.path}"


def _payload(target: Target, channel: Channel, attempt: int) -> str:
    """The folder of the payload as the nodes see it."""
    return PAYLOAD if carries(target) else f"{_in_job(target, channel)}/{payload_folder(attempt)}"


def _seed_in_job(target: Target, seed: Seed | None, store: Mapping[str, Any]) -> dict[str, Any] | None:
    """Where a checkpoint of another channel is for the ranks. A folder has the same path there as here.

    :param store: what a job may be told of the seed's store.
    :raises Rejected: jobs of this target cannot read there.
    """
    if seed is None:
        return None
    here = target.channel.rstrip("/")
    if seed.channel.startswith(f"{here}/"):
        where, store = target.job_channel.rstrip("/") + seed.channel[len(here) :], target.job_store
    elif seed.channel.startswith("file://"):
        where, store = unquote(seed.channel.removeprefix("file://")), {}
    elif seed.channel.startswith(("memory:", "sftp:")):  # the ranks have no log-in there
        raise Rejected(
            f"the checkpoint to go on from is at {seed.channel}, where jobs of this target cannot read"
        )
    else:
        where = seed.channel
    return {
        "channel": where,
        "store": dict(store),
        "life": seed.life,
        "step": seed.step,
        "run": seed.run,
    }


async def stage(
    channel: Channel,
    target: Target,
    key: RunKey,
    incarnation: str,
    gang: Gang,
    attempt: Attempt,
    seed_store: Mapping[str, Any] = MappingProxyType({}),
) -> Mapping[str, bytes]:
    """Write the payload of an attempt. Doing it again changes nothing: what was staged first stays.

    :param seed_store: what a job may be told of the store of ``attempt.seed``, where that is another one.
    :return: what the target carries (``Job.files``), as it was staged first; nothing where the ranks see the channel.
    """
    files: dict[str, bytes] = {"runtime.pyz": build()}
    if gang.function is not None:
        files["function.py"] = gang.function.source.encode()
        files["function.json"] = json.dumps(gang.function.call).encode()
        command = ["<python>", "-m", "airflow_gpu.runtime.call", "<payload>/function.py"]
    elif gang.script is not None:
        files["script.sh"] = gang.script.encode()
        command = ["/bin/bash", "-euo", "pipefail", "<payload>/script.sh"]
    else:
        command = list(gang.command or ())
    body: dict[str, Any] = {
        "v": PAYLOAD_VERSION,
        "run": f"{key.dag_id}/{key.run_id}/{key.task_id}"
        + (f"[{key.map_index}]" if key.map_index >= 0 else ""),
        "key": {
            "installation": key.installation,
            "dag_id": key.dag_id,
            "run_id": key.run_id,
            "task_id": key.task_id,
            "map_index": key.map_index,
            "incarnation": incarnation,
        },
        "attempt": attempt.number,
        "name": attempt.name,
        "first_life": attempt.first_life,
        "resume": attempt.resume,
        "since": attempt.since,
        "seed": _seed_in_job(target, attempt.seed, seed_store),
        "channel": _in_job(target, channel),
        "store": dict(target.job_store),
        "nodes": gang.nodes,
        "ranks_per_node": gang.ranks,
        "gpus_per_node": gang.gpus_per_node,
        "launch": gang.launch,
        "command": command,
        "env": dict(gang.env),
        "secrets_file": None,
        "barrier_timeout": gang.barrier_timeout,
        # Agents that are killed before they have ended their ranks leave no record.
        "stop_grace": min(gang.stop_grace, target.capabilities.grace or gang.stop_grace),
        "time_limit": gang.time_limit,
        "checkpoint": _checkpointing(gang, attempt),
    }
    # Last: a payload with a job.json is whole.
    files["job.json"] = json.dumps(body, indent=1).encode()
    folder = f"{channel.path}/{payload_folder(attempt.number)}"
    for name, data in files.items():
        try:
            await channel.store.create(f"{folder}/{name}", data)
        except Exists:
            continue
    return await _staged(channel, folder) if carries(target) else {}


async def _staged(channel: Channel, folder: str) -> dict[str, bytes]:
    """All files of a payload. Its job.json is the last that is written, so they are all there."""
    found = {}
    for entry in await channel.store.list(folder):
        if entry.size > MOST_CARRIED:
            raise StoreError(
                f"{channel.uri}: {entry.path} has {entry.size} bytes: no file of a payload is that large"
            )
        found[entry.path.removeprefix(f"{folder}/")] = await channel.store.get(entry.path)
    return found


def _checkpointing(gang: Gang, attempt: Attempt) -> dict[str, Any]:
    """When to save, as the ranks are told: with an ``mtbf`` the interval is only the first one."""
    interval: Any = gang.checkpointing.interval
    body: dict[str, Any] = {
        "interval": interval,
        "keep": gang.checkpointing.keep,
        "every": gang.checkpointing.every,
        "local": gang.checkpointing.local,
        "local_interval": gang.checkpointing.local_interval,
    }
    if interval == AUTO:
        provisioning = str((attempt.offer.get("chosen") or {}).get("provisioning") or "")
        body |= {"interval": FIRST, "mtbf": expected_mtbf(gang.nodes, provisioning)}
    return body


def job_for(
    channel: Channel,
    target: Target,
    key: RunKey,
    incarnation: str,
    gang: Gang,
    attempt: Attempt,
    secrets: Mapping[str, str],
    exclude_hosts: tuple[str, ...] = (),
    files: Mapping[str, bytes] = MappingProxyType({}),
) -> Job:
    """The attempt, as the target is asked to run it. ``files``: what :func:`stage` answered."""
    payload = _payload(target, channel, attempt.number)
    return Job(
        name=attempt.name,
        labels=labels(key, incarnation, attempt.number, attempt.digest),
        attempt=attempt.number,
        digest=attempt.digest,
        nodes=gang.nodes,
        gpus_per_node=gang.gpus_per_node,
        ranks_per_node=gang.ranks,
        payload=payload,
        channel=_in_job(target, channel),
        time_limit=gang.time_limit,
        argv=(target.python, f"{payload}/runtime.pyz", "agent", f"{payload}/job.json"),
        stop_grace=gang.stop_grace,
        pool=str((attempt.offer.get("chosen") or {}).get("pool") or ""),
        team=gang.team,
        topology=gang.topology,
        accelerator=gang.accelerator,
        cpus=gang.cpus,
        memory=gang.memory,
        image=gang.image,
        priority=gang.priority,
        env=dict(gang.env),
        secrets=dict(secrets),
        exclude_hosts=exclude_hosts,
        files=dict(files),
    )


def ref_for(key: RunKey, incarnation: str, attempt: Attempt) -> JobRef:
    """What finds the attempt's job again."""
    return JobRef(
        name=attempt.name,
        labels=labels(key, incarnation, attempt.number, attempt.digest),
        attempt=attempt.number,
        digest=attempt.digest,
        platform_id=attempt.platform_id,
        channel=attempt.channel,
    )
