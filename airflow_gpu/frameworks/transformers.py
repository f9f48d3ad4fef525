"""Hugging Face Trainer: a callback that saves with the gang, and the path to go on from.

Purpose: :class:`GangCheckpoint` asks after every optimizer step whether a save
is due. Then the Trainer writes its own checkpoint, all ranks of it, into the
gang's folder instead of ``output_dir``.

Limits: saves are waited for. A step that the Trainer's own ``save_strategy`` saves
as well goes into the gang's folder only, so leave that to ``"no"``, also because
``load_best_model_at_end`` needs checkpoints that stay.

Example::

    with gang() as g:
        trainer = Trainer(model, TrainingArguments(save_strategy="no"), callbacks=[GangCheckpoint(g)])
        trainer.train(resume_from_checkpoint=resume_path(g))
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, List, Optional

from transformers import TrainerCallback

from airflow_gpu.runtime.api import Gang, GangError
from airflow_gpu.runtime.checkpointing import Saving

__all__ = ["GangCheckpoint", "resume_path"]


class GangCheckpoint(TrainerCallback):  # type: ignore[misc]
    """Saves when the gang's interval has passed, and on a notice; then ``train`` raises SystemExit(75) on every rank.

    A step is an optimizer step, ``state.global_step``. It also reports progress.
    """

    def __init__(self, g: Gang) -> None:
        self._gang = g
        self._saving: Optional[Saving] = None
        self._output_dir: Optional[str] = None

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        step = int(state.global_step)
        self._gang.progress(step, int(state.max_steps))
        if self._gang.checkpoint.due(step):
            self._saving = self._gang.checkpoint.save(step)
            # The Trainer reads its folder anew at each save, and writes checkpoint-<step> into it.
            self._output_dir, args.output_dir = args.output_dir, str(self._saving.__enter__())
            control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            args.output_dir = self._output_dir
            saving.__exit__(None, None, None)


def resume_path(g: Gang) -> Optional[str]:
    """For ``trainer.train(resume_from_checkpoint=...)``: the newest checkpoint, compared with its digests, or None.

    Raises GangError when it was not written by a Trainer.
    """
    found: List[Path] = []
    step = g.checkpoint.restore(found.append)
    if not found:
        return None
    path = found[0] / f"checkpoint-{step}"
    if not path.is_dir():
        raise GangError(
            f"{found[0]} holds no {path.name}: it was not written by a Trainer with this callback"
        )
    return str(path)
