"""The scenarios that every target must pass. One suite; a bed makes the platform misbehave.

A target's own module subclasses :class:`Scenarios` and gives the fixture
``bed``. Nothing here knows what system it runs on.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from airflow_gpu.gang.run import Cause, State
from airflow_gpu.gang.spec import Gang
from tests.conformance import programs
from tests.conformance.bed import Bed, play


class Scenarios:
    """Start whole, wait whole, run, preempt, requeue, lose nodes, fail, time out, cancel, be found, be told apart."""

    def gang(self, bed: Bed, function: Any = programs.count, *args: Any, **more: Any) -> Gang:
        from airflow_gpu.gang.function import FunctionSource

        kwargs = dict(more.pop("kwargs", {}))
        if function is programs.count:
            kwargs.setdefault("pause", programs.PAUSE * bed.pace)
        shape: dict[str, Any] = {
            "nodes": bed.nodes,
            "gpus_per_node": bed.gpus_per_node,
            "time_limit": "20m",
            "stop_grace": 20,
            "checkpointing": {"interval": 0.5},
            "targets": bed.target.name,
        }
        recovery = {"backoff": 0.1, "backoff_max": 0.1, **more.pop("recovery", {})}
        return Gang(
            function=FunctionSource.of(function, args, kwargs), recovery=recovery, **{**shape, **more}
        )

    async def test_start_whole_and_run(self, bed: Bed, tmp_path: Path) -> None:
        """All ranks start, each with its place; success is the word of every one of them."""
        played = (await play(bed, tmp_path, self.gang(bed, programs.count, 5))).start()
        verdict = await played.verdict()
        assert verdict.success, verdict
        [life] = await played.lives()
        world = bed.nodes * bed.gpus_per_node
        assert (life.nodes, life.world_size) == (bed.nodes, world)
        found = await (await played.channel()).evidence(1, ended=True)
        assert (found.ok, found.nodes_reported) == (world, bed.nodes)

    async def test_result(self, bed: Bed, tmp_path: Path) -> None:
        """What rank 0 returns comes back, with attempts, cost and placement."""
        played = (await play(bed, tmp_path, self.gang(bed, programs.count, 3))).start()
        record = (await played.verdict()).record
        assert record["result"] == {
            "start": 0,
            "total": 3,
            "world_size": bed.nodes * bed.gpus_per_node,
            "rank": 0,
        }
        assert [item["cause"] for item in record["attempts"]] == ["succeeded"]
        assert record["cost"]["gpu_hours"] > 0
        assert record["placement"]["chosen"]["target"] == bed.target.name

    async def test_wait_whole(self, bed: Bed, tmp_path: Path) -> None:
        """With one node taken the whole gang waits: no rank starts; when it is free, all do."""
        taker = (await play(bed, tmp_path, self.gang(bed, programs.sleep, 600, nodes=1))).start()

        async def taken() -> bool:
            return bool(taker.run.attempts) and bool(await taker.lives())

        await taker.until("the taker runs", taken)
        played = (await play(bed, tmp_path, self.gang(bed, programs.count, 3))).start()

        async def waits() -> bool:
            return any("queued" in line for line in played.said)

        await played.until("the gang waits", waits)
        await asyncio.sleep(1.0)
        assert await played.lives() == []
        await taker.driver.stop("user", "free the node")
        assert (await taker.verdict()).outcome == "cancelled"
        assert (await played.verdict()).success

    async def test_preempted_with_notice(self, bed: Bed, tmp_path: Path) -> None:
        """The gang saves within the grace and goes on exactly there, in a new attempt. No failure is counted."""
        if not bed.target.capabilities.notices:
            pytest.skip("this target gives no notice")
        played = await play(
            bed, tmp_path, self.gang(bed, programs.count, 150, checkpointing={"interval": None})
        )
        played.start()
        await played.until_step(5)
        await bed.preempt(played.job, notice=True)
        verdict = await played.verdict()
        assert verdict.success, verdict
        assert [a.outcome.cause for a in played.run.attempts] == [Cause.PREEMPTED, Cause.SUCCEEDED]
        first, second = await played.lives()
        assert second.start is not None
        assert second.start.life == first.number
        assert second.start.step >= 5
        assert verdict.record["result"]["start"] == second.start.step

    async def test_preempted_without_notice(self, bed: Bed, tmp_path: Path) -> None:
        """It goes on from its newest complete checkpoint."""
        played = (await play(bed, tmp_path, self.gang(bed, programs.count, 80))).start()
        await played.until_step(25)
        await bed.preempt(played.job, notice=False)
        verdict = await played.verdict()
        assert verdict.success, verdict
        assert [a.outcome.cause for a in played.run.attempts] == [Cause.PREEMPTED, Cause.SUCCEEDED]
        assert verdict.record["result"]["start"] > 0

    async def test_requeued_by_the_platform(self, bed: Bed, tmp_path: Path) -> None:
        """One attempt, two lives: the platform itself starts it again, and it resumes."""
        target = await bed.requeueing()
        played = (await play(bed, tmp_path, self.gang(bed, programs.count, 60), target=target)).start()
        await played.until_step(5)
        await bed.preempt(played.job, notice=True)
        verdict = await played.verdict()
        assert verdict.success, verdict
        assert [a.outcome.cause for a in played.run.attempts] == [Cause.SUCCEEDED]
        first, second = await played.lives()
        assert (first.attempt, first.restart, second.attempt, second.restart) == (1, 0, 1, 1)
        assert second.start is not None
        assert second.start.life == first.number

    async def test_node_lost(self, bed: Bed, tmp_path: Path) -> None:
        """A node dies in the middle: the whole gang ends, the node is blamed, the gang comes back."""
        played = (await play(bed, tmp_path, self.gang(bed, programs.count, 80))).start()
        await played.until_step(25)
        await bed.kill_node(played.job)
        verdict = await played.verdict()
        assert verdict.success, verdict
        assert [a.outcome.cause for a in played.run.attempts] == [Cause.NODE_LOST, Cause.SUCCEEDED]
        assert verdict.record["result"]["start"] > 0

    async def test_rank_fails(self, bed: Bed, tmp_path: Path) -> None:
        """The first failing rank is named with its exit code, host and last words; the others do not wait on."""
        bad = bed.nodes * bed.gpus_per_node - 1
        played = (await play(bed, tmp_path, self.gang(bed, programs.fail, bad, 3))).start()
        verdict = await played.verdict()
        assert (verdict.outcome, verdict.cause) == ("failed", Cause.APPLICATION)
        failure = verdict.record["failure"]
        assert (failure["rank"], failure["exit_code"], failure["node"]) == (bad, 3, bed.nodes - 1)
        assert failure["host"]
        assert "the loss is not a number" in failure["tail"]
        assert len(played.run.attempts) == 1

    async def test_rank_killed(self, bed: Bed, tmp_path: Path) -> None:
        """A signal is a signal, not an exit code."""
        played = (await play(bed, tmp_path, self.gang(bed, programs.fail, 1, -9))).start()
        verdict = await played.verdict()
        assert verdict.cause is Cause.APPLICATION
        assert (verdict.record["failure"]["rank"], verdict.record["failure"]["signal"]) == (1, "SIGKILL")

    async def test_time_out(self, bed: Bed, tmp_path: Path) -> None:
        """The limit ends it, and says so."""
        played = (
            await play(bed, tmp_path, self.gang(bed, programs.sleep, 600, time_limit=2, stop_grace=1))
        ).start()
        verdict = await played.verdict()
        assert (verdict.outcome, verdict.cause) == ("failed", Cause.TIMED_OUT)

    async def test_cancel(self, bed: Bed, tmp_path: Path) -> None:
        """A person ends it: it saves, it is gone, and nothing is left."""
        played = (
            await play(bed, tmp_path, self.gang(bed, programs.count, 2000, checkpointing={"interval": None}))
        ).start()
        await played.until_step(3)
        assert await played.driver.stop("user", "marked failed")
        verdict = await played.verdict()
        assert (verdict.outcome, verdict.cause) == ("cancelled", Cause.STOPPED)
        attempt = played.run.attempts[-1]
        ref = await played.ref(attempt)
        assert (await bed.target.observe([ref]))[ref.name].state.ended
        if bed.target.capabilities.notices:
            assert attempt.outcome.checkpoint is not None
            assert attempt.outcome.checkpoint.step >= 3

    async def test_cancel_while_queued(self, bed: Bed, tmp_path: Path) -> None:
        """What has not started never starts."""
        taker = (await play(bed, tmp_path, self.gang(bed, programs.sleep, 600))).start()

        async def taken() -> bool:
            return bool(taker.run.attempts) and bool(await taker.lives())

        await taker.until("the taker runs", taken)
        played = (await play(bed, tmp_path, self.gang(bed, programs.count, 3))).start()

        async def waits() -> bool:
            return any("queued" in line for line in played.said)

        await played.until("the gang waits", waits)
        await played.driver.stop("user", "not wanted any more")
        assert (await played.verdict()).outcome == "cancelled"
        await taker.driver.stop("user", "free the nodes")
        await taker.verdict()
        assert await played.lives() == []

    async def test_ended_by_somebody_else(self, bed: Bed, tmp_path: Path) -> None:
        """Who ends the job outside of Airflow meant it: it is not started again."""
        played = (await play(bed, tmp_path, self.gang(bed, programs.count, 2000))).start()
        await played.until_step(3)
        await bed.end_outside(await played.ref(played.run.attempts[-1]))
        verdict = await played.verdict()
        assert (verdict.outcome, verdict.cause) == ("failed", Cause.CANCELLED)
        assert len(played.run.attempts) == 1

    async def test_runtime_that_cannot_start(self, bed: Bed, tmp_path: Path) -> None:
        """The platform's own words say why; it is tried again as often as the budget says, and no more."""
        gang = self.gang(bed, programs.count, 3, recovery={"node_failures": 1})
        played = await play(bed, tmp_path, gang)
        target = played.target
        submit = target.submit

        async def broken(job: Any) -> str:
            return await submit(replace(job, argv=(job.argv[0], "/nowhere/runtime.pyz", *job.argv[2:])))

        target.submit = broken  # type: ignore[method-assign]
        try:
            verdict = await played.start().verdict()
        finally:
            del target.__dict__["submit"]
        assert (verdict.outcome, verdict.cause) == ("failed", Cause.NOT_STARTED)
        assert len(played.run.attempts) == 2
        assert "/nowhere/runtime.pyz" in verdict.message

    async def test_found_again(self, bed: Bed, tmp_path: Path) -> None:
        """The driver dies; another one, who knows the run directory only, brings the same life to its end."""
        first = (await play(bed, tmp_path, self.gang(bed, programs.count, 60))).start()
        await first.until_step(3)
        assert first.task is not None
        first.task.cancel()
        await asyncio.gather(first.task, return_exceptions=True)
        second = (await play(bed, tmp_path, first.gang, key=first.key)).start()
        assert (await second.verdict()).success
        assert len(second.run.attempts) == 1
        assert len(await second.lives()) == 1
        assert await bed.submissions(second.job) == 1

    async def test_two_drivers(self, bed: Bed, tmp_path: Path) -> None:
        """Two drivers of one run from the start: one attempt, one life, one verdict for both."""
        gang = self.gang(bed, programs.count, 10)
        first = await play(bed, tmp_path, gang)
        second = await play(bed, tmp_path, gang, key=first.key)
        first.start(), second.start()
        one, two = await first.verdict(), await second.verdict()
        assert one.success
        assert one == two
        assert len(first.run.attempts) == 1
        assert len(await first.lives()) == 1

    async def test_submitted_twice(self, bed: Bed, tmp_path: Path) -> None:
        """The same attempt submitted again and again, also at once: one job, one life."""
        played = (await play(bed, tmp_path, self.gang(bed, programs.count, 30))).start()
        await played.until_step(1)
        attempt = played.run.attempts[-1]
        job = await played.as_submitted(attempt)
        ids = await asyncio.gather(*[bed.target.submit(job) for _ in range(8)])
        assert set(ids) == {attempt.platform_id}
        assert (await played.verdict()).success
        assert len(await played.lives()) == 1
        assert await bed.submissions(attempt.name) == 1

    async def test_name_taken_by_another(self, bed: Bed, tmp_path: Path) -> None:
        """A job of that name that is not ours is never adopted, and never cancelled."""
        from airflow_gpu.targets.base import NameTaken

        played = (await play(bed, tmp_path, self.gang(bed, programs.count, 40))).start()
        await played.until_step(1)
        attempt = played.run.attempts[-1]
        job = await played.as_submitted(attempt)
        labels = {
            name: "aaaaaaaaaa" if name.endswith("incarnation") else value
            for name, value in job.labels.items()
        }
        with pytest.raises(NameTaken):
            await bed.target.submit(replace(job, labels=labels))
        stranger = replace(await played.ref(attempt), labels=labels)
        await bed.target.cancel(stranger, grace=0, since=0.0)
        assert (await played.verdict()).success

    async def test_unknown_state(self, bed: Bed, tmp_path: Path) -> None:
        """A word that is in no table: kept, shown, looked at again; neither success nor a new attempt."""
        played = (await play(bed, tmp_path, self.gang(bed, programs.count, 40))).start()
        await played.until_step(3)
        await bed.obscure(played.job)

        async def shown() -> bool:
            return any("unknown" in line or "does not answer" in line for line in played.said)

        await played.until("the unknown state is shown", shown)
        assert len(played.run.attempts) == 1
        assert played.run.verdict is None
        await bed.clear()
        assert (await played.verdict()).success
        assert len(played.run.attempts) == 1

    async def test_unknown_state_for_too_long(self, bed: Bed, tmp_path: Path) -> None:
        """Bounded: then an error that says so, and still nothing is started in its place."""
        gang = self.gang(bed, programs.count, 2000, recovery={"unknown_limit": 1.5})
        played = (await play(bed, tmp_path, gang)).start()
        await played.until_step(1)
        await bed.obscure(played.job)
        try:
            verdict = await played.verdict()
            assert (verdict.outcome, verdict.cause) == ("failed", Cause.LOST_SIGHT)
            assert len(played.run.attempts) == 1
        finally:
            await bed.clear()
        # The next try of the task finds it again and may end it.
        patient = gang.replace(recovery={"unknown_limit": "1h"})
        after = await play(bed, tmp_path, patient, key=played.key, ti_id="ti-2", try_number=2)
        after.start()
        await after.until_step(3)
        await after.driver.stop("user", "enough")
        assert (await after.verdict()).outcome == "cancelled"

    async def test_logs(self, bed: Bed, tmp_path: Path) -> None:
        """Rank 0's output comes while it runs; every rank's is in the run directory."""
        gang = self.gang(bed, programs.count, 40, kwargs={"shout": "hello from a rank äöü "})
        played = (await play(bed, tmp_path, gang)).start()

        async def heard() -> bool:
            return any("hello from a rank äöü" in line for line in played.log)

        await played.until("rank 0 is heard", heard)
        assert (await played.verdict()).success
        last = bed.nodes * bed.gpus_per_node - 1
        data = await (await played.channel()).log(1, last, 0, 1 << 20)
        assert "hello from a rank äöü" in data.decode()

    async def test_secrets(self, bed: Bed, tmp_path: Path) -> None:
        """A secret reaches the ranks, and no file of the run directory but their own output."""
        value = "s3cr3t-of-the-suite"
        gang = self.gang(bed, programs.count, 3, kwargs={"shout": "token="}, secrets={"TOKEN": "var:token"})
        played = (await play(bed, tmp_path, gang, secret_values={"TOKEN": value})).start()
        assert (await played.verdict()).success
        assert any(value in line for line in played.log)
        channel = await played.channel()
        for store, path in ((played.store, ""), (channel.store, channel.path)):
            for entry in await store.list(path):
                if "/logs/" not in f"/{entry.path}":
                    assert value.encode() not in await store.get(entry.path), entry.path

    async def test_secret_in_an_error(self, bed: Bed, tmp_path: Path) -> None:
        """A program that fails with a secret in its last words: they come to Airflow without it."""
        value = "s3cr3t-of-the-suite"
        gang = self.gang(bed, programs.blurt, secrets={"TOKEN": "var:token"})
        played = (await play(bed, tmp_path, gang, secret_values={"TOKEN": value})).start()
        verdict = await played.verdict()
        assert verdict.cause is Cause.APPLICATION
        assert "cannot log in with" in verdict.record["failure"]["tail"]
        assert value not in str(verdict)
        for entry in await played.store.list(""):
            if "/logs/" not in f"/{entry.path}":
                assert value.encode() not in await played.store.get(entry.path), entry.path

    async def test_bad_request(self, bed: Bed, tmp_path: Path) -> None:
        """What can never run is said at once, with what there is; nothing is submitted."""
        played = (await play(bed, tmp_path, self.gang(bed, programs.count, 3, nodes=bed.nodes + 100))).start()
        verdict = await played.verdict()
        assert (verdict.outcome, verdict.cause) == ("failed", Cause.REJECTED)
        assert verdict.message
        assert not any(a.submitted_at for a in played.run.attempts)

    async def test_gone(self, bed: Bed, tmp_path: Path) -> None:
        """A name the platform has never heard of is gone, and that is no error."""
        played = await play(bed, tmp_path, self.gang(bed, programs.count, 3))
        played.start()
        assert (await played.verdict()).success
        ref = replace(await played.ref(played.run.attempts[-1]), name="never-heard-of-1")
        assert (await bed.target.observe([ref]))[ref.name].state is State.GONE
        await bed.target.cancel(ref, grace=0, since=0.0)
