"""A Slurm cluster as a place that can run gangs.

Purpose: the methods of :class:`~airflow_gpu.targets.base.Target` on top of one way of access.
A gang is one batch job with one agent on each node; Slurm places and starts it whole.

How a job is found: by its number where it is known, else by its name, which is the same for the
same attempt for ever; whose it is says its comment. Slurm has no create-if-absent: a submit
looks first. Should two drivers have submitted one attempt in the same second, the second job waits
for the end of the first (``--dependency=singleton``), can claim no life, and goes when the
attempt is over; what happened to it then is nobody's business.

What it does not do: trust a word of Slurm further than it goes. A job that the controller has
forgotten is asked for in accounting; where there is none it is gone, and the run directory decides.

Limits: names of hosts that failed are known where Slurm still shows them as down.

Example::

    target = SlurmTarget("slurm_h100", config, access, files)
    await target.submit(job)
    (await target.observe([ref]))[ref.name].state
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from typing import Any, Final
from weakref import WeakValueDictionary

from airflow_gpu.gang.run import State
from airflow_gpu.gang.spec import Gang
from airflow_gpu.targets.base import (
    Capabilities,
    Job,
    JobRef,
    Listed,
    LogChunk,
    NameTaken,
    Offer,
    Sighting,
    TargetError,
)
from airflow_gpu.targets.slurm import shape
from airflow_gpu.targets.slurm.access import Access, NoAccounting
from airflow_gpu.targets.slurm.config import SlurmConfig
from airflow_gpu.targets.slurm.identity import incarnation_of, of_comment
from airflow_gpu.targets.slurm.records import Record, hosts
from airflow_gpu.targets.slurm.submission import Files, Submission
from airflow_gpu.targets.slurm.words import state_of, words_for

LOG_CHUNK: Final = 64 * 1024

NOTICE: Final = "USR1"
"""Signal by which agents are told to end when the cluster's KillWait is too short for the grace."""

KILL_WAIT: Final = 0.0
"""Seconds that ranks have after a cancel, where neither the connection nor Slurm says: REST does not. Too low is safe."""

NODES_AGE: Final = 10.0
"""Seconds for which a list of the cluster's nodes will do: many gangs ask for offers at once."""

NOBODY: Final = ("", "root", "0")
"""Who cancelled a job, in accounting, where it was Slurm itself. A person is always named."""

LAUNCH_SECONDS: Final = 5.0
"""A job that Slurm has cancelled so soon after it got its nodes was cancelled by a node that could not start it."""

REMEMBERED: Final = 10_000
"""Names of jobs that this process has submitted."""


