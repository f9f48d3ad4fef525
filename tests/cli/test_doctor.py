"""``airflow-gpu doctor``: what is right is proven, what is wrong is said with what to do."""

from __future__ import annotations

import json
from typing import Any

from tests.cli.conftest import Shell
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
