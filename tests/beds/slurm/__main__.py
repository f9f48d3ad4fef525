"""A cluster for a person: `python -m tests.beds.slurm --version 24.11`, until Ctrl-C.

`--once COMMAND...` runs a command on the login node as alice instead, and ends the cluster.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import signal
import subprocess
import sys
import time

from tests.beds.slurm.cluster import Cluster, cluster
from tests.beds.slurm.image import SUITES, Unavailable


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.beds.slurm", description=__doc__.splitlines()[0])
    parser.add_argument("--version", default="24.11", choices=SUITES)
    parser.add_argument("--nodes", type=int, default=8, help="from 1 to 8")
    parser.add_argument("--grace", type=int, default=20, help="seconds after a preemption")
    parser.add_argument(
        "--min-job-age", type=int, default=300, help="seconds for which ended jobs are remembered"
    )
    parser.add_argument("--user", default="alice", help="for --once: alice, bob, mlops or root")
    parser.add_argument("--once", nargs=argparse.REMAINDER, metavar="COMMAND", help="run this and end")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    begun = time.monotonic()
    try:
        with cluster(
            options.version, grace=options.grace, nodes=options.nodes, min_job_age=options.min_job_age
        ) as made:
            if options.once:
                return subprocess.run([*made.prefix(options.user), *options.once]).returncode
            print(_told(made, time.monotonic() - begun), flush=True)
            with contextlib.suppress(KeyboardInterrupt):
                signal.pause()
    except Unavailable as reason:
        print(reason, file=sys.stderr)
        return 1
    return 0


def _told(made: Cluster, seconds: float) -> str:
    options = f"-i {made.ssh.key_file} -o UserKnownHostsFile={made.ssh.known_hosts}"
    return f"""Slurm {made.version} is up after {seconds:.1f} s, with {len(made.names)} nodes of 8 pretended GPUs.

  REST    {made.rest}, header X-SLURM-USER-TOKEN: {made.token("alice", 86400)}
  SSH     ssh {options} alice@{made.ssh.host}
  enter   {shlex.join([*made.prefix("alice"), "bash", "-l"])}
  root    {shlex.join([*made.prefix(), "bash", "-l"])}
  shared  {made.shared} is /shared there
  logs    {made.home / "log"}

Ctrl-C ends it."""


if __name__ == "__main__":
    sys.exit(main())
