"""Lightning's Trainer in a real gang, with DistributedDataParallel over gloo."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.frameworks.bed import PYTHON, comes_back, needs
from tests.runtime.bed import Bed

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import torch
import LIBRARY as L
from airflow_gpu.runtime import gang
from airflow_gpu.frameworks.lightning import GangCheckpoint, resume_path

class Batches:
    "A loader that knows where it is, and says so."
    at = 0
    def __len__(self):  # without it Lightning takes one batch ahead, which it forgets
        return 1000
    def __iter__(self):
        while True:
            self.at += 1
            yield torch.randn(16, 8, generator=torch.Generator().manual_seed(self.at))
    def state_dict(self):
        return {"at": self.at}
    def load_state_dict(self, state):
        self.at = state["at"]

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    def training_step(self, x, index):
        loss = (self.layers(x) - x.sum(1, keepdim=True)).square().mean()
        return loss
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)

class Tell(L.Callback):
    def on_train_batch_end(self, trainer, module, outputs, *more):
        if g.rank == 0:
            tell(trainer.global_step, outputs["loss"])

class Once(L.Callback):
    "A save of the test's own, at one step."
    def on_train_batch_end(self, trainer, module, *more):
        if trainer.global_step == SAVE_AT:
            with g.checkpoint.save(SAVE_AT) as folder:
                trainer.save_checkpoint(folder / "lightning.ckpt")

with gang() as g:
    torch.manual_seed(0)
    trainer = L.Trainer(
        accelerator="cpu", strategy="ddp", num_nodes=g.nodes, devices=g.local_world_size, max_steps=STEPS,
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        callbacks=[Tell(), GangCheckpoint(g), Once()],
    )
    trainer.fit(Model(), Batches(), ckpt_path=resume_path(g))
"""


@needs("lightning")
@pytest.mark.timeout(600)
def test_comes_back(bed: Bed) -> None:
    comes_back(bed, PROGRAM.replace("LIBRARY", "lightning.pytorch"), exact=False, ranks_per_node=1)


@needs("pytorch_lightning")
def test_the_package_that_the_program_uses() -> None:
    """Both are installed here, and a Trainer takes callbacks of its own package only."""
    code = (
        "import pytorch_lightning as L; from airflow_gpu.frameworks.lightning import GangCheckpoint as C; "
        "L.Trainer(callbacks=[C(None)], accelerator='cpu', logger=False); print(issubclass(C, L.Callback))"
    )
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    said = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=False, env=env)
    assert said.stdout.strip() == "True", said.stderr
