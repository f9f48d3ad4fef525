"""What this machine has: GPUs, cores, memory; and how it is split into nodes.

Purpose: turn the declared shape into the nodes that the scheduler sees. What
is not declared is detected: GPUs by ``nvidia-smi``, cores by the affinity of
the daemon, memory by ``/proc/meminfo`` and the cgroup's limit.

What it does not do: check that a GPU works, or use MIG slices and other
vendors' GPUs (declare those with ``gpus_per_node`` and ``pretend``).

Limits: GPUs that are left over when they do not split evenly are not used.

Example::

    nodes = build_nodes(shape, detect_gpus())
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow_gpu.targets.local.schedule import Node

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SMI_TIMEOUT = 60.0
"""Seconds for nvidia-smi, which loads the driver when nothing else holds it."""


class MachineError(Exception):
    """The declared shape does not fit this machine, or the machine could not be asked."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as ``nvidia-smi`` lists it. ``memory`` is in MiB, 0 where it is not told."""

    index: int
    name: str
    memory: int


def detect_gpus() -> list[Gpu]:
    """This machine's GPUs; none where there is no ``nvidia-smi``.

    :raises MachineError: there is one, but it failed. That is not the same as no GPUs.
    """
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    try:
        answer = subprocess.run(
            [command, "--query-gpu=index,name,memory.total", "--format=csv,noheader,nounits"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SMI_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MachineError(f"{command} failed: {error}") from None
    if "no devices were found" in (answer.stdout + answer.stderr).lower():
        return []
    if answer.returncode != 0:
        said = (answer.stderr or answer.stdout).strip().splitlines()
        raise MachineError(f"{command} ended with {answer.returncode}: {said[0] if said else 'no output'}")
    return parse_gpus(answer.stdout)


def parse_gpus(text: str) -> list[Gpu]:
    """The GPUs in the answer of ``nvidia-smi``.

    >>> parse_gpus("0, NVIDIA H200, 143771")
    [Gpu(index=0, name='NVIDIA H200', memory=143771)]
    """
    found = []
    for line in text.splitlines():
        if not line.strip():
            continue
        index, _, rest = line.partition(",")
        name, _, memory = rest.rpartition(",")
        try:
            size = int(memory)
        except ValueError:
            size = 0  # "[N/A]" on machines whose GPU shares the host's memory
        try:
            found.append(Gpu(int(index), name.strip(), size))
        except ValueError:
            raise MachineError(f"nvidia-smi said {line!r}, which is no GPU") from None
    return found


def build_nodes(shape: Mapping[str, Any], gpus: Sequence[Gpu]) -> list[Node]:
    """The nodes of a cluster of this shape on a machine with these GPUs.

    :raises MachineError: more GPUs are declared than there are, and ``pretend`` is off.
    """
    count = int(shape.get("nodes") or 1)
    declared = shape.get("gpus_per_node")
    each = len(gpus) // count if declared is None else int(declared)
    short = count * each > len(gpus)
    if short and gpus and not shape.get("pretend"):
        raise MachineError(
            f"{count} nodes x {each} GPUs are declared, but nvidia-smi lists {len(gpus)}; "
            "declare no more than that, or set pretend for GPUs that need not be there"
        )
    devices = list(range(count * each)) if short else [gpu.index for gpu in gpus[: count * each]]
    names = {gpu.index: gpu.name for gpu in gpus}
    cpus = shape.get("cpus") or _cores() / count
    memory = shape.get("memory") or _memory() // count
    nodes = []
    for index in range(count):
        own = tuple(devices[index * each : (index + 1) * each])
        kinds = {names[device] for device in own if device in names}
        detected = kinds.pop() if len(kinds) == 1 and not short else None
        nodes.append(
            Node(
                index=index,
                host=f"node-{index}",
                gpus=own,
                cpus=float(cpus),
                memory=int(memory),
                accelerator=shape.get("accelerator") or detected,
            )
        )
    return nodes


def address(node: int) -> str:
    """The loopback address of a node. Each has its own, so that ports need not differ between nodes."""
    return f"127.0.0.{1 + node}"


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _memory() -> int:
    """Bytes of memory: the machine's, or the limit of our cgroup if that is lower."""
    total = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            total = int(line.split()[1]) * 1024
    try:
        own = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip().lstrip("/")
        limit = (Path("/sys/fs/cgroup") / own / "memory.max").read_text().strip()
        return min(total, int(limit))
    except (OSError, ValueError):
        return total  # "max", or no cgroup v2
