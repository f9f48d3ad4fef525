"""PyTorch with DistributedDataParallel on a gang of 2 nodes x 2 ranks, that survives preemption.

Every rank keeps its state in a file of its own: the model, the optimizer, the
schedule and the random numbers. The saves are written in the background. It
needs a target (a connection named ``gpu_default``) and, in the Python of the
ranks, torch; it uses GPUs where the ranks see any, else CPUs with gloo.
"""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import dag, task


@task.gang(
    nodes=2,
    gpus_per_node=2,
    targets="gpu_default",
    env={"OMP_NUM_THREADS": "1"},
    checkpointing={"interval": 10},
    time_limit="30m",
    retries=2,
    retry_delay=timedelta(seconds=5),
)
def train(steps: int, gang=None):
    """Runs on every rank. What rank 0 returns is the task's result."""
    import os
    import time

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from airflow_gpu.frameworks.torch import restore, save

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", gang.local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")

    torch.manual_seed(0)  # the same first weights everywhere; then each rank has its own data
    layers = [torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    torch.manual_seed(1 + gang.rank)
    state = {
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
        "random": torch.get_rng_state(),
        "losses": [],
    }

    start = restore(gang, state)
    torch.set_rng_state(state["random"])
    print(f"rank {gang.rank} of {gang.world_size} on {device}, from step {start}", flush=True)
    pause = float(os.environ.get("DEMO_PAUSE", "0"))
    for step in range(start + 1, steps + 1):
        x = torch.randn(64, 32).to(device)
        loss = (model(x) - x.square().mean(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        state["losses"].append(loss.item())
        gang.progress(step, steps, loss=round(state["losses"][-1], 4))
        time.sleep(pause)
        if gang.checkpoint.due(step):
            state["random"] = torch.get_rng_state()
            save(gang, step, state, wait=False)
    dist.destroy_process_group()
    return {"steps": steps, "resumed_from": start, "losses": state["losses"]}


@dag(schedule=None, params={"steps": 500}, render_template_as_native_obj=True, tags=["gpu", "example"])
def gang_torch():
    """One gang that trains."""
    train("{{ params.steps }}")


gang_torch()
