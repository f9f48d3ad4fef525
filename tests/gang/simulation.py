"""A small world that is against us, for ``step()``: a platform, ranks, several drivers, lost replies, crashes.

Everything is decided by one random generator, on a clock of its own. The world
keeps the truth (who really computes, who really succeeded) apart from what is
observed, and :meth:`Sim.check` compares the two after every move.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from airflow_gpu.gang import lifecycle
from airflow_gpu.gang.entries import (
    JournalError,
    attempt_entry,
    fold,
    iso,
    over_entry,
    owner_entry,
    stop_entry,
    submitted_entry,
    verdict_entry,
)
from airflow_gpu.gang.lifecycle import StepFunction
from airflow_gpu.gang.run import Cause, CheckpointRef, Failure, Life, Observation, Run, State
from airflow_gpu.gang.spec import Gang

RANKS = 4
HOUR = 3600.0


class Broken(AssertionError):
    """An invariant does not hold."""


@dataclass
class Job:
    """The platform's truth about one submission."""

    attempt: int
    name: str
    id: str
    state: State = State.QUEUED
    since: float = 0.0
    restart: int = 0
    life: int | None = None  # the life whose ranks compute now
    kill_at: float | None = None
    notice: bool = False
    ending: State | None = None  # what it becomes once its ranks are dead
    removed: bool = False
    claimed: bool = False


@dataclass
class LifeTruth:
    """What really became of a life, and what its ranks wrote down."""

    life: Life
    step: int = 0
    saved: int | None = None
    ok: int = 0
    notice: bool = False
    failure: Failure | None = None


@dataclass
class DriverSim:
    """A driver's own, perhaps stale, view."""

    epoch: int
    run: Run = field(default_factory=Run)
    seen: Observation | None = None
    since: tuple[str, float] = ("", 0.0)
    dead: bool = False
    asked: float | None = None


