"""How an end is named: one case a rule. Also the closed table, and the kernel's word on memory."""

from __future__ import annotations

import pytest

from airflow_gpu.gang.run import State
from airflow_gpu.targets.local.evidence import find_victims
from airflow_gpu.targets.local.outcome import RESTARTED, conclude
from airflow_gpu.targets.local.records import Cause, JobState, Place, Spec, Stop
from airflow_gpu.targets.local.words import HOLDING, STATES, WAITING, Word, state_of


def spec(**fields: object) -> Spec:
    given = {
        "id": "x",
        "name": "x",
        "labels": {},
        "digest": "",
        "nodes": 2,
        "gpus_per_node": 0,
        "time_limit": 1.0,
    }
    more = {"payload": "", "channel": "", "argv": (), "submitted_at": 0.0}
    return Spec(**{**given, **more, **fields})  # type: ignore[arg-type]


def place(rank: int, code: int | None = None, at: float = 0.0, lost: str = "", killed: bool = False) -> Place:
    return Place(rank, rank, exit=code, lost=lost, killed=killed, ended_at=at)


def ended(*places: Place, cause: Cause | None = None, cancelled: bool = False) -> JobState:
    stop = (
        None if cause is None else Stop(cause, 0, 0, "why", cancelled or cause is Cause.CANCEL, killed=True)
    )
    return JobState("x", 1, Word.STOPPING, places=list(places), stop=stop)


@pytest.mark.parametrize(
    ("state", "word"),
    [
        (ended(place(0, 0), place(1, 0)), Word.DONE),
        (ended(place(0, 0), place(1, 0), cause=Cause.PREEMPT), Word.DONE),
        (ended(place(0, 0), place(1, 0), cause=Cause.CANCEL), Word.DONE),
        (ended(place(0, 0), place(1, 3)), Word.FAILED),
        (ended(place(0, 75), place(1, 75)), Word.FAILED),
        (ended(place(0, 75), place(1, 75), cause=Cause.PREEMPT), Word.PREEMPTED),
        (ended(place(0, 0), place(1, 75), cause=Cause.PREEMPT), Word.PREEMPTED),
        (ended(place(0, killed=True), place(1, 137), cause=Cause.PREEMPT), Word.PREEMPTED),
        (ended(place(0, 75), place(1, 75), cause=Cause.CANCEL), Word.CANCELLED),
        (ended(place(0, 75), place(1, 75), cause=Cause.PREEMPT, cancelled=True), Word.CANCELLED),
        (ended(place(0, 75), place(1, killed=True), cause=Cause.TIME_LIMIT), Word.TIMEOUT),
        (ended(place(0, 75), place(1, 75), cause=Cause.TIME_LIMIT, cancelled=True), Word.TIMEOUT),
        (ended(place(0, 1, 5.0), place(1, lost="went", at=1.0), cause=Cause.NODE_ENDED), Word.NODE_LOST),
        (ended(place(0, 1, 1.0), place(1, killed=True, at=9.0), cause=Cause.NODE_ENDED), Word.FAILED),
        (ended(place(0, 1, 1.0), place(1, 1, 2.0), cause=Cause.NODE_ENDED, cancelled=True), Word.FAILED),
    ],
)
def test_the_first_cause_decides(state: JobState, word: Word) -> None:
    assert conclude(spec(), state).word is word


def test_a_preempted_gang_goes_back_to_the_queue_only_if_so_configured() -> None:
    state = ended(place(0, 75), place(1, killed=True), cause=Cause.PREEMPT)
    ending = conclude(spec(requeue=True), state)
    assert (ending.word, ending.again) == (Word.REQUEUED, True)
    state = ended(place(0, 75), place(1, 75), cause=Cause.PREEMPT, cancelled=True)
    assert conclude(spec(requeue=True), state).word is Word.CANCELLED
    lost = ended(place(0, lost="went"), place(1, 75), cause=Cause.NODE_ENDED)
    assert conclude(spec(requeue=True), lost).word is Word.NODE_LOST


def test_lost_nodes_are_blamed_but_not_for_a_restart_of_the_machine() -> None:
    assert conclude(spec(), ended(place(0, 75), place(1, lost="went", at=-1))).blamed == ("node-1",)
    restarted = ended(place(0, lost=RESTARTED), place(1, lost=RESTARTED))
    assert conclude(spec(), restarted).word is Word.NODE_LOST
    assert conclude(spec(), restarted).blamed == ()


def test_the_reason_names_node_and_code() -> None:
    reason = conclude(spec(), ended(place(0, 1, 2.0), place(1, 139, 1.0))).reason
    assert reason == "node 1 of the gang (node-1) ended with exit code 139 (SIGSEGV)"
    preempted = conclude(spec(), ended(place(0, 75), place(1, 75), cause=Cause.PREEMPT)).reason
    assert preempted == (
        "why: node 0 of the gang (node-0) ended with exit code 75 (ended after a notice), and 1 more not with 0"
    )


def test_out_of_memory_only_with_evidence() -> None:
    state = ended(place(0, 137, 1.0), place(1, 1, 2.0))
    assert conclude(spec(), state).word is Word.FAILED
    assert conclude(spec(), state, frozenset({1})).word is Word.FAILED
    assert conclude(spec(), state, frozenset({0})).word is Word.OUT_OF_MEMORY


def test_evidence_is_a_line_of_the_kernel_about_that_process_in_that_time() -> None:
    log = [
        "6,1,1000000,-;Out of memory: Killed process 41 (python) total-vm:1kB",
        "3,2,9000000,-;Memory cgroup out of memory: Killed process 42 (python) total-vm:1kB",
        "3,3,9000000,-;python[43]: segfault at 0",
        "3,4,9000000,-;Killed process 44 by somebody",
        " SUBSYSTEM=x",
        "4,x;Out of memory: Killed process 45",
    ]
    assert find_victims(log, 5.0) == {42}


def test_every_word_maps_to_a_state_and_any_other_is_unknown() -> None:
    assert set(STATES) == set(Word)
    assert state_of("HIBERNATED") is State.UNKNOWN
    assert state_of("") is State.UNKNOWN
    assert state_of("done") is State.UNKNOWN
    assert {state_of(word) for word in WAITING} == {State.QUEUED}
    assert {state_of(word) for word in HOLDING} == {State.STARTING, State.RUNNING}
    over = set(Word) - WAITING - HOLDING - {Word.DAMAGED}
    assert all(state_of(word).ended for word in over)
