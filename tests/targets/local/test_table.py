"""The daemon's table, read round after round: what stays the same is neither read nor parsed again."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from airflow_gpu.targets.local import table as module
from airflow_gpu.targets.local.files import Damaged, replace_file
from airflow_gpu.targets.local.table import Table


def text(jobs: dict[str, Any]) -> str:
    """As the daemon writes it."""
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in jobs.items())
    return '{"v": 1, "nodes": [], "jobs": {\n' + rows + "\n}}\n"


def jobs(count: int) -> dict[str, Any]:
    return {
        f"job-{n}": {"native": "PENDING", "order": n, "reason": "behind {job}, \n first"}
        for n in range(count)
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "table.json"


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was given to the JSON parser."""
    given: list[str] = []
    real = json.loads

    def loads(data: str) -> Any:
        given.append(data)
        return real(data)

    monkeypatch.setattr(module.json, "loads", loads)
    return given


def put(path: Path, what: str) -> None:
    replace_file(path, what.encode())


def test_only_what_changed_is_parsed(path: Path, parsed: list[str]) -> None:
    found = jobs(100)
    put(path, text(found))
    table = Table(path)
    before = dict(table.rows())
    assert before == found
    assert len(parsed) == 101  # and the first line, which is about the cluster
    parsed.clear()
    assert table.rows() == found
    assert parsed == []
    found["job-42"] = {"native": "RUNNING", "order": 42, "reason": ""}
    del found["job-7"]
    put(path, text(found))
    after = table.rows()
    assert after == found
    assert len(parsed) == 2
    assert all((after[name] is before[name]) == (name != "job-42") for name in after)


def test_a_row_more_at_the_end(path: Path) -> None:
    """The line before it gets a comma."""
    for count in (0, 1, 2, 3, 2, 0):
        put(path, text(jobs(count)))
        assert Table(path).rows() == jobs(count)


def test_the_daemons_own_table_with_no_jobs(path: Path) -> None:
    put(path, '{"v": 1, "jobs": {\n\n}}\n')
    assert Table(path).rows() == {}


def test_a_table_of_another_shape_is_read_as_a_whole(path: Path) -> None:
    put(path, json.dumps({"jobs": jobs(3), "nodes": []}, indent=1))
    table = Table(path)
    assert table.rows() == jobs(3)
    assert table.whole() == {"jobs": jobs(3), "nodes": []}
    put(path, text(jobs(4)))
    assert table.rows() == jobs(4)
    assert table.whole() == {"v": 1, "jobs": jobs(4), "nodes": []}


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"{",
        b"[]",
        b'{"jobs": []}',
        b'{"jobs": {"fit',
        b"\xff\xfe",
        b'{"v": 1, "jobs": {\n"a": {"native": 1}\n"b": 2\n}}\n',
        b'{"v": 1, "jobs": {\n"a": {"native": 1},\n',
    ],
)
def test_damage_is_told_and_passes(path: Path, bad: bytes) -> None:
    put(path, text(jobs(2)))
    table = Table(path)
    table.rows()
    path.write_bytes(bad)
    for _ in range(2):
        with pytest.raises(Damaged):
            table.rows()
    put(path, text(jobs(2)))
    assert table.rows() == jobs(2)


def test_a_missing_table_is_damage(path: Path) -> None:
    with pytest.raises(Damaged, match="missing"):
        Table(path).rows()


def test_a_table_that_is_written_in_place_is_read_again(path: Path) -> None:
    put(path, text(jobs(2)))
    table = Table(path)
    table.rows()
    path.write_text(text(jobs(2)).replace("PENDING", "HEALING"))
    os.utime(path, ns=(1, 1))
    assert {row["native"] for row in table.rows().values()} == {"HEALING"}


def test_what_a_caller_adds_stays_with_the_caller(path: Path) -> None:
    put(path, text(jobs(1)))
    table = Table(path)
    table.whole()["jobs"]["mine"] = table.whole()["mine"] = {}
    assert table.whole() == {"v": 1, "jobs": jobs(1), "nodes": []}


def test_many_threads_read_while_it_is_replaced(path: Path) -> None:
    """Each reading is whole, and none stays behind."""
    put(path, text(jobs(50)))
    table, wrong, end = Table(path), [], threading.Event()

    def read() -> None:
        while not end.is_set():
            generations = {row.get("generation") for row in table.rows().values()}
            if len(generations) != 1:
                wrong.append(generations)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for generation in range(60):
        put(path, text({name: {**row, "generation": generation} for name, row in jobs(50).items()}))
    end.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert {row["generation"] for row in table.rows().values()} == {59}
