"""The table: what a sweep never does, whatever it is shown."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from airflow_gpu.gang.identity import RunKey, attempt_name, labels
from airflow_gpu.gang.run import Attempt, Cause, Outcome, Owner, Run, State, Stop, Verdict
from airflow_gpu.sweeping.decide import (
    ABSENT,
    COMING,
    ENDED,
    TABLE,
    Answer,
    Case,
    Do,
    Wanted,
    answer_of,
    case_of_job,
    case_of_run,
    unasked,
)
from airflow_gpu.targets.base import JobRef, Listed, Sighting

KEY, INCARNATION = RunKey("prod", "dag", "r1", "fit"), "abcdefgh23"


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Journals as they can be: owners, attempts of which at most the last one is not over, stops, verdicts."""
    count = draw(st.integers(0, 3))
    if count == 0:
        return Run()
    owners = tuple(Owner(epoch=n + 1, ti_id=f"ti-{n}", try_number=n + 1, at=float(n)) for n in range(count))
    attempts = []
    total = draw(st.integers(0, 3))
    for number in range(1, total + 1):
        outcome = None
        if number < total or draw(st.booleans()):
            outcome = Outcome(draw(st.sampled_from(list(Cause))), at=float(number), epoch=1)
        stop = draw(
            st.none()
            | st.builds(
                Stop, st.sampled_from(["user", "superseded", "deadline", "moved"]), st.just(1.0), st.just(1)
            )
        )
        name = attempt_name(KEY, INCARNATION, number)
        attempts.append(
            Attempt(
                number,
                name,
                "here",
                float(number),
                1,
                digest="d",
                outcome=outcome,
                stop=stop,
                submitted_at=1.0,
            )
        )
    run = Run(owners=owners, attempts=tuple(attempts), seq=9)
    if draw(st.booleans()):
        cause = Cause.LOST_SIGHT if run.current is not None else draw(st.sampled_from(list(Cause)))
        run = replace(
            run, verdict=Verdict(draw(st.sampled_from(["success", "failed", "cancelled"])), cause, 1.0, count)
        )
    return run


answers = st.one_of(
    st.builds(answer_of, st.none() | st.sampled_from(sorted(ENDED | COMING)) | st.text(max_size=9)),
    st.builds(answer_of, st.none(), exists=st.just(False), trusted=st.booleans()),
    st.builds(unasked, st.text(max_size=9)),
)


def job(
    number: int, state: State = State.RUNNING, installation: str = "prod", name: str | None = None
) -> Listed:
    key = replace(KEY, installation=installation)
    ref = JobRef(
        name or attempt_name(key, INCARNATION, number),
        labels(key, INCARNATION, number, "d"),
        number,
        "d",
        "17",
    )
    return Listed(ref, Sighting(state, state.value))


@given(runs(), answers)
def test_what_is_wanted_is_left_alone(run: Run, answer: Answer) -> None:
    """A newest run whose task may still have it, or of which that is not known, is never ended."""
    case = case_of_run(run, newest=True, answer=answer)
    if answer.wanted is not Wanted.NO:
        assert TABLE[case].do not in (Do.END, Do.CLOSE, Do.CANCEL), case
    if answer.wanted is Wanted.UNKNOWN and (run.current or (run.owners and not run.verdict)):
        assert TABLE[case].problem, "what could not be found out is told"


@given(runs(), answers, st.booleans())
def test_nothing_that_runs_is_forgotten(run: Run, answer: Answer, newest: bool) -> None:
    """A current attempt is wanted, undecided or ended; never taken for over."""
    case = case_of_run(run, newest=newest, answer=answer)
    if run.current is not None:
        assert case in (Case.WANTED, Case.UNDECIDED, Case.UNWANTED, Case.ENDING, Case.EARLIER)
        if answer.wanted is Wanted.NO or not newest:
            assert TABLE[case].do is Do.END


@given(runs(), answers)
def test_twice_is_once(run: Run, answer: Answer) -> None:
    """After the end (the attempt over, a verdict) there is nothing more to do, whatever Airflow says then."""
    case = case_of_run(run, newest=True, answer=answer)
    if TABLE[case].do in (Do.END, Do.CLOSE):
        done = run
        if run.current is not None:
            done = run.with_attempt(replace(run.current, outcome=Outcome(Cause.STOPPED, 2.0)))
        done = replace(done, verdict=Verdict("cancelled", Cause.STOPPED, 3.0, done.epoch))
        for newest in (True, False):
            assert case_of_run(done, newest=newest, answer=answer) is Case.OVER


def test_states_of_task_instances() -> None:
    """Every state that Airflow knows is in exactly one of the two lists; one it does not know is not known here."""
    from airflow.utils.state import TaskInstanceState

    for state in TaskInstanceState:
        assert (state.value in ENDED) != (state.value in COMING), state
    assert answer_of(None).wanted is Wanted.YES  # cleared, and the new try has not begun
    assert answer_of("dreaming").wanted is Wanted.UNKNOWN
    assert answer_of(None, exists=False) == Answer(Wanted.NO, ABSENT)
    assert answer_of(None, exists=False, trusted=False).wanted is Wanted.UNKNOWN


def test_broken_is_reported() -> None:
    case = case_of_run(None, newest=True, answer=answer_of("failed"))
    assert (case, TABLE[case].do, TABLE[case].problem) == (Case.BROKEN, Do.REPORT, True)


@given(
    runs(), st.integers(1, 4), st.sampled_from(list(State)), st.sampled_from(["prod", "staging", "prod-2"])
)
def test_jobs(run: Run, number: int, state: State, installation: str) -> None:
    """Only a living job of this installation whose attempt is over is cancelled."""
    found = job(number, state, installation)
    case = case_of_job(found, "prod", (KEY, INCARNATION, run))
    if TABLE[case].do is Do.CANCEL:
        assert installation == "prod"
        assert not state.ended
        assert run.attempts[number - 1].over
    if installation != "prod":
        assert case is Case.FOREIGN
    elif not state.ended and number <= len(run.attempts) and run.attempts[number - 1].over:
        assert case is Case.ORPHAN
    elif not state.ended and number > len(run.attempts):
        assert case is Case.STRANGE


def test_a_job_without_a_run_directory() -> None:
    """It is told, and ended by nothing but an explicit wish: with a wrong state_uri every gang looks so."""
    case = case_of_job(job(1), "prod", None)
    assert (case, TABLE[case].do, TABLE[case].problem) == (Case.LOST, Do.REPORT, True)
    assert "state_uri" in TABLE[case].words
    assert "--lost" in TABLE[case].words
    assert case_of_job(job(1), "prod", (KEY, INCARNATION, None)) is Case.HELD
    assert case_of_job(job(1, name="not-its-name"), "prod", (KEY, INCARNATION, Run())) is Case.STRANGE


def test_the_table_is_whole() -> None:
    assert set(TABLE) == set(Case)
    for case, row in TABLE.items():
        assert (row.do is Do.REPORT) == row.problem, case
