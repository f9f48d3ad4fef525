"""Which checkpoints may go, and letting go of them beside lives that are being claimed.

Purpose: :func:`prune` after each commit; :func:`pin` for a claim, so that what a
life has chosen is still there when it has been claimed.

Limits: what another run begins from (``continue_previous``) is not pinned.
"""

from __future__ import annotations

import re
from typing import List, Optional, Sequence

from airflow_gpu.runtime.checkpoint import (
    DOOMED,
    PIN,
    SAVING,
    Ancestor,
    Report,
    Start,
    complete,
    doomed_by,
    doomed_mark,
    is_doomed,
    life_folder,
    pin_mark,
    step_in,
)
from airflow_gpu.runtime.files import Channel
from airflow_gpu.runtime.manifest import MANIFEST

LIVES = "lives"

_ENTRY = re.compile(r"^(\d{4,})\.json$")


def taken(channel: Channel) -> List[int]:
    """Numbers of all entries of ``lives/``, sorted. One listing, nothing is read."""
    return sorted(int(match[1]) for match in map(_ENTRY.match, channel.names(LIVES)) if match)


def prune(
    channel: Channel,
    life: int,
    keep: int,
    start: Optional[Start],
    ancestors: Sequence[int],
    report: Report,
    every: Optional[int] = None,
) -> None:
    """Let go of what no later life can need, after a commit of this life.

    Of what was saved through the handle, the newest ``keep`` complete ones of
    this life stay, beside them each whose step is a multiple of ``every``, and
    always what the life started from. Unfinished ones before the newest go.
    Once this life has ``keep`` of its own, those of its ``ancestors`` go as
    well, less the same multiples. Programs that write their own checkpoints
    rotate their own: those are never touched. A life that another has
    followed removes nothing.
    """
    pruner = _Pruner(channel, life, report)
    own = [
        checkpoint for checkpoint in complete(channel, life, report) if checkpoint.manifest.writer == "api"
    ]
    for checkpoint in own[max(1, keep) :]:
        if not is_kept(checkpoint.step, every):
            pruner.remove(life, checkpoint.name)
    if own:
        pruner.remove_partial(life, own[0].step)
    if len(own) < keep:
        return
    # Where this life has left the chain; what an ancestor wrote beyond it is of no history.
    limit = start.step if start is not None and not start.seed else None
    seen = {checkpoint.step for checkpoint in own}
    for ancestor in ancestors:  # the newest first: of two with the same step the newer one stays
        for checkpoint in complete(channel, ancestor, lambda _: None):
            step = checkpoint.step
            kept = is_kept(step, every) and step not in seen and (limit is None or step <= limit)
            kept = kept or (start is not None and (start.life, start.name) == (ancestor, checkpoint.name))
            if kept:
                seen.add(step)
            elif checkpoint.manifest.writer == "api":
                pruner.remove(ancestor, checkpoint.name)
        pruner.remove_partial(ancestor, None)


def is_kept(step: int, every: Optional[int]) -> bool:
    """Whether a checkpoint of this step stays whatever its age; not that of step 0, before any work."""
    return every is not None and step > 0 and step % every == 0


class Superseded(Exception):
    """Another life has followed: what lies here is for that one to keep or remove."""


class _Pruner:
    """Removes one checkpoint after the other, unless a newer life may need it.

    A life that is being claimed first pins what it has chosen, then looks whether
    that is doomed, then creates its entry, and lets go of the pin. Here the mark
    comes first, then the look for pins, then the look for entries. So whichever
    comes first, at least one of the two sees the other, and yields.
    """

    def __init__(self, channel: Channel, life: int, report: Report) -> None:
        self._channel = channel
        self._life = life
        self._report = report

    def remove(self, life: int, name: str) -> None:
        """Raises Superseded."""
        root = life_folder(life)
        if max(taken(self._channel), default=0) > self._life:
            raise Superseded  # without a mark that somebody would have to take away again
        doomed = f"{root}/{doomed_mark(name, self._life)}"
        self._channel.replace(doomed, b"")
        beside = self._channel.names(root)
        pins = [mark for mark in beside if mark.startswith(f".{name}{PIN}")]
        newest = max(taken(self._channel), default=0)
        if newest > self._life:
            self._channel.remove(doomed)
            raise Superseded
        # A pin of a life that is there by now, and so this one, is what its claim has left behind.
        if any(_pinned_by(pin) > newest for pin in pins):
            self._channel.remove(doomed)
            return
        self._remove(f"{root}/{name}")
        for mark in (*pins, *(doomed_mark(name, by) for by in {*doomed_by(beside, name), self._life})):
            self._channel.remove(f"{root}/{mark}")

    def remove_partial(self, life: int, before: Optional[int]) -> None:
        """What somebody began to save, or to remove. Raises Superseded."""
        root = life_folder(life)
        for mark in self._channel.names(root):
            if mark.startswith(".") and DOOMED in mark:
                self.remove(life, mark[1:].rpartition(DOOMED)[0])
            if not (mark.startswith(".") and mark.endswith(SAVING)):
                continue
            name = mark[1 : -len(SAVING)]
            step = step_in(name)
            if self._channel.exists(f"{root}/{name}/{MANIFEST}"):
                self._channel.remove(f"{root}/{mark}")  # committed; only the mark was left behind
            elif before is None or (step is not None and step < before):
                self._remove(f"{root}/{name}")
                self._channel.remove(f"{root}/{mark}")

    def _remove(self, where: str) -> None:
        # The manifest first: half of a checkpoint must not look like one.
        self._channel.remove(f"{where}/{MANIFEST}")
        if not self._channel.remove_tree(where):
            self._report(f"could not remove the old checkpoint {where}")


def _pinned_by(mark: str) -> int:
    digits = mark.rpartition(PIN)[2]
    return int(digits) if digits.isdigit() else 0


def pin(channel: Channel, life: int, start: Start, lives: Sequence[Ancestor]) -> bool:
    """For a life that is about to be claimed: keep what it has chosen. False: choose again, that one is going.

    ``lives``: those that are there.
    """
    root = life_folder(start.life)
    channel.replace(f"{root}/{pin_mark(start.name, life)}", b"")
    names = channel.names(root)
    going = is_doomed(names, start.name, start.life, start.step, lives)
    if not going and channel.exists(f"{root}/{start.name}/{MANIFEST}"):
        return True
    unpin(channel, life, start)
    return False


def unpin(channel: Channel, life: int, start: Start) -> None:
    channel.remove(f"{life_folder(start.life)}/{pin_mark(start.name, life)}")
