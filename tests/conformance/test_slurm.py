"""A real Slurm passes the whole suite: 24.11 through REST. Through SSH, and on 22.05, the scenarios in which these differ.

``SLURM_WAYS=all``: every scenario through every way on both.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.beds.slurm.cluster import Cluster, cluster
from tests.beds.slurm.image import missing
from tests.conformance.slurm_bed import SlurmBed
from tests.conformance.suite import Scenarios

ALL = os.environ.get("SLURM_WAYS") == "all"


def skipped(version: str) -> pytest.MarkDecorator:
    why = missing(version)
    return pytest.mark.skipif(bool(why), reason=f"SLURM {version} IS NOT PROVED HERE: {why}")


@pytest.fixture(scope="module")
def new() -> Iterator[Cluster]:
    with cluster("24.11", grace=15, nodes=2) as made:
        yield made


@pytest.fixture(scope="module")
def old() -> Iterator[Cluster]:
    with cluster("22.05", grace=15, nodes=2) as made:
        yield made


class Differing:
    """Where the versions, or what is known of a job on the way, differ."""

    gang = Scenarios.gang
    test_result = Scenarios.test_result
    test_preempted_with_notice = Scenarios.test_preempted_with_notice
    test_requeued_by_the_platform = Scenarios.test_requeued_by_the_platform
    test_cancel_while_queued = Scenarios.test_cancel_while_queued
    test_ended_by_somebody_else = Scenarios.test_ended_by_somebody_else
    test_gone = Scenarios.test_gone


@skipped("24.11")
class TestRest(Scenarios):
    """See the suite."""

    @pytest_asyncio.fixture
    async def bed(self, new: Cluster) -> AsyncIterator[SlurmBed]:
        bed = SlurmBed(new)
        yield bed
        await bed.end()


@skipped("24.11")
class TestSsh(Scenarios if ALL else Differing):  # type: ignore[misc]
    """See the suite."""

    @pytest_asyncio.fixture
    async def bed(self, new: Cluster) -> AsyncIterator[SlurmBed]:
        bed = SlurmBed(new, "ssh")
        yield bed
        await bed.end()


@skipped("22.05")
class TestOldRest(Scenarios if ALL else Differing):  # type: ignore[misc]
    """See the suite."""

    @pytest_asyncio.fixture
    async def bed(self, old: Cluster) -> AsyncIterator[SlurmBed]:
        bed = SlurmBed(old)
        yield bed
        await bed.end()


if ALL:

    @skipped("24.11")
    class TestCommand(Scenarios):
        """See the suite."""

        @pytest_asyncio.fixture
        async def bed(self, new: Cluster) -> AsyncIterator[SlurmBed]:
            bed = SlurmBed(new, "command")
            yield bed
            await bed.end()

    @skipped("22.05")
    class TestOldSsh(Scenarios):
        """See the suite."""

        @pytest_asyncio.fixture
        async def bed(self, old: Cluster) -> AsyncIterator[SlurmBed]:
            bed = SlurmBed(old, "ssh")
            yield bed
            await bed.end()

    @skipped("22.05")
    class TestOldCommand(Scenarios):
        """See the suite."""

        @pytest_asyncio.fixture
        async def bed(self, old: Cluster) -> AsyncIterator[SlurmBed]:
            bed = SlurmBed(old, "command")
            yield bed
            await bed.end()
