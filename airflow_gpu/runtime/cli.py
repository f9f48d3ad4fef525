"""The command line of runtime.pyz: ``agent JOB.JSON``, ``rsh HOST COMMAND...``.

Purpose: what a target runs on each node. Exit codes: ``docs/run-directory.md``;
64 when it was called wrongly.
"""

from __future__ import annotations

import os
import sys
from typing import List, Optional

from airflow_gpu.runtime.words import EXIT_USAGE

USAGE = "usage: runtime.pyz agent JOB.JSON | rsh HOST COMMAND...\n"


def main(arguments: Optional[List[str]] = None) -> int:
    """Answers the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    if len(words) == 2 and words[0] == "agent":
        return _agent(words[1])
    if words[:1] == ["rsh"]:
        from airflow_gpu.runtime.rsh import main as rsh

        return rsh(words[1:])
    sys.stderr.write(USAGE)
    return EXIT_USAGE


def _agent(path: str) -> int:
    # All of it now: the payload's archive may be gone by the time the ranks end.
    from airflow_gpu.runtime.agent import Agent
    from airflow_gpu.runtime.guard import guarded
    from airflow_gpu.runtime.job import Job, Node, Unusable

    try:
        job = Job.load(path)
        node = Node.of(job, os.environ)
    except Unusable as error:
        sys.stderr.write(f"gang: {error}\n")
        return EXIT_USAGE
    return guarded(lambda descriptor: Agent(job, node, descriptor).run())
