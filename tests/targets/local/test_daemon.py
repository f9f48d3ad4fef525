"""The daemon dies, Airflow dies, crashes come at the worst moment: gangs go on, and none starts twice."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import airflow_gpu
from airflow_gpu.gang.run import State
from airflow_gpu.targets.base import TargetError
from airflow_gpu.targets.local import launch, supervise
from airflow_gpu.targets.local.client import Client, ClientError
from airflow_gpu.targets.local.cluster import Cluster
from airflow_gpu.targets.local.daemon import take_lock
from airflow_gpu.targets.local.files import read_json
from airflow_gpu.targets.local.processes import read_process, send
from airflow_gpu.targets.local.records import Cause, JobState, Place, Spec
from airflow_gpu.targets.local.schedule import Share
from airflow_gpu.targets.local.supervise import Gang
from airflow_gpu.targets.local.words import Word

from .conftest import SAVE, STAY, Bed, marked

ONCE = "echo $GANG_RESTART.$GANG_NODE_RANK >> $MARKS/starts\n"


async def test_a_gang_outlives_the_daemon_and_the_next_one_gives_it_notice(bed: Bed) -> None:
    target = bed.target(grace=60)
    job = bed.job(ONCE + SAVE + STAY, nodes=2)
    await target.submit(job)
    await bed.appears("up-0-0", "up-0-1")
    before = await bed.until(target, job, State.RUNNING)
    killed = await bed.kill_daemon()
    assert bed.processes(job)
    after = await bed.look(target, job)
    assert (after.state, after.since, after.hosts) == (State.RUNNING, before.since, before.hosts)
    assert bed.daemon_pid() != killed
    bed.admin.preempt(job.name)
    await bed.until(target, job, State.PREEMPTED)
    assert bed.notices() == ["0.0", "0.1"]
    assert sorted((bed.marks / "starts").read_text().split()) == ["0.0", "0.1"]


async def test_exit_codes_of_nodes_that_ended_without_a_daemon_are_found(bed: Bed) -> None:
    target = bed.target()
    script = "echo x > $MARKS/up-$GANG_NODE_RANK; while ! [ -e $MARKS/go ]; do sleep 0.05; done; exit {}"
    good, bad = bed.job(script.format(0), "good", nodes=2), bed.job(script.format(9), "bad")
    for job in (good, bad):
        await target.submit(job)
        await bed.until(target, job, State.RUNNING)
    await bed.appears("up-0", "up-1")
    await bed.kill_daemon()
    (bed.marks / "go").touch()
    exits = [
        bed.folder.job("good").exit(0, 0),
        bed.folder.job("good").exit(0, 1),
        bed.folder.job("bad").exit(0, 0),
    ]
    await bed.holds(lambda: all(path.exists() for path in exits), "the shells wrote the exit codes")
    await bed.until(target, good, State.SUCCEEDED)
    assert "exit code 9" in (await bed.until(target, bad, State.FAILED)).reason


async def test_a_daemon_killed_within_a_grace_is_followed_by_one_that_keeps_it(bed: Bed) -> None:
    target = bed.target(grace=1.5)
    job = bed.job("trap 'echo x >> $MARKS/notices' TERM\necho x > $MARKS/up\n" + STAY)
    await target.submit(job)
    await bed.appears("up")
    bed.admin.preempt(job.name)
    await bed.appears("notices")
    await bed.kill_daemon()
    seen = await bed.look(target, job)
    assert (seen.state, seen.ending) == (State.RUNNING, State.PREEMPTED)
    assert "was killed" in (await bed.until(target, job, State.PREEMPTED)).reason


async def test_many_daemons_at_once_are_one(bed: Bed) -> None:
    target = bed.target()
    job = bed.job("true")
    bed.folder.make()
    Client(bed.path).make(bed.config().cluster())
    clients = [Client(bed.path) for _ in range(8)]
    for client in clients[:4]:  # also without the lock that keeps starters apart
        client._launch()
    await asyncio.gather(*(asyncio.to_thread(client.ensure) for client in clients))
    assert take_lock(bed.folder) is None
    await target.submit(job)
    await bed.until(target, job, State.SUCCEEDED)
    log = bed.folder.log.read_text()
    assert log.count("INFO serving") == 1


async def test_the_daemon_ends_by_itself_when_idle_and_comes_back_when_needed(bed: Bed) -> None:
    target = bed.target(idle_exit=0.2)
    job = bed.job("true")
    await target.submit(job)
    await bed.until(target, job, State.SUCCEEDED)
    client = Client(bed.path)
    await bed.holds(lambda: not client.alive(), "the daemon ends")
    assert not bed.admin.status()["daemon"]["alive"]
    assert (await bed.look(target, job)).state is State.SUCCEEDED
    long = bed.job("sleep 1", "long")
    await target.submit(long)
    await bed.until(target, long, State.SUCCEEDED)


async def test_gangs_and_daemon_outlive_a_killed_airflow(bed: Bed, tmp_path: Path) -> None:
    target = bed.target()
    job = bed.job(
        "grep -E '^Sig(Ign|Blk)' /proc/self/status > $MARKS/signals\n" + SAVE + STAY, nodes=2, gpus_per_node=1
    )
    driver = f"""
