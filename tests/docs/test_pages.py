"""The documentation is run: transcripts as a person would, Python blocks as DAG files."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest

from airflow_gpu.cli.connections import PlainConnection, parse, target_of
from airflow_gpu.hooks.stores import Credentials, conn_ids
from tests.docs.transcript import blocks, play

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


@pytest.mark.timeout(900)  # a person's machine is faster than one that runs all tests at once
@pytest.mark.parametrize(("page", "commands"), [("first-gang", 15), ("commands", 25)])
def test_transcripts(page: str, commands: int, tmp_path: Path) -> None:
    """A person who has never seen the project gets to a gang of their own, and every command does what the page says."""
    from airflow_gpu.targets.local.admin import Admin

    keep = ("PATH", "HOME", "LANG", "USER", "TMPDIR")
    env = {name: os.environ[name] for name in keep if name in os.environ}
    env["PATH"] = f"{_commands(tmp_path / 'bin')}:{Path(sys.executable).parent}:{env['PATH']}"
    env["NO_PROXY"] = env["no_proxy"] = "*"
    env["PYTHONPATH"] = str(ROOT)
    try:
        assert play(ROOT / "docs" / f"{page}.md", tmp_path, env) >= commands
    finally:
        if (tmp_path / "cluster").exists():
            Admin(tmp_path / "cluster").stop(gangs=True, grace=0)


def _commands(folder: Path) -> Path:
    """``airflow-gpu`` as its entry point starts it, of this checkout."""
    folder.mkdir()
    command = folder / "airflow-gpu"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m airflow_gpu.cli "$@"\n')
    command.chmod(0o755)
    return folder


def _python_blocks() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        if page.stem == "frameworks":  # run by tests/frameworks, where the libraries are
            continue
        for number, block in enumerate(blocks(page)):
            if block.kind == "python" and block.skip is None:
                found.append((f"{page.stem}-{number}", block.body))
    return found


@pytest.mark.parametrize(("name", "source"), _python_blocks(), ids=[name for name, _ in _python_blocks()])
def test_python_blocks(name: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block is a DAG file (or a piece of a job's program) that Airflow takes as it stands."""
    if "from airflow_gpu.runtime import gang" in source:
        # Runs inside of a gang; outside of one it is a gang of one.
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        exec(compile(source, name, "exec"), {"__name__": "program"})
        return
    path = tmp_path / f"{re.sub('[^a-z0-9]', '_', name)}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def test_settings_of_the_page_on_s3() -> None:
    """What stands there is taken: the connections by whoever reads them, the setting, and the DAG's references."""
    given = {
        block.title: block.body
        for block in blocks(ROOT / "docs" / "s3.md")
        if block.kind == "json" and block.title
    }
    places = conn_ids(given["AIRFLOW__GPU__STORE_CONN_IDS"])
    gangs = parse("gangs_s3", given["AIRFLOW_CONN_GANGS_S3"])
    target = target_of(parse("gpu_default", given["AIRFLOW_CONN_GPU_DEFAULT"]))

    async def find(conn_id: str) -> PlainConnection:
        assert conn_id == gangs.conn_id
        return gangs

    credentials = Credentials(places, find)
    assert credentials.conn_id(target.channel) == gangs.conn_id
    options = asyncio.run(credentials.options(target.channel))
    assert (options["access_key_id"], options["secret_access_key"]) == (gangs.login, gangs.password)
    told = asyncio.run(credentials.public(target.channel))
    assert told == {"region": "eu-central-1", "endpoint": "https://minio.example.com"}
    page = (ROOT / "docs" / "s3.md").read_text()
    for reference in re.findall(r"conn:[\w#]+", page):
        conn_id, _, field = reference.removeprefix("conn:").partition("#")
        assert conn_id == gangs.conn_id
        assert getattr(gangs, field)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links(page: Path) -> None:
    """Links between the pages lead somewhere."""
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("path", sorted((ROOT / "dags").glob("*.py")), ids=lambda path: path.name)
def test_example_dags_have_docstrings(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))
