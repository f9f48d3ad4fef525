"""The file system that a cluster starts from: Debian with Slurm, made once for each version and never written to again.

with image("24.11") as root: ...

The newest Debian that has a version is where it comes from, so the last figure of the version may move. Concurrent
callers wait for the one that makes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

SUITES = {"22.05": "bookworm", "24.11": "trixie", "26.05": "sid"}
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "airflow-gpu" / "slurm"
MAKE_FOR = 900.0
"""Seconds that making one may take; 35-90 on two idle cores."""

_HERE = Path(__file__).parent
_PACKAGES = (
    *("slurmctld", "slurmd", "slurmdbd", "slurmrestd", "slurm-client", "slurm-wlm-basic-plugins"),
    *("slurm-wlm-jwt-plugin", "slurm-wlm-mysql-plugin", "munge", "mariadb-server", "openssh-server"),
    *("openssh-sftp-server", "jq", "procps", "iproute2", "python3", "curl", "ca-certificates"),
)
_TOOLS = ("unshare", "nsenter", "mount", "pivot_root", "ip")
_APT = [
    'Acquire::Check-Valid-Until "false"',
    'Acquire::Check-Date "false"',
    'APT::Install-Recommends "false"',
]


class Unavailable(Exception):
    """A cluster cannot be had on this machine; the text says why."""


@contextlib.contextmanager
def image(version: str) -> Iterator[Path]:
    """The root of `version`, made when it is not there yet, and kept from being removed while in use."""
    home = CACHE / version / _recipe(version)
    home.mkdir(parents=True, exist_ok=True)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        if not (home / "root").is_dir():
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (home / "root").is_dir():
                _make(SUITES[version], home / "root")
                _remove_others(home)
            fcntl.flock(lock, fcntl.LOCK_SH)
        yield home / "root"


def missing(version: str = "24.11") -> str:
    """Why a cluster of `version` cannot be had here; empty when it can."""
    if version not in SUITES:
        return f"there is no Slurm {version} here, only {', '.join(SUITES)}"
    if os.geteuid() != 0:
        return "a Slurm cluster needs root, for namespaces of its own"
    absent = [tool for tool in _TOOLS if not _which(tool)]
    if absent:
        return f"not on this machine: {', '.join(absent)}"
    if refused := _refused():
        return refused
    if (CACHE / version / _recipe(version) / "root").is_dir() or _which("mmdebstrap") or _which("apt-get"):
        return ""
    return "neither a cached root of Slurm, nor mmdebstrap, nor apt-get to install it"


def _refused() -> str:
    """Whether this machine lets us make namespaces, an overlay and a network: tried, because nothing tells."""
    script = (
        "set -e; mount -t tmpfs tmpfs /mnt; mkdir /mnt/u /mnt/w /mnt/r; mknod /mnt/null c 1 3; "
        "mount -t overlay overlay -o lowerdir=/etc,upperdir=/mnt/u,workdir=/mnt/w /mnt/r; ip link add br0 type bridge; "
        "ip link add one type veth peer name two"
    )
    tried = subprocess.run(
        [_which("unshare"), "--mount", "--net", "--pid", "--uts", "--ipc", "--fork", "sh", "-c", script],
        env={**os.environ, "PATH": _path()},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return f"namespaces are refused here: {tried.stderr.strip()}" if tried.returncode else ""


def _recipe(version: str) -> str:
    """A name for what the image is made of: another one is made, not this changed, when that changes."""
    told = repr((SUITES[version], _PACKAGES, _APT)).encode() + (_HERE / "image.sh").read_bytes()
    return hashlib.sha256(told).hexdigest()[:12]


def _remove_others(home: Path) -> None:
    """Images of former recipes, but those that are in use."""
    for other in home.parent.iterdir():
        if other == home:
            continue
        with contextlib.suppress(OSError), (other / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(other)


def _make(suite: str, root: Path) -> None:
    mmdebstrap = _which("mmdebstrap") or _install()
    making = Path(tempfile.mkdtemp(prefix="making-", dir=root.parent))
    command = ["nice", "-n", "10", mmdebstrap, "--variant=minbase", "--skip=check/qemu"]
    command += [f"--aptopt={option}" for option in _APT]
    command += [
        f"--include={','.join(_PACKAGES)}",
        f"--customize-hook=chroot \"$1\" sh -s < '{_HERE / 'image.sh'}'",
    ]
    try:
        made = subprocess.run(
            [*command, suite, str(making / "root")], capture_output=True, text=True, timeout=MAKE_FOR
        )
        if made.returncode:
            raise Unavailable(f"mmdebstrap made no Debian {suite}: {made.stderr[-2000:]}")
        (making / "root").rename(root)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _install() -> str:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    said = ""
    for arguments in (["update", "-qq"], ["install", "-qq", "-y", "--no-install-recommends", "mmdebstrap"]):
        done = subprocess.run(
            ["apt-get", *arguments], env=environment, capture_output=True, text=True, timeout=MAKE_FOR
        )
        said = done.stderr
    found = _which("mmdebstrap")
    if not found:
        raise Unavailable(
            f"mmdebstrap is not on this machine, and apt-get does not install it: {said[-1000:]}"
        )
    return found


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin:/usr/bin:/bin"


def _which(tool: str) -> str:
    return shutil.which(tool, path=_path()) or ""
