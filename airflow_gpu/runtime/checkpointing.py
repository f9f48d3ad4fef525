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
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Callable, Mapping, NoReturn, Optional, Protocol, Type

from airflow_gpu.runtime.checkpoint import mark_bad
from airflow_gpu.runtime.files import Folder
from airflow_gpu.runtime.manifest import (
    BadManifest,
    Manifest,
    contents_differ,
    digest_of,
    hash_files,
    listing,
    sizes_differ,
)
from airflow_gpu.runtime.member import GangError, Leave, Member, say
from airflow_gpu.runtime.wire import HASH_SECONDS, LIST_SECONDS, WRITE_SECONDS, Message
from airflow_gpu.runtime.words import EXIT_PREEMPTED, SCRATCH

GO_SECONDS = 120.0
"""For node 0 to make the folder of a save."""

COMMIT_SECONDS = WRITE_SECONDS + LIST_SECONDS + HASH_SECONDS + 300.0
"""Longest wait for a commit; node 0 gives a save up before that."""

VISIBLE_SECONDS = 60.0
"""How long a file that another node wrote may take to be seen here, on a network file system."""

VISIBLE_PAUSE = 0.5
"""Between looks for it."""

Load = Callable[[Path], Any]
Write = Callable[[Path], Any]


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

    @property
    def saved_by(self) -> Optional[int]:
        """How many ranks saved the checkpoint that this life starts from; None when there is none.

        When it is not ``world_size``, ``load`` has to reshard: that is the framework's business.
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

    def save_async(self, step: int, write: Write) -> None:
        """``write(d)`` fills the folder ``d`` in a thread of its own, while the program goes on.

        What it writes must not change meanwhile: hand it a copy. One such save
        is under way at a time; the next one waits for it. A save that fails is
        said loudly, and the program goes on. After a notice it is waited for
        like any other, and then every rank raises SystemExit(75); an error of
        ``write`` is raised then. Raises GangError when the gang is over.

        Example::

            state = {name: tensor.cpu().clone() for name, tensor in model.state_dict().items()}
            g.checkpoint.save_async(step, lambda d: torch.save(state, d / f"rank-{g.rank}.pt"))
        """

    def wait(self) -> None:
        """Until no save is under way. The end of ``with gang()`` does it too."""


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
        self._background = _Background(member, env)

    def restore(self, load: Optional[Load] = None) -> int:
        folder = self._env.get("GANG_RESTORE_DIR")
        if not folder:
            return 0
        step = int(self._env.get("GANG_RESTORE_STEP") or 0)
        if self._env.get("GANG_RESTORE_VERIFIED") != "1":
            self._verify(folder)
        saved_by, here = self.saved_by, self._member.identity.world_size
        if saved_by not in (None, here):
            say(f"step {step} was saved by {saved_by} ranks, and this gang has {here}: load must reshard it")
        if load is not None:
            load(Path(folder))
        return step

    @property
    def saved_by(self) -> Optional[int]:
        told = self._env.get("GANG_RESTORE_WORLD_SIZE")
        return int(told) if told else None

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
            mark_bad(Folder(folder), "", wrong)
            raise CheckpointError(f"checkpoint {folder} is damaged, the next life will not take it: {wrong}")

    def due(self, step: int) -> bool:
        return self._member.due(int(step))

    def save(self, step: int) -> Saving:
        self._background.wait()
        return _Saving(self._member, self._env, int(step))

    def save_async(self, step: int, write: Write) -> None:
        self._background.save(int(step), write)

    def wait(self) -> None:
        self._background.wait()


class _Save:
    """One save of this rank, from the first word to node 0 until the checkpoint is complete or given up."""

    def __init__(self, member: Member, env: Mapping[str, str], step: int) -> None:
        self._member = member
        self._channel = Folder(env["GANG_DIR"])
        self._local = env.get("GANG_LOCAL_DIR") or ""
        self._scratch: Optional[tempfile.TemporaryDirectory[str]] = None
        self._folder = ""
        self.step = step
        self.key = member.begin_save(step)
        self.hold = False

    def begin(self) -> Path:
        """Where to write, on every rank. Raises GangError."""
        self._say("begin")
        go = self._next("go", GO_SECONDS)
        self.hold = bool(go.get("hold"))
        if go["skip"]:
            say(f"step {self.step} is saved already; this save goes to a temporary folder")
            self._scratch = tempfile.TemporaryDirectory(prefix=SCRATCH)
            return Path(self._scratch.name)
        place = Folder(self._local) if go.get("local") else self._channel
        self._folder = place.folder(str(go["name"] if go.get("local") else go["dir"]))
        return Path(self._folder)

    def commit(self) -> bool:
        """This rank has written. Until it is complete or given up; answers whether the gang leaves now."""
        if self._scratch is not None:
            return False
        self._say("written")
        saved = self._next("saved", COMMIT_SECONDS)
        if not saved["ok"]:
            say(f"CHECKPOINT OF STEP {self.step} WAS NOT SAVED: {saved['error']}")
        return bool(saved["leave"])

    def fail(self, error: BaseException) -> None:
        """This rank could not write."""
        if self._scratch is None:
            words = f"rank {self._member.identity.rank} failed in it: {type(error).__name__}: {error}"
            self._say("unsaved", error=words)

    def end(self) -> None:
        if self._scratch is not None:
            self._scratch.cleanup()
        self._member.end_save(self.key)

    def _next(self, kind: str, seconds: float) -> Message:
        """The answer of this kind; does what node 0 asks for meanwhile."""
        until = time.monotonic() + seconds
        while True:
            message = self._member.receive(self.key, until - time.monotonic())
            if message is None:
                raise GangError(
                    f"node 0 did not answer for {seconds:.0f} s while step {self.step} was to be saved"
                )
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
        self._member.send({"t": kind, "step": self.key[0], "try": self.key[1], **fields})

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


class _Saving:
    """``with g.checkpoint.save(step) as d:`` in a gang."""

    def __init__(self, member: Member, env: Mapping[str, str], step: int) -> None:
        self._member = member
        self._env = env
        self._step = step
        self._save: _Save
        self._cooperative = member.cooperative
        self._begun = 0.0

    def __enter__(self) -> Path:
        # From here on a notice is answered by the end of this save.
        self._cooperative, self._member.cooperative = self._member.cooperative, True
        self._begun = time.monotonic()
        self._save = _Save(self._member, self._env, self._step)
        try:
            return self._save.begin()
        except BaseException:
            self._save.end()
            raise

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        leave = False
        try:
            if error is not None:
                self._save.fail(error)
            else:
                leave = self._save.commit()
        finally:
            self._save.end()
            self._member.saved(time.monotonic() - self._begun)
            self._member.cooperative = self._cooperative
        # Without due() nobody would ask again whether to leave.
        if leave or (error is None and self._member.notice and not self._cooperative):
            leave_after(self._step)


def leave_after(step: int) -> NoReturn:
    say(f"leaving after step {step}: the platform gave notice, the gang is to be resumed")
    raise Leave(EXIT_PREEMPTED)


class _Background:
    """Saves that go on while the program does: one at a time, in threads of their own."""

    def __init__(self, member: Member, env: Mapping[str, str]) -> None:
        self._member = member
        self._env = env
        self._thread: Optional[threading.Thread] = None

    def save(self, step: int, write: Write) -> None:
        begun = time.monotonic()
        cooperative, self._member.cooperative = self._member.cooperative, True
        self.wait()
        save = _Save(self._member, self._env, step)
        try:
            folder = save.begin()
        except BaseException:
            save.end()
            raise
        if not save.hold:
            self._thread = threading.Thread(
                target=self._write, args=(save, folder, write), name=f"gang-save-{step}", daemon=True
            )
            self._thread.start()
            self._member.saved(time.monotonic() - begun)
            self._member.cooperative = cooperative
            return
        # Every rank does the same here: it was decided for this save, once.
        try:
            write(folder)
            save.commit()
        except BaseException as error:
            save.fail(error)
            raise
        finally:
            save.end()
        leave_after(step)

    def wait(self) -> None:
        """Until nothing is being saved any more."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def _write(self, save: _Save, folder: Path, write: Write) -> None:
        try:
            write(folder)
            save.commit()  # whether to leave is decided by a save that all ranks wait for
        except GangError as error:
            say(f"CHECKPOINT OF STEP {save.step} WAS NOT SAVED: {error}")
        except BaseException as error:  # whatever it is: training goes on
            say(f"CHECKPOINT OF STEP {save.step} WAS NOT SAVED: {type(error).__name__}: {error}")
            save.fail(error)
        finally:
            save.end()
