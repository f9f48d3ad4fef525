"""What ``airflow-gpu checkpoints`` does, and how it says it."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

import click

from airflow_gpu.cli.finding import find_run
from airflow_gpu.cli.place import Place
from airflow_gpu.cli.show import ago, cell, out, print_json, say, table
from airflow_gpu.gang.entries import iso
from airflow_gpu.rundir.checkpoints import Checkpoint, Checkpoints, Survey, What
from airflow_gpu.rundir.copying import NotCopied
from airflow_gpu.rundir.copying import copy as copy_to
from airflow_gpu.rundir.pruning import NotPruned, Plan, plan
from airflow_gpu.rundir.pruning import prune as prune_now
from airflow_gpu.rundir.store import StoreError
from airflow_gpu.rundir.verifying import Verified, mark
from airflow_gpu.rundir.verifying import verify as verify_one
from airflow_gpu.sweeping.looking import SeenRun
from airflow_gpu.targets.base import TargetError
from airflow_gpu.tasklog import size

NEWS = 10.0
"""Seconds between two lines on how far hashing or copying is."""

SHOWN = 20
"""Files with something wrong that a table lists of one checkpoint."""


@dataclass(frozen=True)
class Choice:
    """Which checkpoints a command is about."""

    step: int | None = None
    life: int | None = None
    every: bool = False

    def of(self, survey: Survey, name: str) -> list[Checkpoint]:
        """
        :raises click.ClickException: there is none, or one was meant and several fit.
        """
        fit = [one for one in survey.found if self.step in (None, one.step) and self.life in (None, one.life)]
        if self.every:
            return [one for one in fit if one.what is not What.UNFINISHED]
        if self.step is None and self.life is None:
            if survey.next is None:
                raise click.ClickException(f"{name} has no checkpoint from which a next life would start")
            return [survey.next]
        best = [one for one in fit if one.on_chain] or [one for one in fit if one.manifest] or fit
        if not best:
            raise click.ClickException(f"{name} has no such checkpoint; see checkpoints list")
        if len(best) > 1 and self.step is None:
            return [max(best, key=lambda one: one.step or 0)]
        if len(best) > 1:
            places = "\n".join(f"  {one.uri}" for one in best)
            raise click.ClickException(f"there are {len(best)} of step {self.step}, give --life:\n{places}")
        return best


class Progress:
    """A line on stderr from time to time: how many bytes of how many."""

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.done = what, total, 0
        self._begun = self._said = time.monotonic()

    def __call__(self, more: int) -> None:
        self.done += more
        now = time.monotonic()
        if now - self._said >= NEWS:
            self._said = now
            rate = self.done / (now - self._begun)
            say(f"{self.what}: {size(self.done)} of {size(self.total)}, {size(rate)}/s")


async def _open(place: Place, name: str) -> tuple[SeenRun, Checkpoints, Survey]:
    """
    :raises click.ClickException: no channel of the run could be read, so nothing is known of its checkpoints.
    """
    seen = await find_run(place.store(), place.installation, name)
    assert seen.journal is not None
    checkpoints = Checkpoints(seen.journal, seen.dir.path, place.open)
    survey = await checkpoints.survey()
    troubles = [f"{channel} could not be read: {trouble}" for channel, trouble in survey.troubles.items()]
    if troubles and len(troubles) == len(checkpoints.channels()):
        raise click.ClickException("\n".join(troubles))
    for trouble in troubles:
        say(trouble)
    return seen, checkpoints, survey


def body_of(one: Checkpoint) -> dict[str, Any]:
    """For ``--json``."""
    return {
        "life": one.life,
        "step": one.step,
        "is": one.what.value,
        "world_size": one.world_size,
        "writer": one.writer or None,
        "files": one.files,
        "bytes": one.size,
        "at": iso(one.at) if one.at else None,
        "on_chain": one.on_chain,
        "next": one.next,
        "in_use": one.in_use,
        "trouble": one.trouble or None,
        "uri": one.uri,
    }


def _marks(one: Checkpoint) -> str:
    marks = ("next start" * one.next, "in use" * one.in_use, "chain" * (one.on_chain and not one.next))
    return ", ".join(filter(None, marks))


def _line(one: Checkpoint) -> list[str]:
    step = "" if one.step is None else one.step
    return [cell(v) for v in (one.life, step, one.what.value, one.files, size(one.size), ago(one.at))]


async def list_checkpoints(place: Place, name: str, *, as_json: bool) -> int:
    """3 when one of several channels could not be read."""
    seen, _, survey = await _open(place, name)
    code = 3 if survey.troubles else 0
    if as_json:
        where = survey.elsewhere
        print_json(
            {
                "ok": not survey.troubles,
                "run": seen.name,
                "path": seen.dir.path,
                "checkpoints": [body_of(one) for one in survey.found],
                "next": survey.next.uri if survey.next else None,
                "elsewhere": {
                    "channel": where.channel,
                    "life": where.life,
                    "step": where.step,
                    "run": where.run,
                }
                if where
                else None,
                "troubles": dict(survey.troubles),
            }
        )
        return code
    rows = table("LIFE", "STEP", "IS", "FILES", "SIZE", "AGE", "RANKS", "COUNTS AS", "TROUBLE")
    for one in survey.found:
        rows.add_row(*_line(one), cell(one.world_size), cell(_marks(one)), cell(one.trouble))
    if survey.found:
        out().print(rows)
    else:
        known = ", as far as its channels could be read" if survey.troubles else ""
        click.echo(f"{seen.name} has no checkpoints{known}")
    if survey.elsewhere is not None:
        click.echo(f"a next life would start from step {survey.elsewhere.step} of {survey.elsewhere.run}")
    return code


async def verify_checkpoints(
    place: Place, name: str, choice: Choice, *, mark: bool, parallel: int, as_json: bool
) -> int:
    """3 when something is not as it was saved."""
    seen, checkpoints, survey = await _open(place, name)
    done = []
    for one in choice.of(survey, seen.name):
        told = Progress(f"life {one.life}, step {one.step}", one.size)
        contents = checkpoints.contents(one.channel)
        found = await verify_one(one, contents, parallel=parallel, told=told)
        done.append((found, mark and one.whole and found.damaged and await _marked(found, contents)))
    if as_json:
        print_json(
            {
                "ok": all(found.ok for found, _ in done),
                "run": seen.name,
                "checkpoints": [
                    {
                        **body_of(found.checkpoint),
                        "verified": found.ok,
                        "gone": found.gone,
                        "marked": marked,
                        "wrong": [{"path": w.path, "what": w.what} for w in found.wrong],
                        "extra": list(found.extra),
                    }
                    for found, marked in done
                ],
            }
        )
    else:
        for found, marked in done:
            _tell_verified(found, marked)
        if not done:
            click.echo(f"{seen.name} has no checkpoints with a manifest")
    return 0 if all(found.ok for found, _ in done) else 3


async def _marked(found: Verified, contents: Any) -> bool:
    await mark(found, contents)
    return True


def _tell_verified(found: Verified, marked: bool) -> None:
    one, console = found.checkpoint, out()
    head = f"life {one.life}, step {one.step}: "
    if found.gone:
        words = "it was removed meanwhile"
    elif found.ok:
        words = f"{one.files} files, {size(found.size)}, all as they were saved"
    else:
        words = f"{len(found.wrong)} of {one.files} files are not as they were saved"
    if found.extra:
        words += f"; {len(found.extra)} files beside them"
    lines = [head + words + ("; marked, no life takes it" if marked else "")]
    lines += [f"  {wrong.path} {wrong.what}" for wrong in found.wrong[:SHOWN]]
    lines += [f"  ... and {len(found.wrong) - SHOWN} more"] * (len(found.wrong) > SHOWN)
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


async def prune_checkpoints(
    place: Place,
    name: str,
    keep: int,
    every: int | None,
    *,
    dry_run: bool,
    yes: bool,
    trust: bool,
    as_json: bool,
) -> int:
    """3 when something stayed that was to go."""
    seen, checkpoints, survey = await _open(place, name)
    try:
        made = plan(survey, keep, every)
        if not as_json:
            _tell_plan(seen.name, made)
        if dry_run or not made.remove:
            if as_json:
                print_json(_pruned(seen.name, made, [], []))
            return 0
        if not yes:
            if not sys.stdin.isatty():
                raise click.UsageError("nobody can be asked here: give --yes or --dry-run")
            click.confirm(f"remove {len(made.remove)}, {size(made.size)}?", abort=True, err=True)
        done = await prune_now(checkpoints, keep, every, agreed=made, trust=trust, told=say)
    except NotPruned as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        print_json(_pruned(seen.name, made, done.removed, done.left))
    else:
        left = f"; {len(done.left)} stayed, since the run moved on" if done.left else ""
        click.echo(f"removed {len(done.removed)}, {size(done.size)}{left}")
    return 3 if done.left else 0


def _pruned(name: str, made: Plan, removed: list[Checkpoint], left: list[Checkpoint]) -> dict[str, Any]:
    return {
        "ok": not left,
        "run": name,
        "keep": [{**body_of(one), "why": why} for one, why in made.keep],
        "remove": [{**body_of(one), "why": why} for one, why in made.remove],
        "bytes": made.size,
        "removed": [one.uri for one in removed],
        "left": [one.uri for one in left],
    }


def _tell_plan(name: str, made: Plan) -> None:
    rows = table("LIFE", "STEP", "IS", "FILES", "SIZE", "AGE", "THEN", "WHY")
    every = [(one, "stays", why) for one, why in made.keep] + [(one, "goes", why) for one, why in made.remove]
    for one, then, why in sorted(every, key=lambda row: (row[0].life, row[0].step or 0, row[0].name)):
        rows.add_row(*_line(one), then, cell(why))
    if every:
        out().print(rows)
    click.echo(f"{name}: {len(made.keep)} stay, {len(made.remove)} go, {size(made.size)}")


async def copy_checkpoint(
    place: Place, name: str, to: str, choice: Choice, *, parallel: int, as_json: bool
) -> int:
    """Raises click.ClickException when it is not complete there."""
    seen, checkpoints, survey = await _open(place, name)
    one = choice.of(survey, seen.name)[0]
    try:
        store = place.open(to if "/" in to else (await place.target(to)).channel)
        told = Progress(f"life {one.life}, step {one.step}", one.size)
        done = await copy_to(one, checkpoints.contents(one.channel), store, parallel=parallel, told=told)
    except (NotCopied, StoreError) as error:
        raise click.ClickException(str(error)) from None
    except TargetError as error:
        raise click.ClickException(f"{to!r} is neither an address nor a target: {error}") from None
    if as_json:
        print_json(
            {
                "ok": True,
                "run": seen.name,
                **{
                    key: value
                    for key, value in body_of(one).items()
                    if key in ("life", "step", "uri", "bytes")
                },
                "copy": done.uri,
                "sent": len(done.sent),
                "there": len(done.there),
            }
        )
        return 0
    there = f", {len(done.there)} were there already" if done.there else ""
    words = f"step {one.step} of life {one.life}: {len(done.sent)} files sent, {size(done.size)}{there}; all verified"
    out().print(f"{words}\n{done.uri}", highlight=False, markup=False, soft_wrap=True)
    return 0
