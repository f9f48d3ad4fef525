"""Does a store keep the promise of create-only writes? Found out by writing to it.

Purpose: for a doctor command and for tests; see :meth:`airflow_gpu.rundir.store.Store.prove`.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from typing import TYPE_CHECKING

from airflow_gpu.rundir.store import Exists, StoreError

if TYPE_CHECKING:
    from airflow_gpu.rundir.store import Store

PROBE_WRITERS = 8
"""How many writers `Store.prove` lets race for one name."""


async def prove(store: Store) -> None:
    """Create twice, then let several writers race; clean up behind.

    :raises StoreError: a second writer was accepted, or the store cannot be written at all.
    """
    folder = f"probe-{secrets.token_hex(8)}"
    try:
        await store.create(f"{folder}/twice", b"first " + secrets.token_bytes(8))
        first = await store.get(f"{folder}/twice")
        try:
            await store.create(f"{folder}/twice", b"second " + secrets.token_bytes(8))
        except Exists:
            pass
        else:
            raise StoreError(f"{store.uri}: does not honour create-only writes: a second one was accepted")
        contents = [f"writer {n} ".encode() + secrets.token_bytes(8) for n in range(PROBE_WRITERS)]
        outcomes = await asyncio.gather(
            *(store.create(f"{folder}/race", content) for content in contents), return_exceptions=True
        )
        for outcome in outcomes:
            if outcome is not None and not isinstance(outcome, Exists):
                raise outcome
        winners = [c for c, outcome in zip(contents, outcomes, strict=True) if outcome is None]
        found = [await store.get(f"{folder}/twice"), await store.get(f"{folder}/race")]
        if found != [first, *winners]:
            raise StoreError(
                f"{store.uri}: does not honour create-only writes: {len(winners)} of {PROBE_WRITERS} "
                "racing writers were accepted, or a file was overwritten"
            )
    finally:
        with contextlib.suppress(StoreError):  # what was found out matters more
            await store.delete_tree(folder)
