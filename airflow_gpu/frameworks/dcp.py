"""PyTorch: one state of all ranks, through torch.distributed.checkpoint (DCP).

Purpose: ``dcp_save`` and ``dcp_restore`` for FSDP, tensor parallel and gangs whose
size changes: what N ranks wrote, M ranks can read. ``state`` is a dict as in
:mod:`airflow_gpu.frameworks.torch`; DTensors are written by the ranks that hold
them, anything else is the same on all ranks, and one of them writes it. What is
a rank's own gets a name of its own: ``{f"random-{g.rank}": torch.get_rng_state()}``.

Limits: PyTorch 2.6 or later, with a process group when there are several ranks.
DCP unpickles what is no tensor: read checkpoints only of people that you trust.

Example::

    dist.init_process_group()
    state = {"model": model, "optimizer": optimizer, "seen": 0}
    start = dcp_restore(g, state)
    ...
    dcp_save(g, step, state, wait=False)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as parts
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from airflow_gpu.frameworks.torch import stateful
from airflow_gpu.runtime.api import Gang, GangError

__all__ = ["dcp_restore", "dcp_save"]

State = Dict[str, Any]

_group: Optional[Tuple[Any, Any]] = None
"""The program's process group, and one for saves alone: in the background they must not mix with its collectives."""


def dcp_save(g: Gang, step: int, state: State, *, wait: bool = True) -> None:
    """Save ``state`` as one, through torch.distributed.checkpoint; all ranks call it.

    ``wait=False`` copies it into CPU memory, and writes in the background.
    Raises SystemExit(75) on every rank after a notice, GangError when the process
    group is missing, ValueError when an optimizer belongs to none of the modules.
    """
    group = _saving_group(g)
    values = _values(state)
    if wait:
        with g.checkpoint.save(step) as folder:
            dcp.save(values, checkpoint_id=str(folder), process_group=group)
    else:
        copy = BlockingAsyncStager().stage(values)
        g.checkpoint.save_async(
            step, lambda folder: dcp.save(copy, checkpoint_id=str(folder), process_group=group)
        )


def dcp_restore(g: Gang, state: State) -> int:
    """Fill ``state``, whatever number of ranks wrote it. Completed steps; 0 when there is no checkpoint.

    Raises GangError when the process group is missing, and what DCP raises when
    the checkpoint lacks a part of ``state``.
    """
    group = _saving_group(g)

    def load(folder: Path) -> None:
        values = _values(state)
        dcp.load(values, checkpoint_id=str(folder), process_group=group)
        for name, value in values.items():
            _give_back(state, name, value)

    return g.checkpoint.restore(load)


def _saving_group(g: Gang) -> Any:
    global _group
    if not dist.is_initialized():
        if g.world_size > 1:
            raise GangError(
                "call torch.distributed.init_process_group() first: all ranks save one state together"
            )
        return None
    world = dist.group.WORLD
    if _group is None or _group[0] is not world:
        _group = (world, dist.new_group(backend="gloo"))
    return _group[1]


def _values(state: State) -> State:
    """What DCP writes and reads in place. Optimizers get their state even before their first step."""
    modules = [value for value in state.values() if isinstance(value, torch.nn.Module)]
    values: State = {}
    for name, value in state.items():
        if isinstance(value, torch.nn.Module):
            values[name] = parts.get_model_state_dict(value)
        elif isinstance(value, torch.optim.Optimizer):
            values[name] = parts.get_optimizer_state_dict(_owner(name, value, modules), value)
        elif stateful(value):
            values[name] = value.state_dict()
        else:
            values[name] = value
    return values


def _give_back(state: State, name: str, value: Any) -> None:
    target = state[name]
    if isinstance(target, torch.nn.Module):
        parts.set_model_state_dict(target, value)
    elif isinstance(target, torch.optim.Optimizer):
        modules = [module for module in state.values() if isinstance(module, torch.nn.Module)]
        parts.set_optimizer_state_dict(_owner(name, target, modules), target, value)
    elif stateful(target):
        target.load_state_dict(value)
    else:
        state[name] = value  # a tensor was filled where it is


def _owner(name: str, optimizer: torch.optim.Optimizer, modules: List[torch.nn.Module]) -> torch.nn.Module:
    wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for module in modules:
        if wanted <= {id(p) for p in module.parameters()}:
            return module
    raise ValueError(f"state[{name!r}] is an optimizer, and no module of the state has all of its parameters")
