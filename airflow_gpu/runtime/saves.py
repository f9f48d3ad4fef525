"""How a checkpoint becomes complete: every rank writes, node 0 commits.

Purpose: a manifest exists only when every rank has said that it has written,
and then lists every file with size and digest. The steps of one save:

1. Each rank asks to begin and gets the folder.
2. Each rank writes its files and says so.
3. Node 0 lists the folder, and one rank of each other node lists it too: on a
   network file system each node surely sees its own files at once.
4. The files are divided among all ranks, by size, to be flushed and hashed.
   Where the channel is no folder, agents upload their nodes' files instead of
   both (:mod:`airflow_gpu.runtime.parts`).
5. Node 0 creates the manifest, last, and tells every rank.

Limits: if a rank fails to do its part, is gone, or takes longer than the time
below, the save is given up: the folder keeps no manifest and is no checkpoint.
Runs in the control server's thread; disks are touched in an executor.
"""

from __future__ import annotations

import asyncio
import heapq
import os
from dataclasses import dataclass, field
from typing import Any, Awaitable, Callable, Dict, List, Optional, Sequence, Set, Tuple

from airflow_gpu.runtime.checkpoint import Start, life_folder, save_name, saving_mark
from airflow_gpu.runtime.copies import Levels
from airflow_gpu.runtime.files import Channel, Exists, to_json
from airflow_gpu.runtime.manifest import MANIFEST, Entry, Manifest, digest_of, listing
from airflow_gpu.runtime.parts import NotCollected, Parts
from airflow_gpu.runtime.pruning import Superseded, prune
from airflow_gpu.runtime.wire import HASH_SECONDS, LIST_SECONDS, WRITE_SECONDS, Message

WAIT_NEWS_SECONDS = 60.0
"""After so long a wait for the others to write, the log says for whom."""


Key = Tuple[int, int]
"""A save: its step, and the how-manieth try it is. Each rank counts its own, and all go through the same ones."""


def save_key(message: Message) -> Key:
    return int(message["step"]), int(message["try"])


class GivenUp(Exception):
    """This save will not be committed. The message says why."""


@dataclass(frozen=True)
class Saver:
    """A rank that takes part: how to reach it, and on which node it is."""

    rank: int
    node: int
    send: Callable[[Message], None]


@dataclass
class _Save:
    key: Key
    name: str
    local: bool = False  # to the nodes' own disks
    over: Set[int] = field(default_factory=set)  # ranks that could not write
    begun_at: float = 0.0
    skip: bool = False  # an earlier try is committed: what is written now goes nowhere
    hold: bool = False  # it began after a notice: every rank waits for it, and leaves
    ready: bool = False  # its folder is there
    begun: Set[int] = field(default_factory=set)
    written: Set[int] = field(default_factory=set)
    views: Dict[int, Optional[List[str]]] = field(default_factory=dict)
    owed: Dict[int, Set[str]] = field(default_factory=dict)
    entries: List[Entry] = field(default_factory=list)
    outcome: Optional[Message] = None
    failed: Optional[str] = None
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def step(self) -> int:
        return self.key[0]

    def message(self, kind: str, **fields: Any) -> Message:
        return {"t": kind, "step": self.key[0], "try": self.key[1], **fields}


