"""``airflow-gpu doctor``: what is right is proven, what is wrong is said with what to do."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.beds.ports import free_port
from tests.beds.stores.servers import Server
from tests.beds.stores.started import started
from tests.cli.conftest import Shell, minio
from tests.sweep.conftest import Plant


def rows(answer: Any) -> dict[tuple[str, str], dict[str, str]]:
    return {(check["where"], check["check"].rpartition(": ")[2]): check for check in answer["checks"]}


async def test_all_is_well(plant: Plant, shell: Shell) -> None:
    """From both sides: a real gang of one node writes to the channel; nothing of it is left."""
    (plant.root / "state").mkdir()
    answer = await shell.json("doctor", "--job")
    assert answer["ok"], answer
    found = rows(answer)
    assert {check["result"] for check in answer["checks"]} == {"ok"}
    assert "AIRFLOW_CONN_HERE" in found["here", "connection"]["found"]
    assert "4 of 4 nodes" in found["here", "answers"]["found"]
    assert found["here", "reads and writes the channel"]["found"] == "a checkpoint at step 1"
    assert found["here", "Python"]["found"].startswith("3.")
    assert found["here", "clock"]["found"] == "as here"
    assert (await shell.json("gangs", "--all"))["gangs"] == []
    assert [path for path in (plant.root / "state").rglob("*") if path.is_file()] == []


async def test_without_a_job_nothing_is_started(plant: Plant, shell: Shell) -> None:
    answer = await shell.json("doctor", "here")
    assert rows(answer)["here", "job"]["result"] == "-"
    assert "spelled right" in rows(answer)["state store", "folder"]["todo"], "it was made just now"
    assert plant.admin.status()["jobs"] == {}
    shown = (await shell("doctor", "here")).stdout
    assert "create-only writes" in shown
    assert "0 fail" in shown


async def test_what_is_wrong(plant: Plant, shell: Shell, tmp_path: Any) -> None:
    """Each with a sentence on what to do."""
    shell.env["AIRFLOW_CONN_BAD"] = json.dumps({"conn_type": "gpu_local", "extra": {"nodez": 3}})
    found = rows(await shell.json("doctor", "here", "bad", "nowhere", "--job", code=3))
    assert "nodez" in found["bad", "connection"]["found"]
    assert "AIRFLOW_CONN_NOWHERE" in found["nowhere", "connection"]["todo"]
    assert found["here", "job"]["result"] == "ok"
    blocked = tmp_path / "blocked"
    blocked.write_text("a file, not a folder")
    found = rows(
        await shell.json("doctor", "here", "--job", "--state-uri", f"file://{blocked}/state", code=3)
    )
    assert found["state store", "create-only writes"]["result"] == "fail"
    assert found["here", "job"]["result"] == "-"  # it could not be journalled


async def test_a_channel_that_cannot_be_written(plant: Plant, shell: Shell, tmp_path: Any) -> None:
    (tmp_path / "file").write_text("not a folder: here not even root may write")
    extra = {
        "path": str(tmp_path / "cluster"),
        "nodes": 1,
        "gpus_per_node": 1,
        "channel": f"{tmp_path}/file/runs",
    }
    shell.env["AIRFLOW_CONN_HERE"] = json.dumps({"conn_type": "gpu_local", "extra": extra})
    found = rows(await shell.json("doctor", code=3))
    assert "Not a directory" in found["here", "create-only writes"]["found"]
    assert "check the mount" in found["here", "create-only writes"]["todo"]


async def test_a_node_that_cannot_run_it(plant: Plant, shell: Shell) -> None:
    """The interpreter of the nodes is none: the job fails, and the row says what it said."""
    connection = json.loads(str(shell.env["AIRFLOW_CONN_HERE"]))
    connection["extra"]["python"] = "/bin/false"
    shell.env["AIRFLOW_CONN_HERE"] = json.dumps(connection)
    found = rows(await shell.json("doctor", "--job", "--wait", "20", code=3))
    assert found["here", "job"]["result"] == "fail"
    assert "airflow-gpu logs v1/prod/airflow-gpu-doctor/" in found["here", "job"]["todo"]


# -- channels and states on an object store --------------------------------------------------------


@pytest.fixture(scope="module")
def s3() -> Iterator[Server]:
    with started() as servers:
        yield servers["s3"]


def on_s3(shell: Shell, s3: Server, key: str = "") -> str:
    """The target's channel is there, with a connection named; answers its address."""
    root = f"{s3.uri}/{secrets.token_hex(6)}"
    connection = json.loads(str(shell.env["AIRFLOW_CONN_HERE"]))
    connection["extra"]["channel"] = root
    shell.env |= {
        "AIRFLOW_CONN_HERE": json.dumps(connection),
        "AIRFLOW_CONN_MINIO": json.dumps(minio(s3, key)),
        "AIRFLOW__GPU__STORE_CONN_IDS": json.dumps({s3.uri: "minio"}),
        "AWS_ACCESS_KEY_ID": None,
        "AWS_SECRET_ACCESS_KEY": None,
    }
    return root


