"""The slot of a task instance: which incarnations of its run there have been, and taking the newest over.

Purpose: the first thing a try does. Create-only, so two processes that start
at the same moment agree on one incarnation and one owner.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from airflow_gpu.gang.entries import iso, owner_entry
from airflow_gpu.gang.identity import RunKey, run_path, slot_path
from airflow_gpu.gang.lineage import changes
from airflow_gpu.gang.ownership import Claim, Try, claim
from airflow_gpu.gang.run import Run, Seed
from airflow_gpu.rundir.journal import Journal, LostRace
from airflow_gpu.rundir.store import Exists, Missing, Store

_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
INCARNATION_LENGTH = 10


@dataclass(frozen=True, slots=True)
class Held:
    """A run that this try owns, or for ``before`` one that must be ended first."""

    journal: Journal
    key: RunKey
    incarnation: str
    epoch: int
    claim: Claim
    note: str = ""  # for people: why it begins again, or from where


async def newest(store: Store, key: RunKey) -> tuple[int, str] | None:
    """Number and name of the newest incarnation."""
    folder = f"{slot_path(key)}/incarnations"
    names = [name for name in await store.names(folder) if name.endswith(".json") and name[:-5].isdigit()]
    if not names:
        return None
    last = max(names, key=lambda name: int(name[:-5]))
    return int(last[:-5]), str(json.loads(await store.get(f"{folder}/{last}"))["incarnation"])


async def _begin(store: Store, key: RunKey, number: int, now: float) -> None:
    """Create incarnation ``number``; no error when another process was first."""
    incarnation = "".join(secrets.choice(_ALPHABET) for _ in range(INCARNATION_LENGTH))
    body = {"v": 1, "incarnation": incarnation, "key": asdict(key), "at": iso(now)}
    data = json.dumps(body, indent=1).encode()
    # The run directory describes itself before anything names it.
    await store.create(f"{run_path(key, incarnation)}/run.json", data)
    try:
        await store.create(f"{slot_path(key)}/incarnations/{number:04d}.json", data)
    except Exists:
        pass


async def read_run(store: Store, path: str) -> tuple[RunKey, str]:
    """Key and incarnation of the run directory at ``path``."""
    try:
        body = json.loads(await store.get(f"{path}/run.json"))
    except Missing as error:
        raise Missing(f"there is no run at {store.uri}/{path}") from error
    known = {k: v for k, v in body["key"].items() if k in RunKey.__dataclass_fields__}
    return RunKey(**known), str(body["incarnation"])


async def take(
    store: Store,
    key: RunKey,
    me: Try,
    *,
    on_clear: str,
    gang: Mapping[str, Any],
    digest: str,
    deadline: float | None,
    now: float,
    seed: Callable[[], Awaitable[tuple[Seed | None, str]]] | None = None,
    doubt: Callable[[], Awaitable[None]] | None = None,
) -> Held:
    """Make this try the owner of the slot's run, or say what must end first.

    :param seed: finds the checkpoint of another run from which a start from
        nothing begins all the same, with a sentence about it.
    :param doubt: called once before a claim that is ``doubtful`` is acted on, and then all is read again. A
        process that Airflow has given up is to be dead by the end of it.

    When the answer's claim has ``action == "new"`` and ``stop``, the run in it
    is an older incarnation whose gang still lives: the caller drives it to its
    end and calls again.
    """
    reason = ""
    while True:
        found = await newest(store, key)
        if found is None:
            await _begin(store, key, 1, now)
            continue
        number, incarnation = found
        journal = Journal(store, run_path(key, incarnation))
        run = await journal.refresh()
        decided = claim(run, me, on_clear) if run.owners else Claim("take", reason or "start")
        if decided.doubtful and doubt is not None:
            await doubt()
            doubt = None
            continue
        if decided.action == "same":
            return Held(journal, key, incarnation, run.epoch, decided)
        if decided.action == "new":
            if decided.stop:
                return Held(journal, key, incarnation, run.epoch, decided)
            reason = decided.reason
            await _begin(store, key, number + 1, now)
            continue
        resume, note = _resumes(journal, run, gang, decided)
        # What an owner begins from when it begins from nothing: as the one before, unless it begins again.
        start, told = run.owners[-1].seed if run.owners else None, ""
        if seed is None:
            start = None
        elif start is None or not resume or not _saved(run, start):
            start, told = await seed()
        note = " ".join(filter(None, (note, told)))
        try:
            await journal.append(
                owner_entry(
                    ti_id=me.ti_id,
                    try_number=me.try_number,
                    max_tries=me.max_tries,
                    reason=decided.reason,
                    resume=resume,
                    deadline=deadline,
                    gang=gang,
                    digest=digest,
                    note=note,
                    dag_run=me.dag_run,
                    seed=start,
                ),
                epoch=run.epoch + 1,
                now=now,
            )
        except LostRace:
            continue
        return Held(journal, key, incarnation, journal.run.epoch, decided, note)


def _saved(run: Run, seed: Seed) -> bool:
    """The run has a checkpoint of its own, beyond the one that it began from."""
    found = [a.outcome.checkpoint for a in run.attempts if a.outcome is not None]
    return any(one is not None and one != seed.checkpoint for one in found)


def _resumes(journal: Journal, run: Run, gang: Mapping[str, Any], decided: Claim) -> tuple[bool, str]:
    """Whether the next attempt may start from the run's checkpoint, and what to say of it."""
    if not run.attempts:
        return decided.resume, ""
    if not decided.resume:
        return False, "It begins again, as recovery.on_clear='fresh' asks."
    changed = changes(journal.gang_of(run.attempts[-1].epoch), gang)
    if not changed:
        return True, ""
    what = f"{', '.join(changed)} changed since its checkpoints were written"
    if run.current is not None and not decided.stop:
        return False, f"{what}: what runs goes on, and a next attempt would begin again."
    if (gang.get("checkpointing") or {}).get("on_change") == "resume":
        return (
            True,
            f"{what}; it goes on from the newest all the same, as checkpointing.on_change='resume' asks.",
        )
    return False, f"{what}: IT BEGINS AGAIN. checkpointing.on_change='resume' would go on from the newest."
