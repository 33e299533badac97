"""Calls of kernels that multiply matrices, small ones, as (function, shapes): what generations of GPUs differ in."""

import jax
import jax.numpy as jnp

from pallas import gemv as gemv_package
from pallas import kda, moe
from pallas.gemv import finish, finished
from pallas.gemv import mosaic as gemv
from pallas.kda import mosaic_prefill
from pallas.mla import mosaic as mla_mosaic
from pallas.moe import mosaic_decode, mosaic_grouped

f32, bf16, i32 = jnp.float32, jnp.bfloat16, jnp.int32


def spec(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


def gemv_call(dtype):
    scale = [spec(f32, 7168)] if dtype == jnp.int8 else []
    return lambda x, w, s: gemv.matmuls(x, [w], scales=s), (spec(bf16, 9, 2048), spec(dtype, 7168, 2048), scale)


def finished_call():
    matrix, weights = gemv_package.Int8Matrix(spec(jnp.int8, 512, 1024), spec(f32, 512)), spec(bf16, 512)
    run = lambda x, matrix, *others: finished.finished(x, matrix, finish.Residual(), others)  # noqa: E731
    return run, (spec(jnp.float16, 8, 1024), matrix, spec(bf16, 8, 512), weights)


def experts_call(kernel, tokens):
    sizes = ((4, 2, 512, 512), (4, 2, 512, 32), (4, 1024, 256), (4, 1024, 16))
    packed = moe.PackedExperts(*(spec(jnp.uint8, *size) for size in sizes))
    arguments = spec(bf16, tokens, 1024), spec(i32, tokens, 2), spec(f32, tokens, 2), packed
    return lambda *args: kernel.experts(*args, 4.0, 25.0, jnp.dtype(f32)), arguments


def latent_call():
    table = spec(bf16, 9, 64, 576), spec(i32, 1, 8), spec(i32, 1), spec(i32, 1)
    run = lambda *args: mla_mosaic.attend_pages(*args, heads=8, rank=512, scale=0.1)  # noqa: E731
    return run, (spec(bf16, 1, 8, 512), spec(bf16, 1, 8, 192), *table)


def attention_call():
    latents, start = spec(bf16, 1, 136, 576), (spec(i32, 1), spec(i32, 1))
    run = lambda *args: mla_mosaic.expanded(*args, 0.1)  # noqa: E731
    return run, (spec(bf16, 1, 136, 2, 192), latents, spec(bf16, 2, 128, 512), spec(bf16, 2, 128, 512), *start)


def prefill_call(heads=2, tokens=128):
    weights = kda.KdaWeights(spec(f32, 4, heads, 3, 128), spec(f32, heads), spec(f32, heads, 128), spec(f32, 128))
    many = [spec(bf16, 1, tokens, heads, *rest) for rest in ((4, 128), (128,), ())]
    states = spec(f32, 1, heads, 128, 128), spec(bf16, 1, 3, heads, 3, 128)
    run = lambda *args: mosaic_prefill.prefill(*args, None, -5.0, 1e-5)  # noqa: E731
    return run, (*many, weights, *states, spec(i32, 1))


CALLS = {
    "gemv": gemv_call(bf16),
    "gemv int8": gemv_call(jnp.int8),
    "gemv finished": finished_call(),
    "moe decode": experts_call(mosaic_decode, 5),
    "moe grouped": experts_call(mosaic_grouped, 200),
    "mla decode": latent_call(),
    "mla prefill": attention_call(),
    "kda prefill": prefill_call(),
}
