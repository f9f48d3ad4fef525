"""A gang from its start to its end: the barrier, evidence of success, who failed first, who dies with whom."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable

import pytest

from tests.runtime.bed import QUICK, Bed, alive, eventually

ENVIRONMENT = """
    import json, os
    from airflow_gpu.runtime import gang
    with gang() as g:
        print(json.dumps({"env": dict(os.environ), "pgid": os.getpgid(0), "pid": os.getpid(), "repr": repr(g)}))
        g.progress(1, 4, loss=0.5)
        g.progress(4, 4, loss=0.25)
        g.result({"rank": g.rank, "world": g.world_size, "nodes": g.nodes})
"""

SLEEP = """
    import os, sys, time
    open(f"pid-{os.environ['RANK']}", "w").write(str(os.getpid()))
    time.sleep(1000)
"""


def pids(bed: Bed, count: int) -> list[int]:
    """Of ranks that have written their number into the agents' working folder."""

    def read() -> list[int]:
        texts = [p.read_text() for p in bed.folder.glob("pid-*")]
        return [int(text) for text in texts if text] if len(texts) == count and all(texts) else []

    return eventually(read, "the ranks did not start")


def test_success_leaves_evidence_of_every_rank(make_bed: Callable[..., Bed], each_python: str) -> None:
    bed = make_bed(each_python)
    job = bed.payload(constants={}, script=ENVIRONMENT, env={"MINE": "yes", "PYTHONPATH": "/else/where"})
    assert bed.run(job) == [0, 0]
    assert bed.codes() == [0, 0, 0, 0]
    assert [entry["local_rank"] for _, entry in sorted(bed.entries().items())] == [0, 1, 0, 1]
    life = bed.read("lives/0001.json")
    assert (life["kind"], life["attempt"], life["job"], life["restart"]) == ("life", 1, "job-1", 0)
    assert (life["nodes"], life["world_size"], life["processes"], life["from"]) == (2, 4, 4, None)
    assert "token" not in life
    assert (bed.channel / "lives/0001/token").stat().st_mode & 0o777 == 0o600
    assert bed.read("lives/0001/result.json") == {"rank": 0, "world": 4, "nodes": 2}
    progress = bed.read("lives/0001/progress.json")
    assert (progress["step"], progress["total"], progress["metrics"]) == (4, 4, {"loss": 0.25})
    assert not (bed.channel / "lives/0001/failure.json").exists()
    assert not (bed.channel / "lives/0001/notice.json").exists()

    told = [json.loads(bed.log(rank)) for rank in range(4)]
    for rank, one in enumerate(told):
        env = one["env"]
        assert (env["RANK"], env["WORLD_SIZE"]) == (str(rank), "4")
        assert (env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"]) == (str(rank % 2), "2")
        assert env["NODE_RANK"] == env["GROUP_RANK"] == str(rank // 2)
        assert env["MASTER_ADDR"] == "127.0.0.1"
        assert env["JAX_COORDINATOR_ADDRESS"].startswith("127.0.0.1:")
        assert not env["JAX_COORDINATOR_ADDRESS"].endswith(":" + env["MASTER_PORT"])
        assert env["MINE"] == "yes"
        assert env["PYTHONPATH"].endswith("runtime.pyz:/else/where")
        assert one["pid"] == one["pgid"]  # each rank leads its own group
        assert one["repr"] == f"<Gang rank {rank} of 4, life 1>"
    assert len({one["env"]["MASTER_PORT"] for one in told}) == 1


def test_first_failing_rank_is_named_and_the_others_are_ended(bed: Bed) -> None:
    job = bed.payload(
        script="""
        import os, sys, time
        if os.environ["RANK"] == "2":
            time.sleep(0.5)
            print("all went well until", "x" * 20000)
            print("ValueError: it was rank 2", file=sys.stderr)
            sys.exit(3)
        time.sleep(1000)
        """
    )
    assert bed.run(job) == [3, 3]
    failure = bed.read("lives/0001/failure.json")
    assert (failure["cause"], failure["rank"], failure["node"]) == ("rank", 2, 1)
    assert (failure["exit_code"], failure["signal"], failure["host"]) == (3, None, socket.gethostname())
    assert failure["tail"].endswith("ValueError: it was rank 2\n")
    assert len(failure["tail"].encode()) == 8192
    assert "rank 2 on node 1" in failure["message"]
    assert bed.codes() == [None, None, 3, None]
    assert {e["signal"] for r, e in bed.entries().items() if r != 2} == {"SIGTERM"}


def test_ranks_that_fail_because_another_died_are_not_blamed(bed: Bed) -> None:
    # Rank 1 is killed; all others see it at once and fail by themselves, as in a collective.
    job = bed.payload(
        script="""
        import os, signal, socket, sys, time
        rank, folder = int(os.environ["RANK"]), os.environ["GANG_DIR"]
        path = folder + "/peer.sock"
        if rank == 1:
            server = socket.socket(socket.AF_UNIX)
            server.bind(path + ".new"); server.listen(3); os.rename(path + ".new", path)
            others = [server.accept()[0] for _ in range(3)]
            os.kill(os.getpid(), signal.SIGKILL)
        while not os.path.exists(path):
            time.sleep(0.01)
        peer = socket.socket(socket.AF_UNIX); peer.connect(path)
        peer.recv(1)
        sys.exit("connection closed by peer")
        """
    )
    assert bed.run(job) == [137, 137]
    failure = bed.read("lives/0001/failure.json")
    assert (failure["rank"], failure["signal"], failure["exit_code"]) == (1, "SIGKILL", None)
    assert bed.codes() == [1, None, 1, 1]


def test_exception_is_first_though_its_process_dies_last(bed: Bed) -> None:
    # The handle reports the exception when it happens; interpreters may take long to end after that.
    job = bed.payload(
        script="""
        import os, sys, time
        from airflow_gpu.runtime import gang
        import atexit
        with gang() as g:
            if g.rank == 3:
                atexit.register(time.sleep, 0.4)
                raise ValueError("the real reason")
            time.sleep(0.5)
            sys.exit("a collective timed out")
        """
    )
    bed.run(job)
    failure = bed.read("lives/0001/failure.json")
    assert failure["rank"] == 3
    assert "the real reason" in failure["message"]
    assert "the real reason" in failure["tail"]


def test_a_rank_that_ends_well_early_is_no_failure(bed: Bed) -> None:
    job = bed.payload(script="import os, time; time.sleep(float(os.environ['RANK']) / 4)")
    assert bed.run(job) == [0, 0]
    assert bed.codes() == [0, 0, 0, 0]


def test_reserved_exit_codes_of_ranks_are_not_passed_on(bed: Bed) -> None:
    job = bed.payload(nodes=1, ranks_per_node=1, script="import sys; sys.exit(76)")
    assert bed.run(job) == [1]
    assert bed.read("lives/0001/failure.json")["exit_code"] == 76
    job = bed.payload(attempt=2, nodes=1, ranks_per_node=1, script="import sys; sys.exit(75)")
    assert bed.run(job) == [1]  # 75 without a notice is a failure like any other
    assert bed.read("lives/0002/failure.json")["exit_code"] == 75


def test_command_that_does_not_exist(bed: Bed) -> None:
    job = bed.payload(nodes=1, ranks_per_node=1, command=["no-such-program"])
    assert bed.run(job) == [127]
    assert "cannot start no-such-program" in bed.read("lives/0001/failure.json")["tail"]


def test_a_node_that_cannot_start_its_ranks_ends_the_gang(bed: Bed) -> None:
    job = bed.payload(script="print(1)", secrets_file=str(bed.folder / "absent.json"))
    assert bed.run(job) == [1, 1]
    failure = bed.read("lives/0001/failure.json")
    assert failure["cause"] == "node"
    assert "secrets file" in failure["message"]


def test_secrets_reach_the_ranks_and_nothing_else(bed: Bed) -> None:
    secrets = bed.folder / "secrets.json"
    secrets.write_text(json.dumps({"DB_PASSWORD": "hunter2-xyzzy"}))
    job = bed.payload(
        nodes=1,
        ranks_per_node=1,
        script="import os; assert os.environ['DB_PASSWORD'] == 'hunter2-xyzzy'",
        secrets_file=str(secrets),
    )
    life = bed.start(job)
    assert life.wait() == [0]
    assert "hunter2" not in life.log()
    for path in bed.channel.rglob("*"):
        assert not path.is_file() or b"hunter2" not in path.read_bytes() or path.name == "script.py"


def test_nothing_starts_unless_all_nodes_come(bed: Bed) -> None:
    job = bed.payload(script="open('started', 'w')", nodes=3, barrier_timeout=1.0)
    assert bed.run(job, nodes=[0, 2]) == [77, 77]
    failure = bed.read("lives/0001/failure.json")
    assert (failure["cause"], failure["node"], failure["rank"]) == ("not_whole", 1, None)
    assert bed.entries() == {}
    assert not (bed.folder / "started").exists()


def test_nodes_without_node_0_leave(bed: Bed) -> None:
    job = bed.payload(script="print(1)", barrier_timeout=1.0)
    assert bed.run(job, nodes=[1]) == [77]
    assert not (bed.channel / "lives").exists()


@pytest.mark.parametrize(("whom", "node"), [("agent", 0), ("agent", 1), ("guard", 1)])
def test_a_killed_agent_takes_its_ranks_and_the_gang_with_it(bed: Bed, whom: str, node: int) -> None:
    job = bed.payload(script=SLEEP)
    life = bed.start(job)
    ranks = pids(bed, 4)
    os.kill(life.agent(node) if whom == "agent" else life.agents[node].pid, signal.SIGKILL)
    codes = life.wait()
    eventually(lambda: not any(map(alive, ranks)), "ranks go on without their agent")
    assert codes[node] in (137, -9)
    assert codes[1 - node] == 1
    failure = bed.read("lives/0001/failure.json")
    assert (failure["cause"], failure["node"], failure["rank"]) == ("node", node, None)
    assert len(bed.entries()) == 2  # the surviving node tells how its ranks ended


@pytest.mark.parametrize("node", [0, 1])
def test_an_agent_that_falls_silent_is_lost(bed: Bed, node: int) -> None:
    """As when a machine stops without a word: connections stay open, nobody answers."""
    job = bed.payload(
        script=SLEEP,
        ranks_per_node=1,
        stop_grace=1,
        constants={**QUICK, "SILENCE_SECONDS": 1.5, "BEAT_SECONDS": 0.3},
    )
    life = bed.start(job)
    ranks = pids(bed, 2)
    silent = life.agent(node)
    os.kill(silent, signal.SIGSTOP)
    assert life.agents[1 - node].wait(60) == 1
    failure = bed.read("lives/0001/failure.json")
    assert (failure["cause"], failure["node"]) == ("node", node)
    assert "nothing was heard" in failure["message"]
    os.kill(silent, signal.SIGCONT)  # it finds that it is out, and ends its rank
    assert life.wait()[node] == 1
    assert not any(map(alive, ranks))
    assert len(bed.entries()) == 2


def test_a_collective_that_breaks_before_the_node_is_missed_is_not_blamed(bed: Bed) -> None:
    job = bed.payload(
        ranks_per_node=1,
        stop_grace=1,
        constants={**QUICK, "SILENCE_SECONDS": 3.0, "BEAT_SECONDS": 0.3},
        script="""
        import os, sys, time
        open(f"pid-{os.environ['RANK']}", "w").write(str(os.getpid()))
        while not os.path.exists("broken"):
            time.sleep(0.05)
        sys.exit("connection reset by peer")
        """,
    )
    life = bed.start(job)
    pids(bed, 2)
    os.kill(life.agent(1), signal.SIGSTOP)
    time.sleep(1.2)  # long enough to be suspect
    (bed.folder / "broken").touch()
    assert life.agents[0].wait(60) == 1
    failure = bed.read("lives/0001/failure.json")
    assert (failure["cause"], failure["node"], failure["rank"]) == ("node", 1, None)


def test_grandchildren_in_sessions_of_their_own_die_too(bed: Bed) -> None:
    # A launcher starts its workers in new sessions; when all above them is killed they would be left.
    job = bed.payload(
        nodes=1,
        ranks_per_node=1,
        script="""
        import os, subprocess, sys, time
        worker = "import os,time; open(f'pid-{os.getpid()}','w').write(str(os.getpid())); time.sleep(1000)"
        for _ in range(2):
            subprocess.Popen([sys.executable, "-c", worker], start_new_session=True)
        time.sleep(1000)
        """,
    )
    life = bed.start(job)
    workers = pids(bed, 2)
    os.kill(life.agent(0), signal.SIGKILL)
    life.wait()
    assert not any(map(alive, workers))


def test_rank_that_ignores_sigterm_is_killed_after_the_grace(bed: Bed) -> None:
    job = bed.payload(
        stop_grace=0.5,
        script="""
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(f"pid-{os.environ['RANK']}", "w").write("1")
        while len([n for n in os.listdir(".") if n.startswith("pid-")]) < 4:
            time.sleep(0.01)
        if os.environ["RANK"] == "0":
            sys.exit(4)
        time.sleep(1000)
        """,
    )
    assert bed.run(job) == [4, 4]
    assert {e["signal"] for r, e in bed.entries().items() if r} == {"SIGKILL"}


def test_superseded_life_ends(bed: Bed) -> None:
    job = bed.payload(script=SLEEP, constants={**QUICK, "LOOK_SECONDS": 0.3})
    life = bed.start(job)
    ranks = pids(bed, 4)
    (bed.channel / "lives/0002.json").write_text(
        json.dumps({"v": 1, "kind": "fence", "life": 2, "attempt": 1, "reason": "test"})
    )
    assert life.wait() == [76, 76]
    assert not any(map(alive, ranks))
    assert not (bed.channel / "lives/0001/failure.json").exists()


def test_strangers_and_garbage_do_not_disturb(bed: Bed) -> None:
    job = bed.payload(script="import time; time.sleep(1.0)")
    life = bed.start(job, nodes=[0])
    bed.await_file("lives/0001/token")
    host, _, port = bed.read("lives/0001.json")["control"].rpartition(":")
    hellos = [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01" + os.urandom(200) + b"\n",
        b"{" * 5000 + b"\n",
        b"x" * 100_000,
        b"[" * 2000 + b"\n",
        json.dumps({"hello": "agent", "v": 1, "index": 1, "token": "guess", "life": 1}).encode() + b"\n",
        json.dumps({"hello": "agent", "v": 1, "index": 1, "token": 7, "life": 1}).encode() + b"\n",
        b'"hello"\n',
        b"",
    ]
    strangers = []
    for hello in hellos:
        stranger = socket.create_connection((host, int(port)), timeout=10)
        strangers.append(stranger)
        try:
            stranger.sendall(hello)
        except OSError:
            pass
    rest = bed.start(job, nodes=[1])
    assert rest.wait() == [0]
    assert life.wait() == [0]
    for stranger in strangers:
        stranger.close()


def test_second_agent_of_the_same_node_is_refused(bed: Bed) -> None:
    job = bed.payload(script="import time; time.sleep(1.5)", nodes=2)
    life = bed.start(job)
    bed.await_file("lives/0001/logs/rank-00002.log")
    twin = bed.start(job, nodes=[1])
    assert twin.wait() == [76]
    assert life.wait() == [0, 0]


def test_wrong_use_says_what_is_missing(bed: Bed) -> None:
    job = bed.payload(script="print(1)")
    life = bed.start(job, nodes=[5])
    assert life.wait() == [64]
    assert "node rank 5 of a gang of 2 nodes" in life.log()
    job.write_text('{"v": 2, "nodes": 1}')
    life = bed.start(job, nodes=[0])
    assert life.wait() == [64]
    assert "version 2" in life.log()
