"""Two processes with four devices each: load, save and restore, each touching its own part."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import sys
import jax
checkpoint, target, port, process = sys.argv[1:]
jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(process))
import numpy as np
import checkpoints
from checkpoints.checking import read_config
from checkpoints.source import OpenTensors
from k3jax import params

mesh = jax.make_mesh((8,), ("x",))
specs = params.model_specs(read_config(checkpoint))
rule = lambda spec: jax.NamedSharding(mesh, jax.P("x") if spec.shape[0] % 8 == 0 else jax.P())
shardings = params.map_tree(rule, specs)
seen, view = set(), OpenTensors.view
OpenTensors.view = lambda self, name: seen.add(name) or view(self, name)
config, tree = checkpoints.load(checkpoint, shardings=shardings)
experts = {int(name.split(".")[6]) for name in seen if ".experts." in name}
first = 4 * int(process)
assert experts == set(range(first, first + 4)), experts
whole = checkpoints.load(checkpoint)[1]

def same(array, expected):
    assert not array.is_fully_addressable
    assert len(array.addressable_shards) == 4
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(expected)[shard.index])

jax.tree.map(same, tree, whole)
checkpoints.save(target, config, tree)
jax.tree.map(same, checkpoints.restore(target, shardings)[1], whole)
try:
    checkpoints.export(target + "-out", config, tree)
except checkpoints.CheckpointError as error:
    assert "lies partly on other hosts" in str(error)
else:
    raise AssertionError("exported half a model")
print("passed")
"""


@pytest.mark.slow
def test_two_processes(checkpoint, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    command = [sys.executable, "-c", PROGRAM, str(checkpoint), str(tmp_path / "saved"), str(port)]
    processes = [
        subprocess.Popen([*command, str(number)], env=environment, stdout=subprocess.PIPE) for number in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [output.splitlines()[-1:] for output in outputs] == [[b"passed"], [b"passed"]]
