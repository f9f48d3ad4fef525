"""``airflow-gpu cancel``."""

from __future__ import annotations

import time
from dataclasses import asdict

import click

from airflow_gpu.cli.finding import NoSuchRun, find_run
from airflow_gpu.cli.place import Place
from airflow_gpu.cli.show import out, print_json, say
from airflow_gpu.sweeping.decide import installation_label
from airflow_gpu.sweeping.ending import LOST_GRACE, Ended, cancel_job, end_run
from airflow_gpu.sweeping.looking import SeenRun, load
from airflow_gpu.sweeping.sweep import grace_of
from airflow_gpu.targets.base import Listed, TargetError

TRIES = 5
"""How often it is begun anew because the run got a new owner, or a new attempt, meanwhile."""


async def cancel_gang(place: Place, name: str, *, grace: float | None, wait: float, as_json: bool) -> int:
    """End it and say what became of it; 3 when it is not known to be over."""
    store = place.store()
    try:
        seen = await find_run(store, place.installation, name)
    except NoSuchRun:
        lost = await _lost(place, name)
        if lost is None:
            raise
        return await _cancel_lost(place, *lost, grace=grace, wait=wait, as_json=as_json)
    begun = time.monotonic()
    ended = Ended(False, "nothing was done")
    for _ in range(TRIES):
        run, key, journal = seen.run, seen.key, seen.journal
        assert run is not None
        assert key is not None
        assert journal is not None
        if run.current is None and (run.verdict is not None or not run.owners):
            words = (
                f"nothing of it runs; it ended as {run.verdict.outcome}"
                if run.verdict
                else "nobody has begun it"
            )
            return _tell(seen, Ended(True, words), as_json, ended_now=False)
        say(
            f"{key}: giving notice"
            + (f" to {run.current.name} on {run.current.target}" if run.current else "")
        )
        ended = await end_run(
            journal,
            key,
            seen.dir.incarnation,
            place.world(lambda line: say(f"{time.monotonic() - begun:4.0f} s  {line}")),
            "ended by airflow-gpu cancel",
            limit=wait + (grace if grace is not None else grace_of(seen, run.epoch)),
            grace=grace,
        )
        if not ended.raced:
            break
        # A retry, a Clear, another attempt: it is to end all the same.
        say(f"{key}: {ended.words}; trying again")
        seen = await load(store, seen.dir)
    return _tell(seen, ended, as_json)


def _tell(seen: SeenRun, ended: Ended, as_json: bool, *, ended_now: bool = True) -> int:
    run = seen.run
    last = run.attempts[-1] if run is not None and run.attempts else None
    checkpoint = ended.checkpoint or (last.outcome.checkpoint if last is not None and last.outcome else None)
    where = (
        f"{last.channel}/checkpoints/{checkpoint.life:04d}"
        if last is not None and checkpoint is not None
        else None
    )
    verdict = run.verdict if run is not None else None
    if as_json:
        print_json(
            {
                "ok": ended.ok,
                "run": seen.name,
                "path": seen.dir.path,
                "job": last.name if last is not None else None,
                "words": ended.words,
                "outcome": verdict.outcome if verdict is not None else None,
                "checkpoint": {**asdict(checkpoint), "uri": where} if checkpoint is not None else None,
            }
        )
        return 0 if ended.ok and not ended.raced else 3
    console = out()
    console.print(f"{seen.name}: {ended.words}", highlight=False, markup=False, soft_wrap=True)
    if checkpoint is not None:
        console.print(
            f"newest checkpoint: step {checkpoint.step}, in {where}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    elif ended.ok:  # else nobody has looked
        console.print("there is no checkpoint", highlight=False)
    if ended_now and verdict is not None and verdict.outcome == "cancelled":
        console.print(
            "its Airflow task, if it still waits, ends as cancelled; with retries left it tries again, so mark it as "
            "failed there if it is not to",
            highlight=False,
            soft_wrap=True,
        )
    return 0 if ended.ok and not ended.raced else 3


async def _lost(place: Place, name: str) -> tuple[str, Listed] | None:
    """A job of that name that has no run directory, as one of the targets lists it."""
    label = {"airflow-gpu/installation": installation_label(place.installation)}
    for target in place.names():
        try:
            for listed in await (await place.target(target)).inventory(label):
                if listed.ref.name == name and not listed.sighting.state.ended:
                    return target, listed
        except TargetError as error:
            say(f"{target} could not be asked: {error}")
    return None


async def _cancel_lost(
    place: Place, target: str, listed: Listed, *, grace: float | None, wait: float, as_json: bool
) -> int:
    say(f"{listed.ref.name} on {target} has no run directory; giving it notice")
    asked = LOST_GRACE if grace is None else grace
    ended = await cancel_job(place.world(say), target, listed.ref, asked, limit=wait + asked)
    if as_json:
        print_json(
            {"ok": ended.ok, "run": None, "job": listed.ref.name, "words": ended.words, "checkpoint": None}
        )
    else:
        click.echo(f"{listed.ref.name}: {ended.words}")
    return 0 if ended.ok and not ended.raced else 3
