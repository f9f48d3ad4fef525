"""``airflow-gpu gangs | logs | cancel | sweep`` on real gangs, without an Airflow."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from airflow_gpu.gang.function import FunctionSource
from airflow_gpu.gang.run import Cause, State
from airflow_gpu.gang.spec import Gang
from tests.beds.stores.started import started
from tests.cli.conftest import Shell, minio
from tests.conformance import programs
from tests.sweep.conftest import LIMIT, Plant

ROOT = Path(__file__).resolve().parents[2]


def counting(total: int = 100000) -> Gang:
    return Gang(
        function=FunctionSource.of(programs.count, (total,), {}),
        gpus_per_node=1,
        targets="here",
        stop_grace=20,
        checkpointing={"interval": 0.5},
    )


async def until_step(shell: Shell, step: int) -> Any:
    for _ in range(int(LIMIT * 2)):
        [gang] = (await shell.json("gangs"))["gangs"]
        if (gang["step"] or 0) >= step:
            return gang
        await asyncio.sleep(0.5)
    raise AssertionError(gang)


async def test_a_gang_from_start_to_end(plant: Plant, shell: Shell) -> None:
    """It is listed with how far it is, its output is read, it is ended with a notice, and its checkpoint is named."""
    nothing = (await shell("gangs")).stdout
    assert nothing.startswith("no gangs live\n")
    assert "there is no run directory of" in nothing
    held = await plant.begin(plant.key(), gang=counting())
    gang = await until_step(shell, 30)
    assert gang["gang"] == "dag/r1/fit"
    assert (gang["state"], gang["target"], gang["attempt"], gang["life"], gang["try"], gang["total"]) == (
        "running",
        "here",
        1,
        1,
        1,
        100000,
    )
    table = (await shell("gangs")).stdout
    assert "dag/r1/fit" in table
    assert "/100000" in table
    result = await shell("cancel", "dag/r1", "--grace", "15")
    assert "dag/r1/fit: ended, as stopped" in result.stdout
    assert "newest checkpoint: step" in result.stdout
    assert "ends as cancelled" in result.stdout
    assert "giving notice" in result.stderr
    run = (await plant.read(held)).run
    assert run.verdict is not None
    assert (run.verdict.outcome, run.verdict.cause) == ("cancelled", Cause.STOPPED)
    assert await plant.state(held) is State.CANCELLED
    outcome = run.attempts[0].outcome
    assert outcome is not None
    assert outcome.checkpoint is not None
    assert outcome.checkpoint.step >= 30
    again = await shell.json("cancel", "dag/r1")
    assert again["ok"]
    assert again["checkpoint"]["step"] == outcome.checkpoint.step
    assert "nothing of it runs" in again["words"]
    assert "1 are over" in (await shell("gangs")).stdout
    [over] = (await shell.json("gangs", "--all"))["gangs"]
    assert (over["state"], over["checkpoint"]) == ("cancelled", outcome.checkpoint.step)


async def test_logs(plant: Plant, shell: Shell) -> None:
    """By key, prefix, job and path; each rank, each life; followed to its end."""
    script = 'echo "rank $RANK of life $GANG_LIFE"; sleep 1; echo "done as $RANK"'
    gang = plant.gang(command=None, script=script, ranks_per_node=2)
    held = await plant.own(plant.key(), gang)
    driving = asyncio.create_task(plant.driver(held, gang).run())
    while not held.journal.run.attempts:
        await asyncio.sleep(0.02)
    followed = await shell("logs", "dag/r1/fit", "--follow")
    assert followed.stdout == "rank 0 of life 1\ndone as 0\n"
    assert await driving is not None
    job = held.journal.run.attempts[0].name
    path = f"{plant.store.uri}/{held.journal.path}"
    for name in ("dag/r1/fit", "da", job, path, held.journal.path, held.journal.path.rpartition("/")[0]):
        assert (await shell("logs", name, "--rank", "1")).stdout == "rank 1 of life 1\ndone as 1\n"
    lines = (await shell("logs", "dag", "--json")).stdout.splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["rank 0 of life 1\ndone as 0\n"]
    for wrong, there in (
        (("--rank", "7"), "life 1 of dag/r1/fit has no rank 7; there are 0 to 1"),
        (("--rank", "2", "--follow"), "life 1 of dag/r1/fit has no rank 2; there are 0 to 1"),
        (("--life", "5"), "dag/r1/fit has no life 5; there are 1"),
        (("--node", "0", "--life", "5"), "dag/r1/fit has no life 5; there are 1"),
        (("--node", "1"), "attempt 1 of dag/r1/fit has no node 1; there is only 0"),
        (("--node", "1", "--life", "1"), "attempt 1 of dag/r1/fit has no node 1; there is only 0"),
    ):
        nothing = await shell("logs", "dag", *wrong, code=1)
        assert nothing.stdout == ""
        assert there in nothing.stderr


async def test_a_rank_that_prints_nothing(plant: Plant, shell: Shell) -> None:
    await plant.finish(await plant.own(plant.key(), silent := plant.gang(command="true")), silent)
    nothing = await shell("logs", "dag")
    assert nothing.stdout == ""
    assert "rank 0 of life 1 has printed nothing\n" in nothing.stderr


async def test_the_output_of_a_node_of_an_earlier_life(plant: Plant, shell: Shell) -> None:
    """Which job it was follows from the life: here each attempt has one."""
    script = 'test "$GANG_ATTEMPT" = 2 || exit 9'
    gang = plant.gang(command=None, script=script, recovery={"application": 1, "backoff": 0})
    held = await plant.own(plant.key(), gang)
    await plant.finish(held, gang)
    lives = [life.number for life in await plant.driver(held).channel(held.journal.run.attempts[0]).lives()]
    for number, attempt in ((lives[0], 1), (lives[-1] - 1, 2)):
        told = await shell("logs", "dag", "--node", "0", "--life", str(number), "--json")
        pieces = [json.loads(line) for line in told.stdout.splitlines()]
        assert {(piece["attempt"], piece["node"]) for piece in pieces} == {(attempt, 0)}
    fence = await shell("logs", "dag", "--life", str(lives[1]), "--follow", code=1)
    assert f"has no life {lives[1]}; there are" in fence.stderr


async def test_which_run(plant: Plant, shell: Shell) -> None:
    """What could be several is an error that lists them; nothing is done to any."""
    for task in ("fit", "fine"):
        await plant.own(plant.key(task))
    for command in ("logs", "cancel"):
        several = (await shell(command, "dag/r1/fi", code=1)).stderr
        assert "could be any of 2 runs" in several
        assert "dag/r1/fit" in several
        assert "dag/r1/fine" in several
        none = (await shell(command, "nonsense", code=1)).stderr
        assert "no run is called 'nonsense'" in none
        assert "dag/r1/fit" in none
    answer = await shell.json("cancel", "dag/r1/fi", code=1)
    assert answer["ok"] is False
    assert "could be any" in answer["error"]
    assert await plant.kinds(await plant.own(plant.key("fit"))) == ["owner"]
    assert "has not been placed yet" in (await shell("logs", "dag/r1/fit", code=1)).stderr


async def test_cancel_between_attempts(plant: Plant, shell: Shell) -> None:
    """Nothing runs, and the owner is to start nothing more."""
    held = await plant.own(plant.key())
    assert (await shell.json("cancel", "dag/r1/fit"))["outcome"] == "cancelled"
    assert await plant.kinds(held) == ["owner", "stop", "verdict"]


async def test_cancel_while_a_driver_waits(plant: Plant, shell: Shell) -> None:
    """The trigger of a task that still waits sees the verdict."""
    held = await plant.begin(plant.key())
    driving = asyncio.create_task(plant.driver(held).run())
    await shell("cancel", "dag/r1/fit")
    verdict = await asyncio.wait_for(driving, LIMIT)
    assert verdict is not None
    assert (verdict.outcome, verdict.message) == ("cancelled", "ended by airflow-gpu cancel")


async def test_cancel_a_lost_job(plant: Plant, shell: Shell) -> None:
    """A job without a run directory is ended by its name."""
    held = await plant.begin(plant.key())
    await plant.store.delete_tree(held.journal.path)
    [row] = (await shell.json("gangs"))["gangs"]
    assert row["mark"] == "lost"
    assert row["state"] in ("starting", "running")
    assert "ended" in (await shell("cancel", row["job"])).stdout
    assert await plant.state(held) is State.CANCELLED


async def test_a_bucket_that_does_not_exist(plant: Plant, shell: Shell) -> None:
    """Said with its reason and at once, though one may wait for a quarter of an hour."""
    with started() as servers:
        shell.env |= {
            "AIRFLOW_CONN_MINIO": json.dumps(minio(servers["s3"])),
            "AIRFLOW__GPU__STORE_CONN_IDS": json.dumps({"s3://": "minio"}),
        }
        await plant.never_submitted(await plant.own(plant.key()), "s3://nobody-made-this")
        told = await shell("cancel", "dag", "--wait", "20", code=3)
        assert "dag/r1/fit: could not be ended: s3://nobody-made-this" in told.stdout
        assert "the bucket or container does not exist" in told.stdout
        assert "there is no checkpoint" not in told.stdout
        assert "does not exist" in (await shell.json("cancel", "dag", "--wait", "20", code=3))["words"]


async def test_sweep(plant: Plant, shell: Shell) -> None:
    """Without Airflow what depends on it is left alone, and the exit code says that something is open."""
    held = await plant.begin(plant.key())
    report = await shell.json("sweep", "--without-airflow", code=3)
    assert [item["case"] for item in report["items"]] == ["undecided"]
    assert report["ok"] is False
    assert not (await plant.state(held)).ended
    # The metadata database of this shell does not exist.
    report = await shell.json("sweep", code=3)
    assert "database" in report["airflow"]["trouble"]
    assert not (await plant.state(held)).ended
    shown = (await shell("sweep", "--without-airflow", code=3)).stdout
    assert "undecided" in shown
    assert "1 to look at" in shown


async def test_sweep_lost(plant: Plant, shell: Shell) -> None:
    held = await plant.begin(plant.key())
    shell.env["AIRFLOW__GPU__STATE_URI"] = f"file://{plant.root}/elsewhere"
    shown = (await shell("sweep", "--without-airflow", code=3)).stdout
    assert "If state_uri is wrong, every gang looks like this" in shown
    assert not (await plant.state(held)).ended
    assert (await shell.json("sweep", "--without-airflow", "--lost"))["ok"]
    assert await plant.state(held) is State.CANCELLED


async def test_a_target_that_is_not_there(plant: Plant, shell: Shell) -> None:
    """What it runs is not known, and that is said."""
    held = await plant.begin(plant.key())
    shell.env["AIRFLOW_CONN_HERE"] = None
    answer = await shell.json("gangs", code=3)
    [gang] = answer["gangs"]
    assert gang["state"] == "not known"
    assert "AIRFLOW_CONN_HERE" in answer["targets"]["here"]
    assert not (await plant.state(held)).ended


@pytest.mark.parametrize("kind", ["json", "yaml", "env", "cfg"])
async def test_settings_and_connections_of_files(plant: Plant, shell: Shell, kind: str) -> None:
    """From a file of connections in each format, and from airflow.cfg."""
    await plant.begin(plant.key())
    text = str(shell.env["AIRFLOW_CONN_HERE"])
    arguments: list[str] = []
    if kind == "cfg":
        (plant.root / "airflow").mkdir()
        (plant.root / "airflow" / "airflow.cfg").write_text(
            f"[core]\nx = %%(y)s\n[gpu]\ninstallation = prod\nstate_uri = file://{plant.root}/state\n"
        )
        shell.env["AIRFLOW__GPU__INSTALLATION"] = shell.env["AIRFLOW__GPU__STATE_URI"] = None
    else:
        file = plant.root / f"connections.{kind}"
        body = {"here": json.loads(text)}
        if kind == "json":
            file.write_text(json.dumps(body))
        elif kind == "yaml":
            import yaml

            file.write_text(yaml.safe_dump(body))
        else:
            extra = json.loads(text)["extra"]
            query = "&".join(f"{name}={value}" for name, value in extra.items())
            file.write_text(f"# targets\nhere=gpu-local://?{query}\n")
        shell.env["AIRFLOW_CONN_HERE"] = None
        arguments = ["--connections", str(file)]
    [gang] = (await shell.json("gangs", *arguments))["gangs"]
    assert gang["state"] in ("starting", "running")


async def test_what_is_missing_is_said(plant: Plant, shell: Shell) -> None:
    shell.env["AIRFLOW__GPU__INSTALLATION"] = None
    assert "AIRFLOW__GPU__INSTALLATION" in (await shell("gangs", code=1)).stderr
    assert "1 to 32 of a-z" in (await shell("gangs", "--installation", "No Name", code=1)).stderr
    shell.env["AIRFLOW__GPU__INSTALLATION"] = "prod"
    bad = plant.root / "bad.json"
    bad.write_text("{password: hunter2")
    told = (await shell("gangs", "--connections", str(bad), code=1)).stderr
    assert "is not JSON" in told
    assert "hunter2" not in told
    await shell("gangs", "--nonsense", code=2)
    assert "come after its name: airflow-gpu gangs --json" in (await shell("--json", "gangs", code=2)).stdout


async def test_a_process_without_airflow(plant: Plant, shell: Shell) -> None:
    """As a person runs it: Airflow's database does not exist, and Airflow itself is never imported."""
    held = await plant.begin(plant.key())
    env = {name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW")}
    env |= {name: value for name, value in shell.env.items() if value is not None}
    env |= {"PYTHONPATH": str(ROOT), "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": "postgresql://127.0.0.1:1/none"}

    def airflow_gpu(*arguments: str) -> subprocess.CompletedProcess[str]:
        program = (
            "import sys, airflow_gpu.cli\n"
            "try:\n    airflow_gpu.cli.main()\n"
            "finally:\n    print('IMPORTED', 'airflow' in sys.modules, file=sys.stderr)"
        )
        return subprocess.run(
            [sys.executable, "-c", program, *arguments], env=env, capture_output=True, text=True
        )

    listed = await asyncio.to_thread(airflow_gpu, "gangs", "--json")
    assert listed.returncode == 0, listed.stderr
    assert "IMPORTED False" in listed.stderr
    [gang] = json.loads(listed.stdout)["gangs"]
    assert gang["state"] in ("starting", "running")
    ended = await asyncio.to_thread(airflow_gpu, "cancel", gang["job"])
    assert ended.returncode == 0, ended.stderr
    assert "IMPORTED False" in ended.stderr
    assert await plant.state(held) is State.CANCELLED
