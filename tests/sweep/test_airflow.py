"""In a real Airflow: the example DAG as it is, a person's actions while no triggerer lives, and each way to ask."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_gpu.gang.identity import RunKey
from airflow_gpu.hooks.asking import PASSWORD, TOKEN, USER, RestAirflow
from airflow_gpu.sweeping.airflow import CannotAsk
from airflow_gpu.targets.local.admin import Admin
from airflow_gpu.targets.local.words import HOLDING, WAITING
from tests.beds.airflow import AirflowBed

pytestmark = pytest.mark.airflow

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 120.0

STAY = '''"""Gangs that stay until somebody ends them."""
from airflow.sdk import DAG
from airflow_gpu import Gang, GangOperator

with DAG("stay", schedule=None):
    gang = Gang(command="sleep 3000", gpus_per_node=1, stop_grace=5)
    GangOperator(task_id="one", gang=gang)
    GangOperator.partial(task_id="many", gang=gang).expand(overrides=[{"priority": 1}, {"priority": 2}])
'''


class Place:
    """One Airflow with the example DAG and a local cluster of 2 nodes x 4 pretended GPUs."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.cluster = home / "cluster"
        self.admin = Admin(self.cluster)
        dags = home / "dags"
        dags.mkdir()
        (dags / "stay.py").write_text(STAY)
        shutil.copy(ROOT / "dags" / "gang_sweep.py", dags)
        extra = {"path": str(self.cluster), "nodes": 2, "gpus_per_node": 4, "accelerator": "pretend"}
        self.bed = AirflowBed(
            home / "airflow",
            dags,
            {
                "AIRFLOW__GPU__INSTALLATION": "tests",
                "AIRFLOW__GPU__STATE_URI": f"file://{home}/state",
                "AIRFLOW__GPU__POLL_INTERVAL": "0.3",
                "AIRFLOW_CONN_GPU_DEFAULT": json.dumps({"conn_type": "gpu_local", "extra": extra}),
            },
        )

    def living(self) -> set[str]:
        """Jobs that are not over, as ``<run>/<task>[index]`` by the labels on them."""
        found = set()
        for row in self.admin.status()["jobs"].values():
            if row["native"] in WAITING or row["native"] in HOLDING:
                labels = row["labels"]
                index = labels["airflow-gpu/map-index"]
                found.add(labels["airflow-gpu/task"] + ("" if index == "none" else f"[{index}]"))
        return found

    def until(self, done: Callable[[], Any], what: str, limit: float = LIMIT) -> Any:
        return self.bed.until(done, what, limit)

    def call(self, method: str, path: str, body: Any) -> Any:
        """An API call; SQLite, which several processes share here, is locked now and then."""

        def done() -> Any:
            answer = self.bed.client.request(method, f"/api/v2{path}", json=body)
            assert answer.status_code == 500 or not answer.is_error, answer.text
            return None if answer.status_code == 500 else answer

        return self.until(done, f"{method} {path}")

    def trigger(self, dag_id: str) -> str:
        answer = self.call("POST", f"/dags/{dag_id}/dagRuns", {"conf": {}, "logical_date": None})
        return str(answer.json()["dag_run_id"])

    def stay(self) -> str:
        """Three gangs that run, deferred."""
        run = self.trigger("stay")
        for task, index in (("one", -1), ("many", 0), ("many", 1)):
            self.bed.wait_task("stay", run, task, "deferred", map_index=index)
        self.until(lambda: self.living() == {"one", "many[0]", "many[1]"}, "three gangs")
        return run

    def sweeps(self) -> list[str]:
        """Ids of the DAG runs of the example that an asset's event made."""
        runs = self.bed.get("/dags/gang_sweep/dagRuns", limit=50)["dag_runs"]
        return sorted(run["dag_run_id"] for run in runs if run["run_type"] == "asset_triggered")

    def sweep(self) -> dict[str, Any]:
        """The report of the example's task, run now."""
        run = self.trigger("gang_sweep")
        assert self.bed.wait("gang_sweep", run) == "success", self.bed.log("gang_sweep", run, "sweep")
        report: dict[str, Any] = self.bed.xcom("gang_sweep", run, "sweep")
        return report


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    made = Place(tmp_path_factory.mktemp("sweep"))
    try:
        with made.bed:
            assert made.bed.import_errors() == {}
            for dag_id in ("gang_sweep", "stay"):
                made.until(lambda dag=dag_id: made.bed.client.get(f"/api/v2/dags/{dag}").is_success, dag_id)
                made.call("PATCH", f"/dags/{dag_id}", {"is_paused": False})
            yield made
    finally:
        if made.cluster.exists():
            made.admin.stop(gangs=True, grace=0)


