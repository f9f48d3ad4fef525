"""The parts of a request: how a gang is placed, saved and recovered, and how much work it has.

All durations are seconds (float) once the part is made, whatever the author
wrote: seconds, a ``timedelta``, or text such as ``"90m"``, ``"1h30m"``, ``"2d"``.
A dict is taken wherever a part is. Constructors raise
:class:`~airflow_gpu.gang.units.GangError`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import ValidationInfo, model_validator

from airflow_gpu.gang._fields import (
    AUTO,
    AtLeastOne,
    Count,
    Duration,
    Interval,
    NodeFolder,
    Number,
    Seconds,
    SomeSeconds,
    Text,
    Whole,
)
from airflow_gpu.gang._model import Part, mode_of
from airflow_gpu.gang.units import GangError, seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


LOCAL_INTERVAL = 120.0


class Work(Part):
    """How much there is to do, so that the planner can compare cost to finish instead of rates.

    :param hours: wall-clock hours that a gang of this shape needs when all its accelerators are
        ``accelerator``. More than 0.
    :param accelerator: the reference. None (default): the gang's own ``accelerator``, or the planner's
        reference when that is open too.

    >>> Work(hours=40, accelerator="H100").hours
    40.0
    """

    hours: Number
    accelerator: Text | None = None

    if TYPE_CHECKING:

        def __init__(self, *, hours: float | str, accelerator: str | None = None) -> None: ...


class Placement(Part):
    """How long the gang may wait, and by when it must be done. Every wait is bounded.

    :param max_wait: longest wait in a queue, for each attempt. Default 7 days; there is no "unlimited". Then
        it goes to a target of the list where it has not waited yet; after the last one it fails.
    :param move_after: with several targets: after waiting so long in the queue of one, it moves, with its
        checkpoint, to another that can start it at once. A target that is drained or sold out is left at
        once. Default 10 min. None: it stays where it waits.
    :param start_timeout: longest time from leaving the queue to the first life, while nodes boot and
        images are pulled. Default 30 min.
    :param deadline: the run ends this long after its first start at the latest, with all its attempts
        and waits. None (default): no deadline.

    >>> Placement(max_wait="12h", deadline="2d").deadline
    172800.0
    """

    max_wait: SomeSeconds = 7 * 86400.0
    move_after: Seconds | None = 600.0
    start_timeout: SomeSeconds = 30 * 60.0
    deadline: SomeSeconds | None = None

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            max_wait: Duration = ...,
            move_after: Duration | None = ...,
            start_timeout: Duration = ...,
            deadline: Duration | None = None,
        ) -> None: ...


class Checkpointing(Part):
    """When the gang saves, and what is kept.

    :param interval: time between saves. ``"auto"`` (default): 5 min for the first, then by Young and Daly, from
        what a save costs the program and how often the gang was interrupted so far. None: only when the
        platform gives notice.
    :param keep: how many complete checkpoints are kept, the newest; at least 1. Default 3.
    :param every: beside these, each complete checkpoint whose step is a multiple of this is kept; at least 1.
        None (default): none. What is kept so is never removed by itself.
    :param local: folder on each node (a disk of its own, or ``/dev/shm``) for quick copies between the saves that
        go to the channel. A gang that comes back to the same nodes starts from the copies when they are
        further and whole on every node. None (default): every save goes to the channel.
    :param local_interval: time between saves of either kind while there is a ``local``; less than ``interval``.
        Default 2 min.
    :param on_change: a retry or a cleared task whose program, arguments or environment differ from those that
        wrote the checkpoint begins again, and says so (``"fresh"``, default), or goes on from it
        (``"resume"``).
    :param continue_previous: a run that has no checkpoint yet begins from the newest one of the DAG run
        before it, by logical date, of the same task and mapped index. Default False: each date is its own.

    >>> Checkpointing(interval="10m").interval
    600.0
    """

    NEVER_EMPTY: ClassVar[frozenset[str]] = frozenset({"local"})

    interval: Interval | None = AUTO
    keep: AtLeastOne = 3
    every: AtLeastOne | None = None
    local: NodeFolder | None = None
    local_interval: SomeSeconds = LOCAL_INTERVAL
    on_change: Literal["fresh", "resume"] = "fresh"
    continue_previous: bool = False

    @model_validator(mode="after")
    def _copies_make_sense(self, info: ValidationInfo) -> Self:
        problem = "" if mode_of(info) == "recorded" else self._wrong_copies()  # what runs already goes on
        if problem:
            raise GangError("Checkpointing", problem)
        return self

    def _wrong_copies(self) -> str:
        quick, durable = self.local_interval, self.interval
        if self.local is None:
            needed = 'local_interval needs local, a folder of each node, such as local="/local/ckpt"'
            return needed if quick != LOCAL_INTERVAL else ""
        if not (isinstance(quick, float) and isinstance(durable, float)) or quick < durable:
            return ""  # "auto", None, or a template
        default = ", its default" if quick == LOCAL_INTERVAL else ""
        return (
            f"local_interval must be less than interval ({durable:g} s), or every save would go to the channel, "
            f"got {quick:g} s{default}"
        )

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            interval: Duration | None = AUTO,
            keep: Whole = 3,
            every: Whole | None = None,
            local: str | None = None,
            local_interval: Duration = 120.0,
            on_change: str = "fresh",
            continue_previous: bool | str = False,
        ) -> None: ...


class Recovery(Part):
    """How often a gang comes back, by cause. None of this spends an Airflow retry.

    :param preemptions: how many preemptions it comes back from. None (default): any number, within the
        deadline.
    :param node_failures: the same for lost nodes, gangs that did not become whole, and jobs that vanished.
        Default 3; None: any number.
    :param out_of_memory: the same for ends by out of memory. Default 0.
    :param application: the same for errors of the program. Default 0: it fails at once, and then Airflow's
        ``retries`` apply.
    :param mode: ``"infra"`` (default): as the budgets say; ``"any"``: a cause whose budget is 0 draws on
        ``node_failures``; ``"never"``: every end is the end.
    :param on_clear: a cleared task goes on from its newest checkpoint (``"resume"``, default) or starts
        again (``"fresh"``).
    :param exclude_blamed_nodes: leave a node that failed out of the next attempt, where the target can.
        Default True.
    :param fruitless: after so many starts in a row that got no further than the same checkpoint, it is
        given up; at least 1. Default 10.
    :param unknown_limit: how long the target may be unreadable. Default 1 h.
    :param unreachable: what then becomes of a gang that may still run there. ``"wait"`` (default): the try
        fails, nothing is started in its place, and a retry looks for the same job. ``"move"``: the gang is
        told to end through its run directory, where it can compute no further life; when its ranks have
        said that they ended, or 5 min after their grace, it goes on from its checkpoint on another target.
    :param backoff: wait before the next attempt, doubled after each fruitless one. Default 10 s.
    :param backoff_max: longest such wait, at least ``backoff``. Default 10 min.

    >>> Recovery(node_failures=5, backoff="30s").backoff
    30.0
    """

    preemptions: Count | None = None
    node_failures: Count | None = 3
    out_of_memory: Count = 0
    application: Count = 0
    mode: Literal["infra", "any", "never"] = "infra"
    on_clear: Literal["resume", "fresh"] = "resume"
    exclude_blamed_nodes: bool = True
    fruitless: AtLeastOne = 10
    unknown_limit: SomeSeconds = 3600.0
    unreachable: Literal["wait", "move"] = "wait"
    backoff: Seconds = 10.0
    backoff_max: Seconds = 600.0

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            preemptions: Whole | None = None,
            node_failures: Whole | None = 3,
            out_of_memory: Whole = 0,
            application: Whole = 0,
            mode: str = "infra",
            on_clear: str = "resume",
            exclude_blamed_nodes: bool | str = True,
            fruitless: Whole = 10,
            unknown_limit: Duration = ...,
            unreachable: str = "wait",
            backoff: Duration = ...,
            backoff_max: Duration = ...,
        ) -> None: ...

    @classmethod
    def _across(cls, data: Mapping[str, Any], wrong: set[str]) -> Iterator[str]:
        if wrong & {"backoff", "backoff_max"}:
            return
        try:
            first = seconds(data.get("backoff", cls.model_fields["backoff"].default))
            most = seconds(data.get("backoff_max", cls.model_fields["backoff_max"].default))
        except ValueError:  # a template
            return
        if first > most:
            yield f"backoff_max must be at least backoff ({first:g} s), got {most:g} s"
