"""Lightning: a callback that saves with the gang, and the path to go on from.

Purpose: :class:`GangCheckpoint` asks after every optimizer step whether a save
is due, and has the trainer write its checkpoint into the gang's. Both packages,
``lightning`` and ``pytorch_lightning``: the one that the program has imported,
else the one that is installed.

Limits: saves are waited for. Where the data goes on in the middle of an epoch
is Lightning's: with a loader that has ``state_dict`` (torchdata's
StatefulDataLoader) at the same batch, with others at the loader's beginning.

Example::

    with gang() as g:
        trainer = L.Trainer(callbacks=[GangCheckpoint(g)], num_nodes=g.nodes, devices=g.local_world_size)
        trainer.fit(model, ckpt_path=resume_path(g))
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any, List, Optional

from airflow_gpu.runtime.api import Gang

__all__ = ["GangCheckpoint", "resume_path"]

NAME = "lightning.ckpt"
"""The trainer's checkpoint in the gang's; a file, or a folder of a sharded strategy."""


def _library() -> Any:
    names = ("lightning.pytorch", "pytorch_lightning")
    for name in names:
        if name in sys.modules:
            return sys.modules[name]
    try:
        return importlib.import_module(names[0])
    except ModuleNotFoundError:
        return importlib.import_module(names[1])


class GangCheckpoint(_library().Callback):  # type: ignore[misc]
    """Saves when the gang's interval has passed, and on a notice; then ``fit`` raises SystemExit(75) on every rank.

    A step is an optimizer step, ``trainer.global_step``. It also reports progress.
    """

    def __init__(self, g: Gang) -> None:
        self._gang = g
        self._asked = -1

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = int(trainer.global_step)
        if step == self._asked:  # gradients are being accumulated
            return
        self._asked = step
        total = trainer.estimated_stepping_batches
        self._gang.progress(step, int(total) if 0 < total < float("inf") else None)
        if self._gang.checkpoint.due(step):
            with self._gang.checkpoint.save(step) as folder:
                trainer.save_checkpoint(folder / NAME)


def resume_path(g: Gang) -> Optional[str]:
    """For ``trainer.fit(ckpt_path=...)``: the newest checkpoint, compared with its digests; None when there is none."""
    found: List[Path] = []
    g.checkpoint.restore(found.append)
    return str(found[0] / NAME) if found else None
