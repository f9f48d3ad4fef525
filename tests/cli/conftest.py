"""Commands on real gangs: a cluster and a state store as in the sweep's tests, settings by environment, no Airflow."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from airflow_gpu.cli.main import commands
from tests.beds.stores.servers import Server
from tests.sweep.conftest import Plant


class Shell:
    """Runs a command as a person does; ``env`` is all that it is told."""

    def __init__(self, plant: Plant) -> None:
        self.plant = plant
        cluster = {
            "path": str(plant.root / "cluster"),
            "nodes": 4,
            "gpus_per_node": 1,
            "accelerator": "pretend",
        }
        self.env: dict[str, str | None] = {
            "AIRFLOW_HOME": str(plant.root / "airflow"),
            "AIRFLOW_CONFIG": None,
            "AIRFLOW__GPU__INSTALLATION": "prod",
            "AIRFLOW__GPU__STATE_URI": f"file://{plant.root}/state",
            "AIRFLOW_CONN_HERE": json.dumps({"conn_type": "gpu_local", "extra": cluster}),
            "AIRFLOW_CONN_GPU_DEFAULT": None,
        }

    async def __call__(self, *arguments: str, code: int = 0) -> Result:
        runner = CliRunner(env=self.env)
        result = await asyncio.to_thread(runner.invoke, commands, list(arguments))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, (result.exit_code, result.output)
        return result

    async def json(self, *arguments: str, code: int = 0) -> Any:
        return json.loads((await self(*arguments, "--json", code=code)).stdout)


def minio(s3: Server, key: str = "") -> dict[str, Any]:
    """A connection to it; with another ``key`` than its own it is refused."""
    return {
        "conn_type": "aws",
        "login": s3.options["access_key_id"],
        "password": key or s3.options["secret_access_key"],
        "extra": {"region_name": "us-east-1", "endpoint_url": s3.options["endpoint"]},
    }


@pytest.fixture
def plant(tmp_path: Path) -> Iterator[Plant]:
    made = Plant(tmp_path)
    try:
        yield made
    finally:
        with contextlib.suppress(FileNotFoundError):
            made.end()


@pytest.fixture
def shell(plant: Plant) -> Shell:
    return Shell(plant)
