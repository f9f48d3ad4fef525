"""Starts the agent of one node of a gang, at most once for each restart, whatever crashes.

Purpose: each node is a tiny ``/bin/sh`` (the shim) in a session of its own. It
claims the start by creating a file, runs the agent, and writes down its exit
code. The daemon need not be its parent, nor alive, to learn how it ended; and
a daemon that crashed while it was starting a gang may simply start it again.
The shim then stays, stopped, as the parent of whoever was orphaned on its
node, until the daemon has seen who is left.

What it does not do: limit what the agent uses. Output goes straight to a file,
so a flood of it costs the daemon nothing.

Limits: an exit code of 128 + n is what ``sh`` makes of signal n. On a full
disk a shim can neither claim nor report, and its node is taken as lost.
"""

from __future__ import annotations

import contextlib
import ctypes
import fnmatch
import os
import signal
import subprocess
from typing import TYPE_CHECKING, Final

from airflow_gpu.targets.local.files import PRIVATE, PRIVATE_FILE, JobFolder, create_file
from airflow_gpu.targets.local.machine import address
from airflow_gpu.targets.local.processes import Ident, read_marker, read_process

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from airflow_gpu.targets.local.records import Place, Spec

SHIM: Final = r"""
claim=$1 agent=$2 exit=$3; shift 3
# A handler, not "ignore": what is ignored here would stay ignored in the agent.
trap : HUP INT TERM USR1 USR2
echo $$ > "$claim.$$" && ln "$claim.$$" "$claim" || { rm -f "$claim.$$"; exit 70; }
rm -f "$claim.$$"
/bin/sh -c 'echo $$ > "$0.new" && mv -f "$0.new" "$0" && exec "$@"' "$agent" "$@"
code=$?
# Stopped, not ended: orphans of this node stay its children, and are found, until the daemon ends it.
echo $code > "$exit.new" && mv -f "$exit.new" "$exit" && kill -STOP $$
"""

FENCE: Final = b"0\n"
"""In a claim file: the daemon made it, so that no shim ever can."""

PASSED: Final = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "LANGUAGE",
    "LC_*",
    "TZ",
    "TMPDIR",
    "XDG_RUNTIME_DIR",
    "XDG_CACHE_HOME",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "CUDA_HOME",
    "CUDA_PATH",
    "NVIDIA_*",
    "HF_HOME",
    "TORCH_HOME",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
)
"""Variables of the submitting process that its gangs get. A list of what may pass, because Airflow's
environment holds its database's password, and other tools' secrets."""

NEVER_PASSED: Final = ("AIRFLOW*", "_AIRFLOW*", "GANG_*", "CUDA_VISIBLE_DEVICES")

LOG_LIMIT: Final = 16 * 2**20
LOG_KEPT: Final = 2**20
"""An agent's own output above LOG_LIMIT bytes is cut to its last LOG_KEPT. Ranks write to the channel."""

_PR_SET_CHILD_SUBREAPER: Final = 36


def passed_environment(environ: Mapping[str, str], more: Iterable[str] = ()) -> dict[str, str]:
    """The part of ``environ`` that a gang gets. ``more`` are further names or patterns."""
    allowed = (*PASSED, *more)
    return {
        name: value
        for name, value in environ.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in allowed)
        and not any(fnmatch.fnmatchcase(name, pattern) for pattern in NEVER_PASSED)
    }


