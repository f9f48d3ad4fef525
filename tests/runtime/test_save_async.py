"""Saves that go on while the program does: as whole as the others, one at a time, and a failed one does no harm."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_gpu.runtime.due import Decider
from airflow_gpu.runtime.interval import FIRST, LEAST, MOST, daly, expected_mtbf, interval, observed_mtbf
from tests.runtime.bed import NOTICE, Bed, eventually


def test_training_goes_on_meanwhile(bed: Bed) -> None:
    job = bed.payload(
        script="""
        import threading, time
        from airflow_gpu.runtime import gang
        with gang() as g:
            start = g.checkpoint.restore(lambda d: print("restored", sorted(p.name for p in d.iterdir())))
            steps = []
            def write(d):
                while len(steps) < 3:          # the save needs the training to go on
                    time.sleep(0.01)
                (d / f"rank{g.rank}").write_text(threading.current_thread().name)
            g.checkpoint.save_async(10, write)
            for step in range(3):
                steps.append(step)
            g.checkpoint.wait()
            g.checkpoint.save_async(20, lambda d: (d / f"rank{g.rank}").write_text("20"))
            g.checkpoint.save_async(30, lambda d: (d / f"rank{g.rank}").write_text("30"))
        """
    )
    assert bed.run(job) == [0, 0]
    found = bed.manifests()
    assert sorted(found) == [10, 20, 30], "also the one that was under way at the end of the block"
    assert (found[10] / "rank3").read_text() == "gang-save-10"


def test_one_that_fails_is_said_and_training_goes_on(bed: Bed) -> None:
    job = bed.payload(
        script="""
        from airflow_gpu.runtime import gang
        with gang() as g:
            def write(d):
                (d / f"rank{g.rank}").write_text("")
                if g.rank == 2:
                    raise OSError("disk full")
            g.checkpoint.save_async(1, write)
            g.checkpoint.save_async(2, lambda d: (d / f"rank{g.rank}").write_text(""))
            g.result("on")
        """
    )
    assert bed.run(job) == [0, 0]
    assert sorted(bed.manifests()) == [2]
    assert "CHECKPOINT OF STEP 1 WAS NOT SAVED: OSError: disk full" in bed.log(2)
    assert "CHECKPOINT OF STEP 1 WAS NOT SAVED: rank 2 failed in it: OSError: disk full" in bed.log(0)


def test_after_a_notice_it_is_waited_for_and_every_rank_leaves(bed: Bed) -> None:
    """Though another save is under way when the notice comes."""
    job = bed.payload(
        script="""
        import time
        from airflow_gpu.runtime import gang
        with gang() as g:
            start = step = g.checkpoint.restore()
            print("start", start)
            def write(d, step):
                if g.notice:
                    print("left", g.grace_left, flush=True)
                time.sleep(0.5)
                (d / f"rank{g.rank}").write_text(str(step))
            while True:
                time.sleep(0.01)
                step += 1
                if step == start + 5:
                    g.checkpoint.save_async(step, lambda d, step=step: write(d, step))
                    print("saving", flush=True)
                if g.checkpoint.due(step):
                    g.checkpoint.save_async(step, lambda d, step=step: write(d, step))
        """,
        interval=None,
    )
    life = bed.start(job)
    eventually(lambda: all("saving" in bed.log(rank) for rank in range(4)))
    life.signal(NOTICE)
    assert life.wait() == [75, 75]
    saved = sorted(bed.manifests())
    assert saved[0] == 5
    assert len(saved) <= 2, "the one that was under way, and that of the notice: perhaps of the same step"
    left = [float(line.split()[1]) for line in bed.log(3).splitlines() if line.startswith("left")]
    assert 0 < left[-1] < 5
    life = bed.start(job, restart=1)
    eventually(lambda: f"start {saved[-1]}" in bed.log(3, life=2))
    life.signal(NOTICE)
    assert life.wait() == [75, 75]


def test_a_gang_of_another_size_is_told(bed: Bed) -> None:
    script = """
        from airflow_gpu.runtime import gang
        with gang() as g:
            print("saved by", g.checkpoint.saved_by, "start", g.checkpoint.restore(), flush=True)
            with g.checkpoint.save(10 * g.attempt) as d:
                (d / f"rank{g.rank}").write_text("")
            if g.attempt == 1:
                raise SystemExit(9)
        """
    assert bed.run(bed.payload(script=script))[0] == 9
    assert bed.run(bed.payload(attempt=2, script=script, nodes=1, first_life=2), job_id="job-2") == [0]
    assert "saved by None start 0" in bed.log(0)
    assert "saved by 4 start 10" in bed.log(1, life=2)
    assert "was saved by 4 ranks, and this gang has 2" in bed.log(1, life=2)


# -- how often ---------------------------------------------------------------------------------------


def test_the_published_estimate() -> None:
    """Young's first term for cheap saves; with dearer ones Daly's is within 2 % of the best (found by search)."""
    assert daly(1, 1e6) == pytest.approx(math.sqrt(2e6), rel=0.01)
    for cost, mtbf in ((30, 3600), (60, 4 * 3600), (300, 86400), (600, 3600)):

        def wasted(tau: float, cost: float = cost, mtbf: float = mtbf) -> float:
            # Daly 2006, equation 20: wall time of an hour's work with exponential interruptions, no restart time.
            return mtbf * (math.exp((tau + cost) / mtbf) - 1) / tau

        best = min(wasted(tau) for tau in range(10, 100_000, 10))
        assert wasted(daly(cost, mtbf)) <= 1.02 * best


@given(st.floats(0, 1e6), st.floats(1, 1e9))
def test_it_stays_within_bounds(cost: float, mtbf: float) -> None:
    found = interval(cost, mtbf)
    assert LEAST <= found <= max(MOST, 9.001 * cost)
    assert cost <= 0.1001 * (found + cost), "no more than a tenth of the time goes into saving"


def test_interruptions_that_were_seen_outweigh_what_was_expected() -> None:
    expected = expected_mtbf(8, "on-demand")
    assert expected == 33 * 86400
    assert observed_mtbf(expected, []) == expected
    assert observed_mtbf(expected_mtbf(8, "spot"), [600.0] * 10) < 2600
    assert expected_mtbf(8, "spot") < expected


def test_rank_0_adapts_to_what_saves_cost() -> None:
    decider = Decider(FIRST, 0.0, mtbf=3600.0)
    decider.saved(300.0, cost=5.0)
    cheap = decider.interval
    assert cheap == pytest.approx(daly(5.0, 3600.0))
    decider.saved(600.0, cost=50.0)
    assert decider.interval is not None
    assert cheap is not None
    assert decider.interval > cheap
    given = Decider(FIRST, 0.0)
    given.saved(300.0, cost=5.0)
    assert given.interval == FIRST
