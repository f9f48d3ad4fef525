"""Where the pages find their run directories in tests, and who reads them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from urllib.parse import quote

import pytest

# Before Airflow is imported: it makes its home when it is.
os.environ.setdefault("AIRFLOW_HOME", tempfile.mkdtemp(prefix="airflow-home-"))
os.environ.setdefault("AIRFLOW__CORE__LOAD_EXAMPLES", "False")

import httpx

from tests.plugin import rundirs

BROWSER = {"Accept": "text/html"}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a state and a channel half, named in the settings."""
    monkeypatch.setenv("AIRFLOW__GPU__INSTALLATION", rundirs.INSTALLATION)
    monkeypatch.setenv("AIRFLOW__GPU__STATE_URI", f"file://{tmp_path}/state")
    monkeypatch.delenv("AIRFLOW__GPU__STATE_CONN_ID", raising=False)
    return tmp_path


@pytest.fixture
async def client(root: Path) -> AsyncIterator[httpx.AsyncClient]:
    """The browser of somebody who may read everything."""
    from airflow_gpu.plugin import app as pages

    allowed: dict[Callable[..., object], Callable[..., object]] = {
        pages.read_task: lambda: None,
        pages.read_logs: lambda: None,
        pages.may_read_logs: lambda: True,
    }
    pages.app.dependency_overrides.update(allowed)
    try:
        transport = httpx.ASGITransport(app=pages.app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://airflow", headers=BROWSER
        ) as browser:
            yield browser
    finally:
        pages.app.dependency_overrides.clear()


def address(made: rundirs.Made, rest: str = "", *, last: str | None = None) -> str:
    """Of the page of a run, below the mount."""
    key = made.key
    parts = [key.dag_id, key.run_id, key.task_id, str(key.map_index) if last is None else last]
    return "/" + "/".join(quote(part, safe="") for part in parts) + rest
