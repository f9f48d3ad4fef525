from __future__ import annotations

import re
from pathlib import PurePosixPath

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from airflow_gpu.gang.identity import RunKey, attempt_name, labels, run_path, segment, slot_path

IDS = st.text(min_size=1, max_size=300)
KEYS = st.builds(RunKey, IDS, IDS, IDS, IDS, st.integers(min_value=-1, max_value=10**6))
INCARNATIONS = st.text(alphabet="abcdefghijklmnopqrstuvwxyz234567", min_size=10, max_size=10)
ATTEMPTS = st.integers(min_value=1, max_value=10**6)

DNS_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
SAGEMAKER_NAME = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}")
LABEL_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")

KEY = RunKey("prod", "train", "scheduled__2026-01-01T00:00:00+00:00", "group.fit")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train", "train"),
        ("Train_v1.2-x", "Train_v1.2-x"),
        ("scheduled__2026-01-01T00:00:00+00:00", "scheduled__2026-01-01T00=3A00=3A00=2B00=3A00"),
        ("a=b/c d", "a=3Db=2Fc=20d"),
        ("früh", "fr=C3=BCh"),
        (".", "=2E"),
        ("..", "=2E=2E"),
        ("...", "..."),
        ("a" * 120, "a" * 120),
        ("a" * 121, "a" * 100 + "-e9615320128cc7a3"),
    ],
)
def test_segments(text: str, expected: str) -> None:
    assert segment(text) == expected


@given(IDS)
@example("/etc/passwd")
@example("..")
@example("\0")
@example("\ud800")
def test_a_segment_is_one_plain_name(text: str) -> None:
    found = segment(text)
    assert re.fullmatch(r"[A-Za-z0-9._=-]{1,120}", found)
    assert found not in (".", "..")
    assert PurePosixPath(found).name == found


@given(st.text(min_size=1, max_size=60), st.text(min_size=1, max_size=60))
@example("a:", "a=3A")
@example(".", "=2E")
def test_different_texts_have_different_segments(one: str, other: str) -> None:
    assert (segment(one) == segment(other)) == (one == other)


@given(st.text(min_size=1, max_size=5), st.text(min_size=1, max_size=5))
def test_so_have_long_ones_with_the_same_beginning(one: str, other: str) -> None:
    assert (segment("x" * 150 + one) == segment("x" * 150 + other)) == (one == other)


def test_paths() -> None:
    run = "scheduled__2026-01-01T00=3A00=3A00=2B00=3A00"
    assert slot_path(KEY) == f"v1/prod/train/{run}/group.fit/_"
    mapped = RunKey("prod", "train", "r", "fit", 0)
    assert run_path(mapped, "abcdefgh23") == "v1/prod/train/r/fit/0/abcdefgh23"
    assert str(mapped) == "train/r/fit[0]"
    assert str(RunKey("prod", "train", "r", "fit")) == "train/r/fit"


@given(KEYS, KEYS, INCARNATIONS)
def test_paths_stay_inside_and_differ(one: RunKey, other: RunKey, incarnation: str) -> None:
    path = run_path(one, incarnation)
    assert path.count("/") == 6
    assert PurePosixPath(path).parts == tuple(path.split("/"))
    assert (slot_path(one) == slot_path(other)) == (one == other)


@pytest.mark.parametrize("wrong", ["", ".", "..", "a/b", "incarnations", "-a", "a" * 101])
def test_what_is_no_incarnation(wrong: str) -> None:
    with pytest.raises(ValueError, match="not an incarnation"):
        run_path(KEY, wrong)


@pytest.mark.parametrize(
    "wrong", [{"dag_id": ""}, {"installation": ""}, {"run_id": None}, {"map_index": -2}, {"map_index": True}]
)
def test_keys_are_checked(wrong: dict[str, object]) -> None:
    fields = {"installation": "i", "dag_id": "d", "run_id": "r", "task_id": "t", **wrong}
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RunKey(**fields)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="empty"):
        segment("")


