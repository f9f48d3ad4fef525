"""One Slurm cluster: up, in hand, and gone again. What it is and is not: see the package.

with cluster("24.11", grace=20, nodes=8) as c:
    job = c.run("sbatch", "--parsable", "--wrap", "sleep 60", user="alice")
    c.kill_node("gpu01")
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from tests.beds.slurm.image import Unavailable, image, missing
from tests.beds.slurm.network import Network, network
from tests.beds.slurm.space import Daemon, Space, tail

USERS = ("alice", "bob", "mlops")
HEAD = ("munged", "mariadb", "slurmdbd", "slurmctld", "slurmrestd", "sshd")
"""The daemons of the login node, in the order in which they start."""

_HERE = Path(__file__).parent
_START_FOR = 60.0
_MARIADB = (
    "/usr/sbin/mariadbd --user=mysql --skip-networking --innodb-buffer-pool-size=64M --innodb-log-file-size=8M "
    "--innodb-flush-log-at-trx-commit=0 --innodb-lock-wait-timeout=900 --performance-schema=OFF "
    "--loose-innodb-snapshot-isolation=OFF --pid-file=/run/mysqld/mysqld.pid"
)
_DATABASE = (
    "CREATE DATABASE IF NOT EXISTS slurm_acct_db; CREATE USER IF NOT EXISTS slurm@localhost IDENTIFIED BY 'slurm'; "
    "GRANT ALL ON slurm_acct_db.* TO slurm@localhost;"
)


@dataclass(frozen=True)
class Ssh:
    """How the host logs in to the login node, as any of `USERS`; the files are the host's."""

    host: str
    port: int
    key_file: Path
    known_hosts: Path


