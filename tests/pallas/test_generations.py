"""What runs on which generation of GPUs: refusals, and kernels that are free of what only Hopper has."""

import dataclasses
from unittest import mock

import jax
import pytest
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir.dialects import llvm

from pallas import dispatch
from pallas.dispatch import BLACKWELL, HOPPER, MissingInstruction, WrongDevice, require_capability, select
from pallas.gemv import mosaic as gemv
from pallas.moe import mosaic_decode
from tests.pallas.generations import CALLS


@dataclasses.dataclass
class Gpu:
    compute_capability: str
    core_count: int = 152


@pytest.fixture
def on(monkeypatch):
    """Makes the default device a GPU of this compute capability."""

    def choose(capability):
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(jax, "devices", lambda: [Gpu(capability)])

    return choose


@pytest.mark.parametrize(
    ("capability", "served", "refusal"),
    [
        ("9.0", (HOPPER,), None),
        ("10.3", (HOPPER, BLACKWELL), None),
        ("10.0", (HOPPER,), MissingInstruction),
        ("8.0", (HOPPER, BLACKWELL), WrongDevice),
        ("12.0", (HOPPER, BLACKWELL), WrongDevice),
        ("gfx942", (HOPPER, BLACKWELL), WrongDevice),
    ],
)
def test_what_is_served_where(capability, served, refusal, on):
    on(capability)
    if refusal is None:
        require_capability("kernel", *served)
        return
    with pytest.raises(refusal, match=rf"kernel needs compute capability 9\.x .*this GPU has {capability}"):
        require_capability("kernel", *served)


def test_another_generation_is_a_note_and_another_gpu_an_error(on, caplog):
    def hopper_only():
        require_capability("kernel", HOPPER)

    on("10.3")
    assert select("mosaic", mosaic=hopper_only, xla=lambda: "portable")() == "portable"
    assert "kernel needs compute capability 9.x" in caplog.text
    on("8.0")
    with pytest.raises(WrongDevice):
        select("mosaic", mosaic=hopper_only, xla=lambda: "portable")()


def test_the_device_says_how_many_blocks(on):
    on("10.3")
    assert gemv.settings_for([49376], 7168).blocks == 152
    assert mosaic_decode.settings_for(3584, 2, True).blocks == 152
    assert dispatch.capability() == (10, 3)


def products(name):
    """Of warpgroups and of warps, as inline code and the lowering of `plgpu.wgmma` emit them."""
    run, arguments = CALLS[name]
    emitted, inline_asm, wgmma = [], llvm.inline_asm, mgpu.wgmma

    def record(kind, operands, text, *rest, **options):
        emitted.append(text)
        return inline_asm(kind, operands, text, *rest, **options)

    lowered = mock.Mock(side_effect=wgmma)
    with mock.patch.object(llvm, "inline_asm", record), mock.patch.object(mgpu, "wgmma", lowered):
        jax.jit(lambda *args: run(*args)).trace(*arguments).lower(lowering_platforms=("cuda",))
    text = " ".join(emitted)
    return lowered.call_count + text.count("wgmma.mma_async"), text.count("mma.sync.aligned.m16n8k16")


def quick(*names):
    """All kernels, the others slow."""
    return [pytest.param(name, marks=() if name in names else pytest.mark.slow) for name in CALLS]


@pytest.mark.parametrize("name", quick("gemv", "gemv int8", "moe decode", "mla decode"))
def test_blackwell_gets_products_of_warps(name, on):
    """Whether they compile there is what `test_machine_code` asks."""
    on("10.3")
    of_warpgroups, of_warps = products(name)
    assert of_warpgroups == 0
    assert of_warps > 0


@pytest.mark.parametrize("name", quick("moe decode"))
def test_hopper_gets_products_of_warpgroups(name, on):
    """But for gemv, which single warps serve as fast."""
    on("9.0")
    of_warpgroups, of_warps = products(name)
    assert (of_warpgroups > 0) == ("gemv" not in name)
    assert (of_warps > 0) == ("gemv" in name)
