"""The closed table against what three versions of Slurm really answered, and against everything else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_gpu.gang.run import State
from airflow_gpu.targets.slurm import records, words

SAMPLES = {
    path.stem: json.loads(path.read_text())
    for path in sorted((Path(__file__).parent / "samples").glob("*.json"))
}

Q, R, U = State.QUEUED, State.RUNNING, State.UNKNOWN
SEEN: dict[str, tuple[State, State | None]] = {
    "cancelled": (State.CANCELLED, None),
    "cancelled-pending": (State.CANCELLED, None),
    "completing": (R, State.CANCELLED),
    "dependency-never": (State.REJECTED, None),
    "down": (R, U),  # a node was set down: queued again, its last processes still there
    "down-restarted": (R, None),
    "failed": (State.FAILED, None),
    "gang-blocked": (Q, None),
    "gang-done": (State.SUCCEEDED, None),
    "held": (Q, None),
    "nodefail-a": (R, U),
    "nodefail-b": (Q, None),
    "nodefail-norequeue": (R, State.NODE_LOST),
    "nodefail-norequeue-b": (State.NODE_LOST, None),
    "nodefail-restarted": (R, None),
    "oom": (State.FAILED, None),  # without memory cgroups Slurm does not say so
    "pending-begin": (Q, None),
    "preempt-exit-early": (Q, None),
    "preempt-grace-high": (Q, None),
    "preempt-grace-low": (R, None),  # in its grace; nothing shows that
    "preempt-requeued": (Q, None),
    "preempt-restarted": (R, None),
    "preempt-usersig": (Q, None),
    "requeue": (R, U),
    "requeuehold": (Q, None),
    "reservation": (Q, None),
    "running": (R, None),
    "segv": (State.FAILED, None),
    "timeout": (State.TIMED_OUT, None),
}
"""State and what it ends as, as REST shows each case."""

OTHERWISE: dict[tuple[str, str], tuple[State, State | None]] = {
    ("22.05.8", "completing"): (R, U),  # one word, which hides the other
    ("22.05.8", "nodefail-norequeue"): (R, U),
    ("22.05.8", "preempt-exit-early"): (State.SUCCEEDED, None),  # queued again only from 24.11 on
}

CASES = [(version, case) for version, cases in SAMPLES.items() for case in cases if case in SEEN]


def test_every_case_is_here() -> None:
    assert set(SAMPLES) == {"22.05.8", "24.11.5", "26.05.5"}
    assert {case for _, case in CASES} == set(SEEN)
    assert len(CASES) > 75


@pytest.mark.parametrize(("version", "case"), CASES)
def test_rest(version: str, case: str) -> None:
    [job] = SAMPLES[version][case]["slurm"]
    record = records.of_rest(job)
    expected = OTHERWISE.get((version, case), SEEN[case])
    assert words.state_of(record.states, record.reason, record.description) == expected


@pytest.mark.parametrize(("version", "case"), CASES)
def test_squeue(version: str, case: str) -> None:
    """It shows one word: COMPLETING hides what the job ends as, whatever the version."""
    _, state, reason, *_ = SAMPLES[version][case]["squeue"][1].split("|")
    expected, ending = OTHERWISE.get((version, case), SEEN[case])
    assert words.state_of([state], reason) == (expected, U if ending else None)


@pytest.mark.parametrize(("version", "case"), CASES)
def test_accounting_never_says_more_than_it_knows(version: str, case: str) -> None:
    """A life that is over has an end there, once it has one; one that goes on has none."""
    rest = words.state_of(*_seen(SAMPLES[version][case]["slurm"][0]))[0]
    lives = [records.of_accounting(job) for job in SAMPLES[version][case].get("slurmdb", [])]
    for life in lives:
        state, ending = words.state_of(life.states, life.reason)
        assert state is not U, life
        assert ending is None
    if rest.ended and lives and rest is not State.REJECTED:
        newest = records.latest(lives)[lives[-1].id]
        assert words.state_of(newest.states, newest.reason)[0] is rest


def _seen(job: Any) -> tuple[tuple[str, ...], str, str]:
    record = records.of_rest(job)
    return record.states, record.reason, record.description


@pytest.mark.parametrize("version", SAMPLES)
def test_exit_codes(version: str) -> None:
    """A bare number is a wait status (22.05), else it is an object; both say the same."""
    failed = records.of_rest(SAMPLES[version]["failed"]["slurm"][0])
    killed = records.of_rest(SAMPLES[version]["segv"]["slurm"][0])
    assert (failed.exit_code, failed.signal) == (3, None)
    assert killed.signal == 11


@pytest.mark.parametrize("version", ["24.11.5", "26.05.5"])
def test_states_of_many(version: str) -> None:
    """``/jobs/state/``: ids are text there, and every word is in the table."""
    rows = (
        [records.of_state(job) for job in SAMPLES[version]["jobs-state"]["jobs"]]
        if "jobs-state" in SAMPLES[version]
        else []
    )
    assert version != "24.11.5" or len(rows) > 10
    for _, said in rows:
        assert words.state_of(said, "")[0] is not U


def test_sacct_counts_lives() -> None:
    rows = "26|nf|NODE_FAIL|1:0|gpu[01-03]|32|0\n26|nf|REQUEUED|0:0|gpu[01-03]|1|1\n26|nf|CANCELLED by 1001|0:0|None assigned|0|2\n"
    newest = records.latest(records.of_sacct(rows))[26]
    assert (newest.restarts, newest.states, newest.nodes) == (2, ("CANCELLED",), "")
    assert (newest.killed_by, newest.elapsed) == ("1001", None)


@given(
    st.lists(st.text(alphabet="ABCDEFGHIJKLMNOPQRSTUVWXYZ_", min_size=1, max_size=12), min_size=1, max_size=4)
)
def test_a_word_that_is_in_no_table_is_unknown(said: list[str]) -> None:
    known = (
        words.BASES.keys() | words.ENDING | words.STARTING | words.WAITING | words.NEUTRAL | {words.REVOKED}
    )
    state, ending = words.state_of(said, "")
    if set(said) - known:
        assert (state, ending) == (U, None)


@given(
    st.sets(st.sampled_from(sorted(words.BASES)), max_size=2),
    st.sets(st.sampled_from(sorted(words.ENDING)), min_size=1),
)
def test_nothing_is_over_while_it_is_ending(bases: set[str], flags: set[str]) -> None:
    state, ending = words.state_of([*bases, *flags], "")
    assert state is R
    assert ending is not None


@given(
    st.lists(st.integers(0, 99), min_size=1, max_size=12, unique=True), st.sampled_from(["gpu", "n-", "a1b"])
)
def test_hostlists(numbers: list[int], prefix: str) -> None:
    numbers = sorted(numbers)
    parts, at = [], 0
    while at < len(numbers):
        end = at
        while end + 1 < len(numbers) and numbers[end + 1] == numbers[end] + 1:
            end += 1
        parts.append(f"{numbers[at]:02d}" + (f"-{numbers[end]:02d}" if end > at else ""))
        at = end + 1
    names = tuple(f"{prefix}{number:02d}" for number in numbers)
    assert records.hosts(f"{prefix}[{','.join(parts)}]") == names
    assert records.hosts(",".join(names)) == names


@pytest.mark.parametrize("text", ["gpu[01-", "gpu[a-b]", "[", "gpu[1-2][3-4]"])
def test_hostlists_of_other_shapes(text: str) -> None:
    assert records.hosts(text) in ((), ("[",))


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("Resources", "waits for nodes to become free (Resources)"),
        (
            "(ReqNodeNotAvail, Reserved for maintenance)",
            "nodes that it needs are down, drained or reserved (ReqNodeNotAvail)",
        ),
        ("SomethingNew", "SomethingNew"),
        (
            "launch failed requeued held",
            "a node could not start the job's script (launch failed), and Slurm holds it",
        ),
    ],
)
def test_reasons(reason: str, said: str) -> None:
    assert words.words_for(reason) == said