class Saves:
    """All saves of one life.

    ``savers`` answers the ranks that are connected, ``world`` how many there
    must be, ``noticed`` whether the platform has given notice: a save that is
    decided after that ends with every rank leaving. ``saved`` hears of each that is complete on the channel: its
    step, seconds and bytes.
    """

    def __init__(
        self,
        channel: Channel,
        life: int,
        keep: int,
        start: Optional[Start],
        ancestors: Sequence[int],
        savers: Callable[[], Dict[int, Saver]],
        world: Callable[[], int],
        noticed: Callable[[], bool],
        report: Callable[[str], None],
        spawn: Callable[[Awaitable[None]], None],
        parts: Parts,
        every: Optional[int] = None,
        levels: Optional[Levels] = None,
        saved: Callable[[int, float, int], None] = lambda step, seconds, size: None,
    ) -> None:
        self._channel = channel
        self._life = life
        self._keep = keep
        self._every = every
        self._parts = parts
        self._levels = levels
        self._saved = saved
        self._start = start
        self._ancestors = ancestors
        self._savers = savers
        self._world = world
        self._noticed = noticed
        self._report = report
        self._spawn = spawn
        self._saves: Dict[Key, _Save] = {}
        self._committed: Set[int] = set()
        self._departed: Dict[int, str] = {}
        self._root = life_folder(life)
        self._pruning = False

    # -- what ranks say -----------------------------------------------------------------------

    def without_copies(self) -> None:
        """Some node cannot keep any: every save goes to the channel."""
        self._levels = None

    def begin(self, rank: int, key: Key) -> None:
        """A rank wants to save. It is told where, or that this step is committed already."""
        saver = self._savers().get(rank)
        if saver is None:
            return
        save = self._saves.get(key)
        if save is None:
            skip = key[0] in self._committed
            save = self._saves[key] = _Save(key, save_name(key[0]), skip=skip, hold=self._noticed())
            save.begun_at = asyncio.get_running_loop().time()
            if self._levels is not None and not save.hold:
                save.local = not self._levels.to_channel(save.begun_at)
                if save.local and self._levels.off:
                    save.local, save.skip = False, True
            for departed, reason in self._departed.items():
                self.give_up(key, f"rank {departed} is gone ({reason})")
            if not save.skip:
                self._spawn(self._run(save))
        save.begun.add(rank)
        if save.ready or save.skip:
            self._go(save, saver)

    def _go(self, save: _Save, saver: Saver) -> None:
        folder = f"{self._root}/{save.name}"
        saver.send(
            save.message("go", dir=folder, name=save.name, local=save.local, skip=save.skip, hold=save.hold)
        )

    def written(self, rank: int, key: Key) -> None:
        save, saver = self._saves.get(key), self._savers().get(rank)
        if save is None or saver is None:
            return
        save.written.add(rank)
        if save.outcome is not None:  # given up before this rank came: it gets the others' answer
            saver.send(save.outcome)
            self._clean_up(save)
        save.news.set()

    def unsaved(self, rank: int, key: Key, reason: str) -> None:
        """A rank says that it cannot do its part."""
        save = self._saves.get(key)
        if save is not None:
            save.over.add(rank)
            self._clean_up(save)
        self.give_up(key, reason)

    def give_up(self, key: Key, reason: str) -> None:
        """It will not be committed."""
        save = self._saves.get(key)
        if save is not None and save.outcome is None:
            save.failed = save.failed or reason
            save.news.set()

    def viewed(self, rank: int, key: Key, names: Optional[List[str]]) -> None:
        """A rank's listing; None when it is the same as node 0's."""
        save = self._saves.get(key)
        if save is not None and rank in save.views:
            save.views[rank] = names or []
            save.news.set()

    def hashed(self, rank: int, key: Key, files: List[List[Any]]) -> None:
        save = self._saves.get(key)
        if save is None or rank not in save.owed:
            return
        for path, size, digest in files:
            if path in save.owed[rank]:
                save.owed[rank].discard(path)
                save.entries.append(Entry(str(path), int(size), str(digest)))
        save.news.set()

    def gone(self, rank: int, reason: str) -> None:
        """A rank will say nothing more: saves that still need it are given up, and those that begin later."""
        self._departed[rank] = reason
        for save in self._saves.values():
            if save.outcome is None and (
                rank not in save.written or save.owed.get(rank) or _asked(save, rank)
            ):
                self.give_up(save.key, f"rank {rank} is gone ({reason})")

    def node_gone(self, node: int, reason: str) -> None:
        """What its ranks have written lies on that node only, unless the channel is a folder that all nodes see."""
        for save in self._saves.values():
            if save.outcome is None and (save.local or not self._channel.shared):
                self.give_up(save.key, f"node {node} is gone ({reason}), and its files with it")
        self._parts.abort(f"node {node} is gone ({reason})")

    def came(self, rank: int) -> None:
        """A rank has connected, perhaps not for the first time."""
        self._departed.pop(rank, None)

    def abort(self, reason: str) -> None:
        """The gang ends."""
        self._parts.abort(reason)
        for save in self._saves.values():
            self.give_up(save.key, reason)

    # -- one save -----------------------------------------------------------------------------

    async def _run(self, save: _Save) -> None:
        world = self._world()
        try:
            try:
                if not save.local:
                    await self._disk(self._prepare, save)
            except OSError as error:  # the ranks will find out too; they must not wait for the folder
                self.give_up(save.key, f"its folder could not be made: {error}")
            save.ready = True
            for rank, saver in self._savers().items():
                if rank in save.begun:
                    self._go(save, saver)
            await self._until(
                save, lambda: len(save.written) >= world, WRITE_SECONDS, self._missing(save, world)
            )
            if save.local:
                await self._keep_copies(save, world)
                return
            self._still(save)
            if self._channel.shared:
                await self._hash(save, await self._view(save))
            else:
                await self._disk(self._channel.replace, f"{self._root}/{saving_mark(save.name)}", b"")
                save.entries = await self._parts.collect(f"{self._root}/{save.name}")
                if not save.entries:
                    raise GivenUp("no rank has written a file")
            manifest = Manifest(
                self._life, save.step, world, tuple(sorted(save.entries, key=lambda e: e.path))
            )
            self._still(save)
            await self._disk(self._commit, save, manifest)
            self._committed.add(save.step)
            size = sum(entry.size for entry in manifest.files)
            self._report(
                f"checkpoint of step {save.step} is complete: {len(manifest.files)} files, {size} bytes"
            )
            self._saved(save.step, asyncio.get_running_loop().time() - save.begun_at, size)
            self._finish(save, None)
            self._let_go(save)
        except (GivenUp, NotCollected) as error:
            self._finish(save, str(error))
        except OSError as error:
            self._finish(save, f"the channel could not be written: {error}")
        except Exception as error:  # whatever it is: the ranks wait for an answer
            self._finish(save, f"{type(error).__name__}: {error}")
        if save.outcome is not None and save.outcome["ok"] and not self._pruning and not save.local:
            self._pruning = True
            try:
                await self._disk(self._prune)
            except Superseded:
                pass  # the life will hear of it soon
            finally:
                self._pruning = False

    async def _keep_copies(self, save: _Save, world: int) -> None:
        """Every node hashes its own part, where it lies."""
        message = {"t": "keep", "life": self._life, "name": save.name, "step": save.step, "world": world}
        self._still(save)
        answers = await self._parts.copies(message, HASH_SECONDS)
        self._still(save)
        empty = [node for node, answer in answers.items() if not answer["files"]]
        if empty:
            assert self._levels is not None
            self._levels.off = True
            raise GivenUp(
                f"node {empty[0]} wrote no file of its own. Copies on the nodes are of use only where each node saves what "
                "it needs to load: from now on saves go to the channel alone"
            )
        size = sum(int(answer["bytes"]) for answer in answers.values())
        self._report(f"checkpoint of step {save.step} is complete on the nodes' own disks: {size} bytes")
        self._committed.add(save.step)
        self._finish(save, None)
        self._parts.tell({"t": "kept", "life": self._life, "name": save.name})

    def _let_go(self, save: _Save) -> None:
        """It is on the channel: older copies on the nodes are of no use."""
        if self._levels is not None:
            self._levels.saved(save.begun_at, asyncio.get_running_loop().time())
            self._parts.tell({"t": "kept", "life": self._life, "name": save.name})
        if not self._channel.shared:
            self._parts.drop(f"{self._root}/{save.name}")

    def _prune(self) -> None:
        prune(
            self._channel,
            self._life,
            self._keep,
            self._start,
            self._ancestors,
            self._report,
            every=self._every,
        )

    def _finish(self, save: _Save, error: Optional[str]) -> None:
        if error is not None:
            self._report(f"CHECKPOINT OF STEP {save.step} WAS NOT SAVED: {error}")
            if self._levels is not None and not save.local:
                self._levels.failed(asyncio.get_running_loop().time())
        # One message for all, so that every rank leaves, or every rank goes on.
        save.outcome = save.message("saved", ok=error is None, error=error or "", leave=self._noticed())
        save.entries, save.views, save.owed = [], {}, {}  # a long life has many saves
        for saver in self._savers().values():
            if saver.rank in save.written:  # the others get it when they have written
                saver.send(save.outcome)
        self._clean_up(save)

    def _clean_up(self, save: _Save) -> None:
        """Nothing of a save that came to nothing stays on the nodes, once no rank writes there any more."""
        busy = set(range(self._world())) - save.written - save.over - set(self._departed)
        if save.outcome is None or save.outcome["ok"] or busy:
            return
        if save.local:
            self._parts.tell({"t": "undo", "life": self._life, "name": save.name})
        elif not self._channel.shared:
            self._parts.drop(f"{self._root}/{save.name}")

    @staticmethod
    def _still(save: _Save) -> None:
        if save.failed is not None:
            raise GivenUp(save.failed)

    def _prepare(self, save: _Save) -> None:
        folder = self._channel.folder(self._root)
        if self._channel.shared:  # on a store it may take time, for which no rank needs to wait
            with open(os.path.join(folder, saving_mark(save.name)), "wb"):
                pass
        self._channel.folder(f"{self._root}/{save.name}")

    def _commit(self, save: _Save, manifest: Manifest) -> None:
        try:
            self._channel.create(f"{self._root}/{save.name}/{MANIFEST}", to_json(manifest.to_dict()))
        except Exists:
            raise GivenUp("somebody else has committed this step") from None
        self._channel.remove(f"{self._root}/{saving_mark(save.name)}")  # else pruning takes it away

    async def _view(self, save: _Save) -> List[str]:
        folder = self._channel.path(f"{self._root}/{save.name}")
        own = await self._disk(listing, folder)
        digest = digest_of(own)
        savers = self._savers()
        here = min((saver.node for saver in savers.values()), default=0)
        asked: Dict[int, Saver] = {}
        for saver in sorted(savers.values(), key=lambda saver: saver.rank):
            if saver.node != here:
                asked.setdefault(saver.node, saver)
        for saver in asked.values():
            save.views[saver.rank] = None
            saver.send(save.message("list", digest=digest))

        def unheard() -> List[int]:
            return [rank for rank, view in save.views.items() if view is None]

        await self._until(save, lambda: not unheard(), LIST_SECONDS, lambda: f"listings of ranks {unheard()}")
        names = set(own).union(*(view or [] for view in save.views.values()))
        if not names:
            raise GivenUp("no rank has written a file")
        return sorted(names)

    async def _hash(self, save: _Save, names: List[str]) -> None:
        folder = self._channel.path(f"{self._root}/{save.name}")
        sizes = await self._disk(_sizes, folder, names)
        savers = self._savers()
        for rank, share in zip(sorted(savers), divide(sizes, len(savers))):
            if share:
                save.owed[rank] = set(share)
                savers[rank].send(save.message("hash", files=share))

        def slow() -> List[int]:
            return [rank for rank, owed in save.owed.items() if owed]

        await self._until(save, lambda: not slow(), HASH_SECONDS, lambda: f"digests of ranks {slow()}")
        if len(save.entries) != len(names):  # no rank was there to ask
            raise GivenUp("not all files were hashed")

    def _missing(self, save: _Save, world: int) -> Callable[[], str]:
        def who() -> str:
            missing = [rank for rank in range(world) if rank not in save.written]
            shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            return f"ranks that have not written: {shown}"

        return who

    async def _until(
        self, save: _Save, done: Callable[[], bool], seconds: float, waiting_for: Callable[[], str]
    ) -> None:
        loop = asyncio.get_running_loop()
        until, news = loop.time() + seconds, loop.time() + WAIT_NEWS_SECONDS
        while True:
            if save.failed is not None:
                raise GivenUp(save.failed)
            if done():
                return
            now = loop.time()
            if now >= until:
                raise GivenUp(f"took longer than {seconds:.0f} s; still missing: {waiting_for()}")
            if now >= news:
                news = until
                self._report(f"checkpoint of step {save.step} still waits for {waiting_for()}")
            save.news.clear()
            try:
                await asyncio.wait_for(save.news.wait(), min(until, news) - now)
            except asyncio.TimeoutError:
                pass

    async def _disk(self, what: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(None, what, *args)


def _asked(save: _Save, rank: int) -> bool:
    return rank in save.views and save.views[rank] is None


def _sizes(folder: str, names: Sequence[str]) -> List[Tuple[int, str]]:
    found = []
    for name in names:
        try:
            size = os.stat(os.path.join(folder, *name.split("/"))).st_size
        except OSError:
            size = 0  # another node's, not seen here yet; whoever hashes it says how large it is
        found.append((size, name))
    return found


def divide(sizes: Sequence[Tuple[int, str]], shares: int) -> List[List[str]]:
    """Share out files so that each share is about as many bytes; deterministic."""
    if shares < 1:
        return []
    loads = [(0, index) for index in range(shares)]
    parts: List[List[str]] = [[] for _ in range(shares)]
    for size, name in sorted(sizes, reverse=True):
        load, index = loads[0]
        parts[index].append(name)
        heapq.heapreplace(loads, (load + size + 1, index))
    return parts
