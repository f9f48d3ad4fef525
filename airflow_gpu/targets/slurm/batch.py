"""What is submitted: one self-contained batch script, and its options for sbatch and for REST.

Purpose: the only place where a job's options are written. sbatch reads them from
``#SBATCH`` lines, slurmrestd from fields (it ignores those lines); both are made of one
:class:`Batch`. What is rendered is kept as golden files by the tests.

How the job goes: the script runs on the first node. It carries the payload there (a tar,
broadcast with ``sbcast``) where the nodes share no folder with Airflow, then starts one
agent on each node with one ``srun``, waits for all, and leaves with their worst code.
Signals reach the agents themselves; the script only outlives them.

Limits: every value in a ``#SBATCH`` line is of a closed set of characters
(:mod:`.config`, :mod:`.identity`); words of the script are quoted for the shell.
"""

from __future__ import annotations

import base64
import io
import shlex
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

EXIT_PREEMPTED: Final = 75
"""Of an agent that left on a notice: to be started again (``airflow_gpu.runtime.words``)."""

ENVIRONMENT: Final = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"}
"""Of the batch script. Nothing of Airflow's own environment goes to a job."""

LINE: Final = 76


@dataclass(frozen=True, slots=True)
class Batch:
    """A job's options and script. ``memory``: MiB a node; ``minutes``: the time limit."""

    name: str
    comment: str
    nodes: int
    minutes: int
    output: str
    folder: str
    script: str
    gpus: int = 0
    gres: str = "gpu"
    gpu_type: str | None = None
    cpus: int | None = None
    memory: int | None = None
    partitions: tuple[str, ...] = ()
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None
    constraint: str | None = None
    switches: int | None = None
    exclusive: bool = False
    requeue: bool = False
    nice: int = 0
    excluded: tuple[str, ...] = ()
    warning: tuple[str, int] | None = None  # signal to the steps, and seconds before the time limit
    options: tuple[str, ...] = ()  # further ones of sbatch
    fields: tuple[tuple[str, Any], ...] = ()  # further ones of REST

    @property
    def gres_words(self) -> str:
        """``gpu:h100:8``; empty without GPUs."""
        return (
            ":".join(part for part in (self.gres, self.gpu_type, str(self.gpus)) if part) if self.gpus else ""
        )

    @property
    def text(self) -> str:
        """The script with its ``#SBATCH`` lines, for sbatch."""
        first, _, rest = self.script.partition("\n")
        return "\n".join([first, *(f"#SBATCH {option}" for option in self._sbatch()), rest])

    def _sbatch(self) -> list[str]:
        pairs: list[tuple[str, Any]] = [
            ("job-name", self.name),
            ("comment", self.comment),
            ("nodes", self.nodes),
            ("ntasks-per-node", 1),
            ("gres", self.gres_words),
            ("cpus-per-task", self.cpus),
            ("mem", f"{self.memory}M" if self.memory else None),
            ("partition", ",".join(self.partitions)),
            ("account", self.account),
            ("qos", self.qos),
            ("reservation", self.reservation),
            ("constraint", self.constraint),
            ("switches", self.switches),
            ("time", self.minutes),
            ("signal", f"{self.warning[0]}@{self.warning[1]}" if self.warning else None),
            ("nice", self.nice or None),
            ("dependency", "singleton"),  # of two jobs of one attempt the second waits
            ("exclude", ",".join(self.excluded)),
            ("output", self.output),
            ("open-mode", "append"),
            ("chdir", self.folder),
            ("export", "NIL"),
        ]
        lines = [f"--{name}={value}" for name, value in pairs if value not in (None, "")]
        lines.append("--requeue" if self.requeue else "--no-requeue")
        if self.exclusive:
            lines.append("--exclusive")
        return lines + list(self.options)

    def rest_job(self, version: int) -> dict[str, Any]:
        """The ``job`` of a REST submit, for ``v0.0.<version>``."""
        set_number = _set if version >= 40 else _plain
        job: dict[str, Any] = {
            "name": self.name,
            "comment": self.comment,
            "nodes": str(self.nodes) if version >= 40 else [self.nodes, self.nodes],
            "tasks": self.nodes,
            "tasks_per_node": 1,
            "time_limit": set_number(self.minutes),
            "requeue": self.requeue,
            "dependency": "singleton",
            "standard_output": self.output,
            "open_mode": ["APPEND"] if version >= 40 else "append",
            "current_working_directory": self.folder,
            "environment": [f"{name}={value}" for name, value in ENVIRONMENT.items()]
            if version >= 39
            else dict(ENVIRONMENT),
        }
        if self.gpus:
            job |= (
                {"tres_per_node": f"gres/{self.gres_words}"} if version >= 39 else {"gres": self.gres_words}
            )
        if self.cpus:
            job["cpus_per_task"] = self.cpus
        if self.memory:
            job["memory_per_node"] = set_number(self.memory)
        named = {
            "partition": ",".join(self.partitions),
            "account": self.account,
            "qos": self.qos,
            "reservation": self.reservation,
            "constraints": self.constraint,
        }
        job |= {name: value for name, value in named.items() if value}
        if self.switches:
            job["required_switches"] = set_number(self.switches)
        if self.warning and version >= 40:  # older ones refuse every spelling of it
            job |= {"kill_warning_signal": self.warning[0], "kill_warning_delay": _set(self.warning[1])}
        if self.nice:
            job["nice"] = self.nice
        if self.excluded:
            job["excluded_nodes"] = list(self.excluded) if version >= 39 else ",".join(self.excluded)
        if self.exclusive:
            job |= {"shared": ["none"]} if version >= 40 else {"exclusive": "exclusive"}
        return {**job, **dict(self.fields)}