class Cluster:
    """A running cluster. Made by `cluster`; its nodes are `names`."""

    def __init__(self, version: str, home: Path, login: Space, net: Network, nodes: int) -> None:
        self.version = version
        self.home = home
        self.names = [f"gpu{i:02}" for i in range(1, nodes + 1)]
        self.shared = home / "shared"
        self.rest = f"http://{net.login}:6820"
        self.ssh = Ssh(net.login, 22, home / "user_key", home / "known_hosts")
        self.host_address = net.host
        """Where the cluster reaches a server that a test has started."""
        self._net = net
        self._login = login
        self._nodes: dict[str, Space] = {}
        self._daemons: dict[str, Daemon] = {}

    # Commands

    def prefix(self, user: str = "root") -> list[str]:
        """What, put before a command, runs it on the login node as `user`."""
        return self._login.prefix(user)

    def run(self, *command: str, user: str = "root", input: bytes = b"", check: bool = True) -> str:
        """What `command` prints on the login node; RuntimeError with what it says if it fails and `check` is set."""
        done = subprocess.run([*self.prefix(user), *command], input=input, capture_output=True)
        if check and done.returncode:
            said = (done.stderr + done.stdout).decode(errors="replace")
            raise RuntimeError(f"{shlex.join(command)} ended with {done.returncode}: {said}")
        return done.stdout.decode(errors="replace")

    def token(self, user: str, seconds: int = 3600) -> str:
        """A JWT of `user` that holds for `seconds`."""
        said = self.run("scontrol", "token", f"username={user}", f"lifespan={seconds}")
        return said.strip().removeprefix("SLURM_JWT=")

    def jobs(self) -> list[dict[str, Any]]:
        """All jobs that the controller remembers, as `squeue --json` has them in this version."""
        return list(json.loads(self.run("squeue", "--all", "--states=all", "--json"))["jobs"])

    def wait_idle(self, timeout: float = 60.0) -> None:
        """Until no job is left and all nodes are idle; TimeoutError after `timeout` seconds.

        Nodes that were drained are taken back, because Slurm does it itself to one that ran a job that was lost.
        """

        def idle() -> bool:
            states = self._usable(self.names)
            jobs = self.run("squeue", "-h", "--all", check=False)
            return list(states.values()) == ["idle"] * len(self.names) and not jobs.strip()

        _wait(idle, timeout, lambda: self.run("sinfo", "-N", "-l") + self.run("squeue", "--all"))

    def preempt(self, job: int | str) -> int:
        """Submit a job of a higher QOS that needs the nodes of `job`, so that Slurm preempts that; its number.

        It ends by itself a few seconds after its start. ValueError when `job` runs nowhere.
        """
        nodes = self.run("squeue", "-h", "-j", str(job), "-o", "%N").strip()
        if not nodes:
            raise ValueError(f"job {job} has no nodes to be preempted from")
        said = self.run(
            *(
                "sbatch",
                "--parsable",
                "--qos=prod",
                "--account=product",
                f"--nodelist={nodes}",
                "--exclusive",
            ),
            *("--time=5", "--output=/dev/null", "--job-name=preemptor", "--wrap=sleep 3"),
            user="mlops",
        )
        return int(said.partition(";")[0])

    def reserve(self, nodes: str, *, start: str = "now", minutes: int = 60) -> None:
        """A maintenance reservation with the name `maint`: no job that would be there then is started.

        `nodes` and `start` as Slurm writes them, such as `gpu[01-02]` and `now+2minutes`.
        """
        self.run(
            *("scontrol", "create", "reservation", "ReservationName=maint", f"StartTime={start}"),
            *(f"Duration={minutes}", "Users=root", f"Nodes={nodes}", "Flags=maint,ignore_jobs"),
        )

    def unreserve(self) -> None:
        """Undo `reserve`."""
        self.run("scontrol", "delete", "ReservationName=maint")

    def reset(self, timeout: float = 90.0) -> None:
        """As it was after its start, but for what is in `/shared` and accounting: no job, all nodes idle."""
        for daemon in HEAD:
            if daemon in self._daemons and self._daemons[daemon].alive():
                self.resume(daemon)
            else:
                self.start(daemon)
        for user in USERS:
            self.run("scancel", "--quiet", f"--user={user}", check=False)
        self.run("scontrol", "delete", "ReservationName=maint", check=False)
        for name in self.names:
            self.start_node(name)
            self.join_node(name)
        self.wait_idle(timeout)

    # Nodes

    def kill_node(self, name: str) -> None:
        """KILL to everything on the node at once, its network gone: as a loss of power."""
        self._nodes.pop(name).kill()
        self._daemons.pop(name).stop(kill=True)

    def start_node(self, name: str) -> None:
        """Start what is missing of the node, and wait until it can have jobs again."""
        if name not in self._nodes:
            self._nodes[name] = self._make_node(name)
        if name not in self._daemons:
            self._daemons[name] = self._nodes[name].spawn(
                ["/usr/sbin/slurmd", "-D"], self._log(f"{name}.out")
            )
        self._resume(name)

    def cut_node(self, name: str) -> None:
        """Its network goes, its processes go on."""
        self._login.network(f"link set {name} down")

    def join_node(self, name: str) -> None:
        """Undo `cut_node`."""
        self._login.network(f"link set {name} up")
        self._resume(name)

    def kill_slurmd(self, name: str) -> None:
        """KILL to the daemon of the node only: its jobs go on. `start_node` starts it again."""
        self._daemons.pop(name).stop(kill=True)

    # Daemons of the login node

    def stop(self, daemon: str, *, kill: bool = False) -> None:
        """End one of `HEAD` by TERM, or by KILL."""
        self._daemons.pop(daemon).stop(kill=kill)

    def start(self, daemon: str) -> None:
        """Start one of `HEAD`, and wait until it answers."""
        command, user, answers = self._programs()[daemon]
        self._daemons[daemon] = self._login.spawn(shlex.split(command), self._log(f"{daemon}.out"), user)

        def answer() -> bool:
            if not self._daemons[daemon].alive():
                raise RuntimeError(f"{daemon} ended: {tail(self._log(f'{daemon}.out'))}")
            return answers()

        _wait(answer, _START_FOR, lambda: f"{daemon}: {tail(self._log(f'{daemon}.out'))}")

    def pause(self, daemon: str) -> None:
        """SIGSTOP to one of `HEAD`: it keeps its connections and does not answer."""
        self._daemons[daemon].signal(signal.SIGSTOP)

    def resume(self, daemon: str) -> None:
        """Undo `pause`."""
        self._daemons[daemon].signal(signal.SIGCONT)

    def logs(self, lines: int = 30) -> str:
        """The last lines of all daemons' logs."""
        logs = sorted((self.home / "log").iterdir())
        return "\n".join(f"--- {log.name}\n{tail(log, lines)}" for log in logs if log.stat().st_size)

    # How it is made

    def set_up(self, grace: int, min_job_age: int) -> None:
        """From an empty login node to a cluster that can have jobs."""
        root = Path(f"/proc/{self._login.pid}/root")
        self._write_configuration(root, grace, min_job_age)
        self.run("sh", "-s", input=(_HERE / "setup.sh").read_bytes())
        self._take_keys(root)
        for daemon in ("munged", "mariadb"):
            self.start(daemon)
        self.run("mariadb", input=_DATABASE.encode())
        self.start("slurmdbd")
        accounts = Template((_HERE / "conf" / "accounts").read_text()).substitute(grace=grace)
        self.run("sacctmgr", "--immediate", "--quiet", input=accounts.encode())
        self.start("slurmctld")
        for name in self.names:
            self._nodes[name] = self._make_node(name)
            self._daemons[name] = self._nodes[name].spawn(
                ["/usr/sbin/slurmd", "-D"], self._log(f"{name}.out")
            )
        for daemon in ("slurmrestd", "sshd"):
            self.start(daemon)
        self.wait_idle(_START_FOR)

    def _write_configuration(self, root: Path, grace: int, min_job_age: int) -> None:
        count = len(self.names)
        middle = (count + 1) // 2
        leaves = [names for names in (self.names[:middle], self.names[middle:]) if names]
        values = {
            "login": self._net.login,
            "names": f"gpu[01-{count:02}]",
            "addresses": self._net.nodes(count),
            "min_job_age": min_job_age,
            # None are used. 22.05 cannot be told so, and asks for none when it is told which kind.
            "cgroups": "cgroup/v1" if self.version == "22.05" else "disabled",
            "leaves": "\n".join(f"SwitchName=leaf{i} Nodes={','.join(n)}" for i, n in enumerate(leaves, 1)),
            "switches": f"leaf[1-{len(leaves)}]",
        }
        for file in (_HERE / "conf").glob("*.conf"):
            (root / "etc/slurm" / file.name).write_text(Template(file.read_text()).substitute(values))
        (root / "etc/ssh/sshd_config").write_text((_HERE / "conf" / "sshd_config").read_text())
        hosts = {"127.0.0.1": "localhost", self._net.host: socket.gethostname(), self._net.login: "login"}
        hosts |= {self._net.node(i): name for i, name in enumerate(self.names)}
        (root / "etc/hosts").write_text("".join(f"{address} {name}\n" for address, name in hosts.items()))
        shutil.copy(_HERE / "node.sh", root / "opt/bed/node.sh")

    def _take_keys(self, root: Path) -> None:
        shutil.copy(root / "opt/bed/user_key", self.ssh.key_file)
        self.ssh.key_file.chmod(0o600)
        kind, key = (root / "etc/ssh/host_key.pub").read_text().split()[:2]
        self.ssh.known_hosts.write_text(f"{self.ssh.host} {kind} {key}\n")

    def _make_node(self, name: str) -> Space:
        node = Space.make(["bash", "/opt/bed/node.sh", name], self._log(f"{name}.out"), self._login)
        self._net.plug(self._login, node, self.names.index(name), name)
        return node

    def _resume(self, name: str) -> None:
        """Until it is idle or has jobs; a state that somebody or something set is taken back."""
        fit = ("idle", "mixed", "allocated", "completing", "planned", "reserved", "maint")
        _wait(
            lambda: self._usable([name])[name] in fit,
            _START_FOR,
            lambda: self.run("scontrol", "show", "node", name),
        )

    def _usable(self, names: list[str]) -> dict[str, str]:
        """The state of nodes by name. Those that answer, but may not be used, are told to the controller as usable."""
        said = self.run("sinfo", "-h", "-N", "-n", ",".join(names), "-p", "train", "-o", "%N %T", check=False)
        states = dict(line.split() for line in said.splitlines())
        for name, state in states.items():
            if state in ("drained", "draining", "down"):
                self.run("scontrol", "update", f"nodename={name}", "state=resume", check=False)
        return states

    def _programs(self) -> dict[str, tuple[str, str, Callable[[], bool]]]:
        """Command, user, and whether it answers, of each of `HEAD`."""

        def said(*command: str, word: str = "") -> Callable[[], bool]:
            return lambda: word in self.run(*command, check=False)

        def runs(*command: str) -> Callable[[], bool]:
            return lambda: not subprocess.run([*self.prefix(), *command], capture_output=True).returncode

        rest = f"env SLURM_JWT=daemon /usr/sbin/slurmrestd -a rest_auth/jwt {self._net.login}:6820"
        sshd = f"/usr/sbin/sshd -D -e -o ListenAddress={self._net.login}"
        return {
            "munged": ("/usr/sbin/munged --foreground", "munge", runs("munge", "-n")),
            "mariadb": (_MARIADB, "root", runs("mariadb-admin", "ping")),
            "slurmdbd": ("/usr/sbin/slurmdbd -D", "root", runs("sacctmgr", "-n", "list", "cluster")),
            "slurmctld": ("/usr/sbin/slurmctld -D", "root", said("scontrol", "ping", word=" UP")),
            "slurmrestd": (rest, "slurmrestd", lambda: _listens(self._net.login, 6820)),
            "sshd": (sshd, "root", lambda: _listens(self._net.login, 22)),
        }

    def _log(self, name: str) -> Path:
        return self.home / "log" / name