class SlurmTarget:
    """One cluster, as one connection names it.

    :param files: the channel's folder; None where the nodes share no folder with Airflow.
    :param secrets: where secrets are put for the jobs, and that folder as the nodes see it; None: gangs with secrets are refused.
    """

    def __init__(
        self,
        name: str,
        config: SlurmConfig,
        access: Access,
        files: Files | None = None,
        secrets: tuple[Files, str] | None = None,
    ) -> None:
        self.name = name
        self.config = config
        self.capabilities = Capabilities(
            notices=True,
            requeues=config.requeue,
            excludes_hosts=True,
            shared_path=config.shared_folder is not None,
            priorities=True,
            grace=config.grace,
        )
        self.job_store: Mapping[str, Any] = {}
        self.folders: tuple[Any, ...] = ()  # those of files and secrets, for whoever knows their log-in
        self._access = access
        self._files = files
        self._submission = Submission(name, config, secrets)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._tried: dict[str, None] = {}  # names that this process has tried to submit, the oldest first
        self._ids: dict[str, int] = {}  # of jobs that were found by their names
        self._nodes: tuple[float, list[Any]] | None = None
        self._kill_wait: float | None = None

    @property
    def channel(self) -> str:
        return self.config.channel_uri

    @property
    def job_channel(self) -> str:
        folder = self.config.shared_folder
        return self.config.channel_uri if folder is None else folder

    @property
    def python(self) -> str:
        return self.config.python

    # -- submitting

    async def submit(self, job: Job) -> str:
        turn = self._turns.setdefault(job.name, asyncio.Lock())
        async with turn:
            # A submit whose reply got lost here may be seconds old; another process's has had longer to show.
            found = await self._access.named(job.name, sure=job.name in self._tried)
            if found:
                return str(self._adopted(job, found).id)
            batch = self._submission.batch(job, await self._excluded(job))
            await self._submission.put_secrets(job)
            self._tried[job.name] = None
            number = await self._access.submit(batch)
            self._ids[job.name] = number
            for name in list(self._tried)[:-REMEMBERED]:
                del self._tried[name]
            return str(number)

    def _adopted(self, job: Job, found: list[Record]) -> Record:
        strangers = [record for record in found if not _ours(record, job.labels, job.digest)]
        mine = [record for record in found if record not in strangers]
        if not mine:
            raise NameTaken(
                f"{self.name}: job {strangers[0].id} has the name {job.name!r} and is of another incarnation or request"
            )
        record = _counting(mine)
        if state_of(record.states, record.reason, record.description)[1] is State.CANCELLED:
            raise NameTaken(f"{self.name}: job {record.id} ({job.name}) is being cancelled")
        return record

    async def _excluded(self, job: Job) -> tuple[str, ...]:
        """The hosts to leave out, as long as the gang fits without them."""
        if not job.exclude_hosts:
            return ()
        wanted = self._submission.wanted(job.nodes, job.gpus_per_node, job.accelerator, job.cpus, job.memory)
        left = [node for node in await self._known_nodes() if node.name not in job.exclude_hosts]
        return () if shape.fit(left, wanted).reason else job.exclude_hosts

    # -- observing

    async def observe(self, jobs: Collection[JobRef]) -> Mapping[str, Sighting]:
        found, trouble = await self._found(jobs)
        answer = {ref.name: await self._sighting(ref, found.get(ref.name), trouble) for ref in jobs}
        if len(self._ids) > 2 * len(jobs) + 1000:
            self._ids = {name: number for name, number in self._ids.items() if name in answer}
        return answer

    async def _found(self, jobs: Collection[JobRef]) -> tuple[dict[str, Record], str]:
        """By name: the record of each job, and why accounting could not be asked for those that have none."""
        numbers = {ref.name: number for ref in jobs if (number := self._number(ref)) is not None}
        known = {record.id: record for record in await self._access.jobs(set(numbers.values()))}
        # Another name means that numbers were given anew: the cluster has lost its state.
        found = {
            name: known[number]
            for name, number in numbers.items()
            if number in known and known[number].name == name
        }
        if len(numbers) < len(jobs) or any(
            number in known and name not in found for name, number in numbers.items()
        ):
            mine = await self._access.mine()
            for ref in jobs:
                same = [record for record in mine if record.name == ref.name and ref.name not in found]
                ours = [record for record in same if _ours(record, ref.labels, ref.digest)]
                if same:
                    record = found[ref.name] = _counting(ours or same)
                    self._ids |= {ref.name: record.id} if ours else {}
        forgotten = {
            name: number for name, number in numbers.items() if name not in found and number not in known
        }
        if not forgotten:
            return found, ""
        try:
            past = {record.id: record for record in await self._access.history(forgotten.values())}
        except NoAccounting:
            return found, ""
        except TargetError as error:
            return found, str(error)
        names = {name: past[number] for name, number in forgotten.items() if number in past}
        return found | {name: record for name, record in names.items() if record.name == name}, ""

    async def _sighting(self, ref: JobRef, record: Record | None, trouble: str = "") -> Sighting:
        if record is None:
            number = self._number(ref)
            if trouble and number is not None:
                return Sighting(
                    State.UNKNOWN, "forgotten", f"the controller has forgotten it, and {trouble}", str(number)
                )
            return Sighting(State.GONE, "", "Slurm knows no such job")
        if not _ours(record, ref.labels, ref.digest):
            return Sighting(
                State.UNKNOWN, record.native, "the job of that name is somebody else's", str(record.id)
            )
        state, ending = state_of(record.states, record.reason, record.description)
        if record.accounting and not state.ended:
            # The controller does not know it, so it does not run; accounting has not heard of its end.
            return Sighting(
                State.UNKNOWN,
                record.native,
                "the controller has forgotten it; accounting says that it goes on",
                str(record.id),
            )
        if state is State.CANCELLED:
            state, ending = await self._cancelled(record)
        names = hosts(record.nodes)
        waits = state in (State.QUEUED, State.REJECTED) or (
            state is State.NODE_LOST and "PENDING" in record.states
        )
        reason = words_for(record.reason, record.description) if waits else ""
        lost = names if state is State.NODE_LOST or ending is State.NODE_LOST else ()
        again = state is State.RUNNING and "PENDING" in record.states
        return Sighting(
            state=state,
            native=record.native,
            reason=reason or _why(record, state),
            platform_id=str(record.id),
            # Started again before the last life has ended: until then it is the last life that is seen.
            restart=max(0, record.restarts - 1) if again else record.restarts,
            since=_since(record, state),
            ending=ending,
            exit_code=record.exit_code if state.ended else None,
            hosts=names if state in (State.RUNNING, State.STARTING) else (),
            blamed_hosts=await self._down(lost) if lost else (),
        )

    async def _cancelled(self, record: Record) -> tuple[State, State | None]:
        """A node that cannot start a script cancels the job as root, where it may not be queued again: nobody meant that.

        Only accounting knows who asked, and may be a moment behind.
        """
        past = record
        if not record.accounting:
            try:
                [past] = await self._access.history([record.id]) or [record]
            except TargetError:
                return State.CANCELLED, None
        if past.accounting and not state_of(past.states, past.reason)[0].ended:
            return State.RUNNING, State.CANCELLED
        if past.killed_by not in NOBODY:
            return State.CANCELLED, None
        if past.elapsed is not None and past.elapsed <= LAUNCH_SECONDS:
            return State.NODE_LOST, None
        # A controller that has lost its state calls all that it does not know any more cancelled, by nobody.
        lost = record.accounting and not past.killed_by and past.elapsed is None
        return (State.GONE if lost else State.CANCELLED), None

    async def _down(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Those of a lost job's nodes that Slurm shows as down."""
        try:
            nodes = await self._known_nodes()
        except TargetError:
            return ()
        return tuple(node.name for node in nodes if node.name in names and shape.AWAY & set(node.states))

    def _number(self, ref: JobRef) -> int | None:
        if ref.platform_id and ref.platform_id.isdecimal():
            return int(ref.platform_id)
        return self._ids.get(ref.name)

    # -- ending

    async def cancel(self, job: JobRef, *, grace: float, since: float) -> None:
        record = await self._living(job)
        if record is None:
            return
        left = since + grace - time.time()
        runs = state_of(record.states, record.reason, record.description)[0] is State.RUNNING
        # Where Slurm starts a gang again that left on a notice, only a cancel ends it for good.
        if runs and not self.config.requeue and left > await self._wait_of_kill():
            # Only the agents hear of it, and have the whole grace; the end comes with a later call, or by their own.
            await self._access.signal(record.id, NOTICE)
            return
        await self._access.cancel(record.id)

    async def _living(self, job: JobRef) -> Record | None:
        number = self._number(job)
        ask = self._access
        found = await (ask.jobs([number]) if number is not None else ask.named(job.name, sure=True))
        mine = [
            record for record in found if record.name == job.name and _ours(record, job.labels, job.digest)
        ]
        record = _counting(mine) if mine else None
        return None if record is None or _over(record) else record

    async def _wait_of_kill(self) -> float:
        if self._kill_wait is None:
            found = self.config.kill_wait
            if found is None:
                found = await self._access.kill_wait()
            self._kill_wait = KILL_WAIT if found is None else found
        return self._kill_wait

    async def forget(self, job: JobRef) -> None:
        # What waits for what will never be, and twins.
        for record in await self._access.named(job.name, sure=False):
            if not _over(record) and _ours(record, job.labels, job.digest):
                await self._access.cancel(record.id)
        self._ids.pop(job.name, None)
        await self._submission.remove_secrets(job.name)

    # -- looking

    async def logs(self, job: JobRef, node: int, since: str = "") -> LogChunk:
        if since and not since.isdecimal():
            raise TargetError(f"{since!r} is no position in a log")
        start = int(since or 0)
        number = self._number(job)
        root = f"{self.config.channel_uri}/"
        if self._files is None or number is None or not job.channel.startswith(root):
            return LogChunk("", str(start))
        folder = f"{job.channel[len(root) :]}/payload/{job.attempt:04d}"
        data = await self._files.read(f"{folder}/slurm-{number}-{node}.log", start, LOG_CHUNK)
        if not data and start == 0 and node == 0:
            data = await self._files.read(
                f"{folder}/slurm-{number}.log", 0, LOG_CHUNK
            )  # srun itself did not come so far
            return LogChunk(data.decode("utf-8", "replace"), "0")
        return LogChunk(data.decode("utf-8", "replace"), str(start + len(data)))

    async def inventory(self, labels: Mapping[str, str]) -> list[Listed]:
        found = []
        for record in await self._access.mine():
            told = of_comment(record.comment)
            if told is None or any(told[0].get(name) != value for name, value in labels.items()):
                continue
            theirs, digest, channel = told
            attempt = theirs.get("airflow-gpu/attempt", "0")
            ref = JobRef(
                record.name,
                theirs,
                int(attempt) if attempt.isdecimal() else 0,
                digest,
                str(record.id),
                channel,
            )
            found.append(Listed(ref, await self._sighting(ref, record), record.submitted))
        return found

    async def offers(self, gang: Gang) -> list[Offer]:
        config = self.config
        wanted = self._submission.wanted(
            gang.nodes, gang.gpus_per_node, gang.accelerator, gang.cpus, gang.memory
        )
        fit = shape.fit(await self._known_nodes(), wanted)
        reason = fit.reason
        if gang.image and not config.container:
            reason = f"image {gang.image!r} was asked for; the connection does not say how the cluster runs containers"
        return [
            Offer(
                target=self.name,
                accelerator=gang.accelerator or (fit.types[0] if fit.types else None),
                provisioning="owned",
                price_per_node_hour=config.price_per_gpu_hour * gang.gpus_per_node,
                source="nodes as Slurm shows them; price declared in the connection",
                at=time.time(),
                free_nodes=fit.free,
                total_nodes=fit.able,
                reason=reason,
                blocked=fit.blocked,
            )
        ]

    async def describe(self) -> str:
        """The cluster in one sentence, for a person who tests the connection."""
        nodes = await self._known_nodes()
        mine = [
            node
            for node in nodes
            if not self.config.partition or set(self.config.partition) & set(node.partitions)
        ]
        total = sum(shape.gpus(node.gres, self.config.gres) for node in mine)
        up = sum(not shape.AWAY & set(node.states) for node in mine)
        return f"Slurm answers: {len(mine)} nodes, {up} up, {total} GPUs; gangs run below {self.channel}"

    async def _known_nodes(self) -> list[Any]:
        now = time.monotonic()
        if self._nodes is None or now - self._nodes[0] > NODES_AGE:
            self._nodes = now, await self._access.nodes()
        return self._nodes[1]

    async def close(self) -> None:
        await self._access.close()


def _ours(record: Record, labels: Mapping[str, str], digest: str) -> bool:
    """Whether a job is the one that these labels and this digest speak of. Accounting may have no comment: then the
    name says it, in which the incarnation is hashed."""
    told = of_comment(record.comment)
    if told is None:
        return record.accounting and not record.comment
    return incarnation_of(told[0]) == incarnation_of(labels) and told[1] == digest


def _over(record: Record) -> bool:
    state, _ = state_of(record.states, record.reason, record.description)
    return state.ended and "PENDING" not in record.states


def _counting(found: list[Record]) -> Record:
    """Of several jobs of one name the one that counts: the oldest that lives, else the oldest."""
    return min(found, key=lambda record: (_over(record), record.id))


def _since(record: Record, state: State) -> float | None:
    if state.ended:
        return record.ended
    return record.started if state in (State.RUNNING, State.STARTING) else record.submitted


def _why(record: Record, state: State) -> str:
    if state is State.UNKNOWN:
        return f"Slurm says {record.native}, which is in no table of this version"
    if state is State.FAILED and record.exit_code:
        return f"the batch script ended with {record.exit_code}"
    if state is State.FAILED and record.signal:
        return f"the batch script was ended by signal {record.signal}"
    return ""
