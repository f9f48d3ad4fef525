"""What counts as another program, and what does not."""

from __future__ import annotations

from hypothesis import given

from airflow_gpu.gang.lineage import changes
from airflow_gpu.gang.spec import Gang
from tests.gang.strategies import GANGS

BEFORE = Gang(command="train --lr 0.1", env={"A": "1", "B": "2"}).to_dict()


@given(GANGS)
def test_nothing_differs_from_itself(gang: Gang) -> None:
    assert changes(gang.to_dict(), Gang.from_json(gang.to_json()).to_dict()) == []


def test_where_and_how_long_is_no_change() -> None:
    other = Gang(
        command="train --lr 0.1",
        env={"A": "1", "B": "2"},
        nodes=4,
        targets=["x", "y"],
        time_limit="2h",
        priority=3,
        recovery={"preemptions": 1},
        secrets={"TOKEN": "var:other"},
    )
    assert changes(BEFORE, other.to_dict()) == []


def test_what_changed_is_named() -> None:
    assert changes(BEFORE, Gang(command="train --lr 0.2", env={"A": "3"}).to_dict()) == [
        "command",
        "env.A",
        "env.B",
    ]
    assert changes(BEFORE, Gang(script="train").to_dict()) == ["command", "script", "env.A", "env.B"]


def one(rate, gang=None):
    return rate


def two(rate, gang=None):
    return rate + 1


def test_a_function_is_its_source_and_its_arguments() -> None:
    from airflow_gpu.gang.function import FunctionSource

    def of(function, rate):
        return Gang(function=FunctionSource.of(function, (), {"rate": rate})).to_dict()

    assert changes(of(one, 1), of(one, 1)) == []
    assert changes(of(one, 1), of(one, 2)) == ["the function's kwargs"]
    assert "the function's source" in changes(of(one, 1), of(two, 1))
