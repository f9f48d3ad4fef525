"""Trains with a real library in a real gang of 2 x 2 ranks that is killed, given notice, and comes back.

Purpose: what the tests of the frameworks share. The libraries live in an
environment of their own, which ``make frameworks`` fills; what is not there is
skipped, with the reason.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.runtime import bed as runtime_bed
from tests.runtime.bed import NOTICE, Bed, Life, eventually

PYTHON = os.environ.get("GANG_TEST_FRAMEWORKS") or str(
    Path("~/.cache/airflow-gpu/frameworks/bin/python").expanduser()
)

SAVED, KILLED, NOTICED, STEPS = 8, 13, 16, 50
"""Steps: the one that is saved, those after which the first life is killed and the second given notice, all."""

LOSSES = """
import os, time
def tell(step, loss):
    "A loss of rank 0, to the last bit."
    with open(f"losses-{os.environ['GANG_LIFE']}", "a") as file:
        file.write(f"{step} {float(loss).hex()}\\n")
    time.sleep(float(os.environ["PAUSE"]))
STEPS, SAVE_AT = int(os.environ["STEPS"]), int(os.environ["SAVE_AT"])
"""
"""Begins each program."""


@functools.cache
def missing(*modules: str) -> str:
    """Why a test of these libraries cannot run; empty when it can."""
    if not os.path.exists(PYTHON):
        return f"no environment with {', '.join(modules)}: run make frameworks"
    code = "import importlib.util as u, sys; print(*[m for m in sys.argv[1:] if u.find_spec(m) is None])"
    said = subprocess.run([PYTHON, "-c", code, *modules], capture_output=True, text=True, check=False)
    if said.returncode:
        return f"the environment of the frameworks is broken: {said.stderr[-200:]}"
    return f"{said.stdout.strip()} not installed: run make frameworks" if said.stdout.strip() else ""


def needs(*modules: str) -> pytest.MarkDecorator:
    why = missing(*modules)
    return pytest.mark.skipif(bool(why), reason=why)


def losses(bed: Bed, life: int) -> dict[int, float]:
    path = bed.folder / f"losses-{life}"
    lines = path.read_text().splitlines() if path.exists() else []
    return {int(step): float.fromhex(loss) for step, loss in map(str.split, lines)}


def start(bed: Bed, job: Path, steps: int = STEPS, save_at: int = 0, pause: float = 0.0, **how: str) -> Life:
    number = len(bed.lives)
    env = {"STEPS": str(steps), "SAVE_AT": str(save_at), "PAUSE": str(pause), "OMP_NUM_THREADS": "1"}
    return bed.start(job, restart=number, **env, **how)


def reaches(bed: Bed, life: int, step: int) -> None:
    """Waits until a life has computed this step."""

    def look() -> bool:
        ended = [agent.poll() for agent in bed.lives[life - 1].agents]
        assert ended == [None] * len(ended), f"it ended: {ended}\n" + said(bed, life)
        return step <= max(losses(bed, life), default=0)

    eventually(look, f"life {life} did not reach step {step}:\n{said(bed, life)}")


def said(bed: Bed, life: int) -> str:
    return "\n".join(f"--- rank {rank}\n{bed.log(rank, life)[-3000:]}" for rank in range(4))


def comes_back(bed: Bed, program: str, exact: bool = True, **fields: object) -> None:
    """Saved, killed without notice, resumed; given notice, resumed; and every step has one loss only.

    The program saves at step ``SAVE_AT`` and when a save is due. ``exact=False`` where
    DistributedDataParallel adds up: after its first step it regroups the gradients, which changes the last bits.
    """
    job = bed.payload(script=LOSSES + program, **fields)
    life = start(bed, job, save_at=SAVED, pause=0.2)
    reaches(bed, 1, KILLED)
    assert sorted(bed.manifests(1)) == [SAVED], said(bed, 1)
    life.signal(signal.SIGKILL, node=1)
    assert 0 not in life.wait()

    life = start(bed, job, pause=0.2)
    reaches(bed, 2, NOTICED)
    life.signal(NOTICE)
    assert life.wait() == [75, 75], said(bed, 2)
    assert set(bed.codes(2)) == {75}
    [noticed] = bed.manifests(2)
    assert start_of(bed, 2) == SAVED
    assert NOTICED <= noticed < STEPS, "it left soon, and by its save"

    life = start(bed, job)
    assert life.wait() == [0, 0], said(bed, 3)
    assert start_of(bed, 3) == noticed
    first, second, third = (losses(bed, number) for number in (1, 2, 3))
    assert sorted(first | second | third) == list(range(1, STEPS + 1))
    again = {step: loss for step, loss in first.items() if step > SAVED}
    assert len(again) >= KILLED - SAVED
    expected = again if exact else pytest.approx(again, rel=1e-4)
    later = third | second
    assert {step: later[step] for step in again} == expected, "the next lives compute what the first did"
    assert len(set(later.values())) == len(later), "each step has a loss of its own"


def start_of(bed: Bed, life: int) -> int:
    """The step that a life began from."""
    return min(losses(bed, life)) - 1


def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks that import such libraries on two cores."""
    monkeypatch.setattr(runtime_bed, "PATIENCE", 200.0)
