"""Bugs that were planted on purpose are caught, each by an invariant that is about it."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.faults import matrix
from tests.faults.bugs import BUGS, Bug
from tests.faults.invariants import check
from tests.faults.scenarios import SCENARIOS
from tests.faults.world import play

PAIRS = 600


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_it_is_caught(bug: Bug) -> None:
    others: Counter[str] = Counter()
    runs = 0
    for name in bug.scenarios:
        scenario = next(s for s in SCENARIOS if s.name == name)
        assert check(play(scenario)) == [], "without the bug it is a clean run"
        with bug.planted():
            calls = play(scenario).calls
            plans = list(matrix.single(scenario, calls))
            random.Random(0).shuffle(plans)
            plans.sort(key=lambda plan: len(calls[plan[0].k - 1].kinds), reverse=True)  # writes first
            for faults in ((), *plans, *matrix.pairs(scenario, calls, PAIRS, seed=0)):
                runs += 1
                found = {line.partition(":")[0]: line for line in check(play(scenario, faults))}
                if caught := sorted(bug.caught_by & set(found)):
                    where = ", ".join(str(fault) for fault in faults) or "no fault at all"
                    print(f"\n{bug.name}: caught in run {runs} ({name}, {where}) by {found[caught[0]]}")
                    return
                others.update(found.keys())
    pytest.fail(f"{bug.name}: not caught in {runs} runs; others that broke: {dict(others)}")
