"""The whole cluster in the daemon's memory, and one round of its work.

Purpose: take jobs in, obey commands, carry on each gang, schedule, forget old
jobs, publish the table. :meth:`Cluster.tick` does each once.

What it does not do: sleep, lock, or start itself (:mod:`.daemon`).

Limits: the table is written as a whole whenever something in it changes, so
tens of thousands of kept jobs make it slow; ``keep`` bounds them. A job whose
``state.json`` was damaged by hand is shown as DAMAGED, and what it may still
hold is not counted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from airflow_gpu.gang.run import State
from airflow_gpu.targets.local import launch, supervise
from airflow_gpu.targets.local.commands import obey
from airflow_gpu.targets.local.files import Damaged, Folder, encode, read_json, replace_file
from airflow_gpu.targets.local.machine import MachineError, address, build_nodes, detect_gpus
from airflow_gpu.targets.local.outcome import first_bad
from airflow_gpu.targets.local.processes import Census, boot_id
from airflow_gpu.targets.local.records import Cause, JobState, Spec
from airflow_gpu.targets.local.schedule import Evict, Job, Node, Share, Start, Wait, impossible, schedule
from airflow_gpu.targets.local.supervise import Gang
from airflow_gpu.targets.local.words import Word

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CENSUS_PERIOD = 1.0
"""Seconds between looks at all processes while nothing ends."""

RESCAN_PERIOD = 5.0
"""Seconds between full listings of the jobs, when the folder's time says that nothing is new."""

TIME_GRAIN = 0.5
"""Seconds for which a folder's time may not tell one change from the next."""

CHORES_PERIOD = 60.0
ABANDONED = 600.0
"""Seconds after which a submission that was never finished, or an answer nobody fetched, is removed."""

TABLE_FORMAT = 1

log = logging.getLogger(__name__)