@contextlib.contextmanager
def cluster(
    version: str = "24.11", *, grace: int = 20, nodes: int = 8, min_job_age: int = 300
) -> Iterator[Cluster]:
    """A running cluster of `version`, with `nodes` from 1 to 8; all of it is gone afterwards.

    `grace`: seconds that QOS `normal` and `scavenge` have after a preemption. `min_job_age`: seconds for which the
    controller remembers a job that ended; 2 is the least. Unavailable where `missing` has a reason.
    """
    if reason := missing(version):
        raise Unavailable(reason)
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(image(version))
        home = stack.enter_context(_home())
        for folder in ("shared", "log", "space"):
            (home / folder).mkdir()
        (home / "shared").chmod(0o1777)
        login = Space.make(
            ["bash", str(_HERE / "cluster.sh"), str(root), str(home)], home / "log" / "cluster.out"
        )
        stack.callback(login.kill)
        made = Cluster(version, home, login, stack.enter_context(network(login)), nodes)
        try:
            made.set_up(grace, min_job_age)
        except BaseException as error:
            error.add_note(made.logs())
            raise
        yield made


@contextlib.contextmanager
def _home() -> Iterator[Path]:
    """A new folder, removed at the end. Removes first what was left by those whose process was killed."""
    base = Path(tempfile.gettempdir())
    with (base / "airflow-gpu-slurm.lock").open("w") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        for other in base.glob("airflow-gpu-slurm-*"):
            with contextlib.suppress(OSError), (other / "lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(other)
        home = Path(tempfile.mkdtemp(prefix="airflow-gpu-slurm-"))
        mine = (home / "lock").open("w")
        fcntl.flock(mine, fcntl.LOCK_EX)
    try:
        with mine:
            yield home
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _wait(until: Callable[[], bool], seconds: float, why: Callable[[], str]) -> None:
    deadline = time.monotonic() + seconds
    while not until():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} s: {why()}")
        time.sleep(0.1)


def _listens(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=5).close()
    except OSError:
        return False
    return True
