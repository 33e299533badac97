"""Compiles kernels, and a decode step of K3 with them, to machine code for a GPU that is not there.

`python -m tests.pallas.machine_code DESCRIPTION [kernels] [step]` with the extra `gpu` installed; a line for each. A
process of its own, because the compiler ends the process at an instruction that the GPU does not have.
"""

import re
import sys
from collections import Counter
from pathlib import Path

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from tests.pallas.generations import CALLS

LAYERS = 4


def devices(description):
    """Compile-only devices, made the default ones."""
    found = topologies.get_topology_desc(platform="cuda", target_config=description, topology="1x1x1")
    jax.default_backend = lambda: "gpu"
    jax.devices = lambda: list(found.devices)
    return found


def placed(tree, sharding):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def compile_step(sharding):
    """Names of the kernels of a decode step of K3's first layers at full width, and how many of each."""
    from k3jax import step
    from k3jax.speculation import bench

    loaded = bench.abstract(bench.Setting.of_k3(LAYERS, None, 1024))
    state = (loaded.leaves, loaded.plain, loaded.params, loaded.stop_ids)
    text = step.decode.lower(loaded.graph, *placed(state, sharding)).compile().as_text()
    return Counter(re.findall(r'custom_call_target="mosaic_gpu[^\n]*?op_name="[^"]*?/(\w+)/mpmd_map"', text))


def main(description, *wanted):
    mesh = topologies.make_mesh(devices(Path(description).read_text()), (1,), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec())
    if "kernels" in wanted:
        for name, (run, arguments) in CALLS.items():
            jax.jit(lambda *args, run=run: run(*args)).lower(*placed(arguments, sharding)).compile()
            print(f"{name}: compiled", flush=True)
    if "step" in wanted:
        for name, count in compile_step(sharding).items():
            print(f"{name}: {count}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
