"""The demo's training, on the local target: preempted and resumed, it computes exactly what it would have computed."""

from __future__ import annotations

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


async def start(bed: LocalBed, tmp_path: Path, name: str, **env: str) -> Played:  # noqa: F811
    function = FunctionSource.of(example().train.function, (data(tmp_path / name), STEPS))
    gang = Gang(
        nodes=2,
        gpus_per_node=2,
        function=function,
        targets="local",
        env={"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", **env},
        checkpointing={"interval": 1},
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
