"""Kernels down to machine code for GPUs that are not there: sm_90a, sm_100a, sm_103a."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pallas.generations import CALLS

ROOT = Path(__file__).resolve().parents[2]
STEP = {"attn_res_read", "gemv", "kda_decode", "mla_decode", "moe_down", "moe_route", "moe_up"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("jax_plugins") is None, reason="the extra `gpu` is not installed"),
]


def compiled(description, wanted):
    """What `machine_code` printed, by name."""
    command = [sys.executable, "-m", "tests.pallas.machine_code", str(description), wanted]
    run = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return dict(line.split(": ") for line in run.stdout.splitlines())


@pytest.mark.parametrize("target", ["h200", "b200", "gb300"])
def test_kernels(target, shared):
    assert compiled(shared / "targets" / f"{target}.txtpb", "kernels").keys() == CALLS.keys()


def test_decode_step_of_k3(shared):
    """Every op that has a kernel runs it."""
    assert set(compiled(shared / "targets" / "gb300.txtpb", "step")) >= STEP
