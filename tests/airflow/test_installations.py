"""Two Airflows on one cluster, with the same DAGs and run ids: neither sees the other's gangs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.airflow.conftest import SWEEP, Gangs
from tests.airflow.scenes import STEP, again, begin, reasons
from tests.beds.postgres import Postgres

pytestmark = [pytest.mark.airflow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def other(gangs: Gangs, server: Postgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gangs]:
    """Another installation with the same cluster folder, and even the same root of journals."""
    home = tmp_path_factory.mktemp("other")
    made = Gangs(home, server, "other", cluster=gangs.cluster, state=gangs.home / "state")
    with made.airflow:
        made.airflow.wait_dag(SWEEP.removesuffix(".py"))
        yield made


def test_two_installations_share_a_target(gangs: Gangs, other: Gangs) -> None:
    """Clear, mark failed and a deleted run of the one leave the gangs of the other alone."""
    cleared, marked, deleted = [("steady", f"shared-{what}") for what in ("cleared", "marked", "deleted")]
    for one in (gangs, other):
        begin(one, cleared, marked, deleted)
    gangs.airflow.clear(*cleared, "count")
    gangs.airflow.mark(*marked, "count", "failed")
    gangs.airflow.delete_run(*deleted)
    assert again(gangs, *cleared).starts[1] >= STEP
    for run in (marked, deleted):
        assert len(gangs.settled(*run).lives) == 1
    for run in (cleared, marked, deleted):
        other.until_goes_on(*run)
        told = other.succeed(*run)
        assert told.starts == [0]
        assert reasons(other, *run) == ["start"]
    names = [{job.name for job in one.history(*cleared).jobs} for one in (gangs, other)]
    assert not names[0] & names[1]


def test_an_installation_that_starts_adopts_nothing_of_another(gangs: Gangs, other: Gangs) -> None:
    """The same DAG run, begun elsewhere while the first one runs: it begins from the beginning, beside it."""
    begin(gangs, ("steady", "shared-late"))
    begin(other, ("steady", "shared-late"))
    gangs.until_goes_on("steady", "shared-late")
    assert gangs.succeed("steady", "shared-late").starts == [0]
    assert other.succeed("steady", "shared-late").starts == [0]
