"""Which run a person means: ``dag/run/task[map]``, the beginning of it, a job's name, or a run directory.

Purpose: one answer or none. What could mean several runs is an error that
lists them, newest first.

Limits: names are taken from paths, so the end of an id that was too long for a
path (120 characters) does not count.
"""

from __future__ import annotations

import re
from urllib.parse import unquote_to_bytes

import click

from airflow_gpu.gang.identity import UNMAPPED, RunKey, attempt_name
from airflow_gpu.rundir.slot import newest
from airflow_gpu.rundir.store import Store, StoreError
from airflow_gpu.sweeping.listing import RunDir, run_dirs
from airflow_gpu.sweeping.looking import SeenRun, load

SHOWN = 15
"""Candidates that an error lists."""


class NoSuchRun(click.ClickException):
    """No run directory fits."""


async def find_run(store: Store, installation: str, text: str) -> SeenRun:
    """The run that ``text`` names, read.

    :raises NoSuchRun: none fits.
    :raises click.ClickException: several fit, or the one that fits cannot be read.
    """
    try:
        every = await run_dirs(store, installation)
    except StoreError as error:
        raise click.ClickException(f"the state store cannot be listed: {error}") from None
    found = await _choose(store, list(every.values()), text.strip())
    seen = await load(store, found)
    if seen.trouble:
        raise click.ClickException(f"{found.path}: {seen.trouble}")
    return seen


async def _choose(store: Store, every: list[RunDir], text: str) -> RunDir:
    path = _path_of(text)
    if path is not None:
        inside = [found for found in every if found.path == path or path.startswith(f"{found.path}/")]
        if inside:
            return inside[0]
        return await _newest(store, [found for found in every if found.slot == path], every, text)
    by_job = [found for found in every if _has_job(found, text)]
    if by_job:
        return by_job[0]
    exact = [found for found in every if name_of(found) == text]
    return await _newest(store, exact or [f for f in every if name_of(f).startswith(text)], every, text)


async def _newest(store: Store, fitting: list[RunDir], every: list[RunDir], text: str) -> RunDir:
    """The newest incarnation of the one slot that fits."""
    slots = {found.slot for found in fitting}
    if not slots:
        lines = _listed(every)
        hint = f"; the newest are:\n{lines}" if lines else "; there is none at all in this state store"
        raise NoSuchRun(f"no run is called {text!r}{hint}")
    if len(slots) > 1:
        raise click.ClickException(f"{text!r} could be any of {len(slots)} runs:\n{_listed(fitting)}")
    if len(fitting) == 1:
        return fitting[0]
    key = key_of(fitting[0])
    last = await newest(store, key) if key is not None else None
    for found in fitting:
        if last is not None and found.incarnation == last[1]:
            return found
    return max(fitting, key=lambda found: found.touched)


def _listed(runs: list[RunDir]) -> str:
    names = list(dict.fromkeys(name_of(found) for found in sorted(runs, key=lambda found: -found.touched)))
    more = [f"  ... and {len(names) - SHOWN} more"] if len(names) > SHOWN else []
    return "\n".join([f"  {name}" for name in names[:SHOWN]] + more)


def _path_of(text: str) -> str | None:
    """The path below the root of the store, of a run directory (or something in it) given by path or address."""
    match = re.search(r"(?:^|/)(v1/[^/]+/[^/]+/[^/]+/[^/]+/(?:_|\d+)(?:/.*)?)$", text.rstrip("/"))
    return match[1] if match else None


def key_of(found: RunDir) -> RunKey | None:
    """The key by the path; None where that does not hold it whole."""
    parts = [
        unquote_to_bytes(part.replace("=", "%")).decode("utf-8", "replace") for part in found.slot.split("/")
    ]
    if len(parts) != 6:
        return None
    index = UNMAPPED if parts[5] == "_" else int(parts[5]) if parts[5].isdigit() else None
    return RunKey(parts[1], parts[2], parts[3], parts[4], index) if index is not None else None


def name_of(found: RunDir) -> str:
    """``dag/run/task[map]``."""
    key = key_of(found)
    return str(key) if key is not None else found.path


def _has_job(found: RunDir, text: str) -> bool:
    """Whether an attempt of the run would be called that."""
    stem, _, number = text.rpartition("-")
    key = key_of(found)
    if not stem or not number.isdigit() or int(number) < 1 or key is None:
        return False
    return attempt_name(key, found.incarnation, int(number)) == text
