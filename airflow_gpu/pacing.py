"""When which gang's files are read: a budget of requests for the run directories of one process.

Purpose: a target is asked for all its gangs at once, but each run directory has
to be read by itself. With a few gangs that happens every poll interval, so that
a task log is live; with thousands the turns come further apart, so that a store
gets no more than ``REQUESTS_A_SECOND`` from one triggerer, however many gangs
it watches.

=========================== ============= ===============
with a poll interval of 5 s each running  each in a queue
=========================== ============= ===============
10 or 100 gangs             5 s           5 s
1,000 gangs                 40 s          5 s
5,000 gangs                 200 s         25 s
=========================== ============= ===============

What it does not do: delay what is urgent. A gang of which the target shows
something new, or whose limit has come, is looked at whatever the budget says.

Limits: turns are given by what a look is expected to cost, not by what it did.
The first look at each gang, and those at changes, come on top; there is one of
them for each event, never one for each round.

Example::

    turns = Turns(pace, every=5.0)
    await sleep(turns.left(LOOK))
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

REQUESTS_A_SECOND = 200.0
"""What all turns of one process together may ask of the stores."""

LOOK = 8
"""Requests of one look at a running gang: journal, lives, failure, notice, progress, nodes, and twice the log."""

GLANCE = 1
"""Requests while a gang waits in its platform's queue: its journal, where somebody may have asked for its end."""

JITTER = 0.2
"""Share of the interval by which a turn may come later, so that gangs which began together do not stay together."""


class Pace:
    """Hands out turns to the gangs of one process.

    Each turn is put behind those that were given before it, so the interval
    grows with what there is to read, and shrinks again by itself.
    """

    def __init__(self, rate: float = REQUESTS_A_SECOND, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate = rate
        self.clock = clock
        self._free = 0.0  # when all turns given so far have been used

    def turn(self, every: float, cost: float) -> float:
        """The moment of a turn that costs so many requests: ``every`` seconds from now, later when there are many."""
        now = self.clock()
        begin = max(self._free, now)
        self._free = begin + cost / self.rate
        return max(now + every * (1 + random.random() * JITTER), begin)


class Turns:
    """The turns of one gang: it has one at a time, so a gang that changes often takes nothing from others."""

    def __init__(self, pace: Pace, every: float) -> None:
        self._pace = pace
        self._every = every
        self._at = 0.0

    def left(self, cost: float) -> float:
        """Seconds until the next turn. One that was given stays until it has come."""
        if self._at <= self._pace.clock():
            self._at = self._pace.turn(self._every, cost)
        return max(0.0, self._at - self._pace.clock())
