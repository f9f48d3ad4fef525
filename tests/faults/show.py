"""One run of the matrix, told in full: its calls, what the processes said, the journal, the truth.

Example::

    python -m tests.faults.show "mark failed" 57:kill-before 80:delay
"""

from __future__ import annotations

import json
import sys

from tests.faults.invariants import check
from tests.faults.scenarios import SCENARIOS
from tests.faults.seam import Fault
from tests.faults.world import play

LEFT_OUT = ("gang", "offer", "record", "digest", "writer", "v")


def main(name: str, *faults: str) -> None:
    scenario = next(s for s in SCENARIOS if s.name == name)
    plan = tuple(Fault(int(k), kind) for k, _, kind in (fault.partition(":") for fault in faults))
    result = play(scenario, plan)
    for call in result.calls:
        print(f"{call.at:9.2f} {call}" + (f"   <== {call.k in result.hit}" if call.k in result.hit else ""))
    print(*result.said, sep="\n")
    for path in sorted(result.state.files):
        if "/journal/" in path:
            entry = {k: v for k, v in json.loads(result.state.files[path]).items() if k not in LEFT_OUT}
            print(path.split("/", 6)[-1], entry)
    for life in result.truth.lives:
        print(life)
    for job in result.jobs:
        print(job.id, job.job.name, job.state, job.restart)
    for told in result.airflow.told:
        print(f"try {told.try_number}: {told.state} {told.why[:200]}")
    print(f"ended at {result.ended_at:.0f} s; {result.airflow.swept} sweeps; {result.problem}")
    print(*(check(result) or ["every invariant holds"]), sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
