"""JAX: pytrees through Orbax.

Purpose: ``save`` writes a pytree of arrays, ``restore`` reads it into the shapes,
types and shardings of another, which may be spread over another number of
devices. Flax and Optax states are such trees.

Limits: several ranks are one JAX program (``jax.distributed.initialize``), or
``save`` refuses. In the background go trees that each process has whole
(replicated, data parallel); one that is spread over processes is waited for.

Example::

    tree = {"params": params, "optimizer": optimizer_state}
    start, tree = restore(g, tree)
    for step in range(start, total):
        tree = train_step(tree)
        if g.checkpoint.due(step + 1):
            save(g, step + 1, tree, wait=False)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, List, Tuple

import jax
import orbax.checkpoint as ocp

from airflow_gpu.runtime.api import Gang, GangError
from airflow_gpu.runtime.words import SCRATCH

__all__ = ["restore", "save"]

NAME = "orbax"
"""Orbax makes its folder itself: one below the gang's."""


def save(g: Gang, step: int, tree: Any, *, wait: bool = True) -> None:
    """Save ``tree`` after ``step`` completed steps; all ranks call it.

    ``wait=False`` copies it into host memory, and rank 0 writes it in the background.
    Raises SystemExit(75) on every rank after a notice, GangError when the ranks are no
    one JAX program, and TypeError for a tree in the background that no process has whole.
    """
    _one_program(g)
    if wait:
        with g.checkpoint.save(step) as folder:
            _write(folder, tree, ocp.options.MultiprocessingOptions())
        return
    copy = _on_host(tree)
    # Without the other processes: their barriers would mix with the collectives of the training.
    alone = ocp.options.MultiprocessingOptions(
        primary_host=0, active_processes={0}, barrier_sync_key_prefix="gang-save"
    )
    g.checkpoint.save_async(step, lambda folder: _write(folder, copy, alone) if g.rank == 0 else None)


def restore(g: Gang, tree: Any) -> Tuple[int, Any]:
    """Completed steps, and the saved tree with the shardings of ``tree``; 0 and ``tree`` itself when there is none.

    Raises GangError when the ranks are no one JAX program, and what Orbax raises for another tree.
    """
    _one_program(g)
    found: List[Path] = []
    step = g.checkpoint.restore(found.append)
    if not found:
        return 0, tree
    wanted = jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)
    with ocp.StandardCheckpointer() as checkpointer:
        return step, checkpointer.restore(found[0] / NAME, wanted)


def _write(folder: Path, tree: Any, processes: Any) -> None:
    if folder.name.startswith(SCRATCH):
        return  # saved already: each rank has a folder of its own, and Orbax would wait for one that all share
    with ocp.StandardCheckpointer(multiprocessing_options=processes) as checkpointer:
        checkpointer.save(folder / NAME, tree)
        checkpointer.wait_until_finished()


def _on_host(tree: Any) -> Any:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
            raise TypeError(
                f"{jax.tree_util.keystr(path)} is spread over processes: save it with wait=True, "
                "so that all of them write it together"
            )
    return jax.tree.map(_copy, tree)


def _copy(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return jax.device_get(leaf)
    return leaf.copy() if hasattr(leaf, "copy") else leaf


def _one_program(g: Gang) -> None:
    # Asked first, since counting the processes starts JAX's backend, and then it is too late to initialize.
    if g.world_size > 1 and not (jax.distributed.is_initialized() and jax.process_count() == g.world_size):
        raise GangError(
            f"the {g.world_size} ranks of this gang are no one JAX program: call "
            "jax.distributed.initialize(num_processes=g.world_size, process_id=g.rank) first"
        )
