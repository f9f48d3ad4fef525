"""``g.checkpoint``: where to start, when to save, and saving so that it is whole or does not count.

Purpose: see :mod:`airflow_gpu.runtime.api`. How a save becomes complete is
described in :mod:`airflow_gpu.runtime.saves`; this is a rank's part of it.

Limits: files are listed by name and hashed as they lie there, so a rank may
write them by whatever library, in one folder with all the others
(torch.distributed.checkpoint, Orbax). Names must differ between ranks. What is
written in the background must be finished when the block ends.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Callable, Mapping, Optional, Protocol, Type

from airflow_gpu.runtime.checkpoint import complete_in, mark_bad, save_name
from airflow_gpu.runtime.files import Exists, Folder, to_json
from airflow_gpu.runtime.manifest import (
    MANIFEST,
    BadManifest,
    Manifest,
    contents_differ,
    digest_of,
    hash_files,
    listing,
    sizes_differ,
)
from airflow_gpu.runtime.member import GangError, Identity, Leave, Member, say
from airflow_gpu.runtime.wire import HASH_SECONDS, LIST_SECONDS, WRITE_SECONDS, Message
from airflow_gpu.runtime.words import EXIT_PREEMPTED

GO_SECONDS = 120.0
"""For node 0 to make the folder of a save."""

COMMIT_SECONDS = WRITE_SECONDS + LIST_SECONDS + HASH_SECONDS + 300.0
"""Longest wait for a commit; node 0 gives a save up before that."""

VISIBLE_SECONDS = 60.0
"""How long a file that another node wrote may take to be seen here, on a network file system."""

VISIBLE_PAUSE = 0.5
"""Between looks for it."""

Load = Callable[[Path], Any]


class CheckpointError(GangError):
    """A checkpoint is damaged."""


class Checkpoint(Protocol):
    """What ``g.checkpoint`` is, in a gang and outside of one."""

    def restore(self, load: Optional[Load] = None) -> int:
        """Completed steps to start from; 0 when there is nothing.

        ``load`` is called with the checkpoint's folder when there is one, on
        every rank; what it answers is not used. Before that, each rank hashes
        its share of the files, unless node 0 hashed all of them at the claim.
        Raises CheckpointError when one is damaged: no later life takes that checkpoint.
        """

    def due(self, step: int) -> bool:
        """Is a save due, now that ``step`` steps are completed? The same answer on every rank.

        All ranks must ask for the same steps, in growing order; every step, or
        every n-th. A rank that is ahead of rank 0 waits for it. Raises GangError
        after half an hour, and when rank 0 has left the gang.
        """

    def save(self, step: int) -> Saving:
        """``with g.checkpoint.save(step) as d:`` each rank writes files below ``d``, a pathlib.Path.

        At the end of the block the rank waits until the checkpoint is complete.
        If it cannot be completed, that is said loudly and the program goes on;
        an exception inside the block goes on its way, and nothing is committed.
        After a notice every rank then raises SystemExit(75). A step that is
        saved already is written to a temporary folder and dropped.
        Raises GangError when the gang is over.
        """


class Saving(Protocol):
    """The context manager that ``save`` answers."""

    def __enter__(self) -> Path: ...

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None: ...


class GangCheckpoint:
    """:class:`Checkpoint` of a rank in a gang."""

    def __init__(self, member: Member, env: Mapping[str, str]) -> None:
        self._member = member
        self._env = env

    def restore(self, load: Optional[Load] = None) -> int:
        folder = self._env.get("GANG_RESTORE_DIR")
        if not folder:
            return 0
        step = int(self._env.get("GANG_RESTORE_STEP") or 0)
        if self._env.get("GANG_RESTORE_VERIFIED") != "1":
            self._verify(folder)
        if load is not None:
            load(Path(folder))
        return step

    def _verify(self, folder: str) -> None:
        identity = self._member.identity
        try:
            manifest = Manifest.load(folder)
        except BadManifest as error:
            raise CheckpointError(f"checkpoint {folder}: its manifest {error}") from None
        if manifest is None:
            raise CheckpointError(f"checkpoint {folder} has lost its manifest")
        share = sorted(manifest.files, key=lambda entry: entry.path)[identity.rank :: identity.world_size]
        wrong = sizes_differ(folder, share) or contents_differ(folder, share, None)[0]
        if wrong is not None:
            mark_bad(folder, wrong)
            raise CheckpointError(f"checkpoint {folder} is damaged, the next life will not take it: {wrong}")

    def due(self, step: int) -> bool:
        return self._member.due(int(step))

    def save(self, step: int) -> Saving:
        return _GangSave(self._member, self._env, int(step))


class _GangSave:
    def __init__(self, member: Member, env: Mapping[str, str], step: int) -> None:
        self._member = member
        self._channel = Folder(env["GANG_DIR"])
        self._step = step
        self._try = 0
        self._folder = ""
        self._scratch: Optional[tempfile.TemporaryDirectory[str]] = None
        self._cooperative = member.cooperative

    def __enter__(self) -> Path:
        # From here on a notice is answered by the end of this save.
        self._cooperative, self._member.cooperative = self._member.cooperative, True
        self._try = self._member.begin_save(self._step)
        self._say("begin")
        go = self._next("go", GO_SECONDS)
        if go["skip"]:
            say(f"step {self._step} is saved already; this save goes to a temporary folder")
            self._scratch = tempfile.TemporaryDirectory(prefix="gang-save-")
            return Path(self._scratch.name)
        self._folder = self._channel.folder(str(go["dir"]))
        return Path(self._folder)

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        leave = False
        try:
            if self._scratch is not None:
                self._scratch.cleanup()
            elif error is not None:
                rank = self._member.identity.rank
                words = f"rank {rank} failed in it: {type(error).__name__}: {error}"
                self._say("unsaved", error=words)
            else:
                self._say("written")
                saved = self._next("saved", COMMIT_SECONDS)
                leave = bool(saved["leave"])
                if not saved["ok"]:
                    say(f"CHECKPOINT OF STEP {self._step} WAS NOT SAVED: {saved['error']}")
        finally:
            self._member.saved()
            self._member.cooperative = self._cooperative
        # Without due() nobody would ask again whether to leave.
        if leave or (error is None and self._member.notice and not self._cooperative):
            say(f"leaving after step {self._step}: the platform gave notice, the gang is to be resumed")
            raise Leave(EXIT_PREEMPTED)

    def _next(self, kind: str, seconds: float) -> Message:
        """The answer of this kind for this step; does what node 0 asks for meanwhile."""
        until = time.monotonic() + seconds
        while True:
            message = self._member.receive(until - time.monotonic())
            if message is None:
                raise GangError(
                    f"node 0 did not answer for {seconds:.0f} s while step {self._step} was to be saved"
                )
            if (message.get("step"), message.get("try")) != (self._step, self._try):
                continue
            if message["t"] == kind:
                return message
            try:
                if message["t"] == "list":
                    self._view(message)
                elif message["t"] == "hash":
                    self._hash(message)
            except OSError as error:
                words = f"rank {self._member.identity.rank} could not read it: {error}"
                self._say("unsaved", error=words)

    def _say(self, kind: str, **fields: Any) -> None:
        self._member.send({"t": kind, "step": self._step, "try": self._try, **fields})

    def _view(self, message: Message) -> None:
        names = listing(self._folder)
        same = digest_of(names) == message["digest"]
        self._say("view", names=None if same else names)

    def _hash(self, message: Message) -> None:
        until = time.monotonic() + VISIBLE_SECONDS
        while True:
            try:
                entries = hash_files(self._folder, message["files"])
                break
            except FileNotFoundError:
                if time.monotonic() >= until:
                    raise
                time.sleep(VISIBLE_PAUSE)
        self._say("hashed", files=[[e.path, e.size, e.sha256] for e in entries])


class LocalCheckpoint:
    """:class:`Checkpoint` outside of a gang: enough to run a program on a laptop.

    With a folder, a single process finds its newest save there again. Without
    one nothing is restored. Nothing is ever due.
    """

    def __init__(self, identity: Identity, folder: Optional[Path]) -> None:
        self._identity = identity
        self._folder = folder

    def restore(self, load: Optional[Load] = None) -> int:
        if self._folder is None:
            return 0
        # The folder stands for one life's.
        channel = Folder(str(self._folder))
        found = [c for c in complete_in(channel, "", 0, say) if not sizes_differ(c.path, c.manifest.files)]
        if not found:
            return 0
        if load is not None:
            load(Path(found[0].path))
        return found[0].step

    def due(self, step: int) -> bool:
        return False

    def save(self, step: int) -> Saving:
        return _LocalSave(self._identity, self._folder, int(step))


class _LocalSave:
    def __init__(self, identity: Identity, folder: Optional[Path], step: int) -> None:
        self._identity = identity
        self._folder = folder
        self._step = step
        self._path = Path()

    def __enter__(self) -> Path:
        base = self._folder if self._folder is not None else Path(tempfile.mkdtemp(prefix="gang-checkpoint-"))
        self._path = base / save_name(self._step)
        self._path.mkdir(parents=True, exist_ok=True)
        return self._path

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        if error is not None:
            return
        if self._folder is None or self._identity.world_size > 1:
            say(
                f"step {self._step} is saved in {self._path}; outside of a gang it is not restored from there"
            )
            return
        entries = hash_files(str(self._path), listing(str(self._path)))
        manifest = Manifest(0, self._step, 1, tuple(entries))
        try:
            Folder(str(self._path)).create(MANIFEST, to_json(manifest.to_dict()))
        except Exists:
            Folder(str(self._path)).replace(MANIFEST, to_json(manifest.to_dict()))