import asyncio, signal, sys, time
sys.path.insert(0, {str(Path(airflow_gpu.__file__).parent.parent)!r})
from pathlib import Path
from airflow_gpu.targets.base import Job
from airflow_gpu.targets.local import LocalConfig, LocalTarget
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR2])
open_for_ever = open({str(tmp_path / "held")!r}, "w")
import os; os.set_inheritable(open_for_ever.fileno(), True)
config = LocalConfig(path={str(bed.path)!r}, python="/bin/sh", nodes=2, gpus_per_node=2, cpus=4, accelerator="H100")
target = LocalTarget("here", config)
job = Job(**{ {f: getattr(job, f) for f in job.__dataclass_fields__}!r})
asyncio.run(target.submit(job))
print("submitted", flush=True)
time.sleep(600)
"""
    child = subprocess.Popen([sys.executable, "-c", driver], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert child.stdout is not None
        assert await asyncio.to_thread(child.stdout.readline) == b"submitted\n"
        await bed.appears("up-0-0", "up-0-1")
    finally:
        os.killpg(child.pid, signal.SIGKILL)  # the whole group, as a container's end does
        child.wait()
    assert len({mark.rank for mark in bed.processes(job).values()}) == 2
    seen = await bed.look(bed.target(), job)
    assert seen.state in (State.STARTING, State.RUNNING)
    about = read_process(bed.daemon_pid())
    assert about is not None
    assert about.session not in (child.pid, about.ident.pid)
    for pid in [*(ident.pid for ident in bed.processes(job)), bed.daemon_pid()]:
        held = open_files(pid)
        assert str(tmp_path / "held") not in held
        assert str(bed.folder.lock) not in held or pid == bed.daemon_pid()
    masks = dict(line.split(":\t") for line in (bed.marks / "signals").read_text().splitlines())
    reserved = 0b11 << 31  # signals 32 and 33 are the C library's own; what is inherited of them is not ours
    assert {int(mask, 16) & ~reserved for mask in masks.values()} == {0}
    await target.cancel(bed.ref(job), grace=60, since=0.0)
    await bed.until(target, job, State.CANCELLED)


def open_files(pid: int) -> list[str]:
    """What a process has open; nothing when it has just ended."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            found.append(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    return found


# -- crashes at the worst moment -----------------------------------------------------------------


class Crash(BaseException):
    """The daemon is killed here."""