def test_while_no_triggerer_lives(place: Place) -> None:
    """Mark failed, one mapped index, then a deleted DAG run: the next triggerer ends them when it starts."""
    bed = place.bed
    run = place.stay()
    assert {item["case"] for item in place.sweep()["items"]} == {"wanted"}
    assert place.living() == {"one", "many[0]", "many[1]"}
    before = place.sweeps()
    bed.stop("triggerer", signal.SIGKILL)
    for path in ("one", "many/1"):
        place.call("PATCH", f"/dags/stay/dagRuns/{run}/taskInstances/{path}", {"new_state": "failed"})
    time.sleep(3)
    assert place.living() == {"one", "many[0]", "many[1]"}, "nobody could tell them"
    bed.start("triggerer", "triggerer", "--skip-serve-logs")
    place.until(lambda: place.living() == {"many[0]"}, "the end of the two that nobody wants")
    assert bed.task("stay", run, "many", 0)["state"] == "deferred"
    # The event made a DAG run of the example, which says what was found.
    [fresh] = place.until(
        lambda: [name for name in place.sweeps() if name not in before], "a run by the asset"
    )
    assert bed.wait("gang_sweep", fresh) == "success"
    events = bed.get(f"/dags/gang_sweep/dagRuns/{fresh}/upstreamAssetEvents")["asset_events"]
    told = json.dumps([event["extra"] for event in events])
    assert f"stay/{run}/one" in told
    assert f"stay/{run}/many[1]" in told
    assert f"stay/{run}/many[0]" not in told
    # A deleted DAG run. Its gang was left alone so far.
    bed.stop("triggerer", signal.SIGKILL)
    place.call("PATCH", f"/dags/stay/dagRuns/{run}", {"state": "failed"})
    place.call("DELETE", f"/dags/stay/dagRuns/{run}", None)
    assert place.living() == {"many[0]"}
    bed.start("triggerer", "triggerer", "--skip-serve-logs")
    place.until(lambda: place.living() == set(), "the end of the deleted run's gang")


def test_each_way_to_ask(place: Place) -> None:
    """Database and REST answer alike: states, none yet, mapped, not there; and each says when it cannot ask."""
    bed = place.bed
    run = place.stay()
    keys = [
        RunKey("tests", "stay", run, "one"),
        RunKey("tests", "stay", run, "many", 1),
        RunKey("tests", "stay", run, "many", 7),
        RunKey("tests", "stay", "no-such-run", "one"),
        RunKey("tests", "stay", run, "many"),
    ]
    expected = {"one": "deferred", "many[1]": "deferred"}

    def short(states: Any) -> dict[str, str]:
        return {str(key).rpartition("/")[2]: state for key, state in states.items()}

    by_user = RestAirflow(bed.url, {USER: "admin", PASSWORD: bed.password})
    assert short(asyncio.run(by_user.states(keys))) == expected
    token = str(bed.client.headers["Authorization"]).removeprefix("Bearer ")
    assert short(asyncio.run(RestAirflow(bed.url, {TOKEN: token}).states(keys))) == expected
    for env in ({}, {TOKEN: "nonsense"}, {USER: "admin", PASSWORD: "wrong"}):
        with pytest.raises(CannotAsk):
            asyncio.run(RestAirflow(bed.url, env).states(keys))
    with pytest.raises(CannotAsk):  # something else is there, which answers 404 to everything
        asyncio.run(RestAirflow(f"{bed.url}/nowhere", {TOKEN: token}).states(keys))
    program = (
        "import asyncio, json, sys; from airflow_gpu.gang.identity import RunKey;"
        "from airflow_gpu.hooks.asking import DatabaseAirflow;"
        "keys = [RunKey(*k) for k in json.loads(sys.argv[1])];"
        "found = asyncio.run(DatabaseAirflow().states(keys));"
        "print('ANSWER', json.dumps([[str(k), s] for k, s in found.items()]))"
    )
    arguments = json.dumps([[k.installation, k.dag_id, k.run_id, k.task_id, k.map_index] for k in keys])

    def database(**env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", program, arguments], env={**bed.env, **env}, capture_output=True, text=True
        )

    answered = database()
    [line] = [line for line in answered.stdout.splitlines() if line.startswith("ANSWER ")]
    assert short(dict(json.loads(line.removeprefix("ANSWER ")))) == expected
    empty = database(AIRFLOW__DATABASE__SQL_ALCHEMY_CONN=f"sqlite:///{place.home}/other.db")
    assert "CannotAsk" in empty.stderr
    # Ended by a person in the usual way, the sweep finds nothing to do.
    for path in ("one", "many/0", "many/1"):
        place.call("PATCH", f"/dags/stay/dagRuns/{run}/taskInstances/{path}", {"new_state": "failed"})
    place.until(lambda: place.living() == set(), "the end of all")
    report = place.sweep()
    assert [item for item in report["items"] if item["case"] == "unwanted"] == []
    assert report["ok"], report["problems"]


