"""Daemons away, replies lost, tokens over, drivers dead or double, at every phase of gangs on a real Slurm."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.beds.slurm.cluster import cluster
from tests.beds.slurm.image import missing
from tests.faults.slurm.sample import MIN_JOB_AGE, sample, text

RUNS = 300 if os.environ.get("FAULTS") == "all" else 20


@pytest.mark.timeout(3600)
@pytest.mark.skipif(bool(missing("24.11")), reason=f"SLURM 24.11 IS NOT PROVED HERE: {missing('24.11')}")
async def test_nothing_runs_twice_and_nothing_is_left(tmp_path: Path) -> None:
    with cluster("24.11", grace=10, nodes=4, min_job_age=MIN_JOB_AGE) as made:
        results, orphans = await sample(made, tmp_path, RUNS, seed=1, way="rest")
    print(text(results, orphans))
    assert not orphans
    assert [problem for result in results for problem in (*result.duplicates, *result.false_ends)] == []
    assert sum(result.happened for result in results) >= RUNS * 0.8
