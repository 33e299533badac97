"""The Triton backend: refusals without its packages or a GPU, machine code for both generations, numbers on a GPU."""

import importlib.util
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas import moe
from pallas.dispatch import MissingPackage, WrongDevice
from pallas.moe import mxfp8
from pallas.moe import triton as backend
from tests.pallas.comparison import relative
from tests.pallas.moe.conftest import definition, draw_experts, draw_tokens

SOURCE = Path(backend.__file__).with_name("triton_kernel.py")
OPTIONS = {"beta": 4.0, "linear_beta": 25.0, "implementation": "triton"}


def call(tokens=20, **options):
    x, ids, weights = draw_tokens(tokens, k=2, experts=4, latent=128)
    packed = draw_experts(experts=4, latent=128, inner=128)
    return moe.experts(jnp.asarray(x, jnp.bfloat16), ids, weights, packed, **OPTIONS, **options)


@pytest.fixture
def kernel(monkeypatch):
    """Triton reads the source of its functions, which the tests' type checks would wrap."""
    pytest.importorskip("triton", reason="the extra `triton` is not installed")
    spec = importlib.util.spec_from_file_location("pallas.moe.triton_kernel", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)  # pyright: ignore[reportOptionalMemberAccess]
    monkeypatch.setitem(sys.modules, "pallas.moe.triton_kernel", module)
    monkeypatch.setattr(moe, "triton_kernel", module, raising=False)
    return module


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="says what happens without a GPU")
def test_a_cpu_is_the_wrong_device():
    with pytest.raises(WrongDevice, match="moe triton runs on GPUs, the default backend is 'cpu'"):
        call()


@pytest.mark.parametrize("absent", ["jax_triton", "triton"])
def test_a_missing_package_is_an_error_that_names_the_extra(absent, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setitem(sys.modules, "jax_triton", object())
    monkeypatch.setitem(sys.modules, "triton", object())
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(MissingPackage, match=rf"needs the package '{absent}': .*pip install 'k3jax\[triton\]'"):
        call(tokens=21)


def test_few_tokens_are_refused(monkeypatch):
    monkeypatch.setattr(backend, "require_gpu", lambda name: None)
    monkeypatch.setattr(backend, "require_package", lambda: None)
    x, *routing = map(jnp.asarray, draw_tokens(16, k=2, experts=4, latent=128))
    packed = draw_experts(experts=4, latent=128, inner=128)
    with pytest.raises(NotImplementedError, match="17 tokens and more, got 16"):
        backend.experts(x.astype(jnp.bfloat16), *routing, packed, beta=4.0, linear_beta=25.0)


def test_blocks_of_tokens_follow_the_load():
    sizes = [backend.block_tokens(tokens * 16, 896) for tokens in (17, 1000, 8192, 65536)]
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[-1]) == (16, 128)


@pytest.mark.parametrize(
    ("capability", "quantised", "product"),
    [
        (90, False, "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16"),
        (90, True, "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16"),
        (100, False, "tcgen05.mma.cta_group::1.kind::f16"),
        (100, True, "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale"),
    ],
)
@pytest.mark.parametrize("planes", [1, 2])
def test_machine_code(capability, quantised, product, planes, kernel):
    """Block-scaled products are native on Blackwell when both operands have scales."""
    from triton import compiler
    from triton.backends.compiler import GPUTarget

    depth, width = (3584, 3072) if planes == 2 else (3072, 3584)
    constants = {"K": depth, "M": width, "PLANES": planes, "MXFP8": quantised, "BETA": 4.0, "LINEAR_BETA": 25.0}
    cut = backend.Settings()
    constants |= {"BLOCK_M": cut.rows, "BLOCK_N": 64, "BLOCK_K": cut.depth}
    kinds = {"rows": "*fp8e4nv" if quantised else "*bf16", "row_scale": "*u8", "weights": "*u8", "scale": "*u8"}
    kinds |= {"expert": "*i32", "used": "*i32", "out": "*bf16"}
    aligned = {(index,): [["tt.divisibility", 16]] for index in range(len(kinds))}
    signature = kinds | dict.fromkeys(constants, "constexpr")
    source = compiler.ASTSource(kernel.grouped_product, signature, constexprs=constants, attrs=aligned)
    target, options = GPUTarget("cuda", capability, 32), {"num_warps": cut.warps, "num_stages": cut.stages}
    assert product in compiler.compile(source, target=target, options=options).asm["ptx"]


@pytest.mark.gpu
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("activations", [None, "mxfp8"])
def test_numbers_on_a_gpu(activations):
    tokens = mxfp8.FEWEST_TOKENS
    x, ids, weights = draw_tokens(tokens, k=2, experts=4, latent=256)
    packed = draw_experts(experts=4, latent=256, inner=384)
    ids[3, 1], ids[5] = -1, -1
    x = np.asarray(jnp.asarray(x / 8, jnp.bfloat16).astype(jnp.float32))
    options = OPTIONS | {"activations": activations, "dtype": jnp.float32}
    found = moe.experts(jnp.asarray(x, jnp.bfloat16), ids, weights, packed, **options)
    expected = definition(x, np.maximum(ids, 0), np.where(ids < 0, 0, weights), packed)
    assert relative(found, expected) < (4e-3 if activations is None else 5e-2)
