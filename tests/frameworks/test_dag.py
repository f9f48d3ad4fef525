"""The example DAG with PyTorch, on the local target: preempted, it goes on where it was."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from airflow_gpu.gang.function import FunctionSource
from airflow_gpu.gang.spec import Gang
from airflow_gpu.targets.local import LocalTarget
from tests.conformance.bed import play
from tests.conformance.test_local import LocalBed, bed  # noqa: F401 (a fixture)
from tests.frameworks.bed import PYTHON, needs

ROOT = Path(__file__).resolve().parents[2]
STEPS = 60


@needs("torch")
@pytest.mark.timeout(600)
async def test_preempted_it_goes_on(bed: LocalBed, tmp_path: Path) -> None:  # noqa: F811
    spec = importlib.util.spec_from_file_location("gang_torch", ROOT / "dags" / "gang_torch.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    bed.target = LocalTarget("local", bed.config(python=PYTHON))
    bed.limit = 300.0
    gang = Gang(
        nodes=2,
        gpus_per_node=2,
        function=FunctionSource.of(example.train.function, (STEPS,)),
        targets="local",
        env={"OMP_NUM_THREADS": "1", "DEMO_PAUSE": "0.1"},
        checkpointing={"interval": 1},
        time_limit="20m",
    )
    played = (await play(bed, tmp_path / "state", gang)).start()
    await played.until_step(20)
    await bed.preempt(played.job, notice=True)
    verdict = await played.verdict()
    assert verdict.success, verdict
    result = verdict.record["result"]
    assert result["resumed_from"] >= 20
    assert len(result["losses"]) == STEPS, "the losses from before came back with the state"
    assert sum(result["losses"][-10:]) < sum(result["losses"][:10]) / 2, "it learns"
