"""The Target protocol: how a gang is submitted, observed, stopped and priced in one place.

Purpose: the small interface between the driver and a system (a Slurm
partition, a Kubernetes queue, this machine). A new system is one folder with
one class that has these methods; what else it can do it says in
:class:`Capabilities`, and planners ask for a capability, never for a system's
name.

What it does not do: decide. A target maps native states with one closed table
and reports; what follows is the business of
:func:`airflow_gpu.gang.lifecycle.step`. A target never imports Airflow: its
hook gives it ready credentials.

Known limits: ``observe`` is a bulk query; a target that can stream gives the
same sightings more cheaply later, through a capability of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from airflow_gpu.gang.run import State
from airflow_gpu.gang.spec import Gang


class TargetError(Exception):
    """The target could not be asked or did not answer properly. Says nothing about the gang."""


class NotConfigured(TargetError):
    """A connection or a secret that the request names is not there: waiting would not help. The message names it."""


class Rejected(TargetError):
    """The target answered that it will never run this gang as asked. The message says why and what would do."""


class NameTaken(TargetError):
    """A job of that name exists and is not ours to adopt: another incarnation, another digest, or being deleted."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A target + accelerator + provisioning + price + capacity + expected wait.

    ``price_per_node_hour`` is in US dollars; 0 is fine when ``source`` says
    that the owner declared it. ``free_nodes`` are nodes that could take this
    gang now, None when the target cannot tell.
    """

    target: str
    accelerator: str | None
    provisioning: str  # owned, reserved, on_demand, spot
    price_per_node_hour: float
    source: str  # where price and capacity come from
    at: float  # when they were read, seconds since the epoch
    free_nodes: int | None = None
    total_nodes: int | None = None
    expected_wait: float | None = None  # seconds
    reason: str = ""  # why the gang can never run here; empty when it can
    blocked: str = ""  # why nothing of the kind starts here for now (drained, sold out); empty when it may
    pool: str = ""  # the target's own name of what is offered (a QOS, a node pool); comes back in Job.pool


PAYLOAD = "<payload>"
"""In a job whose files the target carries: the folder in which it will have put them."""


@dataclass(frozen=True, slots=True)
class Job:
    """One attempt, as it is given to a target. Everything a target needs and nothing else.

    ``name`` is a DNS label of at most 63 characters and the same for the same
    attempt for ever: submitting is create-if-absent by it. ``labels`` go onto
    the job (labels, comment, tags): installation, incarnation, attempt, key,
    digest. ``argv`` is run once on each node, from any directory: the runtime
    with its payload. What differs between the nodes the target gives them by
    environment (``docs/run-directory.md``, "The payload").

    Where the channel is a folder that the nodes see, the payload lies there and
    ``files`` is empty. Else the target carries the payload: it puts ``files`` (name to
    content, a few hundred KB) into a folder of its own on every node before ``argv`` is
    run, for the job's user alone, keeps it for as long as the job may start again, and
    removes it with the job. ``payload`` and ``argv`` have :data:`PAYLOAD` in place of that
    folder; :meth:`placed` answers the job with it filled in.
    """

    name: str
    labels: Mapping[str, str]
    attempt: int
    digest: str
    nodes: int
    gpus_per_node: int
    ranks_per_node: int
    payload: (
        str  # the folder payload/<attempt> as the nodes see it; PAYLOAD where the target carries ``files``
    )
    channel: str  # path (or URI) of the channel half of the run directory
    time_limit: float  # seconds, of one life, without the time in a queue
    argv: tuple[str, ...]
    stop_grace: float = 30.0  # seconds; the longest grace that a cancel may ask for
    pool: str = ""  # of the chosen offer
    team: str | None = None
    topology: str | None = None
    accelerator: str | None = None
    cpus: float | None = None  # per node
    memory: int | None = None  # bytes per node
    image: str | None = None
    priority: int = 0
    env: Mapping[str, str] = field(
        default_factory=dict
    )  # no secrets; already in job.json, here for targets that show it
    secrets: Mapping[str, str] = field(
        default_factory=dict, repr=False
    )  # by the target's one named route, never shown
    exclude_hosts: tuple[str, ...] = ()  # a wish: left out as long as the gang fits without them
    files: Mapping[str, bytes] = field(
        default_factory=dict, repr=False
    )  # of the payload, by name, to be carried

    def placed(self, folder: str) -> Job:
        """The job with its carried files in ``folder`` of its nodes: payload and argv point there."""
        argv = tuple(part.replace(PAYLOAD, folder) for part in self.argv)
        return replace(self, payload=folder, argv=argv)


@dataclass(frozen=True, slots=True)
class JobRef:
    """What is needed to find a job again, also after a crash: its name, and its platform id where known."""

    name: str
    labels: Mapping[str, str]
    attempt: int
    digest: str
    platform_id: str | None = None
    channel: str = ""  # URI of the channel half, as journalled


@dataclass(frozen=True, slots=True)
class Sighting:
    """One job as the target shows it now.

    ``state`` comes from the target's closed table; ``native`` is the system's
    own word. A state for which ``state.ended`` holds may be reported only when
    no rank runs any more: while a system is still stopping them (COMPLETING, a
    pod that terminates) it is ``RUNNING`` with ``ending`` set to what it is
    ending as (``UNKNOWN`` where the system does not say). A gang of which only
    some ranks are up or over is ``RUNNING`` too. For ``NODE_LOST`` the promise
    is weaker: nothing runs that the system could still end.

    ``GONE`` means that everyone who could know has answered that there is no
    such object and nothing of it runs. Where several objects have the name (a
    system without create-if-absent), the one that lives is reported, else the
    oldest. ``restart`` stays 0 where the system does not count; the runtime is
    told ``GANG_RESTART=auto`` then.

    ``hosts`` are the nodes' names by node rank, ``""`` where not known;
    ``blamed_hosts`` are those to keep away from where nodes can be excluded.
    """

    state: State
    native: str
    reason: str = ""
    platform_id: str = ""
    restart: int = 0  # how often the platform itself started it again
    since: float | None = None  # of this state, seconds since the epoch, by the platform's clock
    ending: State | None = None
    hosts: tuple[str, ...] = ()
    blamed_hosts: tuple[str, ...] = ()
    exit_code: int | None = (
        None  # of the first node that ended badly, once it has ended and where the system says
    )


@dataclass(frozen=True, slots=True)
class Listed:
    """A job as the target itself lists it: who it is by its own labels, and how it stands.

    ``ref.channel`` is the channel half of its run directory as the target was
    given it (as the ranks see it), empty where it does not keep that.
    """

    ref: JobRef
    sighting: Sighting
    submitted_at: float | None = None  # seconds since the epoch, by the platform's clock


@dataclass(frozen=True, slots=True)
class LogChunk:
    """A piece of output. ``next`` is what to pass as ``since`` for what follows."""

    text: str
    next: str


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a target can do beyond the core. Planners and tests ask for these."""

    notices: bool = False  # a preemption comes with a warning that reaches the agents
    requeues: bool = False  # the platform starts a preempted gang again by itself, also one that left with 75
    grace: float | None = (
        None  # seconds from that warning to the kill, where the platform has a limit of its own
    )
    excludes_hosts: bool = False
    shared_path: bool = False  # the ranks see the channel as a folder
    priorities: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Target(Protocol):
    """One place that can run a gang. All methods may raise TargetError, and may be called by two drivers at once."""

    name: str
    capabilities: Capabilities
    job_store: Mapping[str, Any]
    """What jobs are told of the store at ``job_channel``: obstore's options without a secret, as strings and
    booleans. Empty for a folder. Who makes the target fills it in."""

    @property
    def channel(self) -> str:
        """Root URI of what both Airflow and the ranks reach, e.g. ``file:///shared/gangs``."""
        ...

    @property
    def job_channel(self) -> str:
        """The same place as the ranks see it: a folder, or a URI."""
        ...

    @property
    def python(self) -> str:
        """The interpreter with which a node starts the runtime, and a function its ranks."""
        ...

    async def submit(self, job: Job) -> str:
        """Create the job if its name is free, else adopt the one that has it; answers the platform's id.

        Adopting needs the same incarnation and digest in its labels and no
        deletion under way, else NameTaken. Rejected when it can never run.
        Submitting twice is safe; a reply that got lost is found by name.
        """
        ...

    async def observe(self, jobs: Collection[JobRef]) -> Mapping[str, Sighting]:
        """One sighting for each of the jobs, by name; one query for all of them, whatever their number."""
        ...

    async def cancel(self, job: JobRef, *, grace: float, since: float) -> None:
        """Give notice, and end what still runs ``grace`` seconds later. Returns once that is on its way.

        ``grace`` is at most the job's ``stop_grace``; a system that has one fixed
        grace may use that. ``since`` is when the end was first asked for, so that
        every driver asks for the same moment: calling it again never shortens
        the grace. No error when it is over or gone. The end is seen by ``observe``.
        """
        ...

    async def logs(self, job: JobRef, node: int, since: str = "") -> LogChunk:
        """The platform's own output of one node since a position, at most 64 KiB: what the agent said, and why it did not start.

        The ranks' output is in the run directory.
        """
        ...

    async def inventory(self, labels: Mapping[str, str]) -> list[Listed]:
        """Every job that the target knows, living or over, whose labels have all these values.

        It needs no journal: so a job is found whose run directory is gone.
        ``airflow-gpu/installation`` is always among ``labels``, so jobs of other
        installations never come up.
        """
        ...

    async def forget(self, job: JobRef) -> None:
        """The attempt is over, and journalled so: remove what is of no use any more (objects, secrets). May be called again."""
        ...

    async def offers(self, gang: Gang) -> list[Offer]:
        """What this target could give the gang, also when it never can (then with a reason)."""
        ...

    async def close(self) -> None:
        """Let go of connections. The target may be used again afterwards."""
        ...