class Cluster:
    """Everything that one daemon knows."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.boot = boot_id()
        self.census = Census()
        self.gangs: dict[str, Gang] = {}
        self.damaged: dict[str, str] = {}
        self.shape: dict[str, Any] = {}
        self.nodes: list[Node] = []
        self.problem = ""  # why nothing can start
        self.closing = False  # an operator asked the daemon to end
        self.down: set[int] = set()
        self.drained: set[int] = set()
        self._table = ""
        self._written: tuple[int, ...] = ()
        self._told = ""
        self._listed = 0.0
        self._looked = 0.0
        self._tidied = 0.0
        self._removers: list[subprocess.Popen[bytes]] = []

    # -- beginning -----------------------------------------------------------------------------

    def load(self) -> None:
        """Read everything, and go on with what another daemon left.

        :raises Damaged: a file of the cluster itself cannot be read.
        """
        self.shape = read_json(self.folder.cluster) or {}
        self.detect()
        marks = read_json(self.folder.nodes) or {}
        self.down, self.drained = set(marks.get("down", ())), set(marks.get("drained", ()))
        self.take_in(everything=True)
        for gang in self.holding():
            log.info("%s (restart %d) goes on as %s", gang.spec.name, gang.state.restart, gang.state.word)
            supervise.take_over(gang)
        self.publish()

    def detect(self) -> None:
        """Split the machine as declared. Where that fails nothing new starts, but what runs is looked after."""
        try:
            self.nodes, self.problem = build_nodes(self.shape, detect_gpus()), ""
        except MachineError as error:
            self.problem = str(error)
            log.error("no gang can start: %s", error)

    def save_marks(self) -> None:
        """Write down which nodes are down or drained."""
        marks = {"down": sorted(self.down), "drained": sorted(self.drained)}
        replace_file(self.folder.nodes, encode(marks), flush=True)

    # -- questions -----------------------------------------------------------------------------

    def holding(self) -> list[Gang]:
        return [gang for gang in self.gangs.values() if gang.state.holding]

    def unfinished(self) -> list[Gang]:
        return [gang for gang in self.gangs.values() if not gang.state.ended]

    def usable_nodes(self) -> list[Node]:
        """The nodes as the scheduler is to see them."""
        barred = self.down | self.drained
        return [replace(node, usable=node.index not in barred) for node in self.nodes]

    # -- one round -----------------------------------------------------------------------------

    def tick(self) -> None:
        """Do once whatever there is to do. Trouble with one part or one job does not touch the others."""
        with self._alone("new jobs"):
            self.take_in()
        with self._alone("commands"):
            obey(self)
        self._carry_on()
        with self._alone("the schedule"):
            self._schedule()
        if time.monotonic() - self._tidied >= CHORES_PERIOD:
            self._tidied = time.monotonic()
            with self._alone("tidying"):
                self._tidy()
        with self._alone("the table"):
            self.publish()

    def take_in(self, *, everything: bool = False) -> None:
        """Look for jobs that are not known yet."""
        now = time.time()
        with contextlib.suppress(FileNotFoundError):
            changed = self.folder.jobs.stat().st_mtime
            # A folder's time is coarse: after a change, look until it would show the next one.
            if not everything and changed < self._listed - TIME_GRAIN and now - self._listed < RESCAN_PERIOD:
                return
        self._listed = now
        found: list[tuple[Spec, JobState | None]] = []
        names = os.listdir(self.folder.jobs)
        self.damaged = {name: why for name, why in self.damaged.items() if name in names}
        for name in names:
            if name.startswith(".") or name in self.gangs:
                continue
            try:
                loaded = self._read(name)
            except (Damaged, OSError) as error:
                if name not in self.damaged:
                    log.error("job %s cannot be read: %s", name, error)
                self.damaged[name] = str(error)
                continue
            self.damaged.pop(name, None)
            if loaded is not None:
                found.append(loaded)
        order = max((gang.state.order for gang in self.gangs.values()), default=0)
        order = max([order, *(state.order for _, state in found if state is not None)])
        for spec, state in sorted(found, key=lambda item: item[0].submitted_at):
            if state is None:
                order += 1
                state = JobState(id=spec.id, order=order, since=spec.submitted_at)
            self._add(spec, state)

    def _read(self, name: str) -> tuple[Spec, JobState | None] | None:
        files = self.folder.job(name)
        data = read_json(files.spec)
        if data is None:
            if not files.root.exists():
                return None
            raise Damaged(f"{files.spec} is missing")
        spec = Spec.from_json(data)
        known = read_json(files.state)
        state = JobState.from_json(known) if known is not None else None
        if spec.name != name or (state is not None and state.id != spec.id):
            raise Damaged(f"{files.root} holds another job's files")
        return spec, state

    def _add(self, spec: Spec, state: JobState) -> None:
        gang = Gang(spec, self.folder.job(spec.name), state, self.boot)
        self.gangs[spec.name] = gang
        if state.waiting and not self.problem:
            why = impossible(self.nodes, spec.request())
            if why:
                supervise.end_waiting(gang, Word.REJECTED, why)
        if not state.ended:
            gang.save()

    def _carry_on(self) -> None:
        """One look at every gang that holds nodes, with one census for all of them where one is due."""
        gangs = self.holding()
        if not gangs:
            return
        census = None
        now = time.monotonic()
        if now - self._looked >= CENSUS_PERIOD or any(supervise.wants_census(gang) for gang in gangs):
            self._looked = now
            census = self.census.take({gang.spec.id for gang in gangs})
        for gang in gangs:
            with self._alone(gang.spec.name):
                supervise.advance(gang, None if census is None else census[gang.spec.id])

    def _schedule(self) -> None:
        jobs = [self._as_job(gang) for gang in self.unfinished()]
        if self.problem or all(job.held for job in jobs):
            return
        for action in schedule(self.usable_nodes(), jobs):
            gang = self.gangs[action.name]
            with self._alone(gang.spec.name):
                match action:
                    case Start(_, shares):
                        gang.line = ""
                        log.info("%s (restart %d) starts on %s", action.name, gang.state.restart, shares)
                        supervise.start(gang, shares)
                    case Evict(_, winner):
                        log.info("%s is to make room for %s", action.name, winner)
                        supervise.stop(gang, Cause.PREEMPT, gang.spec.grace, f"made room for {winner}")
                        gang.try_save()
                    case Wait(_, reason):
                        gang.line = reason

    def _as_job(self, gang: Gang) -> Job:
        spec, state = gang.spec, gang.state
        held = tuple(Share(place.node, tuple(place.gpus)) for place in state.places) if state.holding else ()
        return Job(
            name=spec.name,
            order=state.order,
            request=spec.request(),
            priority=spec.priority,
            held=held,
            stopping=state.stop is not None or gang.all_over,
            started=state.started or 0.0,
        )

    @contextlib.contextmanager
    def _alone(self, part: str) -> Iterator[None]:
        """What goes wrong here (a full disk, a folder that was removed) is tried again next round."""
        try:
            yield
        except Exception as error:
            told = f"{part}: {error!r}"
            if told != self._told:
                self._told = told
                log.exception("%s: this round failed, going on", part)

    # -- the end of jobs -----------------------------------------------------------------------

    def _tidy(self) -> None:
        """Forget what ended long ago, remove what was left lying, cut logs that grew too long."""
        now = time.time()
        if self.problem:
            self.detect()
        for name, gang in list(self.gangs.items()):
            if gang.state.ended and now - (gang.state.ended_at or now) > gang.spec.keep:
                # First the folder, then the table: whoever finds neither may say that it is gone.
                with contextlib.suppress(FileNotFoundError):
                    gang.folder.root.rename(self.folder.trash / gang.spec.id)
                del self.gangs[name]
        self.publish()
        for path in self.folder.trash.iterdir():
            self._remove(path)
        for folder, pattern in (
            (self.folder.jobs, ".*"),
            (self.folder.acks, "*"),
            (self.folder.commands, ".*"),
        ):
            for path in folder.glob(pattern):
                with contextlib.suppress(FileNotFoundError):
                    if now - path.stat().st_mtime > ABANDONED:
                        self._remove(path)
        for gang in self.holding():
            for place in gang.state.places:
                launch.trim_log(gang.folder.log(place.rank))
        launch.trim_log(self.folder.log)
        self._removers = [child for child in self._removers if child.poll() is None]

    def _remove(self, path: Path) -> None:
        # In a process of its own: work folders may be large, and gangs are not to wait for that.
        self._removers.append(subprocess.Popen(["rm", "-rf", "--", str(path)], stdin=subprocess.DEVNULL))

    # -- the table -----------------------------------------------------------------------------

    def publish(self) -> None:
        """Write the table, if it differs from what is there."""
        rows = [f"{json.dumps(name)}: {_row(gang)}" for name, gang in self.gangs.items()]
        for name, reason in self.damaged.items():
            rows.append(f"{json.dumps(name)}: {json.dumps({'native': Word.DAMAGED, 'reason': reason})}")
        head = {
            "v": TABLE_FORMAT,
            "shape": self.shape,
            "problem": self.problem,
            "nodes": [self._node_row(node) for node in self.nodes],
        }
        # One job a line: an ended one is made into text only once, and people can grep.
        table = json.dumps(head, sort_keys=True)[:-1] + ', "jobs": {\n' + ",\n".join(rows) + "\n}}\n"
        # Also when somebody else wrote the file: a damaged one would stay so until the next change.
        if table != self._table or _mark(self.folder.table) != self._written:
            replace_file(self.folder.table, table.encode())
            self._table, self._written = table, _mark(self.folder.table)

    def _node_row(self, node: Node) -> dict[str, Any]:
        word = "down" if node.index in self.down else "drained" if node.index in self.drained else "up"
        return {
            "index": node.index,
            "host": node.host,
            "address": address(node.index),
            "gpus": list(node.gpus),
            "cpus": node.cpus,
            "memory": node.memory,
            "accelerator": node.accelerator,
            "state": word,
        }


def _mark(path: Path) -> tuple[int, ...]:
    """Changes whenever somebody writes the file."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns


