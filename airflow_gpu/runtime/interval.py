"""How often to save, when nobody has said: from what a save costs and how often the gang is interrupted.

Purpose: Daly's higher-order estimate of the interval with the least time lost to
saving and to work that is done again (J. T. Daly, "A higher order estimate of
the optimum checkpoint interval for restart dumps", Future Generation Computer
Systems 22, 2006, equation 37; its first term is Young's of 1974).

Pure: no I/O, no clock. All times in seconds.

Example::

    interval(cost=30.0, mtbf=4 * 3600.0)   # about 15 min
"""

from __future__ import annotations

import math
from typing import Sequence

FIRST = 300.0
"""Until the first save has been measured."""

LEAST = 10.0
"""Not more often: committing has a cost that the program does not feel."""

MOST = 3600.0
"""Not less often, however dear a save is: people want to see one."""

SHARE = 0.1
"""Of the time a gang may spend on saving, whatever the estimate says."""


NODE_MTBF = 264 * 86400.0
"""Of one node that nobody takes away. Meta counted 419 unexpected interruptions of 2,048 nodes of 8 H100 in 54 days
(The Llama 3 Herd of Models, 2024, section 3.3.4): one in 264 node-days."""

SPOT_MTBF = 6 * 3600.0
"""Of a gang on capacity that the platform may take back, before anything was seen. A guess on the safe side; what
happens to the gang soon outweighs it."""


def expected_mtbf(nodes: int, provisioning: str) -> float:
    """Mean time between interruptions of a gang of which nothing was seen yet."""
    if provisioning == "spot":
        return SPOT_MTBF
    return NODE_MTBF / max(1, nodes)


def observed_mtbf(expected: float, uptimes: Sequence[float]) -> float:
    """The same once lives of it have ended, after so many seconds each: as if the expected one had been seen once."""
    return (expected + sum(uptimes)) / (1 + len(uptimes))


def daly(cost: float, mtbf: float) -> float:
    """The interval between the end of one save and the beginning of the next.

    ``cost``: how long a save holds the program up; ``mtbf``: mean time between interruptions of the whole gang.
    """
    if cost >= 2 * mtbf:
        return mtbf
    ratio = cost / (2 * mtbf)
    return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


def interval(cost: float, mtbf: float) -> float:
    """Daly's interval within sensible bounds."""
    least = max(LEAST, cost * (1 - SHARE) / SHARE)
    return max(least, min(MOST, daly(max(cost, 0.0), mtbf)))
