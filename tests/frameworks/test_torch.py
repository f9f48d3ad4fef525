"""PyTorch in a real gang, with gloo: files of single ranks, and torch.distributed.checkpoint."""

from __future__ import annotations

import pytest

from tests.frameworks.bed import (
    LOSSES,
    comes_back,
    losses,
    needs,
    start,
)
from tests.runtime.bed import Bed

pytestmark = [needs("torch"), pytest.mark.timeout(600)]

PROGRAM = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from airflow_gpu.runtime import gang
IMPORT

torch.set_num_threads(1)
with gang() as g:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 1))
    model = WRAP(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    torch.manual_seed(g.rank)
    random = f"random-{g.rank}"
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "seen": 0}
    state[random] = torch.get_rng_state()
    begin = restore(g, state)
    torch.set_rng_state(state[random])
    assert state["seen"] == begin, state["seen"]
    for step in range(begin + 1, STEPS + 1):
        x = torch.randn(16, 8)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if not isinstance(model, DistributedDataParallel):
            for p in model.parameters():
                dist.all_reduce(p.grad)
        optimizer.step()
        schedule.step()
        if g.rank == 0:
            tell(step, loss.detach())
        if g.checkpoint.due(step) or step == SAVE_AT:
            state.update({random: torch.get_rng_state(), "seen": step})
            save(g, step, state, wait=WAIT)
"""

PLAIN = PROGRAM.replace("IMPORT", "from airflow_gpu.frameworks.torch import restore, save").replace(
    "WRAP(model)", "model"
)
DCP = PROGRAM.replace(
    "IMPORT", "from airflow_gpu.frameworks.dcp import dcp_restore as restore, dcp_save as save"
).replace("WRAP", "DistributedDataParallel")


def test_a_file_for_each_rank(bed: Bed) -> None:
    comes_back(bed, PLAIN.replace("WAIT", "True"))
    # The same checkpoint is no use to another number of ranks: said, and nothing begins from scratch.
    job = bed.payload(2, script=LOSSES + PLAIN.replace("WAIT", "True"), nodes=1, first_life=4)
    assert start(bed, job).wait() == [1]
    assert "was written by 4 ranks, and this gang has 2" in bed.log(0, 4)
    assert losses(bed, 4) == {}


def test_a_file_for_each_rank_in_the_background(bed: Bed) -> None:
    comes_back(bed, PLAIN.replace("WAIT", "False"), ranks_per_node=1)


def test_one_state_of_all_ranks(bed: Bed) -> None:
    comes_back(bed, DCP.replace("WAIT", "True"), exact=False)


SHARDED = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from airflow_gpu.runtime import gang
from airflow_gpu.frameworks.dcp import dcp_restore, dcp_save

with gang() as g:
    dist.init_process_group("gloo")
    torch.manual_seed(g.life)
    model = torch.nn.Linear(8, 12)
    fully_shard(model, mesh=init_device_mesh("cpu", (g.world_size,)))
    optimizer = torch.optim.Adam(model.parameters())
    state = {"model": model, "optimizer": optimizer, "bias": torch.zeros(3), "words": "none"}
    start = dcp_restore(g, state)
    if not start:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        state["bias"] += 7
        state["words"] = "seven"
        dcp_save(g, 1, state, wait=False)
        g.checkpoint.wait()
    moment = optimizer.state[model.weight]["exp_avg"].full_tensor()
    found = [model.weight.full_tensor().sum().item(), moment.sum().item(), state["bias"].tolist(), state["words"]]
    g.result([start, len(model.weight.to_local()), found])
"""


def test_sharded_state_goes_to_another_number_of_ranks(bed: Bed) -> None:
    assert bed.run(bed.payload(script=SHARDED)) == [0, 0], bed.log(0)
    assert bed.run(bed.payload(2, script=SHARDED, nodes=1, first_life=2), job_id="job-2") == [0], bed.log(
        0, 2
    )
    first, second = (bed.read(f"lives/{life:04d}/result.json") for life in (1, 2))
    assert (first[:2], second[:2]) == ([0, 3], [1, 6]), "each of 4 ranks held 3 rows of 12, each of 2 holds 6"
    assert first[2] == second[2], "weights, moments, a plain tensor, a word"
    assert first[2][2:] == [[7.0, 7.0, 7.0], "seven"]


def test_what_cannot_be_read_again_is_refused_when_it_is_saved(bed: Bed) -> None:
    program = """
    import pathlib, torch
    from airflow_gpu.runtime import gang
    from airflow_gpu.frameworks.torch import restore, save
    with gang() as g:
        if g.life == 2:
            restore(g, {"other": 1})
        save(g, 1, {"weights": torch.ones(3)})
        save(g, 2, {"weights": torch.ones(3), "path": pathlib.PurePosixPath("x")})
    """
    job = bed.payload(script=program, nodes=1, ranks_per_node=1)
    assert bed.run(job) == [1]
    assert "TypeError: the state holds pathlib.PurePosixPath" in bed.log(0)
    assert sorted(bed.manifests()) == [1]
    assert bed.run(job, restart=1) == [1]
    assert "holds ['weights'], and the program asks for ['other']" in bed.log(0, 2)


def test_one_state_of_all_ranks_in_the_background(bed: Bed) -> None:
    comes_back(bed, DCP.replace("WAIT", "False"), exact=False, ranks_per_node=1)
