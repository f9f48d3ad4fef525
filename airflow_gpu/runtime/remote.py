"""The agent's side of a remote start: run a command line for mpirun, and send back what it says.

Purpose: see :mod:`airflow_gpu.runtime.relay`. Also writes the files that
mpirun needs on node 0: a list of nodes and the script that stands in for ssh.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import threading
from typing import IO, Callable, Dict, List, Tuple

from airflow_gpu.runtime.job import Job
from airflow_gpu.runtime.ranks import Processes, signal_group, start_process
from airflow_gpu.runtime.wire import Message

READ_BYTES = 65536
"""Of output, carried in one message."""


class Remote:
    """Commands that run on this node because mpirun on node 0 asked for them."""

    def __init__(self, processes: Processes, send: Callable[[Message], None]) -> None:
        self._processes = processes
        self._send = send

    def start(self, number: int, line: str, env: Dict[str, str]) -> None:
        """Run a line by the shell, as sshd would. Only in the main thread."""
        try:
            process = start_process(["/bin/sh", "-c", line], env, subprocess.PIPE, subprocess.PIPE)
        except OSError as error:
            self._send({"t": "output", "id": number, "stream": "err", "text": f"gang: {error}\n"})
            self._send({"t": "exit", "id": number, "code": 255})
            return
        self._processes.others[number] = process
        assert process.stdout is not None and process.stderr is not None
        readers = [
            threading.Thread(target=self._carry, args=(number, name, stream), daemon=True)
            for name, stream in (("out", process.stdout), ("err", process.stderr))
        ]
        for reader in readers:
            reader.start()
        threading.Thread(target=self._await, args=(number, process, readers), daemon=True).start()

    def kill(self, number: int, how: int) -> None:
        process = self._processes.others.get(number)
        if process is not None:
            signal_group(process, how)

    def _carry(self, number: int, name: str, stream: IO[bytes]) -> None:
        while True:
            data = os.read(stream.fileno(), READ_BYTES)
            if not data:
                return
            self._send({"t": "output", "id": number, "stream": name, "text": data.decode("utf-8", "replace")})

    def _await(self, number: int, process: subprocess.Popen[bytes], readers: List[threading.Thread]) -> None:
        code = process.wait()
        for reader in readers:
            reader.join(1.0)  # a daemon that went on may hold the pipes; its start is over all the same
        self._processes.others.pop(number, None)
        self._send({"t": "exit", "id": number, "code": code if code >= 0 else 128 - code})


def write_tools(folder: str, job: Job, nodes: List[Message], runtime: str) -> Tuple[str, str, str]:
    """Into a folder of this node: hostfile (Open MPI), hostfile (Hydra), and the script that stands in for ssh."""
    slots = job.ranks_per_node
    hostfile, hydra, rsh = (os.path.join(folder, name) for name in ("hosts", "hosts.hydra", "rsh"))
    _write(hostfile, "".join(f"{node['addr']} slots={slots}\n" for node in nodes))
    _write(hydra, "".join(f"{node['addr']}:{slots}\n" for node in nodes))
    program = (
        f"import sys; sys.path.insert(0, {runtime!r}); "
        "from airflow_gpu.runtime.rsh import main; sys.exit(main(sys.argv[1:]))"
    )
    _write(rsh, f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(program)} "$@"\n')
    os.chmod(rsh, 0o755)
    return hostfile, hydra, rsh


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
