"""Every call of every scenario, spoilt in every way: nothing twice, nothing left behind, no false end."""

from __future__ import annotations

import os
import time

import pytest

from tests.faults import matrix
from tests.faults.invariants import check
from tests.faults.scenarios import SCENARIOS
from tests.faults.seam import Fault
from tests.faults.world import play

ALL = os.environ.get("FAULTS") == "all"
SHARE = 1.0 if ALL else 0.28
PAIRS = 200 if ALL else 60
AT_LEAST = 10_000


@pytest.mark.timeout(3600)
def test_the_matrix() -> None:
    started = time.monotonic()
    tallies = matrix.run_matrix(share=SHARE, pair_count=PAIRS)
    print("\n" + matrix.table(tallies, time.monotonic() - started))
    broken = [
        f"{name}: {line}"
        for tally in tallies.values()
        for name, where in tally.broken.items()
        for line in where[:5]
    ]
    assert not broken, "\n".join(broken)
    assert sum(tally.runs.total() for tally in tallies.values()) >= AT_LEAST
    for tally in tallies.values():
        assert {"before", "after", "duplicate", "delay", "drop", "kill-before", "stall"} <= set(tally.runs)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_without_faults_and_the_same_every_time(scenario: matrix.Scenario) -> None:
    first, second = play(scenario), play(scenario)
    assert check(first) == []
    assert [str(call) for call in first.calls] == [str(call) for call in second.calls]
    assert first.ended_at == second.ended_at


def test_a_killed_process_asks_nothing_more() -> None:
    """And what it had in its hands is gone: the submit that was not yet sent is sent by another."""
    scenario = SCENARIOS[0]
    submit = next(call for call in play(scenario).calls if call.op == "target.submit")
    result = play(scenario, (Fault(submit.k, "kill-before"),))
    assert [call.actor for call in result.calls if call.k > submit.k].count(submit.actor) == 0
    assert len(result.jobs) == 1
    assert result.airflow.told[0].why == f"{submit.actor} died"
    assert check(result) == []


def test_a_late_request_still_arrives() -> None:
    """Where names are not unique, a submit that comes late makes a twin; it is there, and it never computes."""
    scenario = next(s for s in SCENARIOS if not s.atomic)
    create = next(call for call in play(scenario).calls if call.op == "target.create")
    result = play(scenario, (Fault(create.k, "duplicate"),))
    names = [job.job.name for job in result.jobs]
    assert len(names) > len(set(names)), "there was a twin"
    assert check(result) == []
