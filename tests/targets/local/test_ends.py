"""How gangs end: preemption, cancel, time limit, lost nodes, ranks that hide."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import pytest

from airflow_gpu.gang.run import State
from airflow_gpu.targets.base import Sighting
from airflow_gpu.targets.local import AdminError
from airflow_gpu.targets.local.files import read_json
from airflow_gpu.targets.local.processes import read_process

from .conftest import SAVE, STAY, STUBBORN, Bed

UP = "echo x > $MARKS/up-$GANG_RESTART-$GANG_NODE_RANK\n"


# -- the queue -----------------------------------------------------------------------------------


async def test_all_or_nothing_and_the_line_holds(bed: Bed) -> None:
    target = bed.target()
    one = bed.job(SAVE + STAY, "one", gpus_per_node=2)
    both = bed.job(f"echo both >> $MARKS/order-$GANG_NODE_RANK\n{UP}", "both", nodes=2, gpus_per_node=1)
    small = bed.job(f"echo small >> $MARKS/order-$GANG_NODE_RANK\n{UP}", "small")
    await target.submit(one)
    await bed.until(target, one, State.RUNNING)
    await target.submit(both)
    seen = await bed.until(target, both, lambda s: s.reason == "waits for 2 nodes with 1 free GPUs; 1 now")
    assert (seen.state, seen.hosts) == (State.QUEUED, ())
    await target.submit(small)  # would fit, but is behind
    await bed.until(target, small, lambda s: s.reason == "behind both, which is first in line")
    await target.cancel(bed.ref(one), grace=30, since=0.0)
    await bed.until(target, small, State.SUCCEEDED)
    await bed.until(target, both, State.SUCCEEDED)


async def test_priority_goes_first_and_then_the_order_of_submission(bed: Bed) -> None:
    target = bed.target(nodes=1)
    blocker = bed.job(SAVE + STAY, "blocker", gpus_per_node=2, priority=9)
    await target.submit(blocker)
    await bed.until(target, blocker, State.RUNNING)
    script = "echo {} >> $MARKS/order; while ! mkdir $MARKS/turn; do sleep 0.02; done; sleep 0.1; rmdir $MARKS/turn"
    jobs = [
        bed.job(script.format(name), name, gpus_per_node=2, priority=priority)
        for name, priority in (("a", 0), ("b", 0), ("c", 5), ("d", 1))
    ]
    for job in jobs:
        await target.submit(job)
        await bed.until(target, job, State.QUEUED)
    await target.cancel(bed.ref(blocker), grace=30, since=0.0)
    for job in jobs:
        await bed.until(target, job, State.SUCCEEDED)
    assert (bed.marks / "order").read_text().split() == ["c", "d", "a", "b"]


# -- preemption ----------------------------------------------------------------------------------


async def test_a_higher_priority_takes_the_nodes_after_a_notice(bed: Bed) -> None:
    target = bed.target(grace=60)
    low = bed.job(SAVE + STAY, "low", nodes=2, gpus_per_node=2)
    high = bed.job(UP.replace("up", "high"), "high", nodes=1, gpus_per_node=1, priority=1)
    await target.submit(low)
    await bed.appears("up-0-0", "up-0-1")
    await target.submit(high)
    await bed.until(target, high, State.SUCCEEDED)
    seen = await bed.until(target, low, State.PREEMPTED)
    assert seen.reason.startswith("made room for high: node ")
    assert "exit code 75" in seen.reason
    assert seen.blamed_hosts == ()
    assert bed.notices() == ["0.0", "0.1"]


async def test_a_requeued_gang_comes_back_as_the_next_restart(bed: Bed) -> None:
    target = bed.target(requeue=True, grace=60)
    assert target.capabilities.requeues
    script = '[ "$GANG_RESTART" = 1 ] && { echo $GANG_JOB_ID >> $MARKS/second; exit 0; }\n' + SAVE + STAY
    job = bed.job(script, nodes=2)
    identifier = await target.submit(job)
    await bed.appears("up-0-0", "up-0-1")
    assert "60 s" in bed.admin.preempt(job.name)
    seen = await bed.until(target, job, State.SUCCEEDED)
    assert seen.restart == 1
    assert bed.notices() == ["0.0", "0.1"]
    assert (bed.marks / "second").read_text().split() == [identifier] * 2


async def test_preempted_while_higher_priority_runs_it_waits_as_requeued(bed: Bed) -> None:
    target = bed.target(requeue=True, nodes=1)
    low = bed.job(SAVE + STAY, "low", gpus_per_node=2)
    high = bed.job(SAVE.replace("up-", "high-") + STAY, "high", gpus_per_node=2, priority=1)
    await target.submit(low)
    await bed.appears("up-0-0")
    await target.submit(high)
    await bed.appears("high-0-0")
    seen = await bed.look(target, low)
    assert (seen.state, seen.native, seen.restart, seen.hosts) == (State.QUEUED, "REQUEUED", 1, ())
    await target.cancel(bed.ref(low), grace=30, since=0.0)
    assert (await bed.until(target, low, State.CANCELLED)).restart == 1


async def test_who_ignores_the_notice_is_killed_after_the_grace(bed: Bed) -> None:
    target = bed.target(grace=1.0)
    job = bed.job(f"{STUBBORN}{UP}{STAY}", nodes=2)
    await target.submit(job)
    await bed.appears("up-0-0", "up-0-1")
    bed.admin.preempt(job.name)
    seen = await bed.until(target, job, lambda s: s.ending)
    assert (seen.state, seen.native) == (State.RUNNING, "STOPPING")
    seen = await bed.until(target, job, State.PREEMPTED)
    assert "was killed" in seen.reason


async def test_without_notice_everything_is_killed_at_once(bed: Bed) -> None:
    target = bed.target(grace=3600)
    job = bed.job(SAVE + STAY, nodes=2)
    await target.submit(job)
    await bed.appears("up-0-0", "up-0-1")
    bed.admin.preempt(job.name, notice=False)
    await bed.until(target, job, State.PREEMPTED)
    assert bed.notices() == []


async def test_success_within_the_grace_is_success(bed: Bed) -> None:
    target = bed.target(requeue=True, grace=60)
    job = bed.job(f"trap 'exit 0' TERM\n{UP}{STAY}")
    await target.submit(job)
    await bed.appears("up-0-0")
    bed.admin.preempt(job.name)
    assert (await bed.until(target, job, State.SUCCEEDED)).restart == 0
    with pytest.raises(AdminError, match="fit-1 is DONE: only a gang that runs can be preempted"):
        bed.admin.preempt(job.name)
    with pytest.raises(AdminError, match="there is no job 'nobody'"):
        bed.admin.preempt("nobody")


# -- cancel and time limit -----------------------------------------------------------------------


async def test_cancel_of_queued_running_ended_and_unknown_jobs(bed: Bed) -> None:
    target = bed.target(nodes=1, grace=60)
    running = bed.job(SAVE + STAY, "running", gpus_per_node=2)
    queued = bed.job("true", "queued", gpus_per_node=2, secrets={"A": "b"})
    await target.submit(running)
    await target.submit(queued)
    await bed.appears("up-0-0")
    await target.cancel(bed.ref(queued), grace=3600, since=0.0)
    assert (await bed.until(target, queued, State.CANCELLED)).hosts == ()
    assert not bed.folder.job("queued").secrets.exists()
    for _ in range(2):
        await target.cancel(bed.ref(running), grace=60, since=0.0)
    await bed.until(target, running, State.CANCELLED)
    await target.cancel(bed.ref(running), grace=0, since=0.0)
    await target.cancel(bed.ref(bed.job("true", "unknown")), grace=0, since=0.0)
    assert (await bed.look(target, running)).state is State.CANCELLED
    assert bed.notices() == ["0.0"]


async def test_cancelling_again_never_shortens_the_grace(bed: Bed) -> None:
    target = bed.target(grace=3600)
    save = "trap 'sleep 1.5; echo saved > $MARKS/saved; exit 75' TERM\n"
    job = bed.job(save + UP + STAY)
    await target.submit(job)
    await bed.appears("up-0-0")
    bed.admin.preempt(job.name)
    await target.cancel(bed.ref(job), grace=0, since=0.0)
    await target.cancel(bed.ref(job), grace=0, since=0.0)
    seen = await bed.until(target, job, State.CANCELLED)  # not requeued, not preempted: it is to end
    assert (bed.marks / "saved").exists(), seen


async def test_cancel_kills_after_its_own_grace(bed: Bed) -> None:
    target = bed.target(grace=3600)
    job = bed.job(STUBBORN + UP + STAY)
    await target.submit(job)
    await bed.appears("up-0-0")
    await target.cancel(bed.ref(job), grace=0.5, since=0.0)
    assert "was killed" in (await bed.until(target, job, State.CANCELLED)).reason


async def test_the_time_limit_gives_notice_and_then_kills(bed: Bed) -> None:
    target = bed.target(grace=1.0)
    polite = bed.job(SAVE + STAY, "polite", time_limit=0.5)
    stubborn = bed.job(STUBBORN + STAY, "stubborn", time_limit=0.5)
    await target.submit(polite)
    await target.submit(stubborn)
    seen = await bed.until(target, polite, State.TIMED_OUT)
    assert seen.reason.startswith("the time limit of 0.5 s is over: ")
    assert "75" in seen.reason
    assert "was killed" in (await bed.until(target, stubborn, State.TIMED_OUT)).reason
    assert bed.notices() == ["0.0"]


# -- bad ends and lost nodes ---------------------------------------------------------------------


async def test_a_bad_end_is_failed_with_its_code(bed: Bed) -> None:
    target = bed.target()
    job = bed.job("exit 3")
    await target.submit(job)
    seen = await bed.until(target, job, State.FAILED)
    assert seen.reason == "node 0 of the gang (node-0) ended with exit code 3"
    missing = bed.job("true", "missing", argv=("/nowhere/python3", "runtime.pyz"))
    await target.submit(missing)
    assert "127 (the interpreter was not found)" in (await bed.until(target, missing, State.FAILED)).reason


async def test_after_one_node_failed_the_others_get_time_then_notice_then_the_kill(bed: Bed) -> None:
    target = bed.target(straggler=0.5, grace=0.5, nodes=3)
    ranks = "case $GANG_NODE_RANK in 0) exit 4;; 1) trap 'echo x > $MARKS/told; exit 75' TERM;; 2) trap '' TERM;; esac\n"
    job = bed.job(ranks + STAY, nodes=3)
    await target.submit(job)
    seen = await bed.until(target, job, lambda s: s.ending)
    assert "exit code 4; the others have 0.5 s" in seen.reason
    assert (await bed.until(target, job, State.FAILED)).reason.endswith("ended with exit code 4")
    assert (bed.marks / "told").exists()


async def test_others_that_end_in_time_are_left_alone(bed: Bed) -> None:
    target = bed.target(straggler=3600)
    job = bed.job('[ "$GANG_NODE_RANK" = 0 ] && exit 4; sleep 0.5; exit 0', nodes=2)
    await target.submit(job)
    assert "exit code 4" in (await bed.until(target, job, State.FAILED)).reason


async def test_a_killed_node_takes_its_gang_with_it_and_stays_down(bed: Bed) -> None:
    target = bed.target(straggler=0.2, grace=60)
    job = bed.job("setsid sleep 600 &\n" + SAVE + STAY, nodes=2)
    bystander = bed.job(SAVE.replace("up-", "by-") + STAY, "bystander")
    await target.submit(job)
    await bed.appears("up-0-0", "up-0-1")
    await target.submit(bystander)
    await bed.appears("by-0-0")
    assert bed.admin.kill_node(1) == "node-1 is down; it took fit-1 with it"
    assert {mark.rank for mark in bed.processes(job).values()} <= {0}
    seen = await bed.until(target, job, State.NODE_LOST)
    assert seen.blamed_hosts == ("node-1",)
    assert "node-1" in seen.reason
    assert bed.notices() == ["0.0"]  # only the node that was left got one
    assert (await bed.look(target, bystander)).state is State.RUNNING
    again = bed.job("true", "again", nodes=2)
    await target.submit(again)
    await bed.until(target, again, lambda s: s.reason == "the nodes it needs are down or drained")
    small = bed.job("true", "small")  # what could not start anyway does not hold the line
    await target.submit(small)
    assert (await bed.until(target, small, State.SUCCEEDED)).hosts == ("node-0",)
    bed.admin.restore_node(1)
    await bed.until(target, again, State.SUCCEEDED)
    with pytest.raises(AdminError, match="there is no node 7"):
        bed.admin.kill_node(7)


async def test_a_drained_node_keeps_what_it_has_and_takes_nothing_new(bed: Bed) -> None:
    target = bed.target()
    bed.folder.make()
    job = bed.job(SAVE + STAY, "stays")
    await target.submit(job)
    await bed.appears("up-0-0")
    bed.admin.drain(0)
    for i in range(2):
        other = bed.job("true", f"other-{i}")
        await target.submit(other)
        assert (await bed.until(target, other, State.SUCCEEDED)).hosts == ("node-1",)
    assert (await bed.look(target, job)).state is State.RUNNING
    bed.admin.undrain(0)
    both = bed.job("true", "both", nodes=2)
    await target.submit(both)
    await bed.until(target, both, State.SUCCEEDED)


async def test_a_node_that_vanishes_without_a_word_is_lost(bed: Bed) -> None:
    target = bed.target()
    job = bed.job(SAVE + STAY)
    await target.submit(job)
    await bed.appears("up-0-0")
    bed.kill_processes(job)
    seen = await bed.until(target, job, State.NODE_LOST)
    assert "vanished" in seen.reason
    assert seen.blamed_hosts == ("node-0",)


async def test_a_killed_agent_is_failed_and_its_orphans_are_ended(bed: Bed) -> None:
    target = bed.target()
    # Orphans: one in the session, one in a session of its own, one without the mark in its environment.
    orphans = "for p in '' setsid 'env -i setsid'; do $p sleep 600 & done\n"
    job = bed.job(orphans + UP + STAY)
    await target.submit(job)
    await bed.appears("up-0-0")
    state = await _placed(bed, job.name)
    os.kill(state["places"][0]["agent"][0], signal.SIGKILL)
    seen = await bed.until(target, job, State.FAILED)
    assert "137 (SIGKILL)" in seen.reason


async def test_ranks_that_hide_are_killed_too(bed: Bed) -> None:
    target = bed.target(grace=60)
    # A rank that double-forks into a session of its own, overwrites its environment and ignores the notice.
    hide = (
        "import os, signal, sys, time\n"
        "if os.fork(): sys.exit()\n"
        "os.setsid()\n"
        "if os.fork(): os._exit(0)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if 'hidden' not in os.environ: os.execve(sys.executable, [sys.executable, '-S', '-c', "
        "'import os,sys,time; open(sys.argv[1],\"w\").write(str(os.getpid())); time.sleep(600)', "
        "sys.argv[1]], {'hidden': '1'})\n"
    )
    (bed.root / "hide.py").write_text(hide)
    # It hides on the notice, so that the daemon has never looked at it before its agent is over.
    hiding = f"{sys.executable} -S {bed.root}/hide.py $MARKS/hidden; while ! [ -s $MARKS/hidden ]; do :; done"
    job = bed.job(f"trap '{hiding}; exit 75' TERM\n{UP}{STAY}")
    await target.submit(job)
    await bed.appears("up-0-0")
    bed.admin.preempt(job.name)
    await bed.until(target, job, State.PREEMPTED)
    pid = int((bed.marks / "hidden").read_text())
    hidden = read_process(pid)
    assert hidden is None or hidden.dead


async def test_success_waits_for_what_the_agent_left_behind(bed: Bed) -> None:
    target = bed.target()
    job = bed.job(
        "setsid sleep 600 &\nsetsid sh -c 'trap \"\" TERM; sleep 0.5; echo x > $MARKS/cleaned' &\nexit 0"
    )
    await target.submit(job)
    seen: Sighting = await bed.until(target, job, lambda s: s.ending)
    assert seen.state is State.RUNNING
    await bed.until(target, job, State.SUCCEEDED)
    assert (bed.marks / "cleaned").exists()  # a helper that cleans up got a moment


async def _placed(bed: Bed, name: str) -> dict[str, Any]:
    """The job's state once its agent is known."""
    end = time.monotonic() + 30
    while True:
        state = read_json(bed.folder.job(name).state)
        if state and state["places"] and all(place["agent"] for place in state["places"]):
            return state
        assert time.monotonic() < end
        time.sleep(0.02)
