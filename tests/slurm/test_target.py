"""A cluster of eight nodes of eight GPUs: 64 ranks, waiting whole, lost nodes, and each way in which access can be wrong."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from airflow_gpu.gang.run import Cause
from airflow_gpu.gang.spec import Gang
from airflow_gpu.targets.base import Job, JobRef, TargetError
from tests.beds.slurm.cluster import Cluster, cluster
from tests.beds.slurm.image import missing
from tests.conformance import programs
from tests.conformance.bed import Played, play
from tests.conformance.slurm_bed import SlurmBed
from tests.conformance.suite import Scenarios

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(missing("24.11")), reason=f"SLURM 24.11 IS NOT PROVED HERE: {missing('24.11')}"),
]

GANG = Scenarios().gang


class WholeBed(SlurmBed):
    nodes = 8
    gpus_per_node = 8
    limit = 300.0


@pytest.fixture(scope="module")
def eight() -> Iterator[Cluster]:
    with cluster("24.11", grace=25, nodes=8) as made:
        yield made


@pytest_asyncio.fixture
async def bed(eight: Cluster) -> AsyncIterator[WholeBed]:
    bed = WholeBed(eight, exclusive=False)
    yield bed
    await bed.end()


async def lives_on(played: Played) -> bool:
    return bool(played.run.attempts) and bool(await played.lives())


async def test_64_ranks_are_preempted_and_come_back(bed: WholeBed, tmp_path: Path) -> None:
    """64 ranks save within the grace and go on from that very step."""
    gang = GANG(bed, programs.count, 40, checkpointing={"interval": None}, stop_grace=20)
    played = (await play(bed, tmp_path, gang)).start()
    await played.until_step(4)
    await bed.preempt(played.job, notice=True)
    verdict = await played.verdict()
    assert verdict.success, verdict
    assert [a.outcome.cause for a in played.run.attempts] == [Cause.PREEMPTED, Cause.SUCCEEDED]
    first, second = await played.lives()
    assert first.world_size == second.world_size == 64
    assert second.start is not None
    assert verdict.record["result"]["start"] == second.start.step >= 4
    found = await (await played.channel()).evidence(2, ended=True)
    assert (found.ok, found.nodes_reported) == (64, 8)


async def test_waits_whole_and_holds_nothing(bed: WholeBed, tmp_path: Path) -> None:
    """With seven nodes free the gang of eight waits, and says for what; the seven stay free for others."""
    taker = (await play(bed, tmp_path, GANG(bed, programs.sleep, 600, nodes=1))).start()
    await taker.until("the taker runs", lambda: lives_on(taker))
    offer = (await bed.make().offers(GANG(bed, programs.count, 3)))[0]  # without what was known before
    assert (offer.free_nodes, offer.total_nodes, offer.reason, offer.blocked) == (7, 8, "", "")
    played = (await play(bed, tmp_path, GANG(bed, programs.count, 3))).start()

    async def waits() -> bool:
        return any("waits for nodes to become free (Resources)" in line for line in played.said)

    await played.until("it says what it waits for", waits)
    used = await asyncio.to_thread(bed.cluster.run, "sinfo", "-h", "-p", "train", "-N", "-O", "GresUsed:40")
    assert used.count("gpu:h100:0") == 7
    assert await played.lives() == []
    await played.driver.stop("user", "enough")
    await taker.driver.stop("user", "enough")
    assert (await played.verdict()).outcome == "cancelled"
    await taker.verdict()


async def test_a_dead_node_is_blamed_and_left_out(bed: WholeBed, tmp_path: Path) -> None:
    played = (await play(bed, tmp_path, GANG(bed, programs.count, 150, nodes=2, gpus_per_node=1))).start()
    await played.until_step(25)
    name = await bed.kill_node(played.job)
    verdict = await played.verdict()
    assert verdict.success, verdict
    first, second = played.run.attempts
    assert first.outcome.cause is Cause.NODE_LOST
    assert first.outcome.blamed == (name,)
    told = await asyncio.to_thread(
        bed.cluster.run, "sacct", "-n", "-X", "-j", second.platform_id, "-o", "NodeList%40"
    )
    assert name not in told
    assert verdict.record["result"]["start"] > 0
    await bed.restored()


async def test_ranks_of_a_node_that_was_cut_off_change_nothing(bed: WholeBed, tmp_path: Path) -> None:
    """The controller loses a node whose ranks go on; they write on, and nothing of it counts."""
    gang = GANG(bed, programs.count, 200, nodes=2, gpus_per_node=1)
    played = (await play(bed, tmp_path, gang)).start()
    await played.until_step(25)
    out = await asyncio.to_thread(bed.cluster.run, "squeue", "-h", "-n", played.job, "-o", "%B")
    name = out.strip()  # the first node, with rank 0
    await asyncio.to_thread(bed.cluster.cut_node, name)
    try:
        await played.until("the next attempt", lambda: _attempts(played, 2))
        verdict = await played.verdict()
    finally:
        await asyncio.to_thread(bed.cluster.join_node, name)
    assert verdict.success, verdict
    assert [a.outcome.cause for a in played.run.attempts] == [Cause.NODE_LOST, Cause.SUCCEEDED]
    first, second = await played.lives()
    assert second.start is not None
    assert (second.start.life, verdict.record["result"]["start"]) == (first.number, second.start.step)


async def _attempts(played: Played, count: int) -> bool:
    return len(played.run.attempts) >= count


async def test_forgotten_by_the_controller(eight: Cluster, bed: WholeBed, tmp_path: Path) -> None:
    """Accounting says how it ended; where that is away it is unknown, never gone."""
    played = (await play(bed, tmp_path, GANG(bed, programs.fail, 0, 3, nodes=1, gpus_per_node=1))).start()
    assert (await played.verdict()).cause is Cause.APPLICATION
    ref = await played.ref(played.run.attempts[-1])
    access: Any = bed.target._access
    known = access.jobs

    async def forgotten(ids: Any) -> list[Any]:
        return [record for record in await known(ids) if str(record.id) != ref.platform_id]

    access.jobs = forgotten
    seen = (await bed.target.observe([ref]))[ref.name]
    assert (seen.state, seen.native) == ("failed", "FAILED")
    await asyncio.to_thread(eight.stop, "slurmdbd")
    try:
        seen = (await bed.target.observe([ref]))[ref.name]
        assert seen.state == "unknown"
        assert "the controller has forgotten it" in seen.reason
    finally:
        await asyncio.to_thread(eight.start, "slurmdbd")


@pytest.mark.parametrize("way", ["rest", "ssh", "command"])
async def test_each_way_sees_the_same(eight: Cluster, way: str, tmp_path: Path) -> None:
    """A gang submitted, found by name, listed, its nodes, its log, its end."""
    bed = WholeBed(eight, way, exclusive=False)
    try:
        gang = GANG(bed, programs.count, 2000, nodes=2, gpus_per_node=3)
        played = (await play(bed, tmp_path, gang)).start()
        await played.until_step(2)
        ref = await played.ref(played.run.attempts[-1])
        [found] = [
            one
            for one in await bed.target.inventory({"airflow-gpu/installation": "conformance"})
            if one.ref.name == ref.name
        ]
        assert (found.ref.platform_id, found.sighting.state) == (ref.platform_id, "running")
        assert len(found.sighting.hosts) == 2
        assert "all 2 nodes are here" in (await bed.target.logs(ref, 0)).text
        offer = (await bed.target.offers(gang))[0]
        assert (offer.accelerator, offer.total_nodes) == ("h100", 8)
        await played.driver.stop("user", "enough")
        assert (await played.verdict()).outcome == "cancelled"
        assert (await bed.target.observe([ref]))[ref.name].state.ended
    finally:
        await bed.end()


@pytest.mark.parametrize("way", ["rest", "ssh", "command"])
async def test_one_question_for_many(eight: Cluster, way: str) -> None:
    """Gangs that run, wait, are over and never were, in one look; few and many of them."""
    bed = WholeBed(eight, way, exclusive=False)
    try:
        refs = []
        for number in range(6):
            job = _sleeper(f"many-{way}-{number}", 1)
            refs.append(JobRef(job.name, job.labels, 1, job.digest, await bed.target.submit(job)))
        # Not before they run: a larger job goes first.
        await _until(lambda: _all_run(bed, refs), refs)
        whole = _sleeper(f"many-{way}-whole", 8)
        refs.append(JobRef(whole.name, whole.labels, 1, whole.digest, await bed.target.submit(whole)))
        await bed.target.cancel(refs[0], grace=0, since=0.0)
        never = [
            JobRef(f"never-{number}", whole.labels, 1, whole.digest, str(900_000 + number))
            for number in range(150)
        ]

        states: list[str] = []

        async def seen() -> bool:
            found = await bed.target.observe(refs)
            states[:] = [f"{found[ref.name].state}" for ref in refs]
            return states == ["cancelled", *["running"] * 5, "queued"]

        await _until(seen, states)
        found = await bed.target.observe([*refs, *never])
        assert {str(found[ref.name].state) for ref in never} == {"gone"}
        assert str(found[refs[1].name].state) == "running"
    finally:
        await bed.end()


def _sleeper(name: str, nodes: int) -> Job:
    return Job(
        name=name,
        labels={"airflow-gpu/installation": "tests", "airflow-gpu/incarnation": "abcdefghij"},
        attempt=1,
        digest="sha256:" + "ab" * 32,
        nodes=nodes,
        gpus_per_node=1 if nodes == 1 else 8,
        ranks_per_node=1,
        payload="/shared/gangs",
        channel="/shared/gangs",
        time_limit=600.0,
        argv=("sleep", "600"),
    )


async def _all_run(bed: SlurmBed, refs: list[JobRef]) -> bool:
    found = await bed.target.observe(refs)
    return {str(found[ref.name].state) for ref in refs} == {"running"}


async def _until(done: Any, shown: Any) -> None:
    end = time.monotonic() + 60
    while not await done():
        assert time.monotonic() < end, shown
        await asyncio.sleep(0.5)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"partition": "trian"}, "there is no partition 'trian'; there are batch, train"),
        (
            {"gpu_types": {"H100": "h1000"}, "accelerator": "H100"},
            "8 nodes in train with 8 h1000 were asked for; 0 have that (8 x gpu:h100:8",
        ),
        ({"gpus_per_node": 9}, "8 nodes in train with 9 GPUs were asked for; 0 have that"),
        ({"nodes": 9}, "9 nodes in train with 8 GPUs were asked for; 8 have that"),
        ({"cpus": 65}, "65 CPUs"),
    ],
)
async def test_what_can_never_run_is_said_before_a_submit(
    eight: Cluster, more: dict[str, Any], says: str
) -> None:
    fields = {name: value for name, value in more.items() if name in ("partition", "gpu_types")}
    asked = {name: value for name, value in more.items() if name not in fields}
    bed = WholeBed(eight, exclusive=False, **fields)
    gang = Gang(**{"nodes": 8, "gpus_per_node": 8, "command": "true", "targets": "slurm", **asked})
    [offer] = await bed.target.offers(gang)
    assert says in offer.reason


@pytest.mark.parametrize("way", ["rest", "command"])
@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"account": "nobody"}, "The user is not in that account"),
        ({"qos": "prod"}, "There is no such QOS, or the user may not use it"),
        ({"reservation": "none"}, "The reservation does not exist"),
    ],
)
async def test_what_slurm_refuses_reads_as_a_person_would_say_it(
    eight: Cluster, way: str, fields: dict[str, Any], says: str, tmp_path: Path
) -> None:
    bed = WholeBed(eight, way, exclusive=False, **fields)
    played = (await play(bed, tmp_path, GANG(bed, programs.count, 3, nodes=1, gpus_per_node=1))).start()
    verdict = await played.verdict()
    assert (verdict.outcome, verdict.cause) == ("failed", Cause.REJECTED)
    assert says in verdict.message


@pytest.mark.parametrize(
    ("way", "fields", "says"),
    [
        ("rest", {"token": "x.y.z", "token_ssh": None}, "slurmrestd refuses the token"),
        ("rest", {"user": "bob"}, "refuses the token"),
        (
            "rest",
            {"token_command": "false", "token_ssh": None},
            "the command for a new token (false) ended with 1",
        ),
        ("rest", {"url": "http://127.0.0.1:9"}, "does not answer"),
        ("ssh", {"ssh": {"key_file": "/nowhere/key", "ssh_config": ""}}, "key_file cannot be used"),
        ("command", {"command_prefix": ()}, "there is no command 'sinfo' on this machine"),
        ("command", {"command_prefix": "env PATH=/nowhere"}, "sinfo"),
    ],
)
async def test_wrong_access(eight: Cluster, way: str, fields: dict[str, Any], says: str) -> None:
    bed = WholeBed(eight, way, **fields)
    with pytest.raises(TargetError) as found:
        await bed.target.offers(Gang(nodes=1, gpus_per_node=1, command="true", targets="slurm"))
    assert says in str(found.value)


async def test_tokens_are_renewed(eight: Cluster) -> None:
    """One that is over and one that is refused are replaced; one that cannot be is an error that says what to do."""
    bed = WholeBed(eight)
    access: Any = bed.target._access
    await bed.target.describe()
    for token in (
        await asyncio.to_thread(eight.token, "alice", 1),
        await asyncio.to_thread(eight.token, "bob", 600),
    ):
        await asyncio.sleep(1.2)
        access._tokens._token = token
        bed.target._nodes = None
        assert "8 nodes, 8 up, 64 GPUs" in await bed.target.describe()
    over = await asyncio.to_thread(eight.token, "alice", 1)
    await asyncio.sleep(1.5)
    lone = WholeBed(eight, token=over, token_ssh=None)
    with pytest.raises(TargetError, match="the token is over: put a new one"):
        await lone.target.describe()


async def test_a_submit_that_was_refused_leaves_nothing(
    eight: Cluster, bed: WholeBed, tmp_path: Path
) -> None:
    played = await play(
        bed,
        tmp_path,
        GANG(bed, programs.count, 3, nodes=1, gpus_per_node=1, secrets={"T": "var:t"}),
        secret_values={"T": "hunter2-hunter2"},
    )
    bed.target._submission.config.__dict__["reservation"] = "none"
    try:
        verdict = await played.start().verdict()
    finally:
        bed.target._submission.config.__dict__["reservation"] = None
    assert verdict.cause is Cause.REJECTED
    left = await asyncio.to_thread(eight.run, "find", "/shared", "-name", ".secrets-*")
    assert left.strip() == ""
