"""Products whose results are finished before they are stored, for eight rows of activations."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pallas.dispatch import multiprocessors
from pallas.gemv.finish import TOKENS, Finish
from pallas.gemv.int8 import Int8Matrix
from pallas.gemv.mosaic import DEPTH, ROWS, SLICES, Call, Settings, kernel, settings_for


def one_turn(rows: Sequence[int], depth: int) -> Settings:
    """A cut of matrices of 8 bits with few outputs into parts of their depth, of which a block takes one at most."""
    tiles, blocks = sum(-(-count // ROWS) for count in rows), multiprocessors()
    cuts = [Settings(groups=2, stages=4, slices=slices, blocks=blocks) for slices in SLICES]
    usable = [cut for cut in cuts if depth % cut.unit(narrow=True) == 0 and tiles * cut.slices <= blocks]
    return usable[-1] if usable else settings_for(rows, depth, narrow=True)


def require_supported(x: jax.Array, rows: Sequence[int], *, narrow: bool) -> None:
    """Raises `NotImplementedError` with the reason for a call that the kernels do not serve."""
    kind = jnp.float16 if narrow else jnp.bfloat16
    if x.shape[0] != TOKENS or x.dtype != kind:
        raise NotImplementedError(
            f"finished products serve {TOKENS} rows of {jnp.dtype(kind)}, got {x.shape[0]} of {x.dtype}"
        )
    if min(rows) < ROWS or any(count % 8 for count in rows):
        raise NotImplementedError(
            f"finished products serve at least {ROWS} outputs in multiples of 8, got {', '.join(map(str, rows))}"
        )


def require_cut(rows: int, depth: int, cut: Settings, *, narrow: bool, whole: bool) -> None:
    """The same for sizes that a cut does not fit."""
    unit = cut.unit(narrow=narrow)
    if depth % unit or (whole and rows % cut.height):
        raise NotImplementedError(
            f"finished products serve inputs in multiples of {unit}, and tiles of {cut.height} outputs if none may "
            f"overlap, got {depth} and {rows}"
        )


@partial(jax.jit, static_argnames=("finish", "settings", "interpret"))
def finished(
    x: Float[Array, "8 K"],
    matrix: Int8Matrix,
    finish: Finish,
    operands: tuple[Array, ...] = (),
    settings: Settings | None = None,
    interpret: Any = None,
) -> tuple[Array, ...]:
    """The product of x with the transpose of a matrix [N, K], stored as `finish` says.

    x is float16 as of `widen.to_half`. Raises `NotImplementedError` with the reason for what is not served.
    """
    rows, depth = matrix.codes.shape
    cut = settings or settings_for([rows], depth, narrow=True, finished=True, whole=finish.whole)
    require_supported(x, [rows], narrow=True)
    require_cut(rows, depth, cut, narrow=True, whole=finish.whole)
    call = _call((rows,), jnp.float32, depth, cut, interpret, narrow=True, finish=finish)
    return tuple(kernel(call, interpret)(x, matrix.codes, matrix.scale, *operands))


@partial(jax.jit, static_argnames=("dtype", "settings", "interpret"))
def by_head(
    x: Float[Array, "8 K"],
    matrices: Float[Array, "H N k"],
    dtype: Any,
    settings: Settings | None = None,
    interpret: Any = None,
) -> Float[Array, "8 _"]:
    """Each head's own product, in bfloat16: head h of x begins at channel h K/H, of which k are taken.

    With float16 as `dtype` the result is that of `widen.to_half`. Raises as `finished` does.
    """
    heads, rows, depth = matrices.shape
    # Few copies each, all of them under way at once.
    deep = Settings(groups=2, stages=depth // (2 * DEPTH))
    cut = settings or (deep if depth > 2 * DEPTH else Settings(shared=False, stages=depth // DEPTH))
    require_supported(x, [rows], narrow=False)
    require_cut(rows, depth, cut, narrow=False, whole=True)
    call = _call((heads * rows,), dtype, depth, cut, interpret, narrow=False, heads=heads)
    return kernel(call, interpret)(x, matrices.reshape(heads * rows, depth))[0][0]


@partial(jax.jit, static_argnames=("settings", "interpret"))
def slices(
    x: Float[Array, "8 K"],
    matrices: tuple[Int8Matrix, ...],
    settings: Settings | None = None,
    interpret: Any = None,
) -> tuple[Float32[Array, "S 8 _"], ...]:
    """Products with each matrix, as sums of parts of the depth that their reader adds. Otherwise as `finished`."""
    rows, depth = tuple(matrix.codes.shape[0] for matrix in matrices), x.shape[1]
    cut = settings or one_turn(rows, depth)
    require_supported(x, rows, narrow=True)
    require_cut(min(rows), depth, cut, narrow=True, whole=False)
    codes, scales = zip(*matrices)
    call = _call(rows, jnp.float32, depth, cut, interpret, narrow=True)
    return tuple(kernel(call, interpret)(x, *codes, *scales))


def _call(rows: tuple[int, ...], dtype: Any, depth: int, cut: Settings, interpret: Any, **options: Any) -> Call:
    kinds = (jnp.dtype(dtype),) * len(rows)
    sizes = {"tokens": TOKENS, "columns": TOKENS, "sizes": rows, "depth": depth}
    return Call(dtypes=kinds, cut=cut, emulated=interpret is not None, **sizes, **options)
