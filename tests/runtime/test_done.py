"""A gang that has succeeded is not computed again when its platform starts it once more."""

from __future__ import annotations

from pathlib import Path

from tests.runtime.bed import Bed


def test_a_restart_after_success_leaves_with_zero(tmp_path: Path) -> None:
    """Newer Slurms queue a job again that exits 0 within a preemption's grace."""
    bed = Bed(tmp_path)
    payload = bed.payload(script="print('computed')")
    first = bed.start(payload)
    assert first.wait() == [0, 0]
    again = bed.start(payload, restart=1)
    assert again.wait() == [0, 0], again.log()
    assert "nothing left to do" in again.log()
    assert [path.name for path in sorted((bed.channel / "lives").glob("*.json"))] == ["0001.json"]


def test_a_restart_after_half_a_success_computes(tmp_path: Path) -> None:
    """Three of four good ends are no success."""
    bed = Bed(tmp_path)
    payload = bed.payload(
        script="import os, sys; sys.exit(os.environ['RANK'] == '3' and os.environ['GANG_LIFE'] == '1')"
    )
    assert 1 in bed.start(payload).wait()
    assert bed.start(payload, restart=1).wait() == [0, 0]
    assert [path.name for path in sorted((bed.channel / "lives").glob("*.json"))] == [
        "0001.json",
        "0002.json",
    ]
