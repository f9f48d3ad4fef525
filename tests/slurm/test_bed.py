"""The Slurm cluster that tests run on is a real one: it gangs, preempts, loses nodes, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import asyncssh
import httpx
import pytest

from tests.beds.slurm import Cluster, Unavailable, cluster, missing
from tests.beds.slurm.fixture import started

both = pytest.mark.parametrize("bed", ["24.11", "22.05"], indirect=True)
ROOT = Path(__file__).parents[2]

GANG = ("--nodes=8", "--exclusive", "--gpus-per-node=8", "--output=/shared/out-%j", "--open-mode=append")
# Each rank appends to its own file, so that it is seen which of them go on.
RANKS = r"""#!/bin/bash
srun bash -c '
    trap "echo TERM $SLURM_PROCID >> /shared/$SLURM_JOB_ID.signals" TERM
    while :; do echo $SLURM_RESTART_COUNT >> /shared/$SLURM_JOB_ID.$SLURM_PROCID; sleep 0.2 & wait $!; done'
"""


@pytest.fixture
def bed(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with started(getattr(request, "param", "24.11")) as made:
        yield made
        print(made.logs(12))


def submit(bed: Cluster, *options: str, script: str = "#!/bin/bash\nsleep 600\n", user: str = "alice") -> str:
    said = bed.run("sbatch", "--parsable", *options, user=user, input=script.encode())
    return said.strip().partition(";")[0]


def state(bed: Cluster, job: str, field: str = "%T") -> str:
    return bed.run("squeue", "-h", "--all", "--states=all", "-j", job, "-o", field).strip()


def until(happened: Callable[[], Any], seconds: float = 90.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := happened()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.2)
    return found


def accounted(bed: Cluster, job: str) -> list[str]:
    said = bed.run("sacct", "--noheader", "--parsable2", "-D", "-X", "-j", job, "-o", "State")
    return said.split()


def grows(path: Path) -> bool:
    """Whether a rank still writes; it does so five times a second."""
    size = path.stat().st_size if path.exists() else 0
    time.sleep(1.5)
    return path.exists() and path.stat().st_size > size


def running_gang(bed: Cluster) -> str:
    job = submit(bed, *GANG, script=RANKS)
    until(lambda: len(list(bed.shared.glob(f"{job}.*"))) == 8)
    return job


@both
def test_a_gang_runs_on_eight_hosts_that_find_each_other_by_name(bed: Cluster) -> None:
    script = "echo $(hostname) $SLURM_PROCID $CUDA_VISIBLE_DEVICES $(getent hosts gpu03) $(ls /tmp | wc -l)"
    said = bed.run("srun", "-N8", "-n64", "--gpus-per-node=8", "bash", "-c", script, user="alice")
    rows = [line.split() for line in said.splitlines()]
    assert sorted(int(row[1]) for row in rows) == list(range(64))
    assert {row[0] for row in rows} == set(bed.names)
    assert {row[2] for row in rows} == {"0,1,2,3,4,5,6,7"}
    assert {row[4] for row in rows} == {"gpu03"}
    assert len({row[3] for row in rows}) == 1
    assert not rows[0][3].startswith("127.")


def test_nodes_are_apart_and_the_shared_folder_is_not(bed: Cluster) -> None:
    bed.run("srun", "-w", "gpu01", "touch", "/tmp/mine", "/shared/ours", user="alice")
    script = "ls /tmp /shared; ps -e -o comm="
    seen = bed.run("srun", "-w", "gpu02", "bash", "-c", script, user="alice").split()
    assert "ours" in seen
    assert "mine" not in seen
    assert seen.count("slurmd") == 1
    assert (bed.shared / "ours").exists()
    assert not Path("/shared/ours").exists()
    assert (bed.shared / "gangs").stat().st_uid == int(bed.run("id", "-u", user="alice"))


@both
def test_a_gang_waits_whole_while_one_node_is_taken(bed: Cluster) -> None:
    other = submit(bed, "--nodes=1", "--exclusive", "--gpus-per-node=8", "--output=/dev/null", user="bob")
    until(lambda: state(bed, other) == "RUNNING")
    gang = submit(bed, *GANG)
    until(lambda: state(bed, gang, "%r") == "Resources")
    assert state(bed, gang) == "PENDING"
    assert state(bed, gang, "%N") == ""
    bed.run("scancel", other)
    until(lambda: state(bed, gang) == "RUNNING")


@both
def test_a_preempted_gang_is_warned_in_its_steps_and_runs_again(bed: Cluster) -> None:
    gang = running_gang(bed)
    signals = bed.shared / f"{gang}.signals"
    taker = str(bed.preempt(gang))
    until(lambda: signals.exists() and len(signals.read_text().split("\n")) > 8)
    assert state(bed, gang) == "RUNNING"  # the warning comes before the end
    until(lambda: state(bed, taker) == "COMPLETED")
    until(lambda: (bed.shared / f"{gang}.0").read_text().endswith("1\n"))
    assert accounted(bed, gang)[:2] == ["PREEMPTED", "RUNNING"]


@both
def test_a_node_that_loses_power_fails_the_gang_and_comes_back(bed: Cluster) -> None:
    gang = running_gang(bed)
    files = {int(p.suffix[1:]): p for p in bed.shared.glob(f"{gang}.*")}
    bed.kill_node("gpu03")
    assert not grows(files[2])
    assert grows(files[0])
    until(lambda: "NODE_FAIL" in accounted(bed, gang))
    bed.start_node("gpu03")
    # The step's part on the first node waits 60 s for the lost one to say that it ended, and the job with it.
    until(lambda: files[2].read_text().endswith("1\n"), 200)
    assert state(bed, gang, "%N") == "gpu[01-08]"


def test_a_node_without_its_network_is_lost_while_its_ranks_go_on(bed: Cluster) -> None:
    gang = running_gang(bed)
    bed.cut_node("gpu08")
    until(lambda: "NODE_FAIL" in accounted(bed, gang))
    assert grows(bed.shared / f"{gang}.7")
    bed.join_node("gpu08")
    # The rank of the first start is ended, and the gang starts again with this node.
    until(lambda: (bed.shared / f"{gang}.7").read_text().split("\n")[-6:] == ["1"] * 5 + [""], 200)


def test_ranks_go_on_without_their_slurmd(bed: Cluster) -> None:
    gang = running_gang(bed)
    bed.kill_slurmd("gpu02")
    assert grows(bed.shared / f"{gang}.1")
    bed.start_node("gpu02")
    assert state(bed, gang) == "RUNNING"


def test_a_job_outlives_the_controller(bed: Cluster) -> None:
    gang = running_gang(bed)
    # It forgets what it has not written down yet, which it does some seconds later.
    begun = bed.run("date", "+%s")
    until(lambda: bed.run("stat", "--format=%Y", "/var/lib/bed/slurmctld/job_state") > begun)
    bed.stop("slurmctld", kill=True)
    assert grows(bed.shared / f"{gang}.0")
    assert "DOWN" in bed.run("scontrol", "ping", check=False)
    bed.start("slurmctld")
    assert state(bed, gang) == "RUNNING"


@pytest.mark.parametrize("daemon", ["slurmdbd", "slurmrestd", "sshd", "mariadb", "munged"])
def test_a_daemon_ends_and_starts_again(bed: Cluster, daemon: str) -> None:
    bed.stop(daemon)
    bed.start(daemon)
    assert httpx.get(f"{bed.rest}/slurmdb/v0.0.42/jobs", headers=_auth(bed)).status_code == 200


def test_a_paused_daemon_does_not_answer_and_then_does(bed: Cluster) -> None:
    url, auth = f"{bed.rest}/slurm/v0.0.42/ping", _auth(bed)
    bed.pause("slurmrestd")
    with pytest.raises(httpx.ReadTimeout):
        httpx.get(url, headers=auth, timeout=1)
    bed.resume("slurmrestd")
    assert httpx.get(url, headers=auth).status_code == 200


@pytest.mark.parametrize("version", ["v0.0.40", "v0.0.41", "v0.0.42"])
def test_rest_knows_users_by_token_and_takes_jobs(bed: Cluster, version: str) -> None:
    url, auth = f"{bed.rest}/slurm/{version}", _auth(bed)
    pings = httpx.get(f"{url}/ping", headers=auth).raise_for_status().json()["pings"]
    assert [ping["pinged"] for ping in pings] == ["UP"]
    assert httpx.get(f"{url}/nodes/", headers=auth).status_code == 200
    assert httpx.get(f"{url}/nodes/", headers={"X-SLURM-USER-TOKEN": "x"}).status_code == 511
    job = {
        "name": "rest",
        "current_working_directory": "/tmp",
        "environment": ["PATH=/usr/bin:/bin"],
        "nodes": "8",
        "tres_per_node": "gres/gpu:h100:8",
        "standard_output": "/shared/rest-%j",
    }
    script = "#!/bin/bash\nsrun hostname\n"
    body = {"script": script, "job": job}
    made = httpx.post(f"{url}/job/submit", headers=auth, json=body).raise_for_status().json()["job_id"]
    until(lambda: state(bed, str(made)) == "COMPLETED")
    assert set((bed.shared / f"rest-{made}").read_text().split()) == set(bed.names)
    assert state(bed, str(made), "%u") == "alice"


def test_a_user_logs_in_with_a_key_and_submits(bed: Cluster) -> None:
    async def login() -> tuple[str, list[str]]:
        options = {"client_keys": [str(bed.ssh.key_file)], "known_hosts": str(bed.ssh.known_hosts)}
        async with asyncssh.connect(
            bed.ssh.host, bed.ssh.port, username="alice", config=[], **options
        ) as there:
            command = "sbatch --parsable --output=/shared/%j --wrap 'echo $USER at $(hostname)'"
            job = str((await there.run(command, check=True)).stdout).strip()
            async with there.start_sftp_client() as files:
                return job, [str(name) for name in await files.listdir("/shared")]

    job, listed = asyncio.run(login())
    assert "gangs" in listed
    until(lambda: state(bed, job) == "COMPLETED")
    assert (bed.shared / job).read_text().startswith("alice at gpu")


def test_a_command_runs_as_the_user_whom_a_prefix_names(bed: Cluster) -> None:
    script = "id -un; hostname; pwd"
    done = subprocess.run(
        [*bed.prefix("bob"), "sh", "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["bob", "login", "/home/bob"]
    with pytest.raises(RuntimeError, match="Invalid qos"):
        submit(bed, "--qos=prod", user="bob")


def test_a_reservation_keeps_jobs_off_its_nodes(bed: Cluster) -> None:
    bed.reserve("gpu[07-08]")
    gang = submit(bed, *GANG)
    until(lambda: state(bed, gang, "%r").startswith("ReqNodeNotAvail"))
    bed.unreserve()
    until(lambda: state(bed, gang) == "RUNNING")


def test_jobs_are_told_and_none_is_left_after_a_reset(bed: Cluster) -> None:
    job = submit(bed, "--output=/dev/null", "--job-name=told")
    assert [row["name"] for row in bed.jobs() if row["job_id"] == int(job)] == ["told"]
    bed.kill_node("gpu05")
    bed.stop("sshd")
    bed.reset()
    assert bed.run("squeue", "-h", "--all") == ""
    assert bed.run("sinfo", "-h", "-N", "-p", "train", "-o", "%T").split() == ["idle"] * 8


def test_a_second_cluster_is_apart_and_leaves_nothing(bed: Cluster) -> None:
    with cluster("24.11", nodes=2, grace=1, min_job_age=2) as second:
        assert second.rest != bed.rest
        submit(second, "--nodes=2", "--output=/dev/null", script="#!/bin/bash\nsrun sleep 4711\n")
        until(lambda: _processes("sleep 4711"))
        home, address = second.home, second.ssh.host
        assert address.rpartition(".")[0] in _links()
        assert bed.run("squeue", "-h", "--all") == ""
    assert _remains(home, address) == []
    assert _processes("sleep 4711") == []


def test_nothing_is_left_when_whoever_made_it_is_killed() -> None:
    if reason := missing():
        pytest.skip(f"SLURM IS NOT PROVED HERE: {reason}")
    code = (
        "import signal, json\nfrom tests.beds.slurm import cluster\nwith cluster(nodes=1) as c:\n"
        "    c.pause('slurmrestd'); print(json.dumps([str(c.home), c.ssh.host]), flush=True); signal.pause()"
    )
    maker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT)
    assert maker.stdout
    home, address = json.loads(maker.stdout.readline())
    assert _remains(Path(home), address)
    os.kill(maker.pid, signal.SIGKILL)
    maker.wait()
    maker.stdout.close()
    until(lambda: all(line == home for line in _remains(Path(home), address)))
    with cluster(nodes=1):  # its files are left, until the next one comes
        assert not Path(home).exists()


def test_a_version_that_is_not_there_is_refused_with_the_reason() -> None:
    with pytest.raises(Unavailable, match="no Slurm 0 here, only"), cluster("0"):
        pass


def _auth(bed: Cluster) -> dict[str, str]:
    return {"X-SLURM-USER-TOKEN": bed.token("alice")}


def _links() -> str:
    return subprocess.run(["ip", "-4", "address"], capture_output=True, text=True, check=True).stdout


def _processes(words: str) -> list[str]:
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if words in line]


def _remains(home: Path, address: str) -> list[str]:
    """What there is of a cluster: processes, mounts, addresses, and its home."""
    mounts = [line for line in Path("/proc/mounts").read_text().splitlines() if str(home) in line]
    links = [line for line in _links().splitlines() if f"{address.rpartition('.')[0]}." in line]
    return [
        *_processes(str(home)),
        *_processes(address),
        *mounts,
        *links,
        *([str(home)] if home.exists() else []),
    ]
