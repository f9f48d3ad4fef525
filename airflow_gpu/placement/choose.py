"""Offers -> decision: which target the next attempt goes to, and why not the others.

Purpose: the placement record that people read. Feasibility first, then the
order in which the author listed the targets, with one that could start the
gang at once before one that would make it wait, and one that has let this run
down before after the others.

What it does not do: I/O. Offers are given, with their source and age.

Limits: price takes no part yet beyond being recorded; targets that are listed
are taken as equally good.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from airflow_gpu.gang.spec import Gang
from airflow_gpu.placement.memory import Memory
from airflow_gpu.targets.base import Offer

NOTHING = Memory({}, {})


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen offer (None: the gang cannot run anywhere), and one reason for every one not chosen."""

    chosen: Offer | None
    others: tuple[tuple[Offer, str], ...]

    def record(self) -> dict[str, Any]:
        """The decision as JSON, for the journal, XCom and the log."""
        return {
            "chosen": None if self.chosen is None else asdict(self.chosen),
            "others": [{**asdict(offer), "reason": reason} for offer, reason in self.others],
        }

    def explain(self) -> str:
        """One line a target that was not chosen."""
        return "; ".join(f"{offer.target}: {reason}" for offer, reason in self.others)


def choose(
    gang: Gang,
    offers: Sequence[Offer],
    errors: Mapping[str, str] | None = None,
    memory: Memory = NOTHING,
) -> Decision:
    """Choose among offers, in the order of ``gang.targets``.

    :param errors: targets that could not be asked, with the reason.
    :param memory: what the run remembers of its targets.
    """
    order = {name: i for i, name in enumerate(gang.targets)}
    asked = [replace(offer, reason=offer.reason or memory.closed.get(offer.target, "")) for offer in offers]
    feasible = [offer for offer in asked if not offer.reason]
    # One that will not start anything for now comes after all that might, then: who can start it at once.
    feasible.sort(
        key=lambda o: (
            bool(o.blocked),
            o.target in memory.avoided,
            not startable(o, gang),
            order.get(o.target, len(order)),
        )
    )
    chosen = feasible[0] if feasible else None
    others = [(offer, _why_not(offer, chosen, gang, memory)) for offer in feasible[1:] if chosen]
    others += [(offer, offer.reason) for offer in asked if offer.reason]
    for name, error in (errors or {}).items():
        others.append((Offer(name, None, "unknown", 0.0, "none", 0.0, reason=error), error))
    return Decision(chosen, tuple(others))


def startable(offer: Offer, gang: Gang) -> bool:
    """The target could start the gang at once, or cannot tell."""
    return (
        not offer.reason
        and not offer.blocked
        and (offer.free_nodes is None or offer.free_nodes >= gang.nodes)
    )


def _why_not(offer: Offer, chosen: Offer, gang: Gang, memory: Memory) -> str:
    if offer.blocked:
        return offer.blocked
    if offer.target in memory.avoided and chosen.target not in memory.avoided:
        return memory.avoided[offer.target]
    if startable(chosen, gang) and not startable(offer, gang):
        return "would have to wait"
    return "listed later"