async def test_an_object_store_is_proven_as_a_folder_is(plant: Plant, shell: Shell, s3: Server) -> None:
    root = on_s3(shell, s3)
    answer = await shell.json("doctor", "here", "--state-uri", f"{root}/state")
    found = rows(answer)
    assert answer["ok"], answer
    assert "8 writers raced, one won" in found["here", "create-only writes"]["found"]
    assert found["here", "create-only writes"]["check"].startswith(f"channel {root}")
    assert found["here", "credentials"]["found"] == (
        "connection 'minio'; jobs log in by themselves, and are told: allow_http, endpoint, region"
    )
    assert "8 writers raced, one won" in found["state store", "create-only writes"]["found"]
    assert s3.options["secret_access_key"] not in json.dumps(answer)


async def test_a_connection_without_the_right_says_which(plant: Plant, shell: Shell, s3: Server) -> None:
    root = on_s3(shell, s3, key="not-the-right-key")
    answer = await shell.json("doctor", "here", code=3)
    row = rows(answer)["here", "create-only writes"]
    assert "403 Forbidden" in row["found"]
    assert (
        row["todo"] == f"the connection 'minio' must have the right to read, write, list and delete at {root}"
    )
    assert "not-the-right-key" not in json.dumps(answer)


async def test_a_connection_that_is_named_and_not_there(plant: Plant, shell: Shell, s3: Server) -> None:
    """The remedy is about the connection that is missing, not about the target's, which is there."""
    on_s3(shell, s3)
    shell.env["AIRFLOW__GPU__STORE_CONN_IDS"] = json.dumps({"s3://": "nothing_there"})
    row = rows(await shell.json("doctor", "here", code=3))["here", "connection"]
    assert "no connection 'nothing_there'" in row["found"]
    assert "[gpu] store_conn_ids" in row["found"]
    assert row["todo"].startswith(
        "create the connection 'nothing_there' of type 'aws', in Airflow or as AIRFLOW_CONN_NOTHING_THERE"
    )


async def test_a_connection_for_something_else(plant: Plant, shell: Shell, s3: Server) -> None:
    """Of a target, or of a store: told with the type that is right, before anybody is asked."""
    on_s3(shell, s3)
    shell.env["AIRFLOW_CONN_MINIO"] = json.dumps({"conn_type": "ssh", "host": "login"})
    row = rows(await shell.json("doctor", "here", code=3))["here", "connection"]
    assert "has the type 'ssh'" in row["found"]
    assert row["todo"] == "give the connection 'minio' the type 'aws', or name another one for this store"
    shell.env["AIRFLOW_CONN_HERE"] = shell.env["AIRFLOW_CONN_MINIO"]
    row = rows(await shell.json("doctor", "here", code=3))["here", "connection"]
    assert row["todo"] == "name a connection of type 'gpu_local' or 'slurm', or give 'here' that type"


async def test_a_bucket_that_does_not_exist(plant: Plant, shell: Shell, s3: Server) -> None:
    on_s3(shell, s3)
    connection = json.loads(str(shell.env["AIRFLOW_CONN_HERE"]))
    connection["extra"]["channel"] = "s3://nobody-made-this/gangs"
    shell.env["AIRFLOW_CONN_HERE"] = json.dumps(connection)
    shell.env["AIRFLOW__GPU__STORE_CONN_IDS"] = json.dumps({"s3://": "minio"})
    found = rows(await shell.json("doctor", "here", "--state-uri", "s3://nobody-made-this", code=3))
    create = "create the bucket or container, or correct its name in"
    assert found["here", "create-only writes"]["todo"] == f"{create} the channel of the connection 'here'"
    assert found["state store", "create-only writes"]["todo"] == f"{create} [gpu] state_uri"