class Sim:
    """One run. ``step`` is the function under test."""

    def __init__(self, seed: int, step: StepFunction, gang: Gang, *, mean: bool = True) -> None:
        self.rng = random.Random(seed)
        self.step = step
        self.gang = gang
        self.now = 1_000_000.0
        self.run = Run()
        self.jobs: list[Job] = []
        self.late: list[tuple[float, Job]] = []  # submits whose effect comes after the reply was lost
        self.lives: list[Life] = []
        self.truth: dict[int, LifeTruth] = {}
        self.drivers: list[DriverSim] = []
        self.total = self.rng.randint(1, 40)  # steps of work
        self.requeues = self.rng.random() < 0.4
        self.reachable = True
        self.blackout_until = 0.0
        self.mean = mean
        self.hazard = self.rng.choice([0.0, 0.02, 0.1, 0.3]) if mean else 0.0
        self.starts: dict[int, list[Cause | None]] = {}
        self.succeeded_at: int | None = None  # seq of the journal when every rank had succeeded
        self.owners = 0

    # -- journal ---------------------------------------------------------------------------------

    def append(self, driver: DriverSim, entry: dict[str, Any], epoch: int | None = None) -> bool:
        """Create-only with the next number: False when another driver was first."""
        body = {"seq": driver.run.seq + 1, "at": iso(self.now), "epoch": epoch or driver.epoch, **entry}
        try:
            after = fold(driver.run, body)
        except JournalError as error:
            raise Broken(f"step wants what must not be: {error}") from error
        if driver.run.seq != self.run.seq:
            driver.run = self.run  # lost the race: read on
            driver.seen = None
            return False
        self.run = driver.run = after
        return True

    def own(self, reason: str) -> DriverSim:
        """A new try of the task takes over, as airflow_gpu.rundir.slot does."""
        self.owners += 1
        driver = DriverSim(epoch=self.run.epoch + 1, run=self.run)
        entry = owner_entry(
            ti_id=f"ti-{self.owners}",
            try_number=self.owners,
            max_tries=3,
            reason=reason,
            resume=True,
            deadline=None,
            gang={},
            digest="d",
        )
        self.append(driver, entry)
        self.drivers.append(driver)
        return driver

    # -- platform --------------------------------------------------------------------------------

    def real(self) -> list[Job]:
        return [job for job in self.jobs if not job.removed]

    def submit(self, attempt_number: int, name: str) -> Job:
        for job in self.real():
            if job.name == name:
                return job
        job = Job(attempt_number, name, f"job-{len(self.jobs) + len(self.late)}", since=self.now)
        self.jobs.append(job)
        return job

    def claim(self, job: Job) -> Life | None:
        """The runtime's rules (docs/run-directory.md); a gang whose work is done says so and leaves."""
        if any(truth.ok == RANKS for truth in self.truth.values()):
            return None
        number = max([life.number for life in self.lives], default=0) + 1
        for life in self.lives:
            if life.attempt > job.attempt or (life.fence and life.attempt >= job.attempt):
                return None
            if (
                not life.fence
                and life.attempt == job.attempt
                and (life.job != job.id or life.restart >= job.restart)
            ):
                return None
        before = [life for life in self.lives if not life.fence]
        life = Life(
            number=number,
            attempt=job.attempt,
            job=job.id,
            restart=job.restart,
            nodes=2,
            world_size=RANKS,
            start=self.newest(before),
            at=self.now,
        )
        self.lives.append(life)
        self.truth[number] = LifeTruth(life, step=life.start.step if life.start else 0)
        return life

    def newest(self, lives: list[Life]) -> CheckpointRef | None:
        if not lives:
            return None
        saved = self.truth[lives[-1].number].saved
        return CheckpointRef(lives[-1].number, saved) if saved is not None else lives[-1].start

    def die(self, job: Job, into: State) -> None:
        """The ranks of the job are dead; the platform says so."""
        job.life = None
        job.kill_at = None
        requeue = self.requeues and into in (State.PREEMPTED, State.NODE_LOST)
        if requeue:
            job.restart += 1
            job.notice = False
            job.ending = None
            job.state, job.since = State.QUEUED, self.now
        else:
            job.state, job.since = into, self.now

    def platform(self) -> None:
        """One random move of each job."""
        rng = self.rng
        for at, job in list(self.late):
            if at <= self.now:
                self.late.remove((at, job))
                if not any(other.name == job.name for other in self.real()) or rng.random() < 0.3:
                    job.since = self.now
                    self.jobs.append(job)  # a twin, where the system has no create-if-absent
        for job in self.real():
            if job.kill_at is not None and self.now >= job.kill_at and not job.state.ended:
                self.die(job, job.ending or State.CANCELLED)
                continue
            if job.state is State.QUEUED and rng.random() < 0.6:
                job.state, job.since = State.STARTING, self.now
            elif job.state is State.STARTING and rng.random() < 0.7:
                life = self.claim(job)
                if life is None:
                    done = any(truth.ok == RANKS for truth in self.truth.values())
                    job.state, job.since = State.SUCCEEDED if done else State.FAILED, self.now  # exit 0 or 76
                else:
                    job.state, job.since, job.life = State.RUNNING, self.now, life.number
            elif job.state is State.RUNNING and job.life is not None:
                self.compute(job)
            if not job.state.ended and job.life is not None and rng.random() < self.hazard:
                self.harm(job)
            if self.mean and job.state.ended and rng.random() < 0.05:
                job.removed = True

    def compute(self, job: Job) -> None:
        rng = self.rng
        assert job.life is not None
        truth = self.truth[job.life]
        newer = self.lives[-1].number != job.life
        if newer and rng.random() < 0.3:  # superseded: it ends itself, once it has looked
            self.die(job, State.FAILED)
            return
        if job.notice and rng.random() < 0.5:
            if rng.random() < 0.7:
                truth.saved = truth.step
            self.die(job, job.ending or State.PREEMPTED)
            return
        truth.step = min(self.total, truth.step + rng.randint(0, 8))
        if rng.random() < 0.4:
            truth.saved = truth.step
        if truth.step >= self.total:
            truth.ok = RANKS
            self.succeeded_at = self.succeeded_at or self.run.seq
            if rng.random() < 0.1 and self.requeues and self.mean:
                self.die(job, State.PREEMPTED)  # exit 0 inside of the grace: queued again all the same
            else:
                self.die(job, State.SUCCEEDED)

    def harm(self, job: Job) -> None:
        """Something bad happens to a running job."""
        assert job.life is not None
        truth = self.truth[job.life]
        kind = self.rng.choice(
            ["preempt", "notice", "node", "app", "oom", "timeout", "scancel", "quiet", "vanish", "lie"]
        )
        if kind == "notice":
            job.notice = truth.notice = True
            job.ending, job.kill_at = State.PREEMPTED, self.now + 30
        elif kind == "app":
            truth.failure = Failure(
                "rank", rank=1, node=0, host="n0", exit_code=3, message="rank 1 exited with 3"
            )
            self.die(job, State.FAILED)
        elif kind == "quiet":
            self.die(job, State.FAILED)
        elif kind == "vanish":
            job.life = None
            job.removed = True
        elif kind == "lie":  # the platform says success, but not every rank does
            truth.ok = RANKS - 1
            self.die(job, State.SUCCEEDED)
        else:
            self.die(
                job,
                {
                    "preempt": State.PREEMPTED,
                    "node": State.NODE_LOST,
                    "oom": State.OUT_OF_MEMORY,
                    "timeout": State.TIMED_OUT,
                    "scancel": State.CANCELLED,
                }[kind],
            )

    # -- drivers ---------------------------------------------------------------------------------

    def look(self, driver: DriverSim, attempt: Any) -> None:
        """One observation, which may fail or be unreadable."""
        rng = self.rng
        jobs = [job for job in self.real() if job.name == attempt.name]
        job = next((j for j in jobs if j.id == attempt.platform_id), jobs[0] if jobs else None)
        mine = [life for life in self.lives if life.attempt == attempt.number and not life.fence]
        real = [life for life in self.lives if not life.fence]
        whole = [life for life in mine if self.truth[life.number].ok == RANKS]
        mine = whole or mine
        truth = self.truth[mine[-1].number] if mine else None
        state = job.state if job else State.GONE
        if self.now < self.blackout_until or (self.mean and rng.random() < 0.05):
            state = State.UNKNOWN
        if driver.since[0] != state.value:
            driver.since = (state.value, job.since if job and state is not State.UNKNOWN else self.now)
        shown = bool(truth and (state.ended or rng.random() < 0.9))
        driver.seen = Observation(
            attempt=attempt.number,
            state=state,
            at=self.now,
            since=driver.since[1],
            restart=job.restart
            if job and state is not State.UNKNOWN
            else (driver.seen.restart if driver.seen else 0),
            life=mine[-1] if mine else None,
            world_size=RANKS if mine else 0,
            ranks_ok=truth.ok if truth and shown else 0,
            notice=bool(truth and truth.notice),
            failure=truth.failure if truth and shown else None,
            checkpoint=self.newest(real),
            asked=driver.asked,
        )

    def move(self, driver: DriverSim) -> None:
        """One round of a driver; it may die in the middle of it."""
        rng = self.rng
        if rng.random() < 0.9:  # else it acts on what it knew
            if driver.run.seq != self.run.seq:
                driver.run = self.run
                driver.seen = None
        action = self.step(driver.run, self.gang, driver.seen, self.now, driver.epoch)
        crash = self.mean and rng.random() < 0.03
        match action:
            case lifecycle.Start(number, resume):
                entry = attempt_entry(
                    attempt=number,
                    name=f"gang-{number}",
                    target="t",
                    channel="c",
                    offer={},
                    resume=resume,
                    first_life=1,
                    digest="d",
                )
                if self.append(driver, entry) and not crash:
                    driver.seen = None
                    self.send(driver, driver.run.attempts[-1])
            case lifecycle.Submit(attempt):
                if driver.run.seq == self.run.seq and not crash:
                    self.send(driver, attempt)
            case lifecycle.Watch(attempt):
                self.look(driver, attempt)
            case lifecycle.RequestStop(attempt, reason, detail):
                self.append(driver, stop_entry(attempt.number, reason, detail))
            case lifecycle.Cancel(attempt):
                driver.asked = driver.asked or self.now
                if rng.random() < 0.9:
                    for job in self.real():
                        if job.name == attempt.name:
                            self.cancel(job)
                self.look(driver, attempt)
            case lifecycle.Close(attempt, outcome):
                lives = self.fence(attempt.number)
                mine = [life.number for life in lives if life.attempt == attempt.number and not life.fence]
                if mine and mine[-1] != outcome.life:
                    self.look(driver, attempt)
                elif not crash:
                    self.append(driver, over_entry(attempt.number, outcome))
                    driver.seen = driver.asked = None
            case lifecycle.Finish(outcome, cause, message):
                self.append(driver, verdict_entry(outcome, cause, message, {}))
            case lifecycle.Done() | lifecycle.Superseded():
                driver.dead = True
            case lifecycle.Wait():
                pass
        if crash:
            driver.dead = True

    def send(self, driver: DriverSim, attempt: Any) -> None:
        if self.mean and self.rng.random() < 0.05:  # the request is on its way while its reply is lost
            self.late.append(
                (
                    self.now + self.rng.choice([1, 50, 4000]),
                    Job(attempt.number, attempt.name, f"late-{self.now}"),
                )
            )
            self.look(driver, attempt)
            return
        job = self.submit(attempt.number, attempt.name)
        if not self.mean or self.rng.random() < 0.9:
            self.append(driver, submitted_entry(attempt.number, job.id))

    def cancel(self, job: Job) -> None:
        if job.state.ended:
            return
        if job.life is None:
            job.state, job.since = State.CANCELLED, self.now
        elif job.kill_at is None or job.ending is not State.CANCELLED:
            job.notice = True
            job.ending = State.CANCELLED
            job.kill_at = job.kill_at or self.now + self.gang.stop_grace

    def fence(self, attempt: int) -> list[Life]:
        if not any(life.fence and life.attempt >= attempt for life in self.lives):
            number = max([life.number for life in self.lives], default=0) + 1
            self.lives.append(Life(number=number, attempt=attempt, fence=True, at=self.now))
        return self.lives

    # -- the invariants --------------------------------------------------------------------------

    def check(self) -> None:
        computing = [job for job in self.real() if job.life is not None and self.lives[-1].number == job.life]
        attempts = {job.attempt for job in self.real() if job.life is not None}
        if len(computing) > 1 or len(attempts) > 1:
            raise Broken(f"two live lives: attempts {sorted(attempts)}")
        verdict = self.run.verdict
        whole = [truth for truth in self.truth.values() if truth.ok == RANKS]
        if verdict is not None and verdict.success and not whole:
            raise Broken("success without evidence from every rank")
        if whole and any(life.number > whole[0].life.number for life in self.lives if not life.fence):
            raise Broken("a life was started after every rank had succeeded")
        self.budgets()

    def budgets(self) -> None:
        recovery = self.gang.recovery
        for owner in self.run.owners:
            causes = [
                a.outcome.cause
                for a in self.run.of_epoch(owner.epoch)
                if a.outcome and a.epoch == owner.epoch
            ]
            for name, of in (
                ("application", {Cause.APPLICATION}),
                ("out_of_memory", {Cause.OUT_OF_MEMORY}),
                ("node_failures", {Cause.NODE_LOST, Cause.GONE, Cause.NOT_STARTED, Cause.NOT_WHOLE}),
                ("preemptions", {Cause.PREEMPTED}),
            ):
                allowed = getattr(recovery, name)
                spent = sum(cause in of for cause in causes)
                if allowed is not None and spent > allowed + 1:
                    raise Broken(f"{spent} ends of the kind {name}, {allowed} allowed")

    # -- a whole run -----------------------------------------------------------------------------

    def play(self, rounds: int = 400) -> Run:
        """Random moves; then the world calms down and the newest owner must come to a verdict."""
        rng = self.rng
        self.own("start")
        for _ in range(rng.randint(5, 60)):
            self.now += rng.choice([0.1, 1, 5, 30, 120, 900])
            self.platform()
            for driver in [d for d in self.drivers if not d.dead]:
                self.move(driver)
            self.disturb()
            self.check()
            if self.run.verdict is not None and not any(not d.dead for d in self.drivers):
                break
        for _ in range(rounds):  # every run ends
            live = [d for d in self.drivers if not d.dead and d.epoch == self.run.epoch]
            if self.run.verdict is not None:
                break
            if not live:
                self.drivers.append(DriverSim(epoch=self.run.epoch, run=self.run))  # a triggerer comes back
                continue
            self.now += rng.choice([5, 60, 600, 3600])
            self.platform()
            for driver in live:
                self.move(driver)
            self.check()
        else:
            raise Broken(f"no verdict after {rounds} rounds: {self.run.attempts[-1:]}")
        self.after()
        return self.run

    def disturb(self) -> None:
        """What happens to Airflow's side."""
        rng = self.rng
        kind = rng.random()
        if kind < 0.03:
            self.blackout_until = self.now + rng.choice([10, 600, 7200])
        elif kind < 0.06 and self.run.verdict is None:
            self.drivers.append(
                DriverSim(epoch=self.run.epoch, run=rng.choice([self.run, Run()]))
            )  # hand-over
        elif kind < 0.09 and not (self.run.verdict and self.run.verdict.success):
            if self.owners < 4:
                self.own("retry" if self.run.verdict else rng.choice(["clear", "adopt"]))
        elif kind < 0.11:
            current = self.run.current
            live = [d for d in self.drivers if not d.dead and d.epoch == self.run.epoch]
            if current and live and current.stop is None and self.run.verdict is None:
                live[0].run = self.run
                self.append(live[0], stop_entry(current.number, "user", "marked failed"))

    def after(self) -> None:
        """Behind the verdict: nothing left, and nothing that could still start."""
        verdict = self.run.verdict
        assert verdict is not None
        if verdict.cause is Cause.LOST_SIGHT:
            return
        self.now += 10 * HOUR
        for _ in range(6):
            self.platform()
            self.now += HOUR
        left = [job for job in self.real() if job.life is not None]
        if left:
            raise Broken(f"left behind after {verdict.outcome}: attempt {left[0].attempt} {left[0].state}")
        whole = [truth for truth in self.truth.values() if truth.ok == RANKS]
        if whole and not verdict.success and not any(a.stop for a in self.run.attempts):
            raise Broken(f"every rank succeeded, but the verdict is {verdict.outcome} ({verdict.cause})")