def test_by_hand(place: Place) -> None:
    """The commands find and end what is left behind too, and ask Airflow in its database or at its address."""
    bed = place.bed
    run = place.stay()
    bed.stop("triggerer", signal.SIGKILL)

    def airflow_gpu(*arguments: str, code: int = 0, **env: str) -> Any:
        command = [sys.executable, "-m", "airflow_gpu.cli", *arguments, "--json"]
        done = subprocess.run(command, env={**bed.env, **env}, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout)

    def marks() -> dict[str, str]:
        return {
            gang["gang"].rpartition("/")[2]: gang["mark"] for gang in airflow_gpu("gangs", "--ask")["gangs"]
        }

    try:
        assert marks() == {"one": "", "many[0]": "", "many[1]": ""}
        place.call("PATCH", f"/dags/stay/dagRuns/{run}/taskInstances/one", {"new_state": "failed"})
        assert marks() == {"one": "unwanted", "many[0]": "", "many[1]": ""}
        report = airflow_gpu("sweep")
        assert {item["run"].rpartition("/")[2]: item["case"] for item in report["items"]} == {
            "one": "unwanted",
            "many[0]": "wanted",
            "many[1]": "wanted",
        }
        assert place.living() == {"many[0]", "many[1]"}
        # Another Airflow, migrated and empty, as a shell with a wrong setting finds it: nothing is ended.
        other = {"AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{place.home}/empty.db"}
        subprocess.run(
            [sys.executable, "-m", "airflow", "db", "migrate"],
            env={**bed.env, **other},
            capture_output=True,
            check=True,
        )
        report = airflow_gpu("sweep", code=3, **other)
        assert {item["case"] for item in report["items"]} == {"undecided"}
        assert "another one" in report["airflow"]["trouble"]
        assert place.living() == {"many[0]", "many[1]"}
        place.call("PATCH", f"/dags/stay/dagRuns/{run}/taskInstances/many/1", {"new_state": "success"})
        secret = {USER: "admin", PASSWORD: bed.password}
        report = airflow_gpu("sweep", "--airflow-url", bed.url, **secret)
        assert [item["run"].rpartition("/")[2] for item in report["items"] if item["case"] == "unwanted"] == [
            "many[1]"
        ]
        assert bed.password not in json.dumps(report)
        assert place.living() == {"many[0]"}
    finally:
        bed.start("triggerer", "triggerer", "--skip-serve-logs")
    # What a command cancels while its task waits: the task ends, and says by whom.
    place.until(lambda: bed.task("stay", run, "many", 0)["state"] == "deferred", "still deferred")
    answer = airflow_gpu("cancel", f"stay/{run}/many[0]")
    assert answer["outcome"] == "cancelled"
    bed.wait_task("stay", run, "many", "failed", map_index=0, limit=LIMIT)
    assert "ended by airflow-gpu cancel" in bed.log("stay", run, "many", 1, 0)
    assert place.living() == set()
