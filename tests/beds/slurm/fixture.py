"""Clusters that tests share: one for each version in this process, up when it is first asked for, gone at its end.

@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with started("24.11") as made:
        yield made

A test is skipped, and says so, where a cluster cannot be. What tests leave behind, jobs and dead nodes, is cleared away
before the next one gets the cluster.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Iterator

import pytest

from tests.beds.slurm.cluster import Cluster, cluster
from tests.beds.slurm.image import Unavailable

GRACE = 10
"""Seconds between the warning of a preemption and its end."""

_stack = contextlib.ExitStack()
_running: dict[str, Cluster] = {}
_owner = os.getpid()


@atexit.register
def _end() -> None:
    if os.getpid() == _owner:  # a forked child that ends must not take them away
        _stack.close()


@contextlib.contextmanager
def started(version: str = "24.11") -> Iterator[Cluster]:
    """The shared cluster of `version`, with eight nodes, `GRACE`, and ended jobs remembered for two minutes."""
    if version not in _running:
        try:
            made = _stack.enter_context(cluster(version, grace=GRACE, min_job_age=120))
        except Unavailable as reason:
            pytest.skip(f"SLURM {version} IS NOT PROVED HERE: {reason}")
        _running[version] = made
    else:
        _running[version].reset()
    yield _running[version]
