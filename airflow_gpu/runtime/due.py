"""When to save: the same answer on every rank, whatever their relative speed.

Purpose: rank 0 decides, step by step, and publishes a horizon: "every step up
to here is decided, and the saves among them are these". What is published is
never changed. A rank that asks about a decided step answers by itself; for one
beyond the horizon it waits. Rank 0 looks about one second ahead, so messages
are few and a notice is acted on within seconds.

Decisions are about step numbers and questions about the steps a program
happens to ask for: a save announced for step s is due at the first step asked
for that is s or later. Since all ranks ask for the same steps they agree, also
when they ask only every hundredth.

Pure: no I/O, no clock. Times are seconds of any monotonic clock.

Example::

    decider = Decider(interval=300.0, now=0.0)
    due, news = decider.ask(step=1, now=0.5, noticed=False)   # news: what to publish, or None
    follower = Follower()
    follower.learn(news.horizon, news.saves)
    follower.ask(1) == due
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import List, Optional, Sequence, Tuple

from airflow_gpu.runtime.interval import interval as best_interval

AHEAD_SECONDS = 1.0
"""How far rank 0 decides ahead, in time."""

MOST_AHEAD = 1000
"""The same in steps, at most. At least one."""

SMOOTHING = 0.2
"""Weight of the newest step in the mean duration of a step."""


@dataclass(frozen=True)
class News:
    """Steps up to ``horizon`` are decided; ``saves`` are those newly announced, in order."""

    horizon: int
    saves: Tuple[int, ...]


class Follower:
    """What a rank knows of the decisions, and its answers."""

    def __init__(self) -> None:
        self.horizon: Optional[int] = None
        self._saves: List[int] = []
        self._asked: Optional[int] = None
        self._answer = False

    def learn(self, horizon: Optional[int], saves: Sequence[int]) -> None:
        """Take in what rank 0 has published. Doing so twice changes nothing."""
        for save in saves:
            at = bisect.bisect_left(self._saves, save)
            if at == len(self._saves) or self._saves[at] != save:
                self._saves.insert(at, save)
        if horizon is not None and (self.horizon is None or horizon > self.horizon):
            self.horizon = horizon

    def knows(self, step: int) -> bool:
        """The answer for this step is decided."""
        if self._asked is not None and step <= self._asked:
            return True
        return self.horizon is not None and step <= self.horizon

    def ask(self, step: int) -> bool:
        """Is a save due at this step? Needs :meth:`knows`. Asking again for the same step gives the same answer."""
        if self._asked is not None and step <= self._asked:
            return self._answer if step == self._asked else False
        self._answer = self.pending(step)
        self._asked = step
        return self._answer

    def pending(self, step: Optional[int] = None) -> bool:
        """A save is announced that no step asked for has reached; up to ``step`` if given."""
        first = 0 if self._asked is None else bisect.bisect_right(self._saves, self._asked)
        return first < len(self._saves) and (step is None or self._saves[first] <= step)


class Decider:
    """Rank 0's side. ``interval``: seconds between saves; None: only on a notice.

    With ``mtbf`` (mean seconds between interruptions of the gang) the interval
    is only the first one: later ones follow from what saves cost.
    """

    def __init__(
        self,
        interval: Optional[float],
        now: float,
        mtbf: Optional[float] = None,
        ahead: float = AHEAD_SECONDS,
        most: int = MOST_AHEAD,
    ) -> None:
        self.interval = interval
        self._mtbf = mtbf
        self._cost: Optional[float] = None
        self._saved_at = now
        self._ahead = ahead
        self._most = most
        self._own = Follower()
        self._step_seconds: Optional[float] = None
        self._asked_step: Optional[int] = None
        self._asked_at = now

    def ask(self, step: int, now: float, noticed: bool) -> Tuple[bool, Optional[News]]:
        """Is a save due at this step, and what is to be published (before the answer is acted on)."""
        if self._asked_step is not None and step <= self._asked_step:
            return self._own.ask(step), None
        self._measure(step, now)
        horizon = step - 1 if self._own.horizon is None else self._own.horizon
        saves: Tuple[int, ...] = ()
        if not self._own.pending() and (noticed or self._overdue(now)):
            # The first step that is still open: what was published stays as it is.
            horizon = max(horizon + 1, step)
            saves = (horizon,)
            self._saved_at = now
        look = self._look_ahead(now)
        if step + max(1, look // 2) > horizon or step > horizon:
            horizon = max(horizon, step + look)
        news = None
        if saves or self._own.horizon is None or horizon > self._own.horizon:
            news = News(horizon, saves)
            self._own.learn(horizon, saves)
        return self._own.ask(step), news

    def saved(self, now: float, cost: float) -> None:
        """The program goes on after a save that held it up for ``cost`` seconds."""
        self._saved_at = now
        self._asked_at = now
        if self._mtbf is not None:
            self._cost = cost if self._cost is None else self._cost + SMOOTHING * (cost - self._cost)
            self.interval = best_interval(self._cost, self._mtbf)

    def _overdue(self, now: float) -> bool:
        return self.interval is not None and now - self._saved_at >= self.interval

    def _look_ahead(self, now: float) -> int:
        seconds = self._ahead
        if self.interval is not None:  # not beyond the moment at which a save may be wanted
            seconds = min(seconds, self.interval - (now - self._saved_at))
        if seconds <= 0:
            return 0
        if self._step_seconds is None:
            return 1
        return max(1, min(self._most, int(seconds / max(self._step_seconds, 1e-9))))

    def _measure(self, step: int, now: float) -> None:
        if self._asked_step is not None:
            seconds = max(0.0, now - self._asked_at) / (step - self._asked_step)
            if self._step_seconds is None:
                self._step_seconds = seconds
            else:
                self._step_seconds += SMOOTHING * (seconds - self._step_seconds)
        self._asked_step, self._asked_at = step, now
