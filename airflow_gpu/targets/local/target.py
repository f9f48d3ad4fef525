"""The local target: gangs on this machine, as the driver sees them.

Purpose: the five methods of :class:`~airflow_gpu.targets.base.Target`. Each
reads and writes a few files of the cluster folder in a thread, and starts the
daemon where none lives.

What it does not do: hold anything in memory that matters. Two targets for one
folder, in two processes, are as good as one.

Limits: Airflow's processes and the ranks must see the folder, and a channel that is a
folder, at the same paths. With a channel on an object store the ranks log in there by
themselves: with ``Gang.secrets``, or variables that ``pass_env`` names.

Example::

    target = LocalTarget("local_gpus", LocalConfig(path="/scratch/gpu", nodes=2, gpus_per_node=4))
    await target.submit(job)
    (await target.observe([ref]))[ref.name].state
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import time
from typing import TYPE_CHECKING, Any

from airflow_gpu.gang.run import State
from airflow_gpu.targets.base import Capabilities, Job, JobRef, Listed, LogChunk, Offer, Sighting, TargetError
from airflow_gpu.targets.local import submission
from airflow_gpu.targets.local.client import Client, ClientError
from airflow_gpu.targets.local.config import ConfigError, LocalConfig
from airflow_gpu.targets.local.files import Damaged, read_json
from airflow_gpu.targets.local.schedule import Free, Node, Request, Share, impossible
from airflow_gpu.targets.local.schedule import Job as Holder
from airflow_gpu.targets.local.table import Row
from airflow_gpu.targets.local.words import WAITING, Word, state_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from airflow_gpu.gang.spec import Gang

LOG_CHUNK = 64 * 1024

ADOPT_ROUNDS = 5
"""How often a submit looks again when the name is taken and free in turn (its job was just forgotten)."""


class LocalTarget:
    """This machine as a place that can run gangs.

    :param name: the target's name, usually the Airflow connection's id.
    """

    def __init__(self, name: str, config: LocalConfig) -> None:
        self.name = name
        self.config = config
        self.capabilities = Capabilities(
            notices=True,
            requeues=config.requeue,
            excludes_hosts=True,
            shared_path=config.channel_folder is not None,
            priorities=True,
            grace=config.grace,
        )
        self.job_store: Mapping[str, Any] = {}
        self._client = Client(config.folder)
        self._known: dict[
            str, tuple[JobRef, Row, Sighting]
        ] = {}  # what was made of a row that stays the same

    @property
    def channel(self) -> str:
        return self.config.channel_uri

    @property
    def job_channel(self) -> str:
        folder = self.config.channel_folder
        return self.config.channel_uri if folder is None else str(folder)

    @property
    def python(self) -> str:
        return self.config.python

    async def submit(self, job: Job) -> str:
        return await asyncio.to_thread(self._submit, job)

    async def observe(self, jobs: Collection[JobRef]) -> Mapping[str, Sighting]:
        return await asyncio.to_thread(self._observe, list(jobs))

    async def cancel(self, job: JobRef, *, grace: float, since: float) -> None:
        # The first command stands, and the daemon counts its grace: nothing depends on who asks when.
        await asyncio.to_thread(self._cancel, job, grace)

    async def logs(self, job: JobRef, node: int, since: str = "") -> LogChunk:
        return await asyncio.to_thread(self._logs, job, node, since)

    async def inventory(self, labels: Mapping[str, str]) -> list[Listed]:
        return await asyncio.to_thread(self._inventory, dict(labels))

    async def forget(self, job: JobRef) -> None:
        """Nothing to do: secrets went with the gang's end, and the daemon forgets the job by itself after ``keep``."""

    async def offers(self, gang: Gang) -> list[Offer]:
        # Read here: the thread is to touch plain values only.
        request = Request(
            nodes=gang.nodes,
            gpus=gang.gpus_per_node,
            cpus=gang.cpus,
            memory=gang.memory,
            accelerator=gang.accelerator,
        )
        return [await asyncio.to_thread(self._offer, request, gang.priority, gang.image)]

    async def close(self) -> None:
        """Nothing is held open: the daemon and its gangs go on."""

    # -- in a thread -----------------------------------------------------------------------------

    def _submit(self, job: Job) -> str:
        with self._errors():
            self._client.make(self.config.cluster())
            for _ in range(ADOPT_ROUNDS):
                found = submission.adopt(self._client.folder, job)
                if found is None:
                    nodes = self._nodes(self._table(declare=True))
                    if self.config.channel_folder is not None:
                        self.config.channel_folder.mkdir(parents=True, exist_ok=True)
                    found = submission.create(self._client.folder, job, self.config, nodes)
                if found is not None:
                    self._client.poke()
                    self._client.ensure()  # the one that was there may just have found nothing to do
                    return found
            raise TargetError(f"job {job.name!r} appears and vanishes; try again")

    def _table(self, *, declare: bool = False) -> dict[str, Any]:
        """The table of a living daemon, for a cluster as this connection declares it."""
        self._client.ensure()
        table = self._client.table()
        if declare and table.get("shape") != self.config.cluster():
            try:
                self._client.call("configure", shape=self.config.cluster())
            except ClientError as error:
                raise TargetError(
                    f"{self.name}: the cluster in {self.config.folder} is declared otherwise: {error}"
                ) from None
            table = self._client.table()
        if declare and table.get("problem"):
            raise TargetError(f"{self.name}: {table['problem']}")
        return table

    def _observe(self, jobs: list[JobRef]) -> dict[str, Sighting]:
        with self._errors():
            self._client.make(self.config.cluster())
            self._client.ensure()
        try:
            rows = self._client.rows.rows()
        except (Damaged, OSError) as error:
            return {
                job.name: Sighting(State.UNKNOWN, "", f"the table cannot be read: {error}") for job in jobs
            }
        seen = {job.name: self._remembered(job, rows) for job in jobs}
        if len(self._known) > 2 * len(rows) + 100:
            self._known = {name: known for name, known in self._known.items() if name in rows}
        return seen

    def _remembered(self, job: JobRef, rows: Mapping[str, Row]) -> Sighting:
        """The sighting, made anew only when the job's row is a new one: most rows stay the same for hours."""
        row, known = rows.get(job.name), self._known.get(job.name)
        if known is not None and known[1] is row and known[0] == job:
            return known[2]
        sighting = self._sighting(job, rows)
        if row is not None:
            self._known[job.name] = job, row, sighting
        return sighting

    def _sighting(self, job: JobRef, rows: Mapping[str, Row]) -> Sighting:
        if job.name not in rows:
            # The folder goes before the row does: whoever has neither is gone.
            try:
                spec = submission.find(self._client.folder, job.name)
            except (Damaged, OSError) as error:
                return Sighting(State.UNKNOWN, Word.DAMAGED, str(error))
            if spec is None:
                return Sighting(State.GONE, "", "there is no job of that name")
            if not submission.is_ours(spec, job.labels, job.digest):
                return _strangers(spec.id)
            return Sighting(
                State.QUEUED, Word.PENDING, "not seen by the daemon yet", spec.id, since=spec.submitted_at
            )
        row = rows[job.name]
        try:
            if row["native"] == Word.DAMAGED:
                return Sighting(State.UNKNOWN, Word.DAMAGED, str(row["reason"]))
            labels = dict(row["labels"])
            ours = submission.incarnation_of(labels) == submission.incarnation_of(job.labels)
            if not ours or row["digest"] != job.digest:
                return _strangers(str(row["id"]))
            native = str(row["native"])
            return Sighting(
                state=state_of(native),
                native=native,
                reason=str(row["reason"]),
                platform_id=str(row["id"]),
                restart=int(row["restart"]),
                since=float(row["since"]),
                ending=State(row["ending"]) if row["ending"] else None,
                hosts=tuple(str(host) for host in row["hosts"]),
                blamed_hosts=tuple(str(host) for host in row["blamed"]),
                exit_code=int(row["exit"]) if row.get("exit") is not None else None,
            )
        except (KeyError, TypeError, ValueError) as error:
            return Sighting(State.UNKNOWN, "", f"its row in the table cannot be understood: {error!r}")

    def _inventory(self, labels: dict[str, str]) -> list[Listed]:
        found = []
        with self._errors():
            self._client.make(self.config.cluster())
            self._client.ensure()
            rows = self._client.table()["jobs"]
            # Folders too: a job that was just submitted has no row yet.
            for name in sorted({*rows, *submission.names(self._client.folder)}):
                told = rows.get(name, {}).get("labels")
                if told is not None and not submission.matches(told, labels):
                    continue
                try:
                    spec = submission.find(self._client.folder, name)
                except Damaged:
                    continue  # whose it is cannot be told, so it is not ours to touch
                if spec is not None and submission.matches(spec.labels, labels):
                    ref = JobRef(
                        name, dict(spec.labels), spec.attempt, spec.digest, spec.id, channel=spec.channel
                    )
                    found.append(Listed(ref, self._sighting(ref, rows), spec.submitted_at))
        return found

    def _cancel(self, job: JobRef, grace: float) -> None:
        with self._errors():
            self._client.make(
                self.config.cluster()
            )  # else a folder that is away would look like a job that is gone
            spec = submission.find(self._client.folder, job.name)
            if spec is None or not submission.is_ours(spec, job.labels, job.digest):
                return
            state = read_json(self._client.folder.job(job.name).state) or {}
            if state.get("ended_at") is None and not submission.ending(self._client.folder, spec):
                self._client.send(
                    "cancel",
                    once=submission.cancel_id(spec.id),
                    name=job.name,
                    job=spec.id,
                    grace=max(0.0, grace),
                )
            self._client.ensure()

    def _logs(self, job: JobRef, node: int, since: str) -> LogChunk:
        if since and not since.isdecimal():
            raise TargetError(f"{since!r} is no position in a log")
        start = int(since or 0)
        with self._errors():
            spec = submission.find(self._client.folder, job.name)
            if spec is None:
                return LogChunk("", str(start))
            path = self._client.folder.job(job.name).log(node)
            data = b""
            with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
                file.seek(start)
                data = file.read(LOG_CHUNK)
        text, used = _decode(data)
        return LogChunk(text, str(start + used))

    def _offer(self, request: Request, priority: int, image: str | None) -> Offer:
        with self._errors():
            self._client.make(self.config.cluster())
            table = self._table(declare=True)
            nodes = self._nodes(table)
            rows = table["jobs"].values()
            # Who is behind somebody in line gets nothing now, whatever is free.
            behind = any(
                r["native"] in WAITING and r["priority"] >= priority for r in rows if "priority" in r
            )
            free = Free(nodes, _holders(table))
            able = [node for node in nodes if not impossible([node], _one(request))]
            reason = (
                f"image {image!r} was asked for; no containers here" if image else impossible(nodes, request)
            )
            names = sorted({node.accelerator for node in able if node.accelerator})
            usable = [node for node in able if node.usable]
            short = impossible(usable, request) if not reason else ""
            down = ", ".join(
                f"{row['host']} is {row['state']}" for row in table["nodes"] if row["state"] != "up"
            )
            blocked = f"{down}: {short}" if short else ""
            declared = self.config.gpus_per_node is not None
            return Offer(
                target=self.name,
                accelerator=request.accelerator or (names[0] if names else None),
                provisioning="owned",
                price_per_node_hour=0.0,
                source="declared in the connection"
                if declared
                else "detected on this machine; price declared",
                at=time.time(),
                free_nodes=0 if reason or behind else len(free.fitting(request)),
                total_nodes=len(able),
                reason=reason,
                blocked=blocked,
            )

    @staticmethod
    def _nodes(table: dict[str, Any]) -> list[Node]:
        return [
            Node(
                index=int(row["index"]),
                host=str(row["host"]),
                gpus=tuple(int(gpu) for gpu in row["gpus"]),
                cpus=float(row["cpus"]),
                memory=int(row["memory"]),
                accelerator=row["accelerator"],
                usable=row["state"] == "up",
            )
            for row in table["nodes"]
        ]

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Everything that can go wrong with files and the daemon, as a TargetError."""
        try:
            yield
        except (ClientError, Damaged, ConfigError, OSError) as error:
            raise TargetError(f"{self.name}: {error}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise TargetError(
                f"{self.name}: a file of the cluster cannot be understood: {error!r}"
            ) from error


def _holders(table: dict[str, Any]) -> list[Holder]:
    """The gangs that hold nodes, as the scheduler counts them."""
    return [
        Holder(
            name=name,
            order=0,
            request=Request(int(row["nodes"]), int(row["gpus_per_node"]), row["cpus"], row["memory"]),
            held=tuple(Share(int(node), tuple(gpus)) for node, gpus in row["held"]),
        )
        for name, row in table["jobs"].items()
        if row.get("held")
    ]


def _one(request: Request) -> Request:
    """The same on a single node."""
    return Request(1, request.gpus, request.cpus, request.memory, request.accelerator)


def _strangers(platform_id: str) -> Sighting:
    return Sighting(
        State.UNKNOWN, "", "the job of that name is another incarnation's or another request's", platform_id
    )


def _decode(data: bytes) -> tuple[str, int]:
    """Text, and how many bytes it took: a character that is not whole yet stays for the next call."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(data)
    waiting, _ = decoder.getstate()
    return text, len(data) - len(waiting)