def node_environment(spec: Spec, folder: JobFolder, restart: int, place: Place) -> dict[str, str]:
    """All that the agent of this node finds in its environment."""
    gpus = ",".join(str(gpu) for gpu in place.gpus)
    environ = {
        **spec.environ,
        "GANG_NODE_RANK": str(place.rank),
        "GANG_JOB_ID": spec.id,
        "GANG_RESTART": str(restart),
        "GANG_NODE_ADDR": address(place.node),
        "GANG_NODE_NAME": f"node-{place.node}",
        "GANG_GPUS": gpus,
        # Empty hides the GPUs from a gang that asked for none.
        "CUDA_VISIBLE_DEVICES": gpus,
        # nvidia-smi counts by bus; CUDA would count by speed, and mean other devices by the same numbers.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    if spec.secrets:
        environ["GANG_SECRETS_FILE"] = str(folder.secrets_file)
    return environ


def prepare(folder: JobFolder, restart: int) -> None:
    """Make the folders of a start."""
    folder.start(restart).mkdir(exist_ok=True, mode=PRIVATE)
    folder.work.mkdir(exist_ok=True, mode=PRIVATE)


def spawn(spec: Spec, folder: JobFolder, restart: int, place: Place) -> subprocess.Popen[bytes]:
    """Start the shim of one node. One that finds the start claimed leaves at once.

    :raises OSError: no process could be made.
    """
    rank = place.rank
    files = [folder.claim(restart, rank), folder.agent(restart, rank), folder.exit(restart, rank)]
    # Appended to: the daemon can cut the file while it is written.
    log = os.open(folder.log(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, PRIVATE_FILE)
    try:
        return subprocess.Popen(
            ["/bin/sh", "-c", SHIM, "airflow-gpu-node", *map(str, files), *spec.argv],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder.work,
            env=node_environment(spec, folder, restart, place),
            start_new_session=True,
            preexec_fn=_reap_orphans,
        )
    finally:
        os.close(log)


def read_claim(folder: JobFolder, spec: Spec, restart: int, place: Place) -> Ident | None:
    """The shim that claimed this start; None when none did, or it has ended."""
    return _ours(_read_number(folder.claim(restart, place.rank)), spec, restart)


def read_agent(folder: JobFolder, spec: Spec, restart: int, place: Place) -> Ident | None:
    """The agent's process; None when there is none (yet, or any more)."""
    return _ours(_read_number(folder.agent(restart, place.rank)), spec, restart)


def claimed(folder: JobFolder, restart: int, place: Place) -> bool:
    """Whether a shim has claimed this start."""
    return (_read_number(folder.claim(restart, place.rank)) or 0) > 0


def fence(folder: JobFolder, restart: int, place: Place) -> bool:
    """See to it that no shim claims this start any more; False when one already has."""
    prepare(folder, restart)
    create_file(folder.claim(restart, place.rank), FENCE)
    return not claimed(folder, restart, place)


def read_exit(folder: JobFolder, restart: int, place: Place) -> tuple[int, float] | None:
    """Exit code of the agent and when it was written; None when there is none."""
    path = folder.exit(restart, place.rank)
    code = _read_number(path)
    if code is None:
        return None
    return code, path.stat().st_mtime


def trim_log(path: Path) -> None:
    """Cut a log that has grown too long; its end stays, in ``<name>.old``."""
    with contextlib.suppress(FileNotFoundError):
        size = path.stat().st_size
        if size <= LOG_LIMIT:
            return
        with path.open("rb") as file:
            file.seek(size - LOG_KEPT)
            path.with_suffix(".log.old").write_bytes(file.read(LOG_KEPT))
        os.truncate(path, 0)


def signal_name(code: int) -> str:
    """Name of the signal in an exit code of 128 + n; empty when it is none."""
    try:
        return signal.Signals(code - 128).name if code > 128 else ""
    except ValueError:
        return ""


def _ours(pid: int | None, spec: Spec, restart: int) -> Ident | None:
    """The process with this pid, if it is of this start: pids come again."""
    if not pid:
        return None
    process = read_process(pid)
    if process is None or process.dead:
        return None
    marker = read_marker(pid)
    if marker is None or marker.job != spec.id or marker.restart != restart:
        return None
    return process.ident


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None


_libc = ctypes.CDLL(None, use_errno=True)


def _reap_orphans() -> None:
    # Runs in the child, before exec. Orphans of this node become children of the shim, so that a
    # walk down the tree finds them, and nobody's zombies are left where process 1 does not wait.
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
