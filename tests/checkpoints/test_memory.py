"""Host memory stays bounded by a layer while a checkpoint many times that size goes through."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import checkpoints
from k3jax.config import nano

ROOT = Path(__file__).resolve().parents[2]

# Runs in a process of its own, which never held the model; prints peak minus resting resident bytes of each step.
PROGRAM = """
import json, pathlib, sys, threading
import jax
import checkpoints
from checkpoints.__main__ import main

def resident():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096

def peak(function):
    seen, stop = [resident()], threading.Event()
    def watch():
        while not stop.wait(0.002):
            seen.append(resident())
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        function()
    finally:
        stop.set()
        thread.join()
    return max(seen) - seen[0]

def run(*arguments):
    assert main([str(argument) for argument in arguments]) == 0

root = pathlib.Path(sys.argv[1])
run("convert", root / "small", root / "small-orbax")  # imports and thread pools do not count
run("export", root / "small-orbax", root / "small-out")
print(json.dumps({
    "reshard": peak(lambda: run("export", root / "large", root / "large-out", "--shards", "3")),
    "convert": peak(lambda: run("convert", root / "large", root / "large-orbax")),
    "load": peak(lambda: jax.block_until_ready(checkpoints.load(root / "large"))),
}))
"""


def _bytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.skipif(sys.platform != "linux", reason="reads the resident size from /proc")
def test_peak_resident_memory(tmp_path):
    small = dataclasses.replace(nano(), num_layers=4, mla_layers=(3,))
    wide = dataclasses.replace(nano().moe, num_experts=64, intermediate_size=384, latent_size=512)
    large = dataclasses.replace(nano(), num_layers=12, mla_layers=(3, 7, 11), moe=wide)
    checkpoints.write_random(tmp_path / "small", small)
    tree = checkpoints.write_random(tmp_path / "large", large)
    total, layer = _bytes(tree), _bytes(tree["layers"]["4"])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, timeout=120)
    peaks = json.loads(result.stdout.splitlines()[-1])
    print({"total": total, "layer": layer, **peaks})
    assert total > 11 * layer
    assert peaks["convert"] < 4 * layer
    assert peaks["reshard"] < 4 * layer
    # On the CPU backend the arrays themselves are in this memory.
    assert peaks["load"] < total + 4 * layer
