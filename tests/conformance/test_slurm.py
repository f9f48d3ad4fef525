"""A real Slurm passes the whole suite: 24.11 through REST."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.beds.slurm.cluster import Cluster, cluster
from tests.beds.slurm.image import missing
from tests.conformance.slurm_bed import SlurmBed
from tests.conformance.suite import Scenarios

pytestmark = pytest.mark.skipif(bool(missing("24.11")), reason=missing("24.11"))


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Cluster]:
    with cluster("24.11", grace=15, nodes=2) as made:
        yield made


@pytest_asyncio.fixture
async def bed(two_nodes: Cluster) -> AsyncIterator[SlurmBed]:
    bed = SlurmBed(two_nodes)
    yield bed
    await bed.end()


class TestSlurm(Scenarios):
    """See the suite."""