async def test_an_endpoint_that_is_away(plant: Plant, shell: Shell, s3: Server) -> None:
    """Nobody listens there: that is no matter of rights."""
    on_s3(shell, s3)
    away = minio(s3)
    away["extra"]["endpoint_url"] = f"http://127.0.0.1:{free_port()}"
    shell.env["AIRFLOW_CONN_MINIO"] = json.dumps(away)
    row = rows(await shell.json("doctor", "here", code=3))["here", "create-only writes"]
    assert row["result"] == "fail"
    assert row["todo"].startswith("see whether the store is up and can be reached from here")
    assert "the right to" not in row["todo"]


async def test_without_credentials_it_says_what_would_do(
    plant: Plant, shell: Shell, s3: Server, tmp_path: Path
) -> None:
    """No connection is named, and the process has no identity: its variables say that nobody is to be asked for one."""
    on_s3(shell, s3)
    shell.env["AIRFLOW__GPU__STORE_CONN_IDS"] = None
    shell.env |= {
        "AWS_ENDPOINT_URL": s3.options["endpoint"],
        "AWS_ALLOW_HTTP": "true",
        "AWS_SKIP_SIGNATURE": "true",
    }
    row = rows(await shell.json("doctor", "here", code=3))["here", "create-only writes"]
    assert row["result"] == "fail"
    for words in ("AIRFLOW__GPU__STORE_CONN_IDS", '{"s3://bucket": "ID"}', "'aws'", "AWS_ACCESS_KEY_ID"):
        assert words in row["todo"]


async def test_a_job_with_secrets(plant: Plant, shell: Shell, s3: Server) -> None:
    """Jobs get no credentials of Airflow's: with references to some the job writes to the channel. No value is shown."""
    on_s3(shell, s3)
    key = s3.options["secret_access_key"]
    shell.env["AIRFLOW_VAR_KEY_ID"] = s3.options["access_key_id"]
    secrets = (
        "--secret",
        "AWS_ACCESS_KEY_ID=var:key_id",
        "--secret",
        "AWS_SECRET_ACCESS_KEY=conn:minio#password",
    )
    result = await shell("doctor", "here", "--job", *secrets, "--json")
    found = rows(json.loads(result.stdout))
    assert found["here", "reads and writes the channel"]["found"] == "a checkpoint at step 1"
    assert key not in result.output
    assert not [
        path for path in plant.root.rglob("*") if path.is_file() and key.encode() in path.read_bytes()
    ]


async def test_a_job_without_credentials(plant: Plant, shell: Shell, s3: Server) -> None:
    """One attempt, which says what is missing and shows what the node said."""
    on_s3(shell, s3)
    row = rows(await shell.json("doctor", "here", "--job", code=3))["here", "job"]
    assert row["found"].startswith("application: the job has no credentials for its channel")
    assert "exit code 78" in row["found"]
    assert "THIS JOB HAS NO CREDENTIALS" in row["found"]
    assert row["todo"].startswith("give it some by --secret")
    [run] = (await shell.json("gangs", "--all"))["gangs"]
    assert run["attempt"] == 1


async def test_secrets_are_references(plant: Plant, shell: Shell) -> None:
    """What is none is refused and not repeated; one that leads nowhere fails the job's row."""
    for wrong in ("TOKEN=hunter2", "hunter2", "TOKEN=conn:hunter2"):
        told = (await shell("doctor", "here", "--job", "--secret", wrong, code=2)).output
        assert "--secret must be NAME=REFERENCE" in told
        assert "hunter2" not in told
    assert "give --job" in (await shell("doctor", "--secret", "A=var:b", code=2)).output
    answer = await shell.json(
        "doctor", "here", "--job", "--secret", "A=conn:here#extra.nothing", "--wait", "5", code=3
    )
    assert "connection 'here' has no 'extra.nothing'" in rows(answer)["here", "job"]["found"]
    assert "correct the --secret" in rows(answer)["here", "job"]["todo"]


async def test_a_wrong_setting_is_named(shell: Shell) -> None:
    shell.env["AIRFLOW__GPU__STORE_CONN_IDS"] = "s3://b=minio"
    assert "[gpu] store_conn_ids must be a JSON object" in (await shell("doctor", code=1)).output
