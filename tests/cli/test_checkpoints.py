"""``airflow-gpu checkpoints``: on run directories as they are, without an Airflow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from airflow_gpu.cli.main import commands
from tests.checkpoints.conftest import Run, one_life


class Commands:
    def __init__(self, root: Path) -> None:
        self.env = {
            "AIRFLOW_HOME": str(root / "airflow"),
            "AIRFLOW_CONFIG": None,
            "AIRFLOW__GPU__INSTALLATION": "prod",
            "AIRFLOW__GPU__STATE_URI": f"file://{root}/state",
            "AIRFLOW_CONN_HERE": json.dumps(
                {"conn_type": "gpu_local", "extra": {"path": str(root / "cluster")}}
            ),
        }

    def __call__(self, *arguments: str, code: int = 0) -> Result:
        result = CliRunner(env=self.env).invoke(commands, ["checkpoints", *arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, (result.exit_code, result.output)
        return result

    def json(self, *arguments: str, code: int = 0) -> Any:
        return json.loads(self(*arguments, "--json", code=code).stdout)


@pytest.fixture
def shell(tmp_path: Path) -> Commands:
    return Commands(tmp_path)


async def _run(root: Path) -> Run:
    run = await one_life(Run(root))
    for step in (100, 200, 300, 400):
        await run.write(step)
    await run.write(500, manifest=b"")
    return run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    import asyncio

    return asyncio.run(_run(tmp_path))


def test_list(run: Run, shell: Commands) -> None:
    lines = shell("list", "dag/r1").stdout.splitlines()
    assert lines[0].split() == [
        "LIFE",
        "STEP",
        "IS",
        "FILES",
        "SIZE",
        "AGE",
        "RANKS",
        "COUNTS",
        "AS",
        "TROUBLE",
    ]
    assert [" ".join(line.split()[:6]) for line in lines[4:]] == [
        "1 400 complete 3 6.8 KiB",
        "1 500 unfinished 3 6.8 KiB",
    ]
    assert "next start" in lines[4]
    body = shell.json("list", "dag")
    assert (body["run"], len(body["checkpoints"]), body["next"]) == (
        "dag/r1/fit",
        5,
        f"{run.channel.uri}/checkpoints/0001/step-000000400",
    )
    assert "no run is called 'other'" in shell("list", "other", code=1).stderr


def test_a_channel_that_cannot_be_read(run: Run, shell: Commands) -> None:
    """Nothing is known of its checkpoints, which is not the same as that there are none."""
    away = run.folder.rename(run.folder.with_name("away"))
    run.folder.write_text("a file, not a folder")
    for arguments in (["list"], ["verify"], ["prune", "--keep", "1", "--dry-run"]):
        command, *more = arguments
        result = shell(command, "dag", *more, code=1)
        assert result.stdout == ""
        assert "Not a directory" in result.stderr
        assert f"{run.channel.uri} could not be read" in shell.json(command, "dag", *more, code=1)["error"]
    run.folder.unlink()
    away.rename(run.folder)
    assert len(shell.json("list", "dag")["checkpoints"]) == 5


def test_verify_and_mark(run: Run, shell: Commands) -> None:
    assert "step 400: 3 files, 6.8 KiB, all as they were saved" in shell("verify", "dag").stdout
    (run.folder / "checkpoints/0001/step-000000300/rank-0.bin").write_bytes(b"ZERO" * 1000)
    found = shell.json("verify", "dag", "--step", "300", code=3)
    [one] = found["checkpoints"]
    assert one["wrong"] == [{"path": "rank-0.bin", "what": "has other content than was saved"}]
    assert not one["marked"]
    assert "no life takes it" in shell("verify", "dag", "--all", "--mark", code=3).stdout
    assert [one["is"] for one in shell.json("list", "dag")["checkpoints"]] == [
        "complete", "complete", "damaged", "complete", "unfinished",
    ]  # fmt: skip
    assert "no such checkpoint" in shell("verify", "dag", "--step", "7", code=1).stderr


def test_prune(run: Run, shell: Commands) -> None:
    dry = shell("prune", "dag", "--keep", "1", "--every", "200", "--dry-run").stdout
    assert "dag/r1/fit: 3 stay, 2 go, 13.7 KiB" in dry
    assert len(shell.json("list", "dag")["checkpoints"]) == 5
    assert "give --yes or --dry-run" in shell("prune", "dag", "--keep", "1", code=2).stderr
    assert "--yes or --dry-run" in shell.json("prune", "dag", "--keep", "1", code=2)["error"]
    assert "removed 2, 13.7 KiB" in shell("prune", "dag", "--keep", "1", "--every", "200", "--yes").stdout
    assert [one["step"] for one in shell.json("list", "dag")["checkpoints"]] == [200, 400, 500]
    assert shell.json("prune", "dag", "--keep", "1", "--yes")["removed"] == [
        f"{run.channel.uri}/checkpoints/0001/step-000000200"
    ]


def test_copy(run: Run, shell: Commands, tmp_path: Path) -> None:
    done = shell.json("copy", "dag", str(tmp_path / "kept"), "--step", "200")
    assert (done["sent"], done["there"], done["step"]) == (3, 0, 200)
    assert (tmp_path / "kept" / run.path / "checkpoints/0001/step-000000200/manifest.json").exists()
    assert "3 were there already" in shell("copy", "dag", f"file://{tmp_path}/kept", "--step", "200").stdout
    # A target's name stands for its channel.
    done = shell.json("copy", "dag", "here")
    assert done["step"] == 400
    assert str(tmp_path / "cluster") in done["copy"]
    assert "neither an address nor a target" in shell("copy", "dag", "nowhere", code=1).stderr
    assert "is unfinished" in shell("copy", "dag", str(tmp_path / "kept"), "--step", "500", code=1).stderr
