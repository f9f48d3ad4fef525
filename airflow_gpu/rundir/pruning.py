"""Which checkpoints of a run may go, and letting go of them beside a gang that runs.

Purpose: :func:`plan` says what would be kept and why, and what would go; it is
pure. :func:`prune` does it. Kept are the newest ``keep`` of the chain, each
step that is a multiple of ``every``, what the newest life started from, what
the next one would take, what another hand put there (``foreign``), and what may
still be being written. While nothing whole is on the chain, nothing goes that
has a manifest.

Why this is safe beside whatever else happens:

- **A gang that saves.** Of the newest life nothing unfinished goes that is as
  far as its newest complete checkpoint or farther. What is behind that the
  runtime itself lets go of too.
- **The runtime's own pruning** keeps the newest of its life and what that
  started from. So does this. Both only ever remove what is older, so what both
  together leave has the newest and the start; that both remove the same is no
  error.
- **A life that begins meanwhile** goes down the chain and takes the first that
  is whole. The first is hashed here before anything goes, so it takes that one
  and none behind it. Before each removal the journal and the lives are looked
  at again: after any change nothing goes that a new plan does not let go.
- **A crash in the middle.** The manifest goes first: what is half gone is
  unfinished, and no life takes it. The oldest go first.
- **A twin** that was declared dead and still writes below its old life: its
  checkpoints are off the chain, for ever.

Limits: a checkpoint of this run from which *another* run begins
(``continue_previous``) is safe as the newest; older ones are not. A run with a
channel that does not answer is not pruned at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from airflow_gpu.rundir.checkpoints import Checkpoint, Checkpoints, Survey, What
from airflow_gpu.rundir.verifying import verify
from airflow_gpu.runtime.checkpoint import saving_mark
from airflow_gpu.runtime.manifest import MANIFEST
from airflow_gpu.runtime.pruning import is_kept

ROUNDS = 5
"""Plans that are made anew because something changed; then the rest is left for another time."""


class NotPruned(Exception):
    """Nothing more was removed, for the reason in the message."""


@dataclass(frozen=True)
class Plan:
    """Checkpoints with a word on why, in the order of life and step."""

    keep: tuple[tuple[Checkpoint, str], ...]
    remove: tuple[tuple[Checkpoint, str], ...]

    @property
    def size(self) -> int:
        """Bytes that would be free."""
        return sum(one.size for one, _ in self.remove)


@dataclass
class Pruned:
    """What was removed; ``left``: what was to go and stayed, since things had changed."""

    removed: list[Checkpoint] = field(default_factory=list)
    left: list[Checkpoint] = field(default_factory=list)

    @property
    def size(self) -> int:
        return sum(one.size for one in self.removed)


def plan(survey: Survey, keep: int, every: int | None = None) -> Plan:
    """What stays and what goes. ``keep`` and ``every`` are at least 1.

    :raises NotPruned: a channel of the run did not answer.
    """
    if keep < 1 or (every is not None and every < 1):
        raise ValueError(f"keep and every must be at least 1, got {keep} and {every}")
    if survey.troubles:
        raise NotPruned(f"not all of the run can be seen: {next(iter(survey.troubles.values()))}")
    stays: list[tuple[Checkpoint, str]] = []
    goes: list[tuple[Checkpoint, str]] = []
    for one in survey.found:
        why = _why_kept(one, survey, keep, every)
        if why:
            stays.append((one, why))
        else:
            goes.append((one, _why_gone(one)))
    return Plan(tuple(stays), tuple(goes))


def _why_kept(one: Checkpoint, survey: Survey, keep: int, every: int | None) -> str:
    if one.in_use:
        return "in use"
    if one.next:
        return "the next start"
    if one.what is What.FOREIGN:
        return "foreign: put there by hand"
    if one.on_chain and one in survey.chain[:keep]:
        return f"one of the newest {keep}"
    if not survey.chain and one.what is not What.UNFINISHED:
        return "nothing whole is on the chain"
    if one.what is What.COMPLETE and is_kept(one.step or 0, every):
        same = [other for other in survey.chain if other.step == one.step]
        if one.on_chain or not same:
            return f"every {every} steps"
    if survey.newest is not None and one.life >= survey.newest.number:
        return _of_newest_life(one, survey)
    return ""


def _of_newest_life(one: Checkpoint, survey: Survey) -> str:
    """Why it is left to the life that perhaps still writes it; empty: it is not."""
    mine = [c.step or 0 for c in survey.found if c.life == one.life and c.what is What.COMPLETE]
    if one.what in (What.UNFINISHED, What.TORN) and (one.step is None or not mine or one.step >= max(mine)):
        return "may be being saved"
    if not survey.open:
        return ""
    if one.writer == "program" or (one.what is What.UNFINISHED and not one.saving):
        return "its program looks after its own"
    return ""


def _why_gone(one: Checkpoint) -> str:
    if one.what is not What.COMPLETE:
        return one.what.value
    return "older" if one.on_chain else "off the chain"


async def prune(
    checkpoints: Checkpoints,
    keep: int,
    every: int | None = None,
    *,
    agreed: Plan | None = None,
    trust: bool = False,
    told: Callable[[str], None] = lambda _: None,
) -> Pruned:
    """Remove what may go.

    :param agreed: only what goes by this plan too, which somebody has seen.
    :param trust: do not hash what the next life would take before anything goes.
    :raises NotPruned: that one is damaged, or not all can be seen.
    :raises StoreError: a removal failed; what was removed before stays so.
    """
    done = Pruned()
    allowed = None if agreed is None else {one.place for one, _ in agreed.remove}
    sound: tuple[str, int, str] | None = None
    for _ in range(ROUNDS):
        survey = await checkpoints.survey()
        todo = [one for one, _ in plan(survey, keep, every).remove if allowed is None or one.place in allowed]
        done.left = todo
        if not todo:
            return done
        head = survey.next
        if head is not None and head.place != sound and not trust:
            await _prove(checkpoints, head, told)
            sound = head.place
            if await checkpoints.stamp() != survey.stamp:
                continue
        while todo and await checkpoints.stamp() == survey.stamp:
            one = todo.pop(0)
            await _remove(checkpoints, one)
            done.removed.append(one)
            told(f"removed {one.uri}")
        if not todo:
            return done
        told("the run has moved on; planning anew")
    return done


async def _prove(checkpoints: Checkpoints, head: Checkpoint, told: Callable[[str], None]) -> None:
    told(f"hashing step {head.step} of life {head.life}, from which a next life would start")
    verified = await verify(head, checkpoints.contents(head.channel))
    if not verified.ok and not verified.gone:
        first = verified.wrong[0]
        raise NotPruned(
            f"{head.uri} is what a next life would start from, and {first.path} {first.what}: nothing was removed. "
            "Mark it (verify --mark), so that the one before it counts"
        )


async def _remove(checkpoints: Checkpoints, one: Checkpoint) -> None:
    contents = checkpoints.contents(one.channel)
    # The manifest first: half of a checkpoint must not look like one.
    await contents.remove(f"{one.folder}/{MANIFEST}")
    await contents.remove_tree(one.folder)
    for mark in (saving_mark(one.name), *one.doomed):
        await contents.remove(f"{one.life:04d}/{mark}")
