"""The matrix: every call of every scenario, with every fault that makes sense there, and pairs of faults by chance.

Example::

    python -m tests.faults.matrix                  # all of it, as a table
    python -m tests.faults.matrix "mark failed"    # one scenario, with what went wrong
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tests.faults.invariants import check
from tests.faults.scenarios import SCENARIOS
from tests.faults.seam import PEOPLE, Call, Fault
from tests.faults.world import Scenario, play

WORKERS = 2
CHUNK = 40
PAIRS = 60
"""Pairs of faults in each scenario."""

PAIR_APART = 60
"""The second fault comes at most so many calls after the first."""


@dataclass
class Tally:
    """What a number of runs came to."""

    runs: Counter[str] = field(default_factory=Counter)  # by kind of fault
    broken: dict[str, list[str]] = field(default_factory=dict)  # invariant -> where, and what
    calls: int = 0
    longest: int = 0

    def add(self, other: Tally) -> None:
        self.runs += other.runs
        for name, where in other.broken.items():
            self.broken.setdefault(name, []).extend(where)
        self.calls = max(self.calls, other.calls)
        self.longest = max(self.longest, other.longest)


def record(scenario: Scenario) -> list[Call]:
    """The calls of a run without faults, which must be without any other blemish too."""
    result = play(scenario)
    broken = check(result)
    assert not broken, f"{scenario.name}, without any fault: {broken}"
    return result.calls


def single(scenario: Scenario, calls: Iterable[Call], share: float = 1.0) -> Iterator[tuple[Fault, ...]]:
    """One fault at each call. Of a ``share`` every call has at least one, and the kinds take turns."""
    turn = 0
    for call in calls:
        kinds = (*call.kinds, *(PEOPLE if scenario.people else ()))
        count = len(kinds) if share >= 1 else max(1, round(share * len(kinds)))
        for kind in (kinds * 2)[turn % len(kinds) :][:count]:
            yield (Fault(call.k, kind),)
        turn += count


def pairs(scenario: Scenario, calls: list[Call], count: int, seed: int) -> Iterator[tuple[Fault, ...]]:
    """Two faults soon after one another, by chance; what the second one hits is seen when it comes."""
    rng = random.Random(f"{seed}/{scenario.name}")
    people = ("cleared", "marked") if scenario.people else ()
    for _ in range(count):
        first = rng.choice(calls)
        second = first.k + rng.randint(1, PAIR_APART)
        kinds = (
            "before",
            "after",
            "late",
            "duplicate",
            "delay",
            "kill-before",
            "kill-after",
            "stall",
            *people,
        )
        yield (Fault(first.k, rng.choice(first.kinds)), Fault(second, rng.choice(kinds)))


def run_all(scenario: Scenario, plans: Iterable[tuple[Fault, ...]], calls: list[Call]) -> Tally:
    """Play each plan and judge it."""
    tally = Tally(calls=len(calls))
    for faults in plans:
        result = play(scenario, faults)
        first = result.hit.get(faults[0].k)
        known = calls[faults[0].k - 1]
        assert str(first) == str(known), f"not the same run: {first} instead of {known}"
        tally.runs[faults[0].kind if len(faults) == 1 else "pair"] += 1
        tally.longest = max(tally.longest, len(result.calls))
        for line in dict.fromkeys(check(result)):
            name, _, what = line.partition(": ")
            where = ", ".join(f"{fault.kind} at {result.hit.get(fault.k, fault.k)}" for fault in faults)
            tally.broken.setdefault(name, []).append(f"{scenario.name}: {where}: {what}")
    return tally


def _chunk(task: tuple[str, list[tuple[Fault, ...]], list[Call]]) -> tuple[str, Tally]:
    name, plans, calls = task
    return name, run_all(next(s for s in SCENARIOS if s.name == name), plans, calls)


def _recorded(name: str) -> tuple[str, list[Call]]:
    return name, record(next(s for s in SCENARIOS if s.name == name))


def run_matrix(
    names: list[str] | None = None, *, pair_count: int = PAIRS, seed: int = 1, share: float = 1.0
) -> dict[str, Tally]:
    """All of it (or a ``share`` of the single faults), on ``WORKERS`` processes."""
    chosen = [s for s in SCENARIOS if not names or s.name in names]
    tallies = {s.name: Tally() for s in chosen}
    with multiprocessing.get_context("spawn").Pool(WORKERS) as pool:
        tasks = []
        recorded = dict(pool.imap_unordered(_recorded, [s.name for s in chosen]))
        for scenario in chosen:
            calls = recorded[scenario.name]
            plans = [*single(scenario, calls, share), *pairs(scenario, calls, pair_count, seed)]
            tasks += [(scenario.name, plans[i : i + CHUNK], calls) for i in range(0, len(plans), CHUNK)]
        for name, tally in pool.imap_unordered(_chunk, tasks):
            tallies[name].add(tally)
    return tallies


DUPLICATES, ORPHANS = ("twice", "again"), ("orphan", "stop")


def table(tallies: dict[str, Tally], seconds: float) -> str:
    """The counts, one scenario a line."""
    kinds = list(dict.fromkeys(kind for tally in tallies.values() for kind in sorted(tally.runs)))
    head = f"{'scenario':28} {'calls':>5} {'runs':>6}  " + " ".join(f"{kind[:9]:>9}" for kind in kinds)
    lines = [f"{head} {'duplicates':>11} {'orphans':>8} {'false ends':>10}"]
    total = Tally()
    for name, tally in [*tallies.items(), ("total", total)]:
        if tally is not total:
            total.add(tally)
        found = Counter(
            "d" if name in DUPLICATES else "o" if name in ORPHANS else "f"
            for name, where in tally.broken.items()
            for _ in where
        )
        calls = sum(t.calls for t in tallies.values()) if tally is total else tally.calls
        cells = " ".join(f"{tally.runs[kind]:9}" for kind in kinds)
        lines.append(
            f"{name:28} {calls:5} {tally.runs.total():6}  {cells} {found['d']:11} {found['o']:8} {found['f']:10}"
        )
    rate = total.runs.total() / seconds
    lines.append(
        f"{total.runs.total()} runs in {seconds:.0f} s, {rate:.0f} a second; {total.longest} calls at most"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenarios", nargs="*")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--share", type=float, default=1.0, help="of the single faults")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--show", type=int, default=8, help="examples of each broken invariant")
    given = parser.parse_args()
    started = time.monotonic()
    tallies = run_matrix(given.scenarios, pair_count=given.pairs, seed=given.seed, share=given.share)
    print(table(tallies, time.monotonic() - started))
    for name, tally in tallies.items():
        for invariant, where in tally.broken.items():
            print(f"\n{name}: {invariant}, {len(where)} runs")
            print("\n".join(f"  {line[:400]}" for line in where[: given.show]))


if __name__ == "__main__":
    main()
