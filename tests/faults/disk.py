"""Create-only files in memory, and the :class:`Store` through which a simulated process sees them.

Purpose: a :class:`Disk` is what is really there, for the processes and for the
ranks. A :class:`SeamStore` is one process's way to it, with every call through
the seam. Everything that reads or writes a run directory is the real code.

Limits: that the two behave as the real ``Store`` does is held by
``test_disk.py``, which runs the same contract against both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from airflow_gpu.rundir.store import Entry, Exists, Missing, Store, StoreError, _check
from tests.faults.seam import READ, WRITE, Actor

LATENCY = 0.02


class Disk:
    """The files of one store. All of it is immediate."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self.files: dict[str, bytes] = {}
        self._folders: dict[str, dict[str, int]] = {}  # folder -> name -> how many files it stands for
        self.on_create: Callable[[str], None] = lambda path: None
        self.away: Callable[[], bool] = lambda: False  # for the processes; the ranks' side always answers

    def create(self, path: str, data: bytes) -> None:
        if path in self.files:
            raise Exists(f"{self.uri}: {path} exists")
        self._add(path, data)
        self.on_create(path)

    def put(self, path: str, data: bytes) -> None:
        if path in self.files:
            self.files[path] = data
        else:
            self._add(path, data)

    def _add(self, path: str, data: bytes) -> None:
        self.files[path] = data
        self._mark(path, 1)

    def _mark(self, path: str, by: int) -> None:
        parts = path.split("/")
        for i, name in enumerate(parts):
            names = self._folders.setdefault("/".join(parts[:i]), {})
            names[name] = names.get(name, 0) + by
            if not names[name]:
                del names[name]

    def get(self, path: str, start: int = 0, limit: int | None = None) -> bytes:
        if path not in self.files:
            raise Missing(f"{self.uri}: no {path}")
        end = None if limit is None else start + limit
        return self.files[path][start:end]

    def names(self, prefix: str = "") -> list[str]:
        return sorted(self._folders.get(prefix, ()))

    def list(self, prefix: str = "") -> list[Entry]:
        head = f"{prefix}/" if prefix else ""
        return sorted(Entry(path, len(data)) for path, data in self.files.items() if path.startswith(head))

    def delete(self, path: str) -> None:
        if self.files.pop(path, None) is not None:
            self._mark(path, -1)

    def delete_tree(self, prefix: str) -> None:
        for entry in self.list(prefix):
            self.delete(entry.path)


class SeamStore(Store):
    """A store as one process sees it."""

    def __init__(self, actor: Actor, disk: Disk, name: str) -> None:
        self.uri = disk.uri
        self._actor, self._disk, self._name = actor, disk, name

    async def _ask(self, op: str, path: str, effect: Callable[[], Any], kinds: tuple[str, ...]) -> Any:
        def unless_away() -> Any:
            if self._disk.away():
                raise StoreError(f"{self.uri}: {path}: status code: 503")
            return effect()

        return await self._actor.seam.call(
            self._actor,
            f"{self._name}.{op}",
            path.split("/", 6)[-1],  # without the slot, the same in every run
            unless_away,
            kinds=kinds,
            error=lambda why: StoreError(f"{self.uri}: {path}: {why}"),
            latency=LATENCY,
        )

    async def create(self, path: str, data: bytes) -> None:
        _check(path, writing=True)
        await self._ask("create", path, lambda: self._disk.create(path, data), WRITE)

    async def put(self, path: str, data: bytes) -> None:
        _check(path, writing=True)
        await self._ask("put", path, lambda: self._disk.put(path, data), WRITE)

    async def get(self, path: str, start: int = 0, limit: int | None = None) -> bytes:
        _check(path)
        found: bytes = await self._ask("get", path, lambda: self._disk.get(path, start, limit), READ)
        return found

    async def exists(self, path: str) -> bool:
        _check(path)
        return bool(await self._ask("exists", path, lambda: path in self._disk.files, READ))

    async def names(self, prefix: str = "") -> list[str]:
        _check(prefix, folder=True)
        return list(await self._ask("names", prefix, lambda: self._disk.names(prefix), READ))

    async def list(self, prefix: str = "", after: str = "") -> list[Entry]:
        _check(prefix, folder=True)
        found = await self._ask("list", prefix, lambda: self._disk.list(prefix), READ)
        return [entry for entry in found if entry.path > after]

    async def delete(self, path: str) -> None:
        _check(path)
        await self._ask("delete", path, lambda: self._disk.delete(path), WRITE)

    async def delete_tree(self, prefix: str) -> None:
        _check(prefix)
        await self._ask("delete_tree", prefix, lambda: self._disk.delete_tree(prefix), WRITE)
