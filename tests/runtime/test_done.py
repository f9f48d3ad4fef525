"""A gang that has succeeded is not computed again when its platform starts it once more."""

from __future__ import annotations

from pathlib import Path

from tests.runtime.bed import QUICK, Bed


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


def test_a_platform_that_does_not_count_its_restarts(tmp_path: Path) -> None:
    """Kubernetes replaces the pods of a plain Job and tells nobody how often: the claim counts."""
    bed = Bed(tmp_path)
    script = "import os, sys; sys.exit(os.environ['GANG_LIFE'] == '1')"
    payload = bed.payload(script=script, constants={**QUICK, "FORMER_SECONDS": 0.3})
    assert 1 in bed.start(payload, restart="auto", GANG_START="pods-1").wait()
    again = bed.start(payload, restart="auto", GANG_START="pods-2")
    assert again.wait() == [0, 0], again.log()
    lives = [bed.read(f"lives/{number:04d}.json") for number in (1, 2)]
    assert [(life["restart"], life["by"]) for life in lives] == [(0, "pods-1"), (1, "pods-2")]


def test_the_same_start_never_claims_twice(tmp_path: Path) -> None:
    """Also where restarts are not counted: a second agent of the very same start leaves."""
    bed = Bed(tmp_path)
    payload = bed.payload(script="import sys; sys.exit(1)", nodes=1)
    assert bed.start(payload, restart="auto", GANG_START="pod").wait() == [1]
    twin = bed.start(payload, restart="auto", GANG_START="pod")
    assert twin.wait() == [76], twin.log()


def test_why_a_notice_came() -> None:
    """Platforms do not say; near the time limit it is that, at the latest in the second half of it."""
    from airflow_gpu.runtime.ends import notice_cause

    assert notice_cause(10, None, 30) == "platform"
    assert notice_cause(3509, 3600, 30) == "platform"
    assert notice_cause(3511, 3600, 30) == "time_limit"
    assert notice_cause(59, 120, 30) == "platform"
    assert notice_cause(61, 120, 30) == "time_limit"
