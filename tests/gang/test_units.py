from __future__ import annotations

import pickle
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_gpu.gang.units import LONGEST, GangError, seconds, size


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (90, 90.0),
        (0, 0.0),
        (1.5, 1.5),
        (timedelta(minutes=5), 300.0),
        ("90", 90.0),
        (" 90 ", 90.0),
        ("1e3", 1000.0),
        ("90m", 5400.0),
        ("1h30m", 5400.0),
        ("1h 30m", 5400.0),
        ("1H30M", 5400.0),
        ("1.5h", 5400.0),
        ("2d", 172800.0),
        ("1w", 604800.0),
        ("500ms", 0.5),
        ("2 days, 3 hours", 183600.0),
        ("1:30:00", 5400.0),
        ("0:00:00.5", 0.5),
        ("1 day, 0:00:01", 86401.0),
    ],
)
def test_durations(written: object, expected: float) -> None:
    assert seconds(written) == expected


@pytest.mark.parametrize(
    "wrong",
    ["", "soon", "5x", "1h1h", "h", "5m x", "-5m", "1:30", "m5", "1..5h", "9" * 5000, None, True, [], b"5m"],
)
def test_what_is_no_duration(wrong: object) -> None:
    with pytest.raises(ValueError, match="must be a duration: seconds"):
        seconds(wrong)


def test_durations_have_limits() -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        seconds(-1)
    with pytest.raises(ValueError, match="must not be negative"):
        seconds(timedelta(seconds=-1))
    with pytest.raises(ValueError, match="must be a duration"):
        seconds(float("nan"))
    for huge in (float("inf"), 10**400, "4000d", "1e300", LONGEST + 1):
        with pytest.raises(ValueError, match="at most 3650 days"):
            seconds(huge)


@given(st.integers(min_value=0, max_value=int(LONGEST)))
def test_a_timedelta_that_jinja_printed_is_read_back(n: int) -> None:
    assert seconds(str(timedelta(seconds=n))) == n == seconds(n) == seconds(str(n)) == seconds(f"{n}s")


@given(st.text(max_size=200))
def test_any_text_is_a_duration_or_a_value_error(text: str) -> None:
    for read in (seconds, size):
        try:
            assert read(text) >= 0
        except ValueError:
            pass


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (2**30, 2**30),
        (1024.0, 1024),
        ("1024", 1024),
        ("64GiB", 64 * 2**30),
        ("64Gi", 64 * 2**30),
        ("64 gib", 64 * 2**30),
        ("64GB", 64 * 10**9),
        ("512MiB", 512 * 2**20),
        ("1.5TiB", 3 * 2**39),
        ("0.1GB", 10**8),
        ("5B", 5),
        ("1PB", 10**15),
    ],
)
def test_sizes(written: object, expected: int) -> None:
    assert size(written) == expected


@pytest.mark.parametrize("wrong", ["", "GiB", "64GiBs", "-1GiB", "1,5GiB", None, True, 1.5, [], "9" * 5000])
def test_what_is_no_size(wrong: object) -> None:
    with pytest.raises(ValueError, match="must be bytes or text such as"):
        size(wrong)


def test_a_bare_letter_is_ambiguous() -> None:
    with pytest.raises(
        ValueError, match=r"Kubernetes and Slurm read a bare G differently: write 64GiB or 64GB"
    ):
        size("64G")


def test_no_part_of_a_byte() -> None:
    with pytest.raises(ValueError, match="whole number of bytes"):
        size("0.0001KiB")


def test_an_error_survives_pickle() -> None:
    error = pickle.loads(pickle.dumps(GangError("Gang", ["a", "b"])))
    assert str(error) == "Gang: a\nGang: b"
    assert error.problems == ("a", "b")
