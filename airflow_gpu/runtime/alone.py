"""``g.checkpoint`` outside of a gang: enough to run the same program on a laptop.

Purpose: see :mod:`airflow_gpu.runtime.api`. With a folder, a single process
finds its newest save there again. Without one nothing is restored.

Limits: nothing is ever due, and there is no notice.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import TracebackType
from typing import Optional, Type

from airflow_gpu.runtime.checkpoint import complete_in, save_name
from airflow_gpu.runtime.checkpointing import Load, Saving, Write
from airflow_gpu.runtime.files import Exists, Folder, to_json
from airflow_gpu.runtime.manifest import MANIFEST, Manifest, hash_files, listing, sizes_differ
from airflow_gpu.runtime.member import Identity, say


class LocalCheckpoint:
    """:class:`~airflow_gpu.runtime.checkpointing.Checkpoint` of a program that runs alone, or under torchrun."""

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

    @property
    def saved_by(self) -> Optional[int]:
        return None

    def due(self, step: int) -> bool:
        return False

    def save(self, step: int) -> Saving:
        return _LocalSave(self._identity, self._folder, int(step))

    def save_async(self, step: int, write: Write) -> None:
        with self.save(step) as folder:
            write(folder)

    def wait(self) -> None:
        pass


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
