"""One row of the doctor's table, and how far two clocks may be apart.

Purpose: what the checks from Airflow's side (:mod:`.doctor`) and those from
inside of a job (:mod:`.inside`) have in common. They check nothing here.
"""

from __future__ import annotations

from dataclasses import dataclass

OK, WARN, FAIL, LEFT_OUT = "ok", "warn", "fail", "-"

SKEW = 30.0
"""Seconds by which clocks may differ before it is worth a warning: limits on waiting are compared across them."""


@dataclass(frozen=True, slots=True)
class Check:
    """One row: what was checked, where, how it went, what was found, and what to do."""

    where: str
    check: str
    result: str
    found: str
    todo: str = ""


def off(found: float, before: float, after: float) -> float:
    """How far a clock is off that said ``found`` at a moment between the two. A second is rounding."""
    if before - 1 <= found <= after + 1:
        return 0.0
    return found - after if found > after else found - before


def clock(where: str, skew: float, whose: str) -> Check:
    if abs(skew) <= SKEW:
        return Check(where, "clock", OK, "as here" if not skew else f"{skew:+.0f} s")
    return Check(
        where, "clock", WARN, f"{skew:+.0f} s", f"set the clocks of {whose} and of this machine by NTP"
    )
