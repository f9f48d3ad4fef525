"""A gang whose nodes share nothing but an object store: each has a scratch folder of its own.

Purpose: :class:`ObjectBed` is a :class:`~tests.runtime.bed.Bed` of which the
channel is on one of the servers in ``tests/beds/stores``. Credentials of S3
reach the agents by the secrets file, as a target hands them over.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from airflow_gpu.runtime.files import Missing
from airflow_gpu.runtime.objects import Objects
from tests.beds.stores.servers import Server
from tests.beds.stores.started import Servers
from tests.runtime.bed import Bed

SECRET = {"access_key_id": "AWS_ACCESS_KEY_ID", "secret_access_key": "AWS_SECRET_ACCESS_KEY"}


class ObjectBed(Bed):
    """One run directory: its payload in ``folder``, everything else on ``server``."""

    def __init__(self, folder: Path, server: Server) -> None:
        super().__init__(folder)
        self.env = {"GANG_SCRATCH": str(folder / "scratch")}
        self.uri = f"{server.uri}/{secrets.token_hex(6)}"
        self.options = {name: value for name, value in server.options.items() if name not in SECRET}
        self.secrets = {name: server.options[key] for key, name in SECRET.items() if key in server.options}
        self.store = Objects(self.uri, server.options, str(folder / "reader"))

    def payload(self, attempt: int = 1, *how: Any, **fields: Any) -> Path:
        given = {"channel": self.uri, "store": self.options, "secrets_file": str(self._secrets())}
        return super().payload(attempt, *how, **{**given, **fields})

    def _secrets(self) -> Path:
        path = self.folder / "secrets.json"
        path.write_text(json.dumps(self.secrets))
        return path

    def read(self, name: str) -> Any:
        try:
            return json.loads(self.store.read(name))
        except Missing:
            return None

    def entries(self, life: int = 1) -> dict[int, dict[str, Any]]:
        root = f"lives/{life:04d}/nodes"
        records = [self.read(f"{root}/{name}") for name in self.store.names(root)]
        return {rank["rank"]: rank for record in records for rank in record["ranks"]}

    def log(self, rank: int, life: int = 1) -> str:
        root = f"lives/{life:04d}/logs/rank-{rank:05d}"
        text = b""
        for name in self.store.names(root):
            assert int(name) == len(text), "a piece of the log is missing, or there twice"
            text += self.store.read(f"{root}/{name}")
        return text.decode()

    def saved(self, life: int = 1) -> dict[int, dict[str, Any]]:
        """Manifests of the complete checkpoints of a life, by step."""
        root = f"checkpoints/{life:04d}"
        found = [self.read(f"{root}/{name}/manifest.json") for name in self.store.names(root)]
        return {manifest["step"]: manifest for manifest in found if manifest is not None}

    def saves(self, life: int) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        for path, size in self.store.sizes(f"checkpoints/{life:04d}").items():
            folder, _, name = path.partition("/")
            if folder.startswith("step-"):
                found.setdefault(folder, {})[name] = size
        return found

    def content(self, name: str) -> bytes | None:
        try:
            return self.store.read(name)
        except Missing:
            return None

    def newest(self) -> int:
        """Number of the newest entry of ``lives/``."""
        return max(
            (int(name[:-5]) for name in self.store.names("lives") if name.endswith(".json")), default=0
        )

    def left(self) -> list[Path]:
        """What agents have left on their nodes."""
        scratch = self.folder / "scratch"
        return sorted(scratch.iterdir()) if scratch.exists() else []


def object_beds(folder: Path, servers: Servers) -> Iterator[Callable[[str], ObjectBed]]:
    made: list[ObjectBed] = []

    def make(kind: str) -> ObjectBed:
        made.append(ObjectBed(folder / f"objects-{len(made)}", servers[kind]))
        return made[-1]

    yield make
    for bed in made:
        bed.close()
