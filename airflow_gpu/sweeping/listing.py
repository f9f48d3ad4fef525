"""All run directories of an installation, cheaply: one listing, and nothing is read.

Purpose: a state store may hold 100,000 run directories of which a handful
matter. One pass says for each how many journal entries it has and when the
newest was written, so that only what has moved lately is read.

How: an object store is listed flat, 1000 names a request. Where journals and
channels share a store, folders of checkpoints and logs are jumped over as soon
as a page shows nothing else. A local folder is walked, and only where journals
can be; so is a folder behind SSH, with ``AT_ONCE`` questions under way.

Limits: times are the store's own and serve to leave out what is old. What is
left out here and lives all the same is found by its target.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from airflow_gpu.gang.identity import segment
from airflow_gpu.rundir.store import Store

PAGE = 1000
"""Names in one answer of an object store."""

AT_ONCE = 16
"""Folders behind SSH that are asked for at once."""

_ENTRY = re.compile(r"^(\d{6,})\.json$")
_JOURNAL = re.compile(r"^(v1/[^/]+/[^/]+/[^/]+/[^/]+/[^/]+/[^/]+)/(journal/(\d{6,})\.json|run\.json)$")
_RUN = re.compile(r"^(v1/[^/]+/[^/]+/[^/]+/[^/]+/[^/]+/[^/]+)/([^/]+)/")


@dataclass(frozen=True, slots=True)
class RunDir:
    """One run directory. ``entries`` is the number of its newest journal entry, ``touched`` when that was written."""

    path: str
    entries: int
    touched: float

    @property
    def slot(self) -> str:
        return self.path.rpartition("/")[0]

    @property
    def incarnation(self) -> str:
        return self.path.rpartition("/")[2]


async def run_dirs(store: Store, installation: str) -> dict[str, RunDir]:
    """Every run directory of the installation, by its path.

    :raises StoreError: the store cannot be listed: then nothing is known.
    """
    prefix = f"v1/{segment(installation)}"
    parts = urlsplit(store.uri)
    if parts.scheme == "file":
        root = Path(unquote(parts.path))
        return await asyncio.to_thread(lambda: {run.path: run for run in _walk(root, prefix)})
    if parts.scheme == "sftp":
        return await _beneath(store, prefix)
    return await store.ask(lambda reader: _flat(reader, prefix, ordered(store.uri)), prefix)


def ordered(uri: str) -> bool:
    """Whether the store lists names in their order, without which nothing may be jumped over."""
    return not urlsplit(uri).netloc.endswith("--x-s3")  # directory buckets of S3 do not


def _flat(reader: Any, prefix: str, jumping: bool) -> dict[str, RunDir]:
    found: dict[str, RunDir] = {}
    offset: str | None = None
    while True:
        jump = None
        for page in reader.list(prefix, offset=offset, chunk_size=PAGE):
            useful = False
            for meta in page:
                match = _JOURNAL.match(meta["path"])
                if match is None:
                    continue
                useful = True
                _note(found, match[1], int(match[3] or 0), meta["last_modified"].timestamp())
            jump = _behind(page[-1]["path"]) if page and jumping and not useful else None
            if jump is not None:
                break
        if jump is None:
            return found
        offset = jump


def _behind(path: str) -> str | None:
    """Where to go on when a whole page showed nothing but one folder of a run directory: behind that folder."""
    match = _RUN.match(path)
    return f"{match[1]}/{match[2]}/~" if match else None  # "~" comes after all that a store's path may have


def _note(found: dict[str, RunDir], path: str, entry: int, at: float) -> None:
    if path.endswith("/incarnations"):
        return
    before = found.get(path)
    if before is None or entry >= before.entries:
        found[path] = RunDir(path, entry, at)


async def _beneath(store: Store, prefix: str) -> dict[str, RunDir]:
    """As ``_walk``, by questions to a server."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def names(path: str) -> list[str]:
        async with turns:
            return [f"{path}/{name}" for name in await store.names(path)]

    level = [prefix]
    for _ in range(5):
        level = [path for found in await asyncio.gather(*map(names, level)) for path in found]

    async def one(path: str) -> RunDir | None:
        entries = [_ENTRY.match(name.rpartition("/")[2]) for name in await names(f"{path}/journal")]
        newest = max((int(match[1]) for match in entries if match), default=0)
        for name in (f"{path}/journal/{newest:06d}.json", f"{path}/run.json"):
            async with turns:
                at = await store.ask(partial(_modified, name), name)
            if at is not None:
                return RunDir(path, newest, at)
        return None

    kept = [path for path in level if not path.endswith("/incarnations")]
    return {run.path: run for run in await asyncio.gather(*map(one, kept)) if run is not None}


def _modified(path: str, reader: Any) -> float | None:
    try:
        return float(reader.head(path)["last_modified"].timestamp())
    except FileNotFoundError:
        return None


def _walk(root: Path, prefix: str) -> Iterator[RunDir]:
    # dag, run, task, map, incarnation
    level = [prefix]
    for _ in range(5):
        level = [f"{path}/{name}" for path in level for name in _folders(root / path)]
    for path in level:
        if path.endswith("/incarnations"):
            continue
        newest, at = 0, None
        journal = root / path / "journal"
        for entry in _scan(journal):
            match = _ENTRY.match(entry.name)
            if match is not None and int(match[1]) > newest:
                newest = int(match[1])
        for name in (f"journal/{newest:06d}.json", "run.json"):
            try:
                at = os.stat(root / path / name).st_mtime
                break
            except OSError:
                continue
        if at is not None:
            yield RunDir(path, newest, at)


def _folders(path: Path) -> list[str]:
    return sorted(entry.name for entry in _scan(path) if entry.is_dir())


def _scan(path: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
