"""JAX and Orbax in a real gang: one program over all ranks, with arrays that are spread over them."""

from __future__ import annotations

import pytest

from tests.frameworks.bed import LOSSES, comes_back, losses, needs, start
from tests.runtime.bed import Bed

pytestmark = [needs("jax", "orbax.checkpoint"), pytest.mark.timeout(600)]

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from airflow_gpu.runtime import gang
from airflow_gpu.frameworks.jax import restore, save

with gang() as g:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if g.world_size > 1:
        jax.distributed.initialize(num_processes=g.world_size, process_id=g.rank)
    mesh = Mesh(np.array(jax.devices()), ("x",))
    spread, everywhere = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (["x"], []))
    rng = np.random.default_rng(0)
    first = rng.normal(size=(8, 4)).astype("float32")
    tree = {
        "weights": jax.device_put(first, KIND),
        "momenta": jax.device_put(np.zeros_like(first), KIND),
        "key": jax.device_put(jax.random.key_data(jax.random.key(7)), everywhere),
    }
    begin, tree = restore(g, tree)
    assert tree["weights"].sharding == KIND

    @jax.jit
    def advance(tree):
        key, use = jax.random.split(jax.random.wrap_key_data(tree["key"]))
        x = jax.random.normal(use, (32, 8))
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w - x[:, :4]) ** 2))(tree["weights"])
        momenta = 0.9 * tree["momenta"] + gradient
        return {"weights": tree["weights"] - 0.1 * momenta, "momenta": momenta, "key": jax.random.key_data(key)}, loss

    for step in range(begin + 1, STEPS + 1):
        tree, loss = advance(tree)
        if g.rank == 0:
            tell(step, loss)
        else:
            loss.block_until_ready()
        if g.checkpoint.due(step) or step == SAVE_AT:
            save(g, step, tree, wait=WAIT)
    g.result(float(tree["weights"].sum()) if KIND == everywhere else None)
"""


def test_arrays_spread_over_the_ranks(bed: Bed) -> None:
    program = PROGRAM.replace("KIND", "spread").replace("WAIT", "True")
    comes_back(bed, program)
    # Another number of ranks reads it.
    job = bed.payload(2, script=LOSSES + program, nodes=1, ranks_per_node=1, first_life=4)
    assert start(bed, job).wait() == [0], bed.log(0, 4)
    assert min(losses(bed, 4)) == max(bed.manifests(2)) + 1


def test_in_the_background(bed: Bed) -> None:
    comes_back(bed, PROGRAM.replace("KIND", "everywhere").replace("WAIT", "False"), ranks_per_node=1)


def test_what_cannot_be_saved_is_said(bed: Bed) -> None:
    program = """
    import jax, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from airflow_gpu.runtime import gang
    from airflow_gpu.frameworks.jax import save
    with gang() as g:
        try:
            save(g, 1, {})
        except RuntimeError as error:
            print(error, flush=True)
        jax.distributed.initialize(num_processes=g.world_size, process_id=g.rank)
        tree = {"w": jax.device_put(np.zeros(8), NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x")))}
        try:
            save(g, 1, tree, wait=False)
        except TypeError as error:
            print(error, flush=True)
        save(g, 2, tree)
        save(g, 2, tree)  # saved already: goes nowhere, and holds nobody up
        save(g, 3, tree)
    """
    job = bed.payload(script=program, ranks_per_node=1)
    assert bed.run(job) == [0, 0], bed.log(0)
    assert "the 2 ranks of this gang are no one JAX program" in bed.log(1)
    assert "['w'] is spread over processes" in bed.log(1)
    assert sorted(bed.manifests()) == [2, 3]
