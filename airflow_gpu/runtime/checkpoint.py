"""Which checkpoint a life starts from, and which ones may go.

Purpose: the ancestors rule. A life continues the newest earlier life: its
furthest complete checkpoint; if it has none, the one that life itself started
from, and so on down the chain. What a superseded life wrote after its
successor had started is further than the chain allows, and never taken.

Limits: a checkpoint whose files are not what its manifest says is passed over
with a log line. Contents are hashed for at most ``VERIFY_SECONDS`` a claim;
what that does not cover is hashed by the ranks when they restore, each its share.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

from airflow_gpu.runtime.files import Channel, Exists, Folder, Missing, to_json
from airflow_gpu.runtime.manifest import (
    BAD,
    COMPLETE,
    MANIFEST,
    BadManifest,
    Entry,
    Manifest,
    contents_differ,
    hash_files,
    listing,
    sizes_differ,
)
from airflow_gpu.runtime.objects import Objects
from airflow_gpu.runtime.words import VERSION, utc

VERIFY_SECONDS = 60.0
"""Longest time that a claim spends on hashing, over all candidates. The other nodes wait meanwhile."""

SAVING = ".saving"
"""``.<name>.saving`` beside a checkpoint: the handle began to save it. Gone once it is committed."""

DOOMED = ".doomed-"
PIN = ".pin-"

_DIGITS = re.compile(r"\d+")

Report = Callable[[str], None]


def life_folder(life: int) -> str:
    """Below the channel: where a life's checkpoints are."""
    return f"checkpoints/{life:04d}"


def save_name(step: int) -> str:
    """The folder of a checkpoint saved through the handle."""
    return f"step-{step:09d}"


def saving_mark(name: str) -> str:
    return f".{name}{SAVING}"


def doomed_mark(name: str, life: int) -> str:
    """Beside a checkpoint that life ``life`` is about to remove: nobody may choose it any more."""
    return f".{name}{DOOMED}{life:04d}"


def doomed_by(names: Sequence[str], name: str) -> List[int]:
    """Lives that are about to remove the checkpoint ``name``, by the ``names`` beside it."""
    marks = [mark[len(name) + 1 + len(DOOMED) :] for mark in names if mark.startswith(f".{name}{DOOMED}")]
    return [int(digits) for digits in marks if digits.isdigit()]


def is_doomed(names: Sequence[str], name: str, life: int, step: int, lives: Sequence[Ancestor]) -> bool:
    """Whether somebody may be removing it. Not what a newer life has been claimed from: to that one removers yield."""
    takers = [one.life for one in lives if (one.start_life, one.start_step) == (life, step)]
    return any(not any(taker > by for taker in takers) for by in doomed_by(names, name))


def pin_mark(name: str, life: int) -> str:
    """Beside a checkpoint that life ``life`` is about to be claimed from: it may not be removed."""
    return f".{name}{PIN}{life:04d}"


@dataclass(frozen=True)
class Found:
    """A complete checkpoint: ``name`` below its life's folder, ``path`` on this node."""

    life: int
    step: int
    name: str
    path: str
    manifest: Manifest


@dataclass(frozen=True)
class Start:
    """What a life starts from. ``verified``: every byte of it was compared with its digest."""

    life: int
    step: int
    name: str
    verified: bool
    seed: bool = False  # of another channel: no life here is its ancestor
    world_size: int = 0  # ranks that saved it

    @property
    def folder(self) -> str:
        """Below its channel."""
        return f"{life_folder(self.life)}/{self.name}"

    def to_dict(self) -> Dict[str, Any]:
        """The life's ``from``. ``dir`` is below the channel, that of the payload's seed for a seed."""
        return {
            "life": self.life,
            "step": self.step,
            "dir": self.folder,
            **({"seed": True} if self.seed else {}),
        }


@dataclass(frozen=True)
class Ancestor:
    """An earlier life, as its entry says. ``start_life`` and ``start_step`` are its ``from``."""

    life: int
    start_life: Optional[int] = None
    start_step: Optional[int] = None


def complete(channel: Channel, life: int, report: Report, lives: Sequence[Ancestor] = ()) -> List[Found]:
    """Checkpoints of a life that have a manifest, the furthest first. Their files are not looked at.

    ``lives``: those that are there, by which :func:`is_doomed` goes.
    """
    return complete_in(channel, life_folder(life), life, report, lives)


def complete_in(
    channel: Channel, root: str, life: int, report: Report, lives: Sequence[Ancestor] = ()
) -> List[Found]:
    """The same for any folder below the channel."""
    found: List[Found] = []
    names = channel.names(root)
    for name in names:
        where = f"{root}/{name}"
        path = channel.path(where)
        if os.path.islink(path):  # a program's "latest"
            continue
        try:
            manifest = manifest_of(channel, where)
            if manifest is None:
                continue
            if is_doomed(names, name, life, manifest.step, lives):
                continue  # half of it may be gone at any moment
            if channel.exists(f"{where}/{BAD}"):
                report(f"checkpoint {where} is passed over: a rank found it damaged ({BAD})")
                continue
        except (BadManifest, OSError) as error:
            report(f"checkpoint {where} is passed over: its manifest {error}")
            continue
        found.append(Found(life, manifest.step, name, path, manifest))
    return sorted(found, key=lambda checkpoint: (checkpoint.step, checkpoint.name), reverse=True)


