"""Data-parallel training on a gang of 2 nodes x 2 ranks, that survives preemption.

A data step, then a gang that really trains: four processes, one JAX device
each, gradients reduced between them over the network; then an evaluation. The
gang saves every few seconds and when it is given notice, and goes on from its
newest checkpoint after a preemption, with the same losses as if nothing had
happened. It needs a target (a connection named ``gpu_default``) and, in the
Python of the ranks, jax and scikit-learn. It runs on CPUs too.
"""

from __future__ import annotations

import os
from datetime import timedelta

from airflow.sdk import dag, get_current_context, task

from airflow_gpu import Gang, GangOperator


@task
def prepare() -> str:
    """The data set, scaled and split, in a folder that the ranks can read."""
    import re
    from pathlib import Path

    import numpy as np
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    run_id = re.sub(r"[^A-Za-z0-9._-]", "_", get_current_context()["run_id"])
    folder = Path(os.environ.get("DEMO_DATA", "/tmp/gang-training")) / run_id
    folder.mkdir(parents=True, exist_ok=True)
    images, labels = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(
        (images / 16.0).astype("float32"),
        labels.astype("int32"),
        test_size=0.2,
        random_state=0,
        stratify=labels,
    )
    np.savez(folder / "digits.npz", x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    return str(folder)


@task.gang(
    nodes=2,
    gpus_per_node=2,
    targets="gpu_default",
    env={"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false", "OMP_NUM_THREADS": "1"},
    checkpointing={"interval": 4},
    time_limit="30m",
    retries=2,
    retry_delay=timedelta(seconds=5),
)
def train(folder: str, steps: int, gang=None):
    """Runs on every rank. What rank 0 returns is the task's result."""
    import os
    import time
    from functools import partial

    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"{gang.master_addr}:{gang.master_port}", num_processes=gang.world_size, process_id=gang.rank
    )
    mesh = Mesh(np.array(jax.devices()), ("data",))
    by_rank, everywhere = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    data = np.load(f"{folder}/digits.npz")
    x, y = data["x_train"], data["y_train"]
    sizes, batch, rate = [64, 512, 512, 10], 256, 0.02

    def first_weights():
        rng = np.random.default_rng(0)
        return [
            part
            for n, m in zip(sizes, sizes[1:])
            for part in (rng.normal(0, (2 / n) ** 0.5, (n, m)).astype("float32"), np.zeros(m, "float32"))
        ]

    def loss_of(weights, images, labels):
        for i in range(0, len(weights) - 2, 2):
            images = jax.nn.relu(images @ weights[i] + weights[i + 1])
        logits = images @ weights[-2] + weights[-1]
        return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(labels)), labels])

    @partial(jax.jit, out_shardings=(everywhere, everywhere, everywhere))
    def advance(weights, momenta, images, labels):
        # The batch is split over the ranks: the mean, and so each gradient, is reduced between them.
        loss, gradients = jax.value_and_grad(loss_of)(weights, images, labels)
        momenta = [0.9 * m + g for m, g in zip(momenta, gradients)]
        return [w - rate * m for w, m in zip(weights, momenta)], momenta, loss

    def share(step):
        """This rank's part of the batch of a step: drawn by the step's number, so a resumed run draws the same."""
        rows = np.random.default_rng((1, step)).choice(len(x), batch, replace=False)
        mine = rows[gang.rank * batch // gang.world_size : (gang.rank + 1) * batch // gang.world_size]
        return [
            jax.make_array_from_process_local_data(by_rank, part[mine], (batch, *part.shape[1:]))
            for part in (x, y)
        ]

    # -- checkpoints: every rank writes its own share of weights and momenta, rank 0 the losses so far ----
    state = {"weights": first_weights(), "losses": []}
    state["momenta"] = [np.zeros_like(w) for w in state["weights"]]

    def save(directory):
        arrays = [np.asarray(a) for a in (*state["weights"], *state["momenta"])]
        np.savez(directory / f"rank-{gang.rank}.npz", *arrays[gang.rank :: gang.world_size])
        if gang.rank == 0:
            np.save(directory / "losses.npy", np.array(state["losses"]))

    def load(directory):
        files = sorted(directory.glob("rank-*.npz"), key=lambda p: int(p.stem.split("-")[1]))
        count = 2 * len(state["weights"])
        arrays = [None] * count
        for rank, file in enumerate(files):
            with np.load(file) as shard:
                arrays[rank :: len(files)] = [shard[f"arr_{i}"] for i in range(len(shard.files))]
        state["weights"], state["momenta"] = arrays[: count // 2], arrays[count // 2 :]
        state["losses"] = np.load(directory / "losses.npy").tolist()

    start = gang.checkpoint.restore(load)
    print(
        f"rank {gang.rank} of {gang.world_size} on {len(jax.devices())} devices, from step {start}",
        flush=True,
    )
    for name in ("weights", "momenta"):
        state[name] = [jax.device_put(a, everywhere) for a in state[name]]
    pause = float(os.environ.get("DEMO_PAUSE", "0"))
    for step in range(start, steps):
        state["weights"], state["momenta"], loss = advance(state["weights"], state["momenta"], *share(step))
        state["losses"].append(float(loss))
        time.sleep(pause)
        gang.progress(step + 1, steps, loss=round(state["losses"][-1], 4))
        if gang.rank == 0 and (step + 1) % 25 == 0:
            print(f"step {step + 1}: loss {state['losses'][-1]:.4f}", flush=True)
        if gang.checkpoint.due(step + 1):
            with gang.checkpoint.save(step + 1) as directory:
                save(directory)
    if gang.rank == 0:
        np.savez(f"{folder}/model.npz", *[np.asarray(w) for w in state["weights"]])
    jax.distributed.shutdown()
    return {"model": f"{folder}/model.npz", "steps": steps, "resumed_from": start, "losses": state["losses"]}


@task
def evaluate(trained: dict) -> dict:
    """Accuracy on images that the gang has not seen."""
    import numpy as np

    with np.load(trained["model"]) as model:
        weights = [model[f"arr_{i}"] for i in range(len(model.files))]
    data = np.load(trained["model"].replace("model.npz", "digits.npz"))
    images = data["x_test"]
    for i in range(0, len(weights) - 2, 2):
        images = np.maximum(images @ weights[i] + weights[i + 1], 0)
    accuracy = float(np.mean((images @ weights[-2] + weights[-1]).argmax(1) == data["y_test"]))
    print(f"accuracy {accuracy:.3f} after {trained['steps']} steps; final loss {trained['losses'][-1]:.4f}")
    return {"accuracy": accuracy, "loss": trained["losses"][-1]}


@dag(schedule=None, params={"steps": 400}, render_template_as_native_obj=True, tags=["gpu", "example"])
def gang_training():
    """Data step, gang, evaluation."""
    evaluate(train(prepare(), "{{ params.steps }}"))


@dag(schedule=None, params={"seconds": 6}, tags=["gpu", "example"])
def urgent_gang():
    """A gang of higher priority that needs the whole cluster: what runs there is preempted, with notice."""
    GangOperator(
        task_id="urgent",
        gang=Gang(
            nodes=2,
            gpus_per_node=2,
            priority=100,
            command=["python3", "-c", "import time; time.sleep({{ params.seconds }})"],
            time_limit="10m",
        ),
    )


gang_training()
urgent_gang()
