"""PyTorch: what each rank holds, in a file of its own.

Purpose: ``save`` and ``restore`` for plain PyTorch and DistributedDataParallel.
``state`` is a dict. Its values are modules, optimizers, anything else that has
``state_dict`` and ``load_state_dict``, tensors (restored in place), or plain
values, which ``restore`` puts into the dict.

Limits: PyTorch 2.6 or later. The files fit the same number of ranks; for
another number, and for FSDP, see :mod:`airflow_gpu.frameworks.dcp`. They are
read with ``weights_only``: tensors and plain containers, no code is run.

Example::

    state = {"model": model, "optimizer": optimizer}
    start = restore(g, state)
    for step in range(start, total):
        train_step()
        if g.checkpoint.due(step + 1):
            save(g, step + 1, state, wait=False)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict

import torch

from airflow_gpu.runtime.api import Gang, GangError

__all__ = ["restore", "save"]

State = Dict[str, Any]


def save(g: Gang, step: int, state: State, *, wait: bool = True) -> None:
    """Save ``state`` after ``step`` completed steps, a file for each rank; all ranks call it.

    ``wait=False`` copies it into CPU memory, and writes in the background.
    Raises SystemExit(75) on every rank after a notice, and TypeError when
    ``state`` holds what ``restore`` would not read (in the background: says so).
    """
    values = {name: value.state_dict() if stateful(value) else value for name, value in state.items()}
    if wait:
        with g.checkpoint.save(step) as folder:
            _write_file(folder, g, values)
    else:
        copy = _on_cpu(values)
        g.checkpoint.save_async(step, lambda folder: _write_file(folder, g, copy))


def restore(g: Gang, state: State) -> int:
    """Fill ``state`` from this rank's file. Completed steps; 0 when there is no checkpoint.

    Raises GangError when another number of ranks wrote it, or it holds other names.
    """
    return g.checkpoint.restore(lambda folder: _read_file(folder, g, state))


def _write_file(folder: Path, g: Gang, values: State) -> None:
    path = folder / f"rank-{g.rank:05d}-of-{g.world_size:05d}.pt"
    torch.save(values, path)
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    if unsafe:
        raise TypeError(
            f"the state holds {', '.join(sorted(unsafe))}, which cannot be read again without running code: "
            "save tensors, numbers, text, lists and dicts, or allow it with torch.serialization.add_safe_globals"
        )


def _read_file(folder: Path, g: Gang, state: State) -> None:
    path = folder / f"rank-{g.rank:05d}-of-{g.world_size:05d}.pt"
    if not path.exists():
        found = sorted(folder.glob("rank-*-of-*.pt"))
        if not found:
            raise GangError(f"{folder} was not written by airflow_gpu.frameworks.torch.save")
        ranks = int(found[0].stem.rpartition("-")[2])
        raise GangError(
            f"the checkpoint {folder} was written by {ranks} ranks, and this gang has {g.world_size}: files of "
            "single ranks fit the same number of ranks only. dcp_save and dcp_restore take any number"
        )
    values = torch.load(path, map_location="cpu", weights_only=True)
    if set(values) != set(state):
        raise GangError(f"{path} holds {sorted(values)}, and the program asks for {sorted(state)}")
    for name, value in values.items():
        if stateful(state[name]):
            state[name].load_state_dict(value)
        elif isinstance(state[name], torch.Tensor):
            with torch.no_grad():
                state[name].copy_(value)
        else:
            state[name] = value


def stateful(value: Any) -> bool:
    """It can say what it holds, and take it back."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _on_cpu(value: Any) -> Any:
    """A copy that the training cannot change."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        copy: Any = value.copy()
        copy.update((key, _on_cpu(item)) for key, item in value.items())
        if hasattr(value, "_metadata"):  # a module's state dict: the versions of its parts
            copy._metadata = value._metadata
        return copy
    if type(value) in (list, tuple):
        return type(value)(_on_cpu(item) for item in value)
    return value
