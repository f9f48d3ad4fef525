"""The demo's training, on the local target: preempted and resumed, it computes exactly what it would have computed."""

from __future__ import annotations

import asyncio
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from airflow_gpu.gang.function import FunctionSource
from airflow_gpu.gang.run import Cause
from airflow_gpu.gang.spec import Gang
from tests.conformance.bed import Played, play
from tests.conformance.test_local import LocalBed, bed  # noqa: F401 (a fixture)

ROOT = Path(__file__).resolve().parents[2]
STEPS = 60

MOMENTS = int(os.environ.get("TRAINING_MOMENTS") or (20 if os.environ.get("FAULTS") == "all" else 2))
"""How often the training is interrupted at random moments; the figure in docs/checkpoints.md has 20."""

SEED = int(os.environ.get("TRAINING_SEED") or time.time())


def example() -> Any:
    """The module of the example DAG."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("gang_training", ROOT / "dags" / "gang_training.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def data(folder: Path) -> str:
    """What the DAG's data step makes, without Airflow's context."""
    import numpy as np
    from sklearn.datasets import load_digits

    folder.mkdir()
    images, labels = load_digits(return_X_y=True)
    np.savez(folder / "digits.npz", x_train=(images / 16).astype("float32"), y_train=labels.astype("int32"))
    return str(folder)


async def start(bed: LocalBed, tmp_path: Path, name: str, steps: int = STEPS, **env: str) -> Played:  # noqa: F811
    function = FunctionSource.of(example().train.function, (data(tmp_path / name), steps))
    gang = Gang(
        nodes=2,
        gpus_per_node=2,
        function=function,
        targets="local",
        env={"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", **env},
        checkpointing={"interval": 1},
        recovery={"node_failures": None, "fruitless": 50, "backoff": 0.1, "backoff_max": 0.1},
        time_limit="20m",
    )
    return (await play(bed, tmp_path / f"{name}-state", gang)).start()


async def test_resumed_losses_are_those_of_an_uninterrupted_run(bed: LocalBed, tmp_path: Path) -> None:  # noqa: F811
    """Step by step, to the last bit, through one preemption with notice and one without."""
    pytest.importorskip("jax")
    straight = await start(bed, tmp_path, "straight")
    whole = (await straight.verdict()).record["result"]
    assert len(whole["losses"]) == STEPS
    assert whole["losses"][-1] < whole["losses"][0] / 2, "it learns"

    broken = await start(bed, tmp_path, "broken", DEMO_PAUSE="0.1")
    await broken.until_step(10)
    await bed.preempt(broken.job, notice=True)
    await broken.until_step(30, life=2)
    await bed.preempt(broken.job, notice=False)
    verdict = await broken.verdict()
    assert verdict.success, verdict
    assert [a.outcome.cause for a in broken.run.attempts] == [
        Cause.PREEMPTED,
        Cause.PREEMPTED,
        Cause.SUCCEEDED,
    ]
    resumed = verdict.record["result"]
    assert resumed["resumed_from"] > 0
    assert resumed["losses"] == whole["losses"]


async def test_weights_after_interruptions_at_random_moments(bed: LocalBed, tmp_path: Path) -> None:  # noqa: F811
    """With and without notice, wherever it is: starting, computing, saving, ending. The weights are the same bits."""
    pytest.importorskip("jax")
    import numpy as np

    steps, rng = 30 * MOMENTS, random.Random(SEED)
    straight = await start(bed, tmp_path, "straight", steps)
    whole = (await straight.verdict()).record["result"]

    broken = await start(bed, tmp_path, "broken", steps, DEMO_PAUSE="0.15")
    for moment in range(MOMENTS):
        before = broken.run.attempts[-1].number if broken.run.attempts and moment else 0

        async def living(before: int = before) -> bool:
            current = broken.run.current
            if current is None or current.number <= before:
                return False
            return any(life.attempt == current.number for life in await broken.lives())

        await broken.until("a life of the next attempt", living)
        if rng.random() < 0.7:  # while it computes or saves; else while it starts, most likely
            newest = (await broken.lives())[-1]
            begun = newest.start.step if newest.start else 0
            await broken.until_step(min(begun + rng.randint(1, 15), steps - 5), newest.number)
        await asyncio.sleep(rng.uniform(0.0, 2.0))
        await bed.preempt(broken.job, notice=rng.random() < 0.5)
    verdict = await broken.verdict()
    assert verdict.success, (SEED, verdict)
    resumed = verdict.record["result"]
    starts = [life.start.step if life.start else 0 for life in await broken.lives()]
    print(f"\n{MOMENTS} interruptions of {steps} steps, seed {SEED}; lives began at steps {starts}")
    assert len(starts) > MOMENTS
    assert starts == sorted(starts), "nothing that was saved is lost"
    assert starts[-1] > 0
    assert resumed["losses"] == whole["losses"], SEED
    with np.load(whole["model"]) as one, np.load(resumed["model"]) as other:
        assert one.files == other.files
        for name in one.files:
            assert one[name].tobytes() == other[name].tobytes(), (SEED, name)
