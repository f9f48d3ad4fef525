"""Drivers as processes on the real local target, killed and spoilt: nothing twice, nothing left, no false end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.faults.real.sample import sample

RUNS = int(os.environ.get("FAULT_RUNS") or ("500" if os.environ.get("FAULTS") == "all" else "60"))
SEED = int(os.environ.get("FAULT_SEED", "1"))


@pytest.mark.timeout(7200)
async def test_sample(tmp_path: Path) -> None:
    counts = await sample(tmp_path, RUNS, SEED)
    print("\n" + counts.text())
    assert counts.runs == RUNS
    assert counts.hit["none"] < RUNS / 4, "faults must find their calls, or this shows nothing"
    assert counts.killed > RUNS / 20
    assert counts.duplicates == []
    assert counts.orphans == []
    assert counts.false_ends == []