@given(KEYS, INCARNATIONS, ATTEMPTS)
def test_attempt_names_fit_everywhere(key: RunKey, incarnation: str, attempt: int) -> None:
    name = attempt_name(key, incarnation, attempt)
    assert DNS_LABEL.fullmatch(name)
    assert SAGEMAKER_NAME.fullmatch(name)
    assert len(name) <= 45  # room for what controllers add, below 63
    assert name == attempt_name(key, incarnation, attempt)


@given(KEYS, KEYS, INCARNATIONS, INCARNATIONS, ATTEMPTS, ATTEMPTS)
def test_attempt_names_differ(a: RunKey, b: RunKey, i: str, j: str, m: int, n: int) -> None:
    same = (a, i, m) == (b, j, n)
    assert (attempt_name(a, i, m) == attempt_name(b, j, n)) == same
    assert attempt_name(a, i, m) != attempt_name(a, i, m + 1)


def test_parts_of_a_key_do_not_run_together() -> None:
    one, other = RunKey("i", "a", "bc", "t"), RunKey("i", "ab", "c", "t")
    assert (
        attempt_name(one, "abcdefgh23", 1).split("-")[-2]
        != attempt_name(other, "abcdefgh23", 1).split("-")[-2]
    )


@pytest.mark.parametrize(
    ("dag", "task", "slug"),
    [
        ("train", "fit", "train-fit"),
        ("Train_Big", "group.fit", "train-big-group-fit"),
        ("a" * 50, "fit", "a" * 20 + "-fit"),
        ("a" * 50, "b" * 50, "a" * 11 + "-" + "b" * 12),
        ("train", "b" * 50, "train-" + "b" * 18),
        ("7b", "fit", "g-7b-fit"),
        ("früh", "été", "fruh-ete"),
        ("日本", "語", "gang"),
        ("日本", "fit", "fit"),
    ],
)
def test_attempt_names_can_be_read(dag: str, task: str, slug: str) -> None:
    name = attempt_name(RunKey("i", dag, "r", task), "abcdefgh23", 12)
    assert re.fullmatch(rf"{slug}-[a-z2-7]{{12}}-12", name)


def test_attempts_count_from_one() -> None:
    with pytest.raises(ValueError, match="count from 1"):
        attempt_name(KEY, "abcdefgh23", 0)


def test_names_never_change() -> None:
    """A running job is found by its name after an upgrade: these are a contract."""
    assert attempt_name(KEY, "abcdefgh23", 2) == "train-group-fit-tb56wxttggyy-2"
    assert labels(KEY, "abcdefgh23", 2, "ab" * 32) == {
        "airflow-gpu/installation": "prod",
        "airflow-gpu/dag": "train",
        "airflow-gpu/run": "scheduled__2026-01-01T00-00-00-00-00-8bc450a85082",
        "airflow-gpu/task": "group.fit",
        "airflow-gpu/map-index": "none",
        "airflow-gpu/incarnation": "abcdefgh23",
        "airflow-gpu/attempt": "2",
        "airflow-gpu/digest": "ab" * 16,
    }


@given(KEYS, INCARNATIONS, ATTEMPTS)
def test_labels_are_legal(key: RunKey, incarnation: str, attempt: int) -> None:
    for name, value in labels(key, incarnation, attempt, "0" * 64).items():
        assert re.fullmatch(r"airflow-gpu/[a-z-]+", name)
        assert value
        assert len(value) <= 63
        assert LABEL_VALUE.fullmatch(value)


@given(KEYS, KEYS)
@example(RunKey("i", "a:b", "r", "t"), RunKey("i", "a-b", "r", "t"))
@example(RunKey("i", "a:b", "r", "t"), RunKey("i", "a-b-6783a31eabf6", "r", "t"))
@example(RunKey("i", "a" * 64, "r", "t"), RunKey("i", "a" * 65, "r", "t"))
def test_different_keys_have_different_labels(one: RunKey, other: RunKey) -> None:
    found = [labels(key, "abcdefgh23", 1, "0" * 64) for key in (one, other)]
    assert (found[0] == found[1]) == (one == other)


def test_a_digest_may_have_its_algorithm_in_front() -> None:
    assert labels(KEY, "abcdefgh23", 1, "sha256:" + "c" * 64)["airflow-gpu/digest"] == "c" * 32
