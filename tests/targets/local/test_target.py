"""Submitting, adopting, observing, logs, offers, secrets: on a real cluster."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from airflow_gpu.gang.run import State
from airflow_gpu.gang.spec import Gang
from airflow_gpu.targets.base import JobRef, NameTaken, Rejected, Target, TargetError
from airflow_gpu.targets.local.files import read_json

from .conftest import SAVE, STAY, Bed


async def test_a_gang_runs_once_on_each_node_with_what_the_contract_says(bed: Bed) -> None:
    target = bed.target()
    assert isinstance(target, Target)
    job = bed.job(
        'env > $MARKS/env-$GANG_NODE_RANK; echo "$1 $2" > $MARKS/argv-$GANG_NODE_RANK',
        nodes=2,
        gpus_per_node=2,
    )
    identifier = await target.submit(job)
    seen = await bed.until(target, job, State.SUCCEEDED)
    assert (seen.native, seen.platform_id, seen.restart, seen.ending) == ("DONE", identifier, 0, None)
    assert seen.hosts == ("node-0", "node-1")
    for rank, gpus in ((0, "0,1"), (1, "2,3")):
        lines = (bed.marks / f"env-{rank}").read_text().splitlines()
        environ = dict(line.split("=", 1) for line in lines if "=" in line)
        assert environ["GANG_NODE_RANK"] == str(rank)
        assert environ["GANG_JOB_ID"] == identifier
        assert environ["GANG_RESTART"] == "0"
        assert environ["GANG_NODE_ADDR"] == f"127.0.0.{rank + 1}"
        assert environ["GANG_GPUS"] == environ["CUDA_VISIBLE_DEVICES"] == gpus
        assert "GANG_SECRETS_FILE" not in environ
        assert (bed.marks / f"argv-{rank}").read_text() == f"agent {job.payload}/job.json\n"


async def test_of_airflows_environment_only_the_harmless_part_gets_to_gangs(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AIRFLOW__CORE__FERNET_KEY", "AWS_SECRET_ACCESS_KEY", "WANDB_MODE", "GANG_FOO"):
        monkeypatch.setenv(name, "leaky-value")
    target = bed.target(pass_env=("WANDB_*", "AIRFLOW*"))
    job = bed.job("env > $MARKS/env", gpus_per_node=0)
    await target.submit(job)
    await bed.until(target, job, State.SUCCEEDED)
    environ = (bed.marks / "env").read_text()
    assert "WANDB_MODE=leaky-value" in environ
    assert environ.count("leaky-value") == 1
    assert "CUDA_VISIBLE_DEVICES=\n" in environ
    with open(f"/proc/{bed.daemon_pid()}/environ", "rb") as file:
        assert b"leaky-value" not in file.read()


async def test_fifty_submits_at_once_make_one_job(bed: Bed) -> None:
    targets = [bed.target(), bed.target()]
    job = bed.job("echo $GANG_JOB_ID >> $MARKS/starts")
    answers = await asyncio.gather(*(targets[i % 2].submit(job) for i in range(50)))
    assert len(set(answers)) == 1
    await bed.until(targets[0], job, State.SUCCEEDED)
    assert await targets[1].submit(job) == answers[0]  # also when it is over
    assert (bed.marks / "starts").read_text().split() == [answers[0]]
    assert [name for name in os.listdir(bed.folder.jobs) if name.startswith(".")] == []


async def test_a_name_is_adopted_only_by_its_own(bed: Bed) -> None:
    target = bed.target()
    job = bed.job(STAY)
    await target.submit(job)
    with pytest.raises(NameTaken, match="another request"):
        await target.submit(replace(job, digest="d2"))
    with pytest.raises(NameTaken, match="belongs to incarnation 'abcdefgh23'"):
        await target.submit(replace(job, labels={**job.labels, "airflow-gpu/incarnation": "other"}))
    stranger = JobRef(job.name, {"airflow-gpu/incarnation": "other"}, 1, "d1")
    assert (await target.observe([stranger]))[job.name].state is State.UNKNOWN
    await target.cancel(stranger, grace=0, since=0.0)
    await bed.until(target, job, State.RUNNING)
    await target.cancel(bed.ref(job), grace=60, since=0.0)
    with pytest.raises(NameTaken, match="is being cancelled"):
        await target.submit(job)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"nodes": 3}, "3 nodes were asked for, the cluster has 2"),
        ({"gpus_per_node": 3}, "3 GPUs on each node were asked for, the nodes have 2"),
        ({"accelerator": "A100"}, "accelerator 'A100' was asked for, the cluster has H100"),
        ({"memory": 2**60}, "of memory on each node were asked for"),
        ({"image": "nvcr.io/x"}, "run without containers"),
        ({"channel": "hdfs://b/x"}, "channel must be a folder of this machine"),
        ({"name": "../x"}, "is not a DNS label"),
    ],
)
async def test_what_can_never_run_is_rejected(bed: Bed, fields: dict[str, object], said: str) -> None:
    target = bed.target()
    with pytest.raises(Rejected, match=said):
        await target.submit(replace(bed.job("true"), **fields))  # type: ignore[arg-type]
    assert os.listdir(bed.folder.jobs) == []


async def test_gone_and_unknown_are_not_guessed(bed: Bed) -> None:
    target = bed.target()
    job = bed.job("true")
    assert (await bed.look(target, job)).state is State.GONE
    await target.submit(job)
    await bed.until(target, job, State.SUCCEEDED)
    # Hold the daemon still, and put words into its mouth.
    os.kill(bed.daemon_pid(), signal.SIGSTOP)
    try:
        table = read_json(bed.folder.table)
        assert table is not None
        table["jobs"][job.name]["native"] = "HIBERNATED"
        bed.folder.table.write_text(json.dumps(table))
        seen = await bed.look(target, job)
        assert (seen.state, seen.native) == (State.UNKNOWN, "HIBERNATED")
        del table["jobs"][job.name]["restart"]
        bed.folder.table.write_text(json.dumps(table))
        assert (await bed.look(target, job)).state is State.UNKNOWN
        bed.folder.table.write_text('{"jobs": {"fit')
        assert (await bed.look(target, job)).state is State.UNKNOWN
        bed.folder.table.unlink()
        assert (await bed.look(target, job)).state is State.UNKNOWN
    finally:
        os.kill(bed.daemon_pid(), signal.SIGCONT)


async def test_jobs_are_listed_by_their_labels(bed: Bed) -> None:
    """Also those that are over, and those that the daemon has not seen; never another installation's."""
    target = bed.target()
    mine = {"airflow-gpu/installation": "prod", "airflow-gpu/dag": "a"}
    over = bed.job("true", "over", labels={**mine, "airflow-gpu/incarnation": "i"})
    alive = bed.job(STAY, "alive", labels={**mine, "airflow-gpu/incarnation": "i"})
    other = bed.job("true", "other", labels={**mine, "airflow-gpu/installation": "dev"})
    for job in (over, alive, other):
        await target.submit(job)
    await bed.until(target, over, State.SUCCEEDED)
    await bed.until(target, alive, State.RUNNING)
    found = {item.ref.name: item for item in await target.inventory({"airflow-gpu/installation": "prod"})}
    assert {name: item.sighting.state for name, item in found.items()} == {
        "over": State.SUCCEEDED,
        "alive": State.RUNNING,
    }
    assert found["alive"].ref.channel == alive.channel
    assert await target.inventory({**mine, "airflow-gpu/dag": "b"}) == []
    await target.cancel(found["alive"].ref, grace=0, since=0)
    await bed.until(target, alive, State.CANCELLED)


