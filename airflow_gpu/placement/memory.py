"""What a run remembers of the targets it has been to, from its journal alone.

Purpose: a target that kept the gang waiting, refused it, never started it or
went out of sight is not the first choice again for a while; one where this
owner has waited as long as it may, or that refused it, is not asked again.

What it does not do: I/O, or remember anything of other runs. Offers say what
holds for everybody: drained, sold out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from airflow_gpu.gang.budgets import CLOSED
from airflow_gpu.gang.run import ELSEWHERE, Run

AVOID_FOR = 3600.0
"""Seconds for which a target that let the gang down comes after the others."""


@dataclass(frozen=True, slots=True)
class Memory:
    """``closed``: not to be asked again, with the reason; ``avoided``: only where nothing else will do."""

    closed: Mapping[str, str]
    avoided: Mapping[str, str]


def remember(run: Run, epoch: int, now: float) -> Memory:
    """What the attempts so far say of their targets."""
    closed, avoided = {}, {}
    mine = {attempt.number for attempt in run.of_epoch(epoch)}
    for attempt in run.attempts:
        outcome = attempt.outcome
        if outcome is None:
            continue
        why = f"attempt {attempt.number} ended there as {outcome.cause}"
        if attempt.number in mine and outcome.cause in CLOSED:
            closed[attempt.target] = why
        if outcome.cause in ELSEWHERE and now - outcome.at < AVOID_FOR:
            avoided[attempt.target] = why
        elif outcome.life:
            avoided.pop(attempt.target, None)  # it has started the gang since
    return Memory(closed, avoided)