_ENDING = {
    Cause.PREEMPT: State.PREEMPTED,
    Cause.CANCEL: State.CANCELLED,
    Cause.TIME_LIMIT: State.TIMED_OUT,
    Cause.NODE_ENDED: State.UNKNOWN,  # what it was is known once all nodes have ended
}


def _ending(state: JobState) -> State | None:
    if state.word is not Word.STOPPING:
        return None
    return _ENDING[state.stop.cause] if state.stop is not None else State.UNKNOWN


def _row(gang: Gang) -> str:
    spec, state = gang.spec, gang.state
    if gang.row and state.ended:
        return gang.row
    bad = first_bad(state) if state.ended else None
    row = {
        "id": spec.id,
        "labels": spec.labels,
        "digest": spec.digest,
        "native": state.word,
        "reason": gang.line or state.reason if state.waiting else state.reason,
        "restart": state.restart,
        "since": state.since,
        "ending": _ending(state),
        "hosts": list(state.hosts),
        "blamed": list(state.blamed),
        "exit": bad.exit if bad is not None else None,
        "order": state.order,
        "priority": spec.priority,
        "nodes": spec.nodes,
        "gpus_per_node": spec.gpus_per_node,
        "cpus": spec.cpus,
        "memory": spec.memory,
        "accelerator": spec.accelerator,
        "held": [[place.node, list(place.gpus)] for place in state.places] if state.holding else [],
    }
    text = json.dumps(row, sort_keys=True)
    gang.row = text if state.ended else ""
    return text