async def test_a_job_that_the_daemon_has_not_seen_is_queued(bed: Bed) -> None:
    target = bed.target()
    first = bed.job("true", "first")
    await target.submit(first)
    await bed.until(target, first, State.SUCCEEDED)
    os.kill(bed.daemon_pid(), signal.SIGSTOP)
    try:
        job = bed.job("true", "second")
        await target.submit(job)
        seen = await bed.look(target, job)
        assert (seen.state, seen.native) == (State.QUEUED, "PENDING")
    finally:
        os.kill(bed.daemon_pid(), signal.SIGCONT)
    await bed.until(target, job, State.SUCCEEDED)


async def test_a_damaged_job_is_unknown_and_the_others_go_on(bed: Bed) -> None:
    target = bed.target()
    job, other = bed.job("true", "damaged"), bed.job("true", "sound")
    await target.submit(job)
    await bed.until(target, job, State.SUCCEEDED)
    bed.admin.stop()
    bed.folder.job(job.name).state.write_text("{")
    await target.submit(other)
    await bed.until(target, other, State.SUCCEEDED)
    seen = await bed.look(target, job)
    assert (seen.state, seen.native) == (State.UNKNOWN, "DAMAGED")
    bed.folder.job(job.name).state.unlink()  # so that the teardown does not meet it


