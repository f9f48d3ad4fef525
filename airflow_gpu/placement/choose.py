"""Offers -> decision: which target the next attempt goes to, and why not the others.

Purpose: the placement record that people read. Feasibility first, then the
order in which the author listed the targets, with one that could start the
gang at once before one that would make it wait.

What it does not do: I/O. Offers are given, with their source and age.

Limits: price takes no part yet beyond being recorded; targets that are listed
are taken as equally good.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from airflow_gpu.gang.spec import Gang
from airflow_gpu.targets.base import Offer


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


def choose(gang: Gang, offers: Sequence[Offer], errors: Mapping[str, str] | None = None) -> Decision:
    """Choose among offers, in the order of ``gang.targets``.

    :param errors: targets that could not be asked, with the reason.
    """
    order = {name: i for i, name in enumerate(gang.targets)}
    feasible = [offer for offer in offers if not offer.reason]
    feasible.sort(key=lambda o: (not _free(o, gang), order.get(o.target, len(order))))
    chosen = feasible[0] if feasible else None
    others = [
        (
            offer,
            "would have to wait"
            if chosen and _free(chosen, gang) and not _free(offer, gang)
            else "listed later",
        )
        for offer in feasible[1:]
    ]
    others += [(offer, offer.reason) for offer in offers if offer.reason]
    for name, error in (errors or {}).items():
        others.append((Offer(name, None, "unknown", 0.0, "none", 0.0, reason=error), error))
    return Decision(chosen, tuple(others))


def _free(offer: Offer, gang: Gang) -> bool:
    return offer.free_nodes is None or offer.free_nodes >= gang.nodes