def manifest_of(channel: Channel, where: str) -> Optional[Manifest]:
    """Of the checkpoint in this folder of the channel; None when it has none. Raises BadManifest, OSError."""
    if channel.shared:
        return Manifest.load(channel.path(where))
    try:
        return Manifest.parse(channel.read(f"{where}/{MANIFEST}"))
    except Missing:
        return None


def candidates(
    channel: Channel, ancestors: Sequence[Ancestor], report: Report, limit: Optional[int] = None
) -> Iterator[Found]:
    """Down the chain, best first. ``ancestors``: the earlier lives in order of their numbers.

    ``limit``: the furthest step of the last of them that counts; None: all.

    Normally the first is taken. The later ones are only for when it is
    damaged: earlier checkpoints of the same life are ancestors as well, as
    long as they are not further than where the chain left that life.
    """
    by_number = {ancestor.life: ancestor for ancestor in ancestors}
    life = ancestors[-1].life if ancestors else None
    while life is not None:
        for checkpoint in complete(channel, life, report, ancestors):
            if limit is None or checkpoint.step <= limit:
                yield checkpoint
        ancestor = by_number.get(life)
        if ancestor is None or ancestor.start_life is None or ancestor.start_life >= life:
            return
        life, limit = ancestor.start_life, ancestor.start_step


def choose(
    channel: Channel,
    ancestors: Sequence[Ancestor],
    report: Report,
    seconds: float,
    limit: Optional[int] = None,
) -> Optional[Start]:
    """The checkpoint to start from, or None. Spends at most ``seconds`` on hashing."""
    until = time.monotonic() + seconds
    for checkpoint in candidates(channel, ancestors, report, limit):
        where = f"{life_folder(checkpoint.life)}/{checkpoint.name}"
        wrong, whole = differs(channel, where, checkpoint.manifest.files, max(0.0, until - time.monotonic()))
        if wrong is not None:
            report(f"checkpoint {where} is passed over: {wrong}")
            continue
        if not whole:
            report(
                f"checkpoint {where}: not all of it could be hashed in {seconds:.0f} s; the rest comes later"
            )
        return Start(
            checkpoint.life,
            checkpoint.step,
            checkpoint.name,
            whole,
            world_size=checkpoint.manifest.world_size,
        )
    return None


def differs(
    channel: Channel, where: str, files: Sequence[Entry], seconds: Optional[float]
) -> Tuple[Optional[str], bool]:
    """What is wrong with these files of a checkpoint (None: nothing seen), and whether all of them were hashed.

    Where the channel is no folder they are on this node afterwards. Raises
    OSError when a store does not answer.
    """
    if isinstance(channel, Objects):
        sizes = channel.sizes(where)
        for entry in files:
            size = sizes.get(entry.path)
            if size is None:
                return f"{entry.path} is not there", False
            if size != entry.size:
                return f"{entry.path} has {size} bytes instead of {entry.size}", False
        return channel.fetch(where, files, seconds)
    folder = channel.path(where)
    wrong = sizes_differ(folder, files)
    return (wrong, False) if wrong is not None else contents_differ(folder, files, seconds)


def mark_bad(channel: Channel, where: str, reason: str) -> None:
    """So that no later life takes the checkpoint in this folder of the channel."""
    try:
        channel.create(
            f"{where}/{BAD}" if where else BAD, to_json({"v": VERSION, "reason": reason, "at": utc()})
        )
    except Exists:
        pass


# -- checkpoints of programs that only take a folder from the environment ----------------------


def step_in(name: str) -> Optional[int]:
    """The last run of digits in a folder's name: ``checkpoint-500``, ``step_500``, ``epoch=3-step=500``."""
    digits = _DIGITS.findall(name)
    return int(digits[-1]) if digits else None


def in_order(name: str) -> Tuple[int, str]:
    """To sort names of checkpoints by: the step counts, however many digits it has."""
    return step_in(name) or 0, name


def unfinished(here: Folder, life: int) -> List[str]:
    """Folders below a life's checkpoints that a program wrote and that have no manifest yet, the furthest last.

    ``here``: the channel, or this node's folder that goes with it.
    """
    root = life_folder(life)
    names = here.names(root)
    found = []
    for name in names:
        path = here.path(f"{root}/{name}")
        if (
            step_in(name) is not None
            and saving_mark(name) not in names
            and os.path.isdir(path)
            and not os.path.islink(path)
            and not os.path.exists(os.path.join(path, MANIFEST))
        ):
            found.append(name)
    return sorted(found, key=in_order)


def declared(here: Folder, life: int) -> List[str]:
    """Those of them that the program itself has called complete."""
    root = life_folder(life)
    return [name for name in unfinished(here, life) if here.exists(f"{root}/{name}/{COMPLETE}")]


def seal(
    channel: Channel, life: int, name: str, world_size: int, entries: Optional[Sequence[Entry]] = None
) -> Optional[Manifest]:
    """Give a program's checkpoint its manifest. None when it has no files, or is gone by now.

    ``entries``: its files, where it takes all nodes to know them; None: those that lie there.
    """
    root = f"{life_folder(life)}/{name}"
    path = channel.path(root)
    if entries is None:
        try:
            entries = hash_files(path, listing(path))
        except OSError:  # programs delete their older ones; perhaps just now
            return None
    if not entries:
        return None
    manifest = Manifest(life, step_in(name) or 0, world_size, tuple(entries), writer="program")
    data = to_json(manifest.to_dict())
    for place in (channel, *(() if channel.shared else (Folder(channel.root),))):
        try:
            place.create(f"{root}/{MANIFEST}", data)
        except Exists:
            pass
    return manifest