async def test_ended_jobs_are_kept_for_a_while_and_then_gone(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = bed.target(keep=0.0)
    job = bed.job("true")
    await target.submit(job)
    await bed.until(target, job, State.SUCCEEDED)
    bed.admin.stop()  # a daemon tidies when it begins
    await bed.until(target, job, State.GONE)
    assert not bed.folder.job(job.name).root.exists()
    await bed.holds(lambda: os.listdir(bed.folder.trash) == [], "the trash is emptied")


async def test_logs_follow_by_bytes_and_keep_characters_whole(bed: Bed) -> None:
    target = bed.target()
    job = bed.job("true")
    assert (await target.logs(bed.ref(job), 0)).text == ""
    await target.submit(job)
    log = bed.folder.job(job.name).log(3)  # of no node of this gang: nobody else writes it
    ref = bed.ref(job)
    assert (await target.logs(ref, 3)).next == "0"
    log.write_bytes("naïve €".encode()[:-1])
    first = await target.logs(ref, 3)
    assert first.text == "naïve "
    log.write_bytes("naïve €\n".encode() + b"\xff!" + b"x" * 100_000)
    second = await target.logs(ref, 3, first.next)
    assert second.text.startswith("€\n�!xxx")
    assert len(second.text.encode()) <= 64 * 1024 + 2
    rest = await target.logs(ref, 3, second.next)
    assert len(second.text) + len(rest.text) == 4 + 100_000
    end = await target.logs(ref, 3, rest.next)
    assert (end.text, end.next) == ("", rest.next)
    with pytest.raises(TargetError, match="no position"):
        await target.logs(ref, 3, "-5")


async def test_offers_say_what_is_free_or_why_it_can_never_be(bed: Bed) -> None:
    target = bed.target()
    gang = Gang(nodes=2, gpus_per_node=2, command=["true"], targets=["here"])
    (offer,) = await target.offers(gang)
    assert (offer.target, offer.provisioning, offer.price_per_node_hour) == ("here", "owned", 0.0)
    assert (offer.free_nodes, offer.total_nodes, offer.accelerator, offer.reason) == (2, 2, "H100", "")
    job = bed.job(STAY, gpus_per_node=1)
    await target.submit(job)
    await bed.until(target, job, State.RUNNING)
    assert (await target.offers(gang))[0].free_nodes == 1
    line = bed.job("true", "line", nodes=2, gpus_per_node=2)
    await target.submit(line)
    await bed.until(target, line, lambda seen: "waits for" in seen.reason)
    small = Gang(nodes=1, gpus_per_node=1, command=["true"], targets=["here"])
    assert (await target.offers(small))[0].free_nodes == 0
    (offer,) = await target.offers(Gang(nodes=3, gpus_per_node=1, command=["true"], targets=["here"]))
    assert (offer.free_nodes, offer.reason) == (0, "3 nodes were asked for, the cluster has 2")


async def test_secrets_are_in_one_private_file_and_nowhere_else(bed: Bed) -> None:
    target = bed.target()
    secret = "s3cr3t-hunter2"
    job = bed.job(
        'cp "$GANG_SECRETS_FILE" $MARKS/got && echo "$GANG_SECRETS_FILE" > $MARKS/path\n' + SAVE + STAY,
        secrets={"TOKEN": secret},
    )
    await target.submit(job)
    await bed.appears("up-0-0")
    path = (bed.marks / "path").read_text().strip()
    assert json.loads((bed.marks / "got").read_text()) == {"TOKEN": secret}
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) == 0o700
    holders = [
        os.path.join(folder, name)
        for folder, _, names in os.walk(bed.path)
        for name in names
        if name != "wake" and secret.encode() in Path(folder, name).read_bytes()
    ]
    assert holders == [path]
    for pid in [*(ident.pid for ident in bed.processes(job)), bed.daemon_pid()]:
        for file in ("cmdline", "environ"):
            with open(f"/proc/{pid}/{file}", "rb") as text:
                assert secret.encode() not in text.read()
    assert secret not in repr(job)
    await target.cancel(bed.ref(job), grace=30, since=0.0)
    await bed.until(target, job, State.CANCELLED)
    assert not os.path.exists(os.path.dirname(path))


async def test_a_changed_shape_is_taken_up_when_nothing_runs(bed: Bed) -> None:
    old, new = bed.target(), bed.target(nodes=3)
    job, wide = bed.job(STAY, "old"), bed.job("true", "wide", nodes=3)
    await old.submit(job)
    await bed.until(old, job, State.RUNNING)
    with pytest.raises(
        TargetError, match=r"nodes cannot change while jobs are queued or running \(now: old\)"
    ):
        await new.submit(wide)
    assert (await bed.look(new, job)).state is State.RUNNING  # looking needs no agreement
    await old.cancel(bed.ref(job), grace=0, since=0.0)
    await bed.until(old, job, State.CANCELLED)
    await new.submit(wide)
    await bed.until(new, wide, State.SUCCEEDED)


async def test_a_shape_that_does_not_fit_the_machine_is_said(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi = bed.root / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\necho '0, NVIDIA L4, 23034'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{smi.parent}:{os.environ['PATH']}")
    target = bed.target(nodes=2, gpus_per_node=2, accelerator=None)
    with pytest.raises(TargetError, match="2 nodes x 2 GPUs are declared, but nvidia-smi lists 1"):
        await target.submit(bed.job("true"))
    target = bed.target(nodes=1, gpus_per_node=None, accelerator=None)
    job = bed.job("true", accelerator="L4")
    await target.submit(job)
    await bed.until(target, job, State.SUCCEEDED)
