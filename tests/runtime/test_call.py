"""Functions on ranks, results as JSON, and the handle outside of a gang."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_gpu.runtime import gang
from airflow_gpu.runtime.api import RESULT_BYTES
from airflow_gpu.runtime.plain import plain
from tests.runtime.bed import BOTH_PYTHONS, Bed

ROOT = str(Path(__file__).parents[2])


def test_function_on_every_rank(make_bed: Callable[..., Bed], each_python: str) -> None:
    bed = make_bed(each_python)
    source = """
    def train(lr, *, layers=(), gang=None):
        import sys
        print(__name__, __file__.rpartition("/")[2], gang.rank, lr, layers)
        if gang.rank == 1:
            return None
        return {"lr": lr, "rank": gang.rank, "layers": layers}
    """
    job = bed.payload(
        nodes=1, function=(source, {"name": "train", "args": [0.5], "kwargs": {"layers": [1, 2]}})
    )
    assert bed.run(job) == [0]
    assert bed.read("lives/0001/result.json") == {"lr": 0.5, "rank": 0, "layers": [1, 2]}
    assert bed.log(1) == "function function.py 1 0.5 [1, 2]\n"


def test_traceback_shows_the_users_lines(bed: Bed) -> None:
    source = """
    def train():
        nothing = {}
        return nothing["here"]  # a remark
    """
    job = bed.payload(nodes=1, ranks_per_node=1, function=(source, {"name": "train"}))
    assert bed.run(job) == [1]
    failure = bed.read("lives/0001/failure.json")
    assert 'return nothing["here"]  # a remark' in failure["tail"]
    assert failure["message"].endswith("KeyError: 'here'")


def test_result_given_by_hand_outlives_a_none(bed: Bed) -> None:
    source = """
    def train(gang):
        gang.result("first")
        gang.result("by hand")
    """
    job = bed.payload(nodes=1, function=(source, {"name": "train", "pass_gang": True}))
    assert bed.run(job) == [0]
    assert bed.read("lives/0001/result.json") == "by hand"


def test_result_that_cannot_travel_names_the_place(bed: Bed) -> None:
    source = """
    def train():
        return {"loss": [1.0, {"model": object()}]}
    """
    job = bed.payload(nodes=1, function=(source, {"name": "train"}))
    assert bed.run(job) == [1]
    assert "result.loss[1].model is a object" in bed.read("lives/0001/failure.json")["message"]
    assert bed.read("lives/0001/result.json") is None


@pytest.mark.parametrize(
    ("call", "words"),
    [(None, "function.json"), ({"name": "other"}, "defines no function other"), ({"args": []}, "'name'")],
)
def test_payload_that_is_not_right(tmp_path: Path, call: Any, words: str) -> None:
    (tmp_path / "function.py").write_text("def train(): pass\n")
    if call is not None:
        (tmp_path / "function.json").write_text(json.dumps(call))
    said = subprocess.run(
        [sys.executable, "-m", "airflow_gpu.runtime.call", str(tmp_path / "function.py")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 64
    assert words in said.stderr


# -- values ----------------------------------------------------------------------------------------


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(JSON)
def test_json_values_travel_as_they_are(value: Any) -> None:
    assert plain(value, "result") == (value, [])
    assert json.loads(json.dumps(plain(value, "result")[0], allow_nan=False)) == value


def test_nearly_json() -> None:
    value = {"a": numpy.float32(0.5), "b": (numpy.int64(3), numpy.bool_(True), numpy.array([7])), "c": True}
    made, gaps = plain(value, "result")
    assert made == {"a": 0.5, "b": [3, True, 7], "c": True}
    assert [type(v) for v in made["b"]] == [int, bool, int]
    assert gaps == []
    made, gaps = plain({"loss": math.nan, "best": [-math.inf, numpy.float64("nan")]}, "result")
    assert made == {"loss": None, "best": [None, None]}
    assert gaps == ["result.loss is nan", "result.best[0] is -inf", "result.best[1] is nan"]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"x": [1, {2}]}, r"result\.x\[1\] is a set, which"),
        ({"x": numpy.zeros((2, 3))}, r"result\.x is a ndarray of shape \(2, 3\)"),
        ({"x": {1: 2}}, r"result\.x has the key 1, a int"),
        (b"x", "result is a bytes"),
        (1j, "result is a complex"),
    ],
)
def test_what_is_not_json(value: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        plain(value, "result")


def test_value_that_contains_itself() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(TypeError, match="contain itself"):
        plain(value, "result")


# -- outside of a gang -----------------------------------------------------------------------------


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("GANG_CONTROL", "GANG_CHECKPOINT_DIR", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def train(total: int) -> tuple[int, list[Path]]:
    folders = []
    with gang() as g:
        assert (g.rank, g.world_size, g.life, g.notice) == (0, 1, 0, False)
        start = g.checkpoint.restore(lambda d: folders.append(d))
        for step in range(start, total):
            g.progress(step + 1, total, loss=1.0)
            assert not g.checkpoint.due(step + 1)
        with g.checkpoint.save(total) as d:
            (d / "x").write_text("1")
            folders.append(d)
        g.result({"done": total})
    return start, folders


def test_on_a_laptop(outside: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    start, [folder] = train(3)
    assert start == 0
    assert (folder / "x").exists()
    assert capsys.readouterr().out == '[gang] result: {"done": 3}\n'


def test_on_a_laptop_with_a_folder(outside: pytest.MonkeyPatch, tmp_path: Path) -> None:
    outside.setenv("GANG_CHECKPOINT_DIR", str(tmp_path))
    assert train(3)[0] == 0
    start, folders = train(5)
    assert start == 3
    assert folders == [tmp_path / "step-000000003", tmp_path / "step-000000005"]


def test_under_torchrun(outside: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": 3,
        "WORLD_SIZE": 8,
        "LOCAL_RANK": 1,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_PORT": 7,
    }.items():
        outside.setenv(name, str(value))
    with gang() as g:
        assert (g.rank, g.world_size, g.local_rank, g.local_world_size, g.nodes) == (3, 8, 1, 2, 4)
        assert (g.master_addr, g.master_port) == ("127.0.0.1", 7)


def test_too_large_a_result(outside: pytest.MonkeyPatch) -> None:
    with gang() as g:
        with pytest.raises(ValueError, match="write it to a file"):
            g.result("x" * RESULT_BYTES)
        g.result("x" * (RESULT_BYTES - 2))


@pytest.mark.parametrize("python", BOTH_PYTHONS)
def test_importing_the_handle_is_cheap(python: str) -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); from airflow_gpu.runtime import gang; print(*sys.modules)"
    said = subprocess.run([python, "-S", "-c", code, ROOT], capture_output=True, text=True, check=True)
    for dear in ("asyncio", "subprocess", "ctypes", "zipfile", "airflow", "numpy"):
        assert dear not in said.stdout.split()
