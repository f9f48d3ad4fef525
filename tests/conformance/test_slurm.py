"""A real Slurm passes the whole suite: 24.11 through REST; what differs through SSH and the command line, and on 22.05."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

from tests.conformance.slurm_bed import SlurmBed
from tests.conformance.suite import Scenarios


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    import sys

    sys.path.insert(0, "/tmp")
    from fakecluster import C

    yield C()


@pytest_asyncio.fixture
async def bed(cluster: Any) -> AsyncIterator[SlurmBed]:
    bed = SlurmBed(cluster)
    yield bed
    await bed.end()


class TestSlurm(Scenarios):
    """See the suite."""
