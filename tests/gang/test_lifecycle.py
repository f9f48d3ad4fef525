"""Properties of ``step()``: thousands of random worlds, and each invariant shown to bite."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from airflow_gpu.gang import lifecycle
from airflow_gpu.gang.budgets import streak
from airflow_gpu.gang.lifecycle import step
from airflow_gpu.gang.run import (
    Attempt,
    Cause,
    CheckpointRef,
    Failure,
    Life,
    Observation,
    Outcome,
    Owner,
    Run,
    State,
    Stop,
)
from airflow_gpu.gang.spec import Gang, Placement
from tests.gang.simulation import Broken, Sim

WORLDS = 15_000
MUTANT_WORLDS = 3_000


def gang_of(seed: int) -> Gang:
    rng = random.Random(seed)
    return Gang(
        nodes=2,
        gpus_per_node=2,
        command="true",
        time_limit="6h",
        placement={"max_wait": "2d", "deadline": rng.choice([None, None, "3d"])},
        recovery={
            "preemptions": rng.choice([None, None, 0, 2]),
            "node_failures": rng.choice([0, 1, 3]),
            "out_of_memory": rng.choice([0, 1]),
            "application": rng.choice([0, 0, 1]),
            "fruitless": rng.choice([2, 5, 10]),
            "mode": "infra",
        },
    )


def test_random_worlds() -> None:
    """Never two live lives, success absorbing and only on evidence, budgets kept, every run ends, nothing is left."""
    outcomes: Counter[str] = Counter()
    attempts = 0
    for seed in range(WORLDS):
        try:
            run = Sim(seed, step, gang_of(seed)).play()
        except Broken as error:
            raise AssertionError(f"world {seed}: {error}") from error
        assert run.verdict is not None
        outcomes[run.verdict.cause.value] += 1
        attempts += len(run.attempts)
    print(f"\n{WORLDS} worlds, {attempts} attempts; verdicts: {dict(outcomes.most_common())}")
    # The worlds are worth something only if they go everywhere.
    for cause in (
        Cause.SUCCEEDED,
        Cause.APPLICATION,
        Cause.PREEMPTED,
        Cause.NODE_LOST,
        Cause.STOPPED,
        Cause.NO_EVIDENCE,
        Cause.LOST_SIGHT,
        Cause.TIMED_OUT,
        Cause.OUT_OF_MEMORY,
        Cause.CANCELLED,
    ):
        assert outcomes[cause.value], f"no world ended as {cause}"


def test_a_calm_world_succeeds() -> None:
    patient = gang_of(0).model_copy(update={"placement": Placement(start_timeout="2d")})
    for seed in range(300):
        sim = Sim(seed, step, patient, mean=False)
        sim.disturb = lambda: None  # type: ignore[method-assign]
        assert sim.play().verdict.success  # type: ignore[union-attr]


# -- deliberately broken variants, each caught by the invariant that forbids it -------------------


def _unknown_is_gone(run, gang, seen, now, epoch):
    if seen is not None and seen.state is State.UNKNOWN:
        seen = replace(seen, state=State.NODE_LOST)
    return step(run, gang, seen, now, epoch)


def _platform_word_is_enough(run, gang, seen, now, epoch):
    if seen is not None and seen.state is State.SUCCEEDED and seen.life is not None:
        seen = replace(seen, ranks_ok=seen.world_size)
    return step(run, gang, seen, now, epoch)


def _budgets_forgotten(run, gang, seen, now, epoch):
    free = gang.recovery.model_copy(update={"node_failures": None, "application": 99, "out_of_memory": 99})
    return step(run, gang.model_copy(update={"recovery": free}), seen, now, epoch)


def _waits_for_ever(run, gang, seen, now, epoch):
    action = step(run, gang, seen, now, epoch)
    if isinstance(action, lifecycle.RequestStop) or (
        isinstance(action, lifecycle.Finish) and action.cause is Cause.LOST_SIGHT
    ):
        return lifecycle.Watch(run.current)
    return action


def _older_owner_goes_on(run, gang, seen, now, epoch):
    return step(run, gang, seen, now, run.epoch)


def _success_is_not_absorbing(run, gang, seen, now, epoch):
    if seen is not None and seen.whole_success:
        seen = replace(seen, ranks_ok=0, state=State.NODE_LOST)
    return step(run, gang, seen, now, epoch)


def _forgets_to_cancel(run, gang, seen, now, epoch):
    action = step(run, gang, seen, now, epoch)
    if isinstance(action, lifecycle.Cancel):
        return lifecycle.Close(
            action.attempt, lifecycle._outcome(Cause.STOPPED, seen, now, "") if seen else None
        )
    return action


MUTANTS = {
    "two live lives": _unknown_is_gone,
    "success without evidence": _platform_word_is_enough,
    "allowed": _budgets_forgotten,
    "no verdict": _waits_for_ever,
    "had succeeded|every rank succeeded": _success_is_not_absorbing,
    "must not be": _older_owner_goes_on,
    "left behind|two live lives": _forgets_to_cancel,
}


@pytest.mark.parametrize("message", MUTANTS)
def test_each_invariant_bites(message: str) -> None:
    """A variant of step() with one thing broken on purpose is caught, by the invariant that is about it."""
    import re

    mutant = MUTANTS[message]
    for seed in range(MUTANT_WORLDS):
        try:
            Sim(seed, mutant, gang_of(seed)).play()
        except Broken as error:
            if re.search(message, str(error)):
                return
    pytest.fail(f"{mutant.__name__} went unnoticed in {MUTANT_WORLDS} worlds")


# -- single rules --------------------------------------------------------------------------------


def _run(**attempt: object) -> Run:
    owner = Owner(epoch=1, ti_id="a", try_number=1, at=0.0)
    first = Attempt(number=1, name="g-1", target="t", at=0.0, epoch=1, platform_id="1", submitted_at=0.0)
    return Run(owners=(owner,), attempts=(replace(first, **attempt),), seq=3)  # type: ignore[arg-type]


def _seen(state: State, **more: object) -> Observation:
    return replace(Observation(attempt=1, state=state, at=0.0, since=0.0), **more)  # type: ignore[arg-type]


GANG = Gang(command="true", time_limit="1h", placement={"max_wait": "2h", "start_timeout": "10m"})


@pytest.mark.parametrize(
    ("state", "now", "reason"),
    [
        (State.QUEUED, 7199, None),
        (State.QUEUED, 7200, "queued_too_long"),
        (State.STARTING, 599, None),
        (State.STARTING, 600, "not_started"),
        (State.RUNNING, 600, "not_started"),  # no life: the runtime never came
    ],
)
def test_every_wait_is_bounded(state: State, now: float, reason: str | None) -> None:
    action = step(_run(), GANG, _seen(state), now, 1)
    assert (action.reason if isinstance(action, lifecycle.RequestStop) else None) == reason


def test_an_unknown_state_is_kept_and_then_shown() -> None:
    unknown = _seen(State.UNKNOWN, native="WIBBLE")
    assert isinstance(step(_run(), GANG, unknown, 3599, 1), lifecycle.Watch)
    action = step(_run(), GANG, unknown, 3600, 1)
    assert isinstance(action, lifecycle.Finish)
    assert action.cause is Cause.LOST_SIGHT
    assert "WIBBLE" in action.message


def test_a_retry_looks_for_as_long_again_at_what_is_out_of_sight() -> None:
    run, unknown = _run(), _seen(State.UNKNOWN, life=LIFE)
    again = replace(
        run, owners=(*run.owners, Owner(epoch=2, ti_id="a", try_number=2, at=5000.0, reason="retry"))
    )
    assert isinstance(step(again, GANG, unknown, 8599, 2), lifecycle.Watch)
    assert isinstance(step(again, GANG, unknown, 8600, 2), lifecycle.Finish)


@pytest.mark.parametrize("state", [State.QUEUED, State.STARTING])
def test_a_life_that_began_behind_a_late_answer_is_not_ended_for_waiting(state: State) -> None:
    late = _seen(state, life=replace(LIFE, at=700.0))
    assert isinstance(step(_run(), GANG, late, 7200, 1), lifecycle.RequestStop), "that is its time_limit"
    assert isinstance(step(_run(), GANG, late, 4000, 1), lifecycle.Watch)
    again = step(_run(), GANG, replace(late, since=701.0), 7901, 1)
    assert isinstance(again, lifecycle.RequestStop)
    assert again.reason in ("queued_too_long", "not_started"), "it was queued again after its life"


def test_preemption_with_progress_goes_on_at_once() -> None:
    run = _run(outcome=Outcome(cause=Cause.PREEMPTED, at=100.0, checkpoint=CheckpointRef(1, 50)))
    assert step(run, GANG, None, 100.0, 1) == lifecycle.Start(2, resume=True)


def _ends(*ends: tuple[CheckpointRef | None, int | None]) -> Run:
    """Preempted so often: the checkpoint on the channel after each, and the step of the copies from which it started."""
    outcomes = [
        Outcome(cause=Cause.PREEMPTED, at=100.0, life=n, checkpoint=at, copy=copy, epoch=1)
        for n, (at, copy) in enumerate(ends, 1)
    ]
    first = _run().attempts[0]
    return replace(
        _run(),
        attempts=tuple(replace(first, number=n, name=f"g-{n}", outcome=o) for n, o in enumerate(outcomes, 1)),
    )


def test_copies_on_the_nodes_are_progress() -> None:
    """No checkpoint on the channel for 30 preemptions, and each start is further: none is held against it."""
    run = _ends((None, None), *((None, 10 * n) for n in range(1, 30)))
    assert step(run, GANG, None, 100.0, 1) == lifecycle.Start(31, resume=True)
    at = CheckpointRef(1, 500)
    run = _ends((at, None), (at, None), (at, 520), (at, 540))
    assert step(run, GANG, None, 100.0, 1) == lifecycle.Start(5, resume=True)


@pytest.mark.parametrize(
    ("copies", "expected"),
    [
        ([None] * 5, 5),
        ([None, 10, 10, 10], 2),
        ([None, 10, 20, 30], 0),
        ([None, 10, None, 10, None, 10], 4),  # the same copies again and again
        ([None, 30, 10, 20], 2),  # what was lost has to be made up for first
        ([None, 30, 10, 40], 0),
    ],
)
def test_a_start_counts_that_is_no_further_than_any_before(copies: list[int | None], expected: int) -> None:
    assert streak(_ends(*((None, copy) for copy in copies)).attempts) == expected


def test_copies_that_are_no_further_run_out() -> None:
    run = _ends(*((None, 10) for _ in range(11)))
    action = step(run, GANG, None, 10_000.0, 1)
    assert isinstance(action, lifecycle.Finish)
    assert action.cause is Cause.FRUITLESS


def test_no_retry_is_spent_on_infrastructure_but_an_error_ends_it() -> None:
    run = _run(outcome=Outcome(cause=Cause.APPLICATION, at=100.0, detail="rank 3 exited with 1"))
    action = step(run, GANG, None, 100.0, 1)
    assert action == lifecycle.Finish("failed", Cause.APPLICATION, "rank 3 exited with 1")


LIFE = Life(number=1, attempt=1, job="1", nodes=1, world_size=2, at=0.0)


@pytest.mark.parametrize(
    ("seen", "cause"),
    [
        # Objects vanish: what it was last said to be ending as decides, not the notice that its ranks had.
        ({"state": State.GONE, "ending": State.CANCELLED, "life": LIFE, "notice": True}, Cause.CANCELLED),
        ({"state": State.GONE, "ending": State.NODE_LOST, "life": LIFE}, Cause.NODE_LOST),
        ({"state": State.GONE, "ending": State.UNKNOWN, "life": LIFE, "notice": True}, Cause.PREEMPTED),
        ({"state": State.FAILED, "life": LIFE, "notice": True}, Cause.PREEMPTED),
        # The notice before a time limit is no preemption: that would start it again for ever.
        (
            {"state": State.FAILED, "life": LIFE, "notice": True, "notice_cause": "time_limit"},
            Cause.TIMED_OUT,
        ),
        # The records of an older life say nothing of a start that never came to a life of its own.
        ({"state": State.FAILED, "life": LIFE, "notice": True, "restart": 1}, Cause.NOT_STARTED),
        ({"state": State.FAILED, "life": LIFE, "failure": Failure("rank", exit_code=3)}, Cause.APPLICATION),
        ({"state": State.FAILED, "life": LIFE, "failure": Failure("node")}, Cause.NODE_LOST),
        ({"state": State.FAILED, "life": None}, Cause.NOT_STARTED),
        # Without credentials the next attempt would find none either. A rank's own 78 is nothing of the kind.
        ({"state": State.FAILED, "life": None, "exit_code": 78}, Cause.APPLICATION),
        (
            {"state": State.FAILED, "life": LIFE, "exit_code": 78, "failure": Failure("node")},
            Cause.NODE_LOST,
        ),
    ],
)
def test_why_it_ended(seen: dict[str, object], cause: Cause) -> None:
    action = step(_run(), GANG, replace(_seen(State.FAILED), **seen), 1.0, 1)  # type: ignore[arg-type]
    assert isinstance(action, lifecycle.Close)
    assert action.outcome.cause is cause


# -- several targets -------------------------------------------------------------------------------

SEVERAL = Gang(
    command="true",
    targets=["t", "u"],
    placement={"move_after": "10m", "max_wait": "2h"},
    recovery={"unreachable": "move", "unknown_limit": "1h"},
)


def test_a_gang_that_waits_moves_when_another_target_could_start_it() -> None:
    waits = _seen(State.QUEUED)
    assert isinstance(step(_run(), SEVERAL, waits, 3000, 1), lifecycle.Watch), "nobody else could"
    better = replace(waits, elsewhere="u")
    assert step(_run(), SEVERAL, better, 599, 1) == lifecycle.Watch(_run().attempts[0], 600)
    action = step(_run(), SEVERAL, better, 600, 1)
    assert isinstance(action, lifecycle.RequestStop)
    assert (action.reason, action.detail) == ("moved", "it waited 10 min; u can start it now")
    drained = step(_run(), SEVERAL, replace(better, blocked="drained"), 1, 1)
    assert isinstance(drained, lifecycle.RequestStop)
    stays = Gang(command="true", targets=["t", "u"], placement={"move_after": None})
    assert isinstance(step(_run(), stays, better, 3000, 1), lifecycle.Watch)


@pytest.mark.parametrize("cause", [Cause.MOVED, Cause.QUEUED_TOO_LONG, Cause.REJECTED])
def test_an_end_that_speaks_against_the_target_goes_on_elsewhere_at_once(cause: Cause) -> None:
    run = _run(outcome=Outcome(cause=cause, at=100.0, epoch=1))
    assert step(run, SEVERAL, None, 100.0, 1) == lifecycle.Start(2, resume=True)
    if cause in (Cause.QUEUED_TOO_LONG, Cause.REJECTED):
        assert isinstance(step(run, GANG.replace(targets=["t"]), None, 100.0, 1), lifecycle.Finish)
    unreachable = _run(outcome=Outcome(cause=Cause.UNREACHABLE, at=100.0, epoch=1))
    assert step(unreachable, SEVERAL, None, 200.0, 1) == lifecycle.Start(2, resume=True)


def test_after_the_last_target_it_fails() -> None:
    first = _run(outcome=Outcome(cause=Cause.QUEUED_TOO_LONG, at=100.0, epoch=1, detail="waited"))
    second = replace(first.attempts[0], number=2, name="g-2", target="u")
    action = step(replace(first, attempts=(*first.attempts, second)), SEVERAL, None, 100.0, 1)
    assert action == lifecycle.Finish("failed", Cause.QUEUED_TOO_LONG, "waited")


def test_many_moves_are_slowed_down_and_are_no_fruitless_starts() -> None:
    moved = _run(outcome=Outcome(cause=Cause.MOVED, at=100.0, epoch=1)).attempts[0]
    attempts = tuple(replace(moved, number=n, name=f"g-{n}") for n in range(1, 21))
    action = step(replace(_run(), attempts=attempts), SEVERAL, None, 100.0, 1)
    assert isinstance(action, lifecycle.Wait)
    assert action.until > 600


UNREACHABLE = Stop("unreachable", at=3600.0, epoch=1, detail="t does not answer")


def test_out_of_reach_is_fenced_and_goes_on_only_when_its_ranks_have_ended() -> None:
    """Or, as the author asked for, when they say nothing for long enough."""
    lost = _seen(State.UNKNOWN, life=LIFE, world_size=2)
    action = step(_run(), SEVERAL, lost, 3600, 1)
    assert isinstance(action, lifecycle.RequestStop)
    assert action.reason == "unreachable"
    run = _run(stop=UNREACHABLE)
    assert isinstance(step(run, SEVERAL, lost, 3601, 1), lifecycle.Cancel), "first it is fenced"
    asked = replace(lost, asked=3601.0)
    assert isinstance(step(run, SEVERAL, replace(asked, ranks_ended=1), 3700, 1), lifecycle.Cancel)
    close = step(run, SEVERAL, replace(asked, ranks_ended=2), 3700, 1)
    assert isinstance(close, lifecycle.Close)
    assert close.outcome.cause is Cause.UNREACHABLE
    limit = 3601 + SEVERAL.stop_grace + lifecycle.FENCE_LIMIT
    assert isinstance(step(run, SEVERAL, asked, limit - 1, 1), lifecycle.Cancel)
    assert isinstance(step(run, SEVERAL, asked, limit, 1), lifecycle.Close)


def test_the_default_starts_nothing_in_place_of_what_is_out_of_reach() -> None:
    stays = SEVERAL.replace(recovery={"unknown_limit": "1h"})
    action = step(_run(), stays, _seen(State.UNKNOWN, life=LIFE), 3600, 1)
    assert isinstance(action, lifecycle.Finish)
    assert action.cause is Cause.LOST_SIGHT


def test_a_persons_wish_stands_above_a_move() -> None:
    from airflow_gpu.gang.entries import fold, stop_entry

    run = _run(stop=Stop("moved", at=5.0, epoch=1))
    entry = {
        "v": 1,
        "seq": 4,
        "at": "1970-01-01T00:00:09.000Z",
        "epoch": 1,
        **stop_entry(1, "user", "enough"),
    }
    stop = fold(run, entry).attempts[0].stop
    assert stop is not None
    assert (stop.reason, stop.at) == ("user", 5.0)