def script(
    argv: tuple[str, ...],
    *,
    nodes: int,
    job_name: str,
    login_shell: bool = True,
    modules: tuple[str, ...] = (),
    prologue: tuple[str, ...] = (),
    srun_options: tuple[str, ...] = (),
    mpi: str = "none",
    output: str = "",
    environment: Mapping[str, str] | None = None,
    files: Mapping[str, bytes] | None = None,
    payload: str = "",
    requeue: bool = False,
) -> str:
    """The batch script without its options.

    ``argv``: what is run once on each node. ``files``: a payload to carry into ``payload``,
    a folder below the nodes' own ``/tmp``. ``environment``: of the agents; nothing secret.
    """
    lines = [
        f"#!/bin/bash{' -l' if login_shell else ''}",
        f"# airflow-gpu: gang {job_name}, one agent a node.",
        "umask 077",
        '# A handler, not "ignore": what is ignored here would stay ignored in the agents.',
        "trap : HUP INT TERM USR1 USR2 CONT",
        "unset SLURM_EXPORT_ENV SBATCH_EXPORT",
        # Neither sbatch --export=NIL nor slurmrestd gives these.
        f'export PATH="${{PATH:-{ENVIRONMENT["PATH"]}}}" HOME="${{HOME:-$(echo ~)}}" USER="${{USER:-$(id -un)}}"',
    ]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in (environment or {}).items()]
    if modules:
        lines.append(f"module load {' '.join(shlex.quote(name) for name in modules)} || exit 71")
    lines += prologue
    words = [shlex.quote(word) for word in argv]
    if files:
        lines += _carried(payload, files)
        words = ["/bin/sh", "-c", shlex.quote(_UNPACK), "airflow-gpu", shlex.quote(payload), *words]
    srun = [
        "srun",
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--export=ALL",
        f"--mpi={mpi}",
        *(['${SLURM_CPUS_PER_TASK:+"--cpus-per-task=$SLURM_CPUS_PER_TASK"}']),
        *([f"--output={shlex.quote(output)}", "--open-mode=append"] if output else []),
        *[shlex.quote(option) for option in srun_options],
    ]
    lines += [" \\\n  ".join(srun) + " \\\n  " + " ".join(words), "code=$?"]
    if files:
        removal = f"rm -rf {shlex.quote(payload)} {shlex.quote(payload)}.tar.gz"
        lines.append(
            f"srun --overlap --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 {removal} >/dev/null 2>&1"
        )
    if requeue:
        lines += [
            "# A gang that left on a notice goes on. Slurm itself sees to that only where it sent the notice (24.11).",
            f'[ "$code" = {EXIT_PREEMPTED} ] && scontrol requeue "$SLURM_JOB_ID"',
        ]
    return "\n".join([*lines, 'exit "$code"', ""])


_UNPACK: Final = (
    'umask 077; rm -rf "$1"; mkdir "$1" && tar -xzf "$1.tar.gz" -C "$1" || exit 71; shift; exec "$@"'
)


def _carried(payload: str, files: Mapping[str, bytes]) -> list[str]:
    data = base64.b64encode(packed(files)).decode()
    quoted = shlex.quote(payload)
    return [
        f"base64 -d > {quoted}.tar.gz <<'AIRFLOW_GPU_PAYLOAD' || exit 71",
        *[data[at : at + LINE] for at in range(0, len(data), LINE)],
        "AIRFLOW_GPU_PAYLOAD",
        f"sbcast --force {quoted}.tar.gz {quoted}.tar.gz || exit 71",
    ]


def packed(files: Mapping[str, bytes]) -> bytes:
    """A tar.gz of these files, the same for the same files."""
    import gzip

    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in sorted(files):
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(files[name]), 0o600
            tar.addfile(info, io.BytesIO(files[name]))
    return gzip.compress(plain.getvalue(), mtime=0)


def _set(value: int) -> Any:
    return {"set": True, "infinite": False, "number": value}


def _plain(value: int) -> Any:
    return value
