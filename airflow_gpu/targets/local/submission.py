"""A job folder made at most once for a name, with its secrets beside it and never in it.

Purpose: ``submit`` of the target, without the waiting. The folder is written
whole under another name and renamed: the rename fails where a job is, so of
any number of submits one creates and the others adopt. A payload that the target
carries is in the folder before it has its name, and goes with it.

What it does not do: start anything. The daemon takes the folder in.

Limits: a folder of that name that was emptied by hand is taken for free.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import time
from typing import TYPE_CHECKING

from airflow_gpu.targets.base import PAYLOAD, Job, NameTaken, Rejected
from airflow_gpu.targets.local.config import ConfigError, LocalConfig, is_object_store, local_path
from airflow_gpu.targets.local.files import (
    PRIVATE,
    Folder,
    JobFolder,
    create_file,
    encode,
    read_json,
    replace_file,
)
from airflow_gpu.targets.local.launch import passed_environment
from airflow_gpu.targets.local.records import Cause, Spec
from airflow_gpu.targets.local.schedule import Node, impossible

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


def cancel_id(job: str) -> str:
    """Id of the command that cancels the job with this id: there is one at most."""
    return f"cancel-{job}"


def incarnation_of(labels: Mapping[str, str]) -> str:
    """The incarnation in a job's labels, with or without a prefix; empty where there is none."""
    for name, value in labels.items():
        if name.rpartition("/")[2] == "incarnation":
            return value
    return ""


def matches(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Whether a job's labels have all the values that are wanted."""
    return all(labels.get(name) == value for name, value in wanted.items())


def names(folder: Folder) -> list[str]:
    """Names of all jobs that have a folder."""
    return sorted(name for name in os.listdir(folder.jobs) if _NAME.fullmatch(name))


def find(folder: Folder, name: str) -> Spec | None:
    """What was asked in the job of that name; None when there is none.

    :raises Damaged: it is there and cannot be read.
    """
    if not _NAME.fullmatch(name):
        return None
    data = read_json(folder.job(name).spec)
    return None if data is None else Spec.from_json(data)


def is_ours(spec: Spec, labels: Mapping[str, str], digest: str) -> bool:
    """Whether a job is the one that these labels and this digest speak of."""
    return incarnation_of(spec.labels) == incarnation_of(labels) and spec.digest == digest


def adopt(folder: Folder, job: Job) -> str | None:
    """The id of the job that has this name, if it is ours; None when the name is free.

    :raises NameTaken: it is another incarnation's, differs in what was asked, or is being ended.
    :raises Damaged: it cannot be read.
    """
    spec = find(folder, job.name)
    if spec is None:
        return None
    if incarnation_of(spec.labels) != incarnation_of(job.labels):
        raise NameTaken(f"job {job.name!r} belongs to incarnation {incarnation_of(spec.labels)!r}")
    if spec.digest != job.digest:
        raise NameTaken(f"job {job.name!r} was submitted with another request (digest {spec.digest})")
    if ending(folder, spec):
        raise NameTaken(f"job {job.name!r} is being cancelled")
    return spec.id


def create(folder: Folder, job: Job, config: LocalConfig, nodes: list[Node]) -> str | None:
    """Make the job; answers its id, None when another submit was first.

    :raises Rejected: it can never run here. The message says what there is and what was asked.
    """
    if job.files:
        job = job.placed(str(folder.job(job.name).payload))
    spec = _spec(job, config)
    why = impossible(nodes, spec.request())
    if why:
        raise Rejected(f"job {job.name!r} can never run here: {why}")
    staged = JobFolder(folder.jobs / f".{job.name}.{secrets.token_hex(6)}")
    staged.root.mkdir(mode=PRIVATE)
    try:
        if job.secrets:
            staged.secrets.mkdir(mode=PRIVATE)
            create_file(staged.secrets_file, json.dumps(dict(job.secrets)).encode())
        if job.files:
            _carry(staged.payload, job.files)
        replace_file(staged.spec, encode(spec.to_json()), flush=True)
        try:
            os.rename(staged.root, folder.job(job.name).root)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            return None
    finally:
        shutil.rmtree(staged.root, ignore_errors=True)
    descriptor = os.open(folder.jobs, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return spec.id


def _carry(folder: Path, files: Mapping[str, bytes]) -> None:
    """Put the payload where the ranks will find it, on the disk before the job is there."""
    folder.mkdir(mode=PRIVATE)
    for name, data in files.items():
        if name != os.path.basename(name) or name in ("", ".", ".."):
            raise Rejected(f"{name!r} is no name of a file of a payload")
        replace_file(folder / name, data, flush=True)


def _spec(job: Job, config: LocalConfig) -> Spec:
    if not _NAME.fullmatch(job.name):
        raise Rejected(f"job name {job.name!r} is not a DNS label")
    if job.image is not None:
        raise Rejected(f"image {job.image!r} was asked for; this machine's gangs run without containers")
    if job.nodes < 1 or job.gpus_per_node < 0 or job.time_limit <= 0:
        raise Rejected(
            f"{job.nodes} nodes, {job.gpus_per_node} GPUs, {job.time_limit} s: not a shape that can run"
        )
    if PAYLOAD in job.payload:
        raise Rejected(f"job {job.name!r} has neither a payload that lies in a folder nor files to carry")
    try:
        payload = local_path(job.payload, "payload")
        channel = job.channel if is_object_store(job.channel) else str(local_path(job.channel, "channel"))
    except ConfigError as error:
        raise Rejected(str(error)) from None
    return Spec(
        id=f"{job.name}.{secrets.token_hex(5)}",
        name=job.name,
        labels=dict(job.labels),
        attempt=job.attempt,
        digest=job.digest,
        nodes=job.nodes,
        gpus_per_node=job.gpus_per_node,
        cpus=job.cpus,
        memory=job.memory,
        accelerator=job.accelerator,
        priority=job.priority,
        time_limit=job.time_limit,
        payload=str(payload),
        channel=channel,
        exclude_hosts=tuple(job.exclude_hosts),
        secrets=bool(job.secrets),
        submitted_at=time.time(),
        argv=tuple(job.argv),
        environ=passed_environment(os.environ, config.pass_env),
        grace=config.grace,
        straggler=config.straggler,
        requeue=config.requeue,
        keep=config.keep,
    )


def ending(folder: Folder, spec: Spec) -> bool:
    """Whether a cancel of this job is on its way or at work, and not yet at its end."""
    if (folder.commands / f"{cancel_id(spec.id)}.json").exists():
        return True
    state = read_json(folder.job(spec.name).state) or {}
    stop = state.get("stop") or {}
    return state.get("ended_at") is None and bool(stop.get("cancelled") or stop.get("cause") == Cause.CANCEL)
