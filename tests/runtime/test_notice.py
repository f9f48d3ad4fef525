"""Notices: every rank saves the same step and leaves with 75, and the next life goes on exactly there."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable

import pytest

from tests.runtime.bed import NOTICE, QUICK, Bed, eventually

TRAIN = """
    import os, sys, time, random
    from airflow_gpu.runtime import gang

    rank = int(os.environ["RANK"])
    state, saves = {"sum": 0}, 0

    def load(d):
        state["sum"] = int((d / f"rank{rank}.txt").read_text())

    with gang() as g:
        start = g.checkpoint.restore(load)
        print("start", start, state["sum"], flush=True)
        for step in range(start, TOTAL):
            time.sleep(0.01 * random.random())
            state["sum"] += step
            g.progress(step + 1, TOTAL)
            due = g.checkpoint.due(step + 1)
            if step == start:
                open(f"asked-{rank}", "w").close()
            if due:
                with g.checkpoint.save(step + 1) as d:
                    (d / f"rank{rank}.txt").write_text(str(state["sum"]))
                    print("saved", step + 1, flush=True)
                saves += 1
            if saves == SAVES:
                break
        print("end", state["sum"])
        g.result(state["sum"])
"""


def train(total: int, saves: int = -1) -> str:
    """A program of ``total`` steps that ends after ``saves`` saves, if that comes before."""
    return TRAIN.replace("TOTAL", str(total)).replace("SAVES", str(saves))


def saved(bed: Bed, rank: int, life: int = 1) -> list[int]:
    return [int(line.split()[1]) for line in bed.log(rank, life).splitlines() if line.startswith("saved")]


def running(bed: Bed) -> None:
    """Wait until every rank has asked once whether to save: before that they just leave on a notice."""
    eventually(lambda: len(list(bed.folder.glob("asked-*"))) == 4)


def test_all_ranks_save_the_same_step_and_the_next_life_goes_on_there(
    make_bed: Callable[..., Bed], each_python: str
) -> None:
    bed = make_bed(each_python)
    job = bed.payload(script=train(100_000))
    life = bed.start(job)
    running(bed)
    life.signal(NOTICE, node=1)
    assert life.wait() == [75, 75]
    assert bed.codes() == [75, 75, 75, 75]
    assert bed.read("lives/0001/notice.json")["node"] == 1
    assert not (bed.channel / "lives/0001/failure.json").exists()
    steps = [saved(bed, rank) for rank in range(4)]
    assert steps[0] == steps[1] == steps[2] == steps[3]
    [step] = steps[0]
    [(manifest_step, folder)] = bed.manifests().items()
    assert manifest_step == step
    manifest = json.loads((folder / "manifest.json").read_text())
    assert [f["path"] for f in manifest["files"]] == [f"rank{r}.txt" for r in range(4)]
    assert manifest["world_size"] == 4
    assert not list(folder.parent.glob(".*"))

    # The platform starts the same job again; this time it ends.
    (job.parent / "script.py").write_text(
        (job.parent / "script.py").read_text().replace("100000", str(step + 5))
    )
    assert bed.run(job, restart=1) == [0, 0]
    assert bed.read("lives/0002.json")["from"]["life"] == 1
    assert bed.read("lives/0002.json")["from"]["step"] == step
    for rank in range(4):
        assert bed.log(rank, life=2).splitlines()[0] == f"start {step} {sum(range(step))}"
    assert bed.read("lives/0002/result.json") == sum(range(step + 5))


def test_interval_saves_on_all_ranks(bed: Bed) -> None:
    job = bed.payload(script=train(100_000, saves=3), checkpoint={"interval": 0.2, "keep": 2})
    assert bed.run(job) == [0, 0]
    steps = [saved(bed, rank) for rank in range(4)]
    assert steps[0] == steps[1] == steps[2] == steps[3]
    assert len(steps[0]) == 3
    assert sorted(bed.manifests()) == steps[0][-2:]  # the newest two are kept
    assert not list((bed.channel / "checkpoints/0001").glob(".*"))


def test_programs_without_the_handle_get_the_signal(bed: Bed) -> None:
    job = bed.payload(
        script="""
        import os, signal, sys, time
        rank = int(os.environ["RANK"])
        def leave(number, frame):
            print("signal", number, flush=True)
            sys.exit({0: 75, 1: 143, 2: 1}[rank])
        if rank < 3:
            signal.signal(signal.SIGTERM, leave)
        open(f"pid-{rank}", "w").close()
        time.sleep(1000)
        """
    )
    life = bed.start(job)
    eventually(lambda: len(list(bed.folder.glob("pid-*"))) == 4)
    life.signal(signal.SIGUSR1)
    assert life.wait() == [75, 75]
    # The 1 of rank 2 is what became of the signal that it was sent: no failure.
    assert bed.codes() == [75, 143, 1, None]
    assert bed.entries()[3]["signal"] == "SIGTERM"
    assert not (bed.channel / "lives/0001/failure.json").exists()


def test_further_signals_change_nothing(bed: Bed) -> None:
    job = bed.payload(
        nodes=1,
        script="""
        import os, signal, sys, time
        rank, seen = os.environ["RANK"], []
        signal.signal(signal.SIGTERM, lambda n, f: seen.append(n))
        open(f"pid-{rank}", "w").close()
        while not seen:
            time.sleep(0.01)
        open(f"noticed-{rank}", "w").close()
        while not os.path.exists("go"):
            time.sleep(0.01)
        print("seen", len(seen))
        sys.exit(75)
        """,
    )
    life = bed.start(job)
    eventually(lambda: len(list(bed.folder.glob("pid-*"))) == 2)
    life.signal(NOTICE)
    eventually(lambda: len(list(bed.folder.glob("noticed-*"))) == 2)
    for number in (signal.SIGCONT, signal.SIGTERM, signal.SIGUSR1, signal.SIGCONT, signal.SIGTERM):
        life.signal(number)
        time.sleep(0.05)
    assert life.agents[0].poll() is None
    (bed.folder / "go").touch()
    assert life.wait() == [75]
    assert bed.log(0) == "seen 1\n"


def test_a_rank_that_ends_well_after_a_notice_has_succeeded(bed: Bed) -> None:
    job = bed.payload(
        script="""
        import os, time
        from airflow_gpu.runtime import gang
        with gang() as g:
            g.notice
            open(f"pid-{g.rank}", "w").close()
            while not g.notice:
                time.sleep(0.01)
            g.result("done")
        """
    )
    life = bed.start(job)
    eventually(lambda: len(list(bed.folder.glob("pid-*"))) == 4)
    life.signal(NOTICE)
    assert life.wait() == [0, 0]
    assert bed.codes() == [0, 0, 0, 0]
    assert bed.read("lives/0001/result.json") == "done"
    assert bed.read("lives/0001/notice.json") is not None


def test_a_failure_before_the_notice_or_besides_it_stays_a_failure(bed: Bed) -> None:
    job = bed.payload(
        nodes=1,
        script="""
        import os, sys, time
        from airflow_gpu.runtime import gang
        with gang() as g:
            g.notice
            open(f"pid-{g.rank}", "w").close()
            while not g.notice:
                time.sleep(0.01)
            if g.rank == 1:
                raise RuntimeError("a mistake of its own")
            time.sleep(1000)
        """,
    )
    life = bed.start(job)
    eventually(lambda: len(list(bed.folder.glob("pid-*"))) == 2)
    life.signal(NOTICE)
    assert life.wait() == [1]
    assert "a mistake of its own" in bed.read("lives/0001/failure.json")["message"]


def test_a_program_that_never_asks_leaves_at_once(bed: Bed) -> None:
    # It uses the handle, but neither due() nor g.notice: it would only waste the platform's grace.
    job = bed.payload(
        nodes=1,
        constants={**QUICK, "CLEANUP_SECONDS": 1.0},
        script="""
        import os, sys, time
        from airflow_gpu.runtime import gang
        with gang() as g:
            open(f"asked-{g.rank}", "w").close()
            try:
                if g.rank == 0:
                    time.sleep(1000)           # Python can be interrupted here
                else:
                    import ctypes, signal      # a main thread that waits in C, as for a collective
                    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
                    ctypes.CDLL(None).sleep(1000)
            finally:
                print("cleaned up", flush=True)
        """,
    )
    life = bed.start(job)
    eventually(lambda: len(list(bed.folder.glob("asked-*"))) == 2)
    life.signal(NOTICE)
    assert life.wait() == [75]
    assert bed.codes() == [75, 75]
    assert "cleaned up" in bed.log(0)


def test_a_notice_before_rank_0_has_asked(bed: Bed) -> None:
    """Rank 0 leaves at once; the others, which wait for its decision, are no failure of the program."""
    job = bed.payload(
        script="""
        import os, time
        from airflow_gpu.runtime import gang
        with gang() as g:
            open(f"there-{g.rank}", "w").close()
            if g.rank == 0:
                time.sleep(1000)
            g.checkpoint.due(1)
        """
    )
    life = bed.start(job)
    eventually(lambda: len(list(bed.folder.glob("there-*"))) == 4)
    time.sleep(0.2)  # so that they wait for rank 0; sooner is no less right
    life.signal(NOTICE)
    assert life.wait() == [75, 75], life.log()
    assert bed.codes() == [75] * 4
    assert not (bed.channel / "lives/0001/failure.json").exists()


def test_signal_to_a_rank_is_a_notice_for_all(bed: Bed) -> None:
    # Slurm signals every process of a step, not only the agents.
    script = train(100_000).replace("start =", "open(f'pid-{rank}', 'w').write(str(os.getpid())); start =")
    job = bed.payload(script=script)
    life = bed.start(job)
    running(bed)
    os.kill(int((bed.folder / "pid-3").read_text()), signal.SIGTERM)
    assert life.wait() == [75, 75]
    assert bed.codes() == [75] * 4
    assert len({tuple(saved(bed, rank)) for rank in range(4)}) == 1
    assert "rank 3" in bed.read("lives/0001/notice.json")["source"]


def test_a_data_loaders_worker_dies_of_sigterm_as_ever(bed: Bed) -> None:
    job = bed.payload(
        nodes=1,
        ranks_per_node=1,
        script="""
        import multiprocessing, time
        from airflow_gpu.runtime import gang
        with gang() as g:
            worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
            worker.start()
            time.sleep(0.1)
            worker.terminate()
            worker.join(10)
            g.result([worker.exitcode, g.notice])
        """,
    )
    assert bed.run(job) == [0]
    assert bed.read("lives/0001/result.json") == [-15, False]


def test_notice_before_the_gang_is_whole(bed: Bed) -> None:
    job = bed.payload(script="open('started', 'w')")
    life = bed.start(job, nodes=[0])
    bed.await_file("lives/0001.json")
    life.signal(NOTICE)
    assert life.wait() == [75]
    assert not (bed.folder / "started").exists()
    assert bed.entries() == {}
    assert bed.read("lives/0001/notice.json")["node"] == 0
    assert not (bed.channel / "lives/0001/failure.json").exists()


def test_notice_to_a_node_that_waits_for_node_0(bed: Bed) -> None:
    job = bed.payload(script="open('started', 'w')", constants={**QUICK, "TELL_SECONDS": 0.5})
    life = bed.start(job, nodes=[1])
    time.sleep(0.3)
    life.signal(NOTICE)
    assert life.wait() == [75]
    assert not (bed.channel / "lives").exists()


def test_a_node_tells_of_its_notice_as_soon_as_it_can(bed: Bed) -> None:
    # Otherwise node 0 would wait for it until the barrier's time is over.
    job = bed.payload(script="open('started', 'w')", nodes=3, barrier_timeout=600)
    one = bed.start(job, nodes=[1])
    time.sleep(0.3)
    one.signal(NOTICE)
    others = bed.start(job, nodes=[0, 2])
    [second], [first, third] = one.wait(), others.wait()
    assert (first, second) == (75, 75)
    assert third in (75, 76), "76: it came when the life was over already"
    assert bed.read("lives/0001/notice.json")["node"] == 1
    assert not (bed.folder / "started").exists()


@pytest.mark.parametrize("node", [0, 1])
def test_nodes_that_vanish_after_a_notice_are_no_failure(bed: Bed, node: int) -> None:
    job = bed.payload(
        script=train(100_000).replace("due = g.checkpoint.due(step + 1)", "due = g.notice and False"),
        stop_grace=1.0,
    )
    life = bed.start(job)
    running(bed)
    life.signal(NOTICE, node=node)
    bed.await_file("lives/0001/notice.json")
    eventually(
        lambda: "the platform gives notice" in bed.log(0) and "the platform gives notice" in bed.log(2)
    )
    life.signal(signal.SIGKILL, node=node)
    codes = life.wait()
    assert (codes[node], codes[1 - node]) == (-9, 75)
    assert not (bed.channel / "lives/0001/failure.json").exists()


def fence(bed: Bed, number: int, grace: float) -> None:
    body = {"v": 1, "kind": "fence", "life": number, "attempt": 1, "reason": "marked failed", "grace": grace}
    (bed.channel / f"lives/{number:04d}.json").write_text(json.dumps(body))


def test_a_fence_that_leaves_time_is_a_notice(bed: Bed) -> None:
    """How Airflow's side ends a gang whose platform cannot be asked: the job finds it, saves and leaves."""
    job = bed.payload(script=train(100_000), constants={**QUICK, "LOOK_SECONDS": 0.3})
    life = bed.start(job)
    running(bed)
    fence(bed, 2, 30)
    assert life.wait() == [75, 75]
    assert bed.codes() == [75, 75, 75, 75]
    assert bed.read("lives/0001/notice.json")["cause"] == "stop"
    assert saved(bed, 0)


def test_the_time_that_a_fence_leaves_ends(bed: Bed) -> None:
    """A program that does not care is killed after the grace, and nothing of it is left."""
    script = """
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open("asked-" + __import__("os").environ["RANK"], "w").close()
        time.sleep(600)
    """
    life = bed.start(bed.payload(script=script, constants={**QUICK, "LOOK_SECONDS": 0.3}))
    running(bed)
    fence(bed, 2, 1)
    assert life.wait() == [76, 76]
    assert {entry["signal"] for entry in bed.entries().values()} == {"SIGKILL"}
