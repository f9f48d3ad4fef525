"""A real OpenSSH server on this machine, as whoever runs the tests: own host key, own authorized_keys, a free port.

with sshd() as server:
    store = Store(server.uri, server.options)

Nothing of the system is changed, but that ``openssh-server`` is installed when it is missing and we are root.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.beds.stores.servers import Server, Unavailable, _free_port, _running

# Another HOME: the login shell of whoever runs this reads its start-up files on the way, which may do anything, and
# killed in the midst of it leave anything.
_CONFIG = """
ListenAddress 127.0.0.1
Port {port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
PubkeyAuthentication yes
PermitRootLogin prohibit-password
SetEnv HOME={folder}
Subsystem sftp {subsystem}
"""


@dataclass
class Sshd(Server):
    """`folder` is the root that `uri` names, `keys` where the keys are."""

    folder: Path = Path()
    keys: Path = Path()

    @property
    def host_key(self) -> str:
        return (self.keys / "host_key.pub").read_text()

    def fail(self, *faults: tuple[str, int | str]) -> None:
        """What goes wrong next: see `faulty_sftp.py`."""
        (self.keys / "faults").write_text(json.dumps(faults))

    def left(self) -> list[Any]:
        """Faults that have not happened yet."""
        return list(json.loads((self.keys / "faults").read_text()))

    def hide(self, *extensions: str) -> None:
        (self.keys / "hidden").write_text("\n".join(extensions))

    def sessions(self) -> list[psutil.Process]:
        """The processes that serve one connection each."""
        return [child for child in psutil.Process(self.pid).children() if child.is_running()]

    def hang_up(self) -> int:
        """Kill the processes of all connections, as a crash of the login node would."""
        found = [p for child in self.sessions() for p in [*child.children(recursive=True), child]]
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        return len(found)


@contextlib.contextmanager
def sshd(*, subsystem: str = "", faulty: bool = False) -> Iterator[Sshd]:
    """A server over a temporary folder.

    `subsystem`: options of sftp-server, such as `-P hardlink`; `faulty`: behind `faulty_sftp.py`.
    """
    program, sftp_server = _programs()
    with tempfile.TemporaryDirectory() as made:
        keys, root = Path(made) / "keys", Path(made) / "root"
        keys.mkdir(mode=0o700)
        root.mkdir()
        for name in ("host_key", "user_key"):
            _keygen(keys / name)
        (keys / "authorized_keys").write_text((keys / "user_key.pub").read_text())
        port = _free_port()
        command = f"internal-sftp {subsystem}".strip()
        if faulty:
            command = f"{sys.executable} -I {Path(__file__).parent / 'faulty_sftp.py'} {keys} {sftp_server} {subsystem}"
        (keys / "sshd_config").write_text(_CONFIG.format(port=port, folder=keys, subsystem=command))
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(
                exist_ok=True
            )  # where it locks itself in; gone after a restart of the machine
        with _running([program, "-D", "-e", "-f", keys / "sshd_config"], port) as pid:
            yield Sshd(
                "sftp",
                f"sftp://{getpass.getuser()}@127.0.0.1:{port}{root}",
                options(keys),
                port,
                pid,
                root,
                keys,
            )


def options(keys: Path) -> dict[str, Any]:
    """What logs in with these keys, and nothing of the user's own."""
    return {
        "key_file": str(keys / "user_key"),
        "host_key": (keys / "host_key.pub").read_text(),
        "ssh_config": "",
    }


def _keygen(path: Path) -> None:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", path.name, "-f", str(path)],
        check=True,
        stdin=subprocess.DEVNULL,
    )


def _programs() -> tuple[str, str]:
    folders = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin:/usr/lib/openssh:/usr/libexec/openssh:/usr/libexec"
    found = [shutil.which(name, path=folders) for name in ("sshd", "sftp-server")]
    if None in found and os.geteuid() == 0 and shutil.which("apt-get"):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
        for arguments in (
            ["update", "-qq"],
            ["install", "-qq", "-y", "--no-install-recommends", "openssh-server"],
        ):
            subprocess.run(["apt-get", *arguments], env=environment, capture_output=True, timeout=600)
        found = [shutil.which(name, path=folders) for name in ("sshd", "sftp-server")]
    if None in found or shutil.which("ssh-keygen") is None:
        raise Unavailable("sshd and sftp-server are not on this machine: install openssh-server")
    return str(found[0]), str(found[1])
