"""The checkpoints of one run, as Airflow's side sees them: all there is, what each is, and which one counts.

Purpose: one survey over all channels that a run has had. It says of each
checkpoint whether it is whole, whether it is on the chain that a next life
goes down, which one that would take, and which one is in use. Built on it:
:mod:`.verifying`, :mod:`.pruning`, :mod:`.copying`.

What it does not do: hash (sizes are compared with the listing), write, or
unpickle. A manifest is untrusted, see :class:`airflow_gpu.runtime.manifest.Manifest`.

Limits: a survey lists everything below ``checkpoints/``: on an object store one
request a thousand files. It is for a worker or a command, not for a
triggerer's loop. A channel that does not answer is in ``troubles``, and what
lies there is not known. A checkpoint of another run from which this one began
(``continue_previous``) is named, not listed.

Example::

    checkpoints = Checkpoints(journal, run_path(key, incarnation))
    survey = await checkpoints.survey()
    for found in survey.found:
        print(found.step, found.what, found.next)
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from airflow_gpu.gang.entries import seconds
from airflow_gpu.gang.run import Life, Run, Seed
from airflow_gpu.rundir.channel import Channel
from airflow_gpu.rundir.contents import Contents, Stored
from airflow_gpu.rundir.journal import Journal
from airflow_gpu.rundir.store import Store, StoreError
from airflow_gpu.runtime.checkpoint import DOOMED, Ancestor, is_doomed, save_name, saving_mark, step_in
from airflow_gpu.runtime.manifest import BAD, COMPLETE, MANIFEST, MOST_BYTES, BadManifest, Manifest

ROOT = "checkpoints"
"""Below the channel half of a run directory."""

_LIFE = re.compile(r"\d{4,9}")
_REASON = 2000  # bytes of a bad.json that are read


class What(StrEnum):
    """What a checkpoint is."""

    COMPLETE = "complete"
    UNFINISHED = "unfinished"  # no manifest
    DAMAGED = "damaged"  # bad.json is there, or a file is not, or has another size
    TORN = "torn"  # its manifest cannot be read, or is not one
    FOREIGN = "foreign"  # whole, but its manifest tells of another life or step than its place


@dataclass(frozen=True)
class Checkpoint:
    """One folder below ``checkpoints/<life>/``.

    ``step`` is the manifest's, or the one in the folder's name; ``size`` in
    bytes and ``files`` as the manifest says, without one as listed; ``at`` when
    it was committed, epoch seconds.
    """

    channel: str
    life: int
    name: str
    what: What
    step: int | None = None
    world_size: int | None = None
    writer: str = ""
    files: int = 0
    size: int = 0
    at: float = 0.0
    trouble: str = ""
    doomed: tuple[str, ...] = ()  # marks of lives that were about to remove it
    saving: bool = False  # the handle began to save it, and has not committed it
    on_chain: bool = False  # a next life could start from it
    next: bool = False  # a next life would start from it
    in_use: bool = False  # the newest life started from it
    manifest: Manifest | None = field(default=None, repr=False, compare=False)

    @property
    def place(self) -> tuple[str, int, str]:
        """What tells it from all others."""
        return self.channel, self.life, self.name

    @property
    def folder(self) -> str:
        """Below ``checkpoints/``."""
        return f"{self.life:04d}/{self.name}"

    @property
    def uri(self) -> str:
        return f"{self.channel}/{ROOT}/{self.folder}"

    @property
    def whole(self) -> bool:
        """A life would take it, as far as can be told without hashing."""
        return self.what in (What.COMPLETE, What.FOREIGN)


@dataclass(frozen=True)
class Survey:
    """All checkpoints of a run, by life and step; ``chain``: those a next life could start from, best first."""

    found: tuple[Checkpoint, ...]
    chain: tuple[Checkpoint, ...]
    newest: Life | None
    open: bool  # something of the run runs, or may start
    elsewhere: Seed | None = None  # what a next life would start from, where that is of another run
    troubles: Mapping[str, str] = field(default_factory=dict)  # channels that did not answer, and why
    stamp: tuple[object, ...] = ()

    @property
    def next(self) -> Checkpoint | None:
        """What a next life would start from."""
        return self.chain[0] if self.chain else None


class Checkpoints:
    """Of the run of ``journal``, whose run directory is ``path`` on each channel."""

    def __init__(self, journal: Journal, path: str, open_store: Callable[[str], Store] = Store) -> None:
        self.journal = journal
        self.path = path
        self._open_store = open_store
        self._channels: dict[str, Channel] = {}
        self._read: dict[tuple[str, str, int, float], Manifest] = {}

    def channels(self) -> dict[str, Channel]:
        """All that the run has had, by address, the first one first."""
        for attempt in self.journal.run.attempts:
            if attempt.channel not in self._channels:
                root = attempt.channel.removesuffix(f"/{self.path}")
                self._channels[attempt.channel] = Channel(self._open_store(root), self.path)
        return dict(self._channels)

    def contents(self, channel: str) -> Contents:
        """The checkpoints of one of them."""
        return Contents(self.channels()[channel].store, f"{self.path}/{ROOT}")

    async def stamp(self) -> tuple[object, ...]:
        """Changes when anything was decided, or a life began. Cheap."""
        run = await self.journal.refresh()
        names = [
            tuple(await channel.store.names(f"{self.path}/lives")) for channel in self.channels().values()
        ]
        return (run.seq, *((len(found), found[-1:]) for found in names))

    async def survey(self) -> Survey:
        """Look at everything. Raises StoreError for the journal only."""
        run = await self.journal.refresh()
        lives: dict[str, list[Life]] = {}
        found: list[Checkpoint] = []
        troubles: dict[str, str] = {}
        stamp: tuple[object, ...] = ()
        try:
            stamp = await self.stamp()
        except StoreError:
            pass  # told below, by channel
        for uri, channel in self.channels().items():
            try:
                lives[uri] = [life for life in await channel.lives() if not life.fence]
                found += await self._on(uri, lives[uri])
            except StoreError as error:
                troubles[uri] = str(error)
        return _judged(run, lives, found, troubles, stamp)

    async def _on(self, uri: str, lives: Sequence[Life]) -> list[Checkpoint]:
        listing = await self.contents(uri).walk()
        claimed = [
            Ancestor(one.number, one.start.life, one.start.step)
            if one.start is not None and not one.seeded
            else Ancestor(one.number)
            for one in lives
        ]
        folders: dict[tuple[int, str], list[Stored]] = defaultdict(list)
        marks = {file.path for file in listing.files if file.path.count("/") == 1}
        for path in listing.folders:
            life, _, name = path.partition("/")
            if _LIFE.fullmatch(life) and name and "/" not in name and not name.startswith("."):
                folders[int(life), name]  # also one that has no file yet
        for file in listing.files:
            life, _, rest = file.path.partition("/")
            name, _, below = rest.partition("/")
            if _LIFE.fullmatch(life) and below and (int(life), name) in folders:
                folders[int(life), name].append(replace(file, path=below))
        made = []
        for (number, name), files in sorted(folders.items()):
            saving = f"{number:04d}/{saving_mark(name)}" in marks
            one = await self._one(uri, number, name, files)
            beside = [mark[5:] for mark in marks if mark.startswith(f"{number:04d}/")]
            doomed = tuple(mark for mark in beside if mark.startswith(f".{name}{DOOMED}"))
            if one is not None and doomed:
                one = replace(one, doomed=doomed)
                if one.what is What.COMPLETE and is_doomed(beside, name, number, one.step or 0, claimed):
                    one = replace(one, what=What.UNFINISHED)  # somebody has begun to remove it
            if one is not None:
                made.append(replace(one, saving=saving and one.what is What.UNFINISHED))
        return made

    async def _one(self, uri: str, life: int, name: str, files: list[Stored]) -> Checkpoint | None:
        one = await self._looked_at(uri, life, name, files)
        if one.what in (What.COMPLETE, What.FOREIGN, What.UNFINISHED):
            return one
        # It may have been committed, or removed, while the listing was made.
        below = f"{life:04d}/{name}"
        listing = await self.contents(uri).walk(below)
        again = [replace(file, path=file.path[len(below) + 1 :]) for file in listing.files]
        return await self._looked_at(uri, life, name, again) if again else None

    async def _looked_at(self, uri: str, life: int, name: str, files: list[Stored]) -> Checkpoint:
        by_path = {file.path: file for file in files}
        content = [file for file in files if file.path not in (MANIFEST, BAD, COMPLETE)]
        plain = Checkpoint(
            channel=uri,
            life=life,
            name=name,
            what=What.UNFINISHED,
            step=step_in(name),
            files=len(content),
            size=sum(file.size for file in content),
            at=max((file.at for file in files), default=0.0),
        )
        if MANIFEST not in by_path:
            return plain
        try:
            manifest = await self._manifest(uri, plain, by_path[MANIFEST])
        except BadManifest as error:
            return replace(plain, what=What.TORN, trouble=f"the manifest {error}")
        what, trouble = What.COMPLETE, ""
        if BAD in by_path:
            what, trouble = What.DAMAGED, await self._reason(uri, plain)
        elif wrong := _differs(manifest, by_path):
            what, trouble = What.DAMAGED, wrong
        elif wrong := _misplaced(manifest, life, name):
            what, trouble = What.FOREIGN, wrong
        return replace(
            plain,
            what=what,
            trouble=trouble,
            step=manifest.step,
            world_size=manifest.world_size,
            writer=manifest.writer,
            files=len(manifest.files),
            size=sum(entry.size for entry in manifest.files),
            at=_moment(manifest.at) or by_path[MANIFEST].at,
            manifest=manifest,
        )

    async def _manifest(self, uri: str, of: Checkpoint, file: Stored) -> Manifest:
        key = (uri, of.folder, file.size, file.at)
        if key not in self._read:  # it never changes
            if file.size > MOST_BYTES:
                raise BadManifest(f"is larger than {MOST_BYTES} bytes")
            data = await self.contents(uri).read(f"{of.folder}/{MANIFEST}", MOST_BYTES + 1)
            if data is None:
                raise BadManifest("is gone")
            self._read[key] = Manifest.parse(data)
        return self._read[key]

    async def _reason(self, uri: str, of: Checkpoint) -> str:
        data = await self.contents(uri).read(f"{of.folder}/{BAD}", _REASON) or b""
        try:
            return str(json.loads(data)["reason"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return f"{BAD} is there"


def _moment(text: str) -> float:
    try:
        return seconds(text)
    except ValueError:
        return 0.0


def _differs(manifest: Manifest, files: Mapping[str, Stored]) -> str:
    for entry in manifest.files:
        file = files.get(entry.path)
        if file is None:
            return f"{entry.path} is not there"
        if file.size != entry.size:
            return f"{entry.path} has {file.size} bytes instead of {entry.size}"
    return ""


def _misplaced(manifest: Manifest, life: int, name: str) -> str:
    if manifest.life != life:
        return f"its manifest is of life {manifest.life}"
    fits = name == save_name(manifest.step) if manifest.writer == "api" else step_in(name) == manifest.step
    return "" if fits or step_in(name) is None else f"its manifest is of step {manifest.step}"


# -- which one counts --------------------------------------------------------------------------


def _judged(
    run: Run,
    lives: Mapping[str, list[Life]],
    found: list[Checkpoint],
    troubles: Mapping[str, str],
    stamp: tuple[object, ...],
) -> Survey:
    every = sorted((life.number, uri) for uri, these in lives.items() for life in these)
    newest = (
        next((life for life in lives[every[-1][1]] if life.number == every[-1][0]), None) if every else None
    )
    chain = list(dict.fromkeys(one.place for one in _chain(run, lives, found)))
    used = _in_use(run, newest, every[-1][1]) if newest is not None else None
    marked = [
        replace(
            one,
            on_chain=one.place in chain,
            next=chain[:1] == [one.place],
            in_use=used is not None and used == (one.channel, one.life, one.step),
        )
        for one in found
    ]
    by_place = {one.place: one for one in marked}
    seed = _seed(run)
    return Survey(
        found=tuple(sorted(marked, key=lambda one: (one.life, one.step or 0, one.name))),
        chain=tuple(by_place[place] for place in chain),
        newest=newest,
        open=bool(run.owners) and (run.current is not None or run.verdict is None),
        elsewhere=seed if seed is not None and seed.run and not chain else None,
        troubles=troubles,
        stamp=stamp,
    )


def _seed(run: Run) -> Seed | None:
    if run.attempts:
        return run.attempts[-1].seed
    return run.owners[-1].seed if run.owners else None


def _in_use(run: Run, life: Life, channel: str) -> tuple[str, int, int | None] | None:
    """Channel, life and step of what the newest life started from."""
    if life.start is None:
        return None
    if life.seeded:
        seed = next((a.seed for a in run.attempts if a.number == life.attempt), None)
        if seed is None or seed.run:
            return None
        channel = seed.channel
    return channel, life.start.life, life.start.step


def _chain(run: Run, lives: Mapping[str, list[Life]], found: list[Checkpoint]) -> Iterator[Checkpoint]:
    """Best first, by the runtime's rule (:func:`airflow_gpu.runtime.checkpoint.candidates`, ``claim.planted``)."""
    if not run.attempts:
        return
    attempt = run.attempts[-1]
    seed = attempt.seed
    behind = max(seed.life if seed is not None and not seed.run else 0, attempt.since - 1)
    here = [life for life in lives.get(attempt.channel, []) if life.number > behind]
    yield from _down(here, attempt.channel, None, found)
    if seed is not None and not seed.run:
        there = [life for life in lives.get(seed.channel, []) if life.number <= seed.life]
        yield from _down(there, seed.channel, seed.step, found)


def _down(
    lives: list[Life], channel: str, limit: int | None, found: list[Checkpoint]
) -> Iterator[Checkpoint]:
    by_number = {life.number: life for life in lives}
    at = lives[-1].number if lives else None
    while at is not None:
        mine = [one for one in found if one.channel == channel and one.life == at and one.whole]
        for one in sorted(mine, key=lambda one: (one.step or 0, one.name), reverse=True):
            if limit is None or (one.step or 0) <= limit:
                yield one
        life = by_number.get(at)
        if life is None or life.start is None or life.seeded or life.start.life >= at:
            return
        at, limit = life.start.life, life.start.step
