"""Workers, triggerers and the API server open stores with the connections that the settings name: Airflow's own code."""

from __future__ import annotations

import json
import os
import secrets
import tempfile
from pathlib import Path

import pytest

# Before Airflow is imported: it makes its home when it is.
os.environ.setdefault("AIRFLOW_HOME", tempfile.mkdtemp(prefix="airflow-home-"))
os.environ.setdefault("AIRFLOW__CORE__LOAD_EXAMPLES", "False")

from airflow_gpu.compat import AirflowFailException
from airflow_gpu.hooks import world
from airflow_gpu.rundir.store import StoreError
from airflow_gpu.settings import settings
from airflow_gpu.targets.base import NotConfigured
from tests.beds.stores.servers import Server


@pytest.fixture
def given(s3: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Settings and connections by environment; answers an address on the server."""
    root = f"{s3.uri}/{secrets.token_hex(6)}"
    extra = {"region_name": "us-east-1", "endpoint_url": s3.options["endpoint"]}
    minio = {
        "conn_type": "aws",
        "login": s3.options["access_key_id"],
        "password": s3.options["secret_access_key"],
        "extra": extra,
    }
    cluster = {"path": str(tmp_path / "cluster"), "channel": f"{root}/channel"}
    for name, value in {
        "AIRFLOW__GPU__INSTALLATION": "tests",
        "AIRFLOW__GPU__STATE_URI": f"{root}/state",
        "AIRFLOW__GPU__STATE_CONN_ID": "minio_state",
        "AIRFLOW__GPU__STORE_CONN_IDS": json.dumps({f"{root}/channel": "minio"}),
        "AIRFLOW_CONN_MINIO": json.dumps(minio),
        "AIRFLOW_CONN_MINIO_STATE": json.dumps({**minio, "password": "wrong-on-purpose"}),
        "AIRFLOW_CONN_HERE": json.dumps({"conn_type": "gpu_local", "extra": cluster}),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    return root


async def test_each_store_has_its_connection(given: str) -> None:
    channel = world.channel_store(f"{given}/channel")
    assert channel is world.channel_store(f"{given}/channel"), "its connections are shared"
    await channel.create("a", b"x")
    assert await channel.get("a") == b"x"
    state = await world.state_store(settings())
    with pytest.raises(StoreError, match="403 Forbidden") as refused:
        await state.create("a", b"x")
    assert "wrong-on-purpose" not in f"{refused.value!r} {state!r}"


async def test_the_driver_s_world_and_target(given: str, s3: Server) -> None:
    target = await world.target("here")
    assert target.channel == target.job_channel == f"{given}/channel"
    assert target.job_store == {"endpoint": s3.options["endpoint"], "region": "us-east-1", "allow_http": True}
    made = world.airflow_world(settings(), print, print)
    await made.channel_store(target.channel).create("a", b"x")
    assert await made.public(f"{given}/channel/deep") == target.job_store
    assert await made.public("/shared/folder") == {}


async def test_a_connection_that_is_not_there(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIRFLOW_CONN_MINIO")
    with pytest.raises(
        NotConfigured, match=r"the channel of here: .*no connection 'minio'.*AIRFLOW_CONN_MINIO"
    ):
        await world.target("here")
    monkeypatch.delenv("AIRFLOW_CONN_MINIO_STATE")
    with pytest.raises(AirflowFailException, match="'minio_state'"):
        await world.state_store(settings())


def test_a_wrong_setting_fails_the_task_at_once(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__GPU__STORE_CONN_IDS", "{s3://b: minio}")
    with pytest.raises(AirflowFailException, match=r"\[gpu\] store_conn_ids must be a JSON object"):
        settings()


async def test_the_pages_open_a_channel_as_the_driver_does(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow_gpu.plugin.reading import NotSet, channel_store, state_store

    monkeypatch.setenv("AIRFLOW__GPU__STATE_CONN_ID", "minio")
    _, state = await state_store()
    await state.create("a", b"x")
    channel = channel_store(f"{given}/channel/v1/run", "v1/run", state)
    await channel.create("a", b"x")
    assert await channel.sizes("") == {"a": 1}
    monkeypatch.setenv("AIRFLOW__GPU__STATE_CONN_ID", "nowhere")
    with pytest.raises(NotSet, match="no connection 'nowhere'"):
        await state_store()
