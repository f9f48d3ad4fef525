"""Which target comes first, and what is said of the others."""

from __future__ import annotations

from typing import Any

from airflow_gpu.gang.run import Attempt, Cause, Outcome, Owner, Run
from airflow_gpu.gang.spec import Gang
from airflow_gpu.placement.choose import choose
from airflow_gpu.placement.memory import AVOID_FOR, remember
from airflow_gpu.targets.base import Offer

GANG = Gang(command="true", nodes=2, targets=["a", "b", "c"])
OWNER = Owner(epoch=1, ti_id="x", try_number=1, at=0.0)


def offer(target: str, free: int | None = 2, **more: Any) -> Offer:
    return Offer(target, None, "owned", 0.0, "declared", 0.0, free_nodes=free, **more)


def been(*ends: tuple[str, Cause], life: int | None = None, epoch: int = 1) -> Run:
    attempts = tuple(
        Attempt(
            number=i,
            name=f"g-{i}",
            target=target,
            at=0.0,
            epoch=epoch,
            outcome=Outcome(cause=cause, at=float(i), life=life, epoch=epoch),
        )
        for i, (target, cause) in enumerate(ends, 1)
    )
    return Run(owners=(OWNER,), attempts=attempts)


def first(*offers: Offer, run: Run | None = None, now: float = 100.0, epoch: int = 1) -> str | None:
    decision = choose(GANG, offers, None, remember(run or Run(owners=(OWNER,)), epoch, now))
    assert all(reason for _, reason in decision.others), "one reason for every one not chosen"
    assert len(decision.others) == len(offers) - (decision.chosen is not None)
    return decision.chosen.target if decision.chosen else None


def test_in_the_order_of_the_list_and_free_before_full() -> None:
    assert first(offer("c"), offer("b"), offer("a")) == "a"
    assert first(offer("a", 1), offer("b")) == "b"
    assert first(offer("a", 0), offer("b", None)) == "b"  # it cannot tell: perhaps at once
    assert first(offer("a", 0), offer("b", 0)) == "a"


def test_drained_comes_last_and_never_is_out() -> None:
    assert first(offer("a", 0, blocked="drained"), offer("b", 0)) == "b"
    assert first(offer("a", 0, blocked="drained")) == "a"
    assert first(offer("a", reason="no such accelerator"), offer("b", 0, blocked="drained")) == "b"
    assert first(offer("a", reason="no such accelerator")) is None


def test_a_bad_one_is_remembered_for_a_while() -> None:
    run = been(("a", Cause.NOT_STARTED))
    assert first(offer("a"), offer("b", 0), run=run) == "b"
    assert first(offer("a"), run=run) == "a"  # nothing else will do
    assert first(offer("a"), offer("b", 0), run=run, now=1.0 + AVOID_FOR) == "a"


def test_one_that_has_started_the_gang_since_is_as_good_as_any() -> None:
    run = been(("a", Cause.MOVED), ("b", Cause.PREEMPTED))
    assert first(offer("a"), offer("b"), run=run) == "b"
    again = Run(owners=(OWNER,), attempts=(*run.attempts, been(("a", Cause.PREEMPTED), life=3).attempts[0]))
    assert first(offer("a"), offer("b"), run=again) == "a"


def test_where_it_has_waited_too_long_it_is_not_asked_again_by_this_owner() -> None:
    run = been(("a", Cause.QUEUED_TOO_LONG), ("b", Cause.REJECTED))
    assert first(offer("a"), offer("b"), offer("c", 0), run=run) == "c"
    assert first(offer("a"), offer("b"), run=run) is None
    assert first(offer("a"), offer("b"), run=run, epoch=2, now=1e6) == "a"  # a later try asks anew