@pytest.mark.parametrize("after", [0, 1, 2])
async def test_a_crash_in_the_middle_of_a_start_starts_no_node_twice(
    bed: Bed, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Killed after the word LAUNCHING was written and ``after`` of three nodes were started."""
    target = bed.target(nodes=3)
    Client(bed.path).make(bed.config(nodes=3).cluster())
    for node in range(3):
        bed.admin.drain(node)
    job = bed.job(ONCE + SAVE + STAY, nodes=3, gpus_per_node=2)
    await target.submit(job)
    await bed.until(target, job, State.QUEUED)
    bed.admin.stop()
    # From here this process is the daemon, up to the moment of its death.
    mine = Cluster(bed.folder)
    mine.load()
    gang = mine.gangs[job.name]
    try:
        real, count = launch.spawn, 0

        def spawn(*args: object) -> subprocess.Popen[bytes]:
            nonlocal count
            if count == after:
                raise Crash
            count += 1
            return real(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(launch, "spawn", spawn)
        with pytest.raises(Crash):
            supervise.start(gang, [Share(node, (2 * node, 2 * node + 1)) for node in range(3)])
    finally:
        monkeypatch.undo()
    state = read_json(bed.folder.job(job.name).state)
    assert state is not None
    assert (state["word"], state["restart"]) == ("LAUNCHING", 0)
    await bed.until(target, job, State.RUNNING)  # on drained nodes: it had them before
    await bed.appears("up-0-0", "up-0-1", "up-0-2")
    assert sorted((bed.marks / "starts").read_text().split()) == ["0.0", "0.1", "0.2"]
    for child in gang.children.values():
        assert child.poll() is None
    await target.cancel(bed.ref(job), grace=60, since=0.0)
    await bed.until(target, job, State.CANCELLED)
    for child in gang.children.values():
        child.wait()


def a_job(bed: Bed, script: str) -> Spec:
    """What was asked, without a daemon."""
    job = bed.job(ONCE + script)
    return Spec(
        id="fit-1.test",
        name="fit-1",
        labels={},
        digest="d1",
        nodes=1,
        gpus_per_node=0,
        time_limit=60,
        payload=job.payload,
        channel=job.channel,
        argv=job.argv,
        submitted_at=time.time(),
        environ={"PATH": os.environ["PATH"]},
    )


async def test_two_shells_for_one_start_run_one_agent(bed: Bed) -> None:
    """A shell that is late, and the one that the next daemon started in its place."""
    spec = a_job(bed, "exit 0")
    files = bed.folder.job(spec.name)
    files.root.mkdir(parents=True)
    launch.prepare(files, 0)
    place = Place(0, 0)
    children = [launch.spawn(spec, files, 0, place) for _ in range(5)]
    await bed.holds(lambda: files.exit(0, 0).exists(), "the exit code is there")
    await bed.holds(lambda: sum(child.poll() is not None for child in children) == 4, "four leave")
    assert (bed.marks / "starts").read_text().split() == ["0.0"]
    for child in children:
        child.kill()
        child.wait()


async def test_a_fenced_start_never_runs(bed: Bed) -> None:
    """An end was reported: a shell that was forked before and runs only now must leave."""
    spec = a_job(bed, "exit 0")
    files = bed.folder.job(spec.name)
    files.root.mkdir(parents=True)
    launch.prepare(files, 0)
    place = Place(0, 0)
    assert launch.fence(files, 0, place)
    child = launch.spawn(spec, files, 0, place)
    assert await asyncio.to_thread(child.wait) == 70
    assert not (bed.marks / "starts").exists()
    assert launch.read_exit(files, 0, place) is None


async def test_killed_in_the_middle_of_a_start_no_late_shell_runs(bed: Bed) -> None:
    """The daemon wrote down a start and a kill, and died before it did either."""
    target = bed.target()
    Client(bed.path).make(bed.config().cluster())
    for node in range(2):
        bed.admin.drain(node)
    job = bed.job(ONCE + "exit 0", nodes=2)
    await target.submit(job)
    await bed.until(target, job, State.QUEUED)
    bed.admin.stop()
    mine = Cluster(bed.folder)
    mine.load()
    gang = mine.gangs[job.name]
    gang.state.word, gang.state.boot, gang.state.started = Word.LAUNCHING, mine.boot, time.monotonic()
    gang.state.places = [Place(0, 0), Place(1, 1)]
    supervise.stop(gang, Cause.CANCEL, 0, "cancelled", notice=False)
    assert gang.state.stop is not None
    gang.state.stop.killed = True
    gang.save()
    await bed.until(target, job, State.CANCELLED)
    child = launch.spawn(gang.spec, gang.folder, 0, gang.state.places[0])
    assert await asyncio.to_thread(child.wait) == 70
    assert not (bed.marks / "starts").exists()


async def test_a_start_must_be_on_the_disk_and_the_rest_goes_on_without(bed: Bed) -> None:
    spec = a_job(bed, "exit 0")
    gang = Gang(spec, bed.folder.job(spec.name), JobState(spec.id, 1), "boot")
    gang.try_save()  # its folder is not there, as on a full disk
    with pytest.raises(OSError):
        supervise.start(gang, [Share(0, ())])
    assert gang.state.word is Word.PENDING
    assert not (bed.marks / "starts").exists()


async def test_a_claim_that_appears_while_we_look_is_not_taken_for_a_lost_node(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = a_job(bed, STAY)
    gang = Gang(spec, bed.folder.job(spec.name), JobState(spec.id, 1, Word.LAUNCHING), "boot")
    gang.folder.root.mkdir(parents=True)
    launch.prepare(gang.folder, 0)
    place = Place(0, 0)
    gang.state.places, gang.state.started = [place], time.monotonic()
    real = launch.claimed

    def claimed(*args: Any) -> bool:
        """The shell comes to its claim at the very moment of the question."""
        if not gang.children:
            gang.children[0] = launch.spawn(spec, gang.folder, 0, place)
            while not real(gang.folder, 0, place):
                time.sleep(0.01)
        return real(*args)

    monkeypatch.setattr(launch, "claimed", claimed)
    supervise.advance(gang, None)
    assert (place.over, place.shim is None) == (False, False)
    for ident, mark in marked().items():
        if mark.job == spec.id:
            send(ident, signal.SIGKILL)
    gang.children[0].wait()


async def test_a_pid_that_came_again_is_nobody_of_ours(bed: Bed) -> None:
    spec = a_job(bed, "exit 0")
    files = bed.folder.job(spec.name)
    files.root.mkdir(parents=True)
    launch.prepare(files, 0)
    place = Place(0, 0)
    files.claim(0, 0).write_text(f"{os.getpid()}\n")
    assert launch.claimed(files, 0, place)
    assert launch.read_claim(files, spec, 0, place) is None


async def test_after_a_restart_of_the_machine_running_gangs_are_lost_and_nobody_is_blamed(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = bed.target()
    job, queued = bed.job(SAVE + STAY, gpus_per_node=2, nodes=2), bed.job("true", "queued", gpus_per_node=2)
    await target.submit(job)
    await bed.appears("up-0-0", "up-0-1")
    await target.submit(queued)
    await bed.until(target, queued, State.QUEUED)
    bed.admin.stop()
    bed.kill_processes(job)
    path = bed.folder.job(job.name).state
    state = read_json(path)
    assert state is not None
    path.write_text(json.dumps({**state, "boot": "another"}))
    seen = await bed.until(target, job, State.NODE_LOST)
    assert "the machine was restarted" in seen.reason
    assert seen.blamed_hosts == ()
    await bed.until(target, queued, State.SUCCEEDED)


async def test_a_command_that_was_applied_before_a_crash_is_not_applied_again(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = bed.target(requeue=True, grace=60)
    job = bed.job(ONCE + SAVE + STAY)
    await target.submit(job)
    await bed.appears("up-0-0")
    client = Client(bed.path)
    identifier = client.send("preempt", name=job.name)
    await bed.until(target, job, lambda s: s.restart == 1 and s.state is State.RUNNING)
    # The daemon was killed before it removed the file: the next one meets it again.
    await bed.kill_daemon()
    (bed.folder.commands / f"{identifier}.json").write_text(json.dumps({"kind": "preempt", "name": job.name}))
    await bed.until(target, job, State.RUNNING)
    await bed.holds(lambda: not (bed.folder.commands / f"{identifier}.json").exists(), "it is consumed")
    assert (await bed.look(target, job)).restart == 1
    assert not (await bed.look(target, job)).ending


async def test_a_daemon_that_is_killed_again_and_again_starts_nothing_twice(bed: Bed) -> None:
    target = bed.target(requeue=True, grace=60, nodes=2)
    script = (
        ONCE.replace("starts", "starts-$GANG_JOB_ID") + '[ "$GANG_RESTART" = 2 ] && exit 0\n' + SAVE + STAY
    )
    jobs = [bed.job(script, f"fit-{i}", nodes=2) for i in range(3)]
    for job in jobs:
        await target.submit(job)
    chance = random.Random(1)
    waiting = {(job.name, restart) for job in jobs for restart in (0, 1)}
    end = time.monotonic() + 180
    while waiting:
        assert time.monotonic() < end
        seen = await target.observe([bed.ref(job) for job in jobs])
        for job in jobs:
            up = seen[job.name].state is State.RUNNING and not seen[job.name].ending
            if up and (job.name, seen[job.name].restart) in waiting:
                waiting.discard((job.name, seen[job.name].restart))
                Client(bed.path).send("preempt", name=job.name)
        await asyncio.sleep(chance.random() * 0.15)
        with contextlib.suppress(ProcessLookupError, AssertionError):
            os.kill(bed.daemon_pid(), signal.SIGKILL)
    for job in jobs:
        assert (await bed.until(target, job, State.SUCCEEDED)).restart == 2
        starts = sorted((bed.marks / f"starts-{bed.id_of(job)}").read_text().split())
        assert starts == [f"{restart}.{rank}" for restart in range(3) for rank in range(2)]


# -- trouble -------------------------------------------------------------------------------------


async def test_a_daemon_that_cannot_start_says_why(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    target = bed.target()
    bed.folder.make()
    bed.folder.cluster.write_text("{")
    with pytest.raises(TargetError, match=r"cannot start: .*is not JSON"):
        await target.observe([bed.ref(bed.job("true"))])
    bed.folder.cluster.unlink()
    with pytest.raises(ClientError, match="is no cluster folder"):
        Client(bed.path).ensure()


async def test_a_daemon_that_hangs_is_no_source_of_truth(bed: Bed) -> None:
    target = bed.target()
    job = bed.job("true")
    await target.submit(job)
    await bed.until(target, job, State.SUCCEEDED)
    os.kill(bed.daemon_pid(), signal.SIGSTOP)
    try:
        long_ago = time.time() - 3600
        os.utime(bed.folder.daemon, (long_ago, long_ago))
        with pytest.raises(TargetError, match="has not done anything for 36"):
            await bed.look(target, job)
    finally:
        os.kill(bed.daemon_pid(), signal.SIGCONT)


async def test_one_gang_in_trouble_does_not_stop_the_others(bed: Bed) -> None:
    target = bed.target()
    job, other = bed.job(SAVE + STAY, "trouble"), bed.job("true", "other")
    await target.submit(job)
    await bed.appears("up-0-0")
    await bed.until(target, job, State.RUNNING)
    files = bed.folder.job("trouble")
    os.rename(files.start(0), files.root / "moved")
    files.start(0).write_text("in the way")
    await target.submit(other)
    await bed.until(target, other, State.SUCCEEDED)
    files.start(0).unlink()
    os.rename(files.root / "moved", files.start(0))
    await target.cancel(bed.ref(job), grace=60, since=0.0)
    await bed.until(target, job, State.CANCELLED)


async def test_logs_that_grow_too_long_are_cut(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "LOG_LIMIT", 1000)
    monkeypatch.setattr(launch, "LOG_KEPT", 10)
    path = bed.root / "node-0.log"
    path.write_text("x" * 1000)
    launch.trim_log(path)
    assert path.stat().st_size == 1000
    with path.open("a") as file:
        file.write("0123456789")
        file.flush()
        launch.trim_log(path)
        file.write("more")
    assert path.read_text() == "more"
    assert (bed.root / "node-0.log.old").read_text() == "0123456789"
