"""Hugging Face's Trainer in a real gang: its own checkpoints, all ranks of them, become the gang's."""

from __future__ import annotations

import pytest

from tests.frameworks.bed import comes_back, needs
from tests.runtime.bed import Bed

pytestmark = [needs("transformers", "accelerate"), pytest.mark.timeout(600)]

PROGRAM = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from airflow_gpu.runtime import gang
from airflow_gpu.frameworks.transformers import GangCheckpoint, resume_path

class Tell(TrainerCallback):
    def on_step_end(self, args, state, control, **more):
        if g.rank == 0:
            tell(state.global_step, self.loss)

class Losses(Trainer):
    def compute_loss(self, *args, **more):
        loss = super().compute_loss(*args, **more)
        tells.loss = loss.detach()
        return loss

class Gang(GangCheckpoint):
    "Saves at one step of the test's own as well."
    def on_step_end(self, args, state, control, **more):
        due = g.checkpoint.due
        g.checkpoint.due = lambda step: due(step) or step == SAVE_AT
        super().on_step_end(args, state, control, **more)
        g.checkpoint.due = due

with gang() as g:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    tokens = torch.randint(0, 64, (256, 12), generator=torch.Generator().manual_seed(1))
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        attention_dropout=0.1,
    ))
    tells = Tell()
    trainer = Losses(
        model,
        TrainingArguments(
            output_dir="trained", use_cpu=True, ddp_backend="gloo", max_steps=STEPS, learning_rate=0.01,
            per_device_train_batch_size=4, save_strategy="no", report_to=[], disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[tells, Gang(g)],
    )
    assert trainer.args.world_size == g.world_size
    trainer.train(resume_from_checkpoint=resume_path(g))
    assert trainer.args.output_dir == "trained"
"""


def test_comes_back(bed: Bed) -> None:
    comes_back(bed, PROGRAM, exact=False, ranks_per_node=1)
    [step] = bed.manifests(2)
    files = {path.name for path in (bed.manifests(2)[step] / f"checkpoint-{step}").iterdir()}
    assert {"model.safetensors", "optimizer.pt", "rng_state_0.pth", "rng_state_1.pth"} <= files
    assert not list((bed.folder / "trained").glob("checkpoint-*"))
