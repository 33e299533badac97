"""Parameters from released tensors: each device's shard is put together on the host and sent there.

Only the bytes of the shards that this process holds are read, and nothing is computed on a device, so a
fused parameter never needs its parts and itself in device memory at once.
"""

import collections
import math
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from typing import Any

import jax
import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.source import OpenTensors
from k3jax.params import HfPiece, ParamSpec

LARGEST_SCALE = 252
"""Largest E8M0 byte with which every code is finite: 6 * 2^(252 - 127); 255 means NaN."""

READERS = 8
"""Threads that copy from the files; they wait for storage most of the time."""

Box = tuple[tuple[int, int], ...]
"""`(start, stop)` per dimension of a parameter."""


class InFlight:
    """Bounds the host bytes whose transfers to devices may still be running."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._bytes = 0
        self._arrays: collections.deque[jax.Array] = collections.deque()

    def add(self, array: jax.Array) -> jax.Array:
        """Registers a transfer; forgets finished ones, and waits for the oldest while the sum is over the budget."""
        self._arrays.append(array)
        self._bytes += array.nbytes
        while self._arrays and (self._bytes > self._budget or self._finished(self._arrays[0])):
            oldest = self._arrays.popleft()
            self._bytes -= oldest.nbytes
            if not self._finished(oldest):
                oldest.block_until_ready()
        return array

    @staticmethod
    def _finished(array: jax.Array) -> bool:
        return array.is_deleted() or array.is_ready()  # pyright: ignore[reportAttributeAccessIssue]


def place(
    spec: ParamSpec,
    tensors: OpenTensors,
    dtype: np.dtype[Any],
    sharding: jax.sharding.Sharding | None,
    in_flight: InFlight,
    executor: Executor,
) -> jax.Array:
    """The parameter `spec` as an array in `sharding` (default: uncommitted, on the default device).

    Model-dtype values are cast to `dtype` exactly as they are copied. Raises `CheckpointError` on scales with which
    a weight would not be finite.
    """
    if sharding is None:
        whole = tuple((0, size) for size in spec.shape)
        return in_flight.add(jax.device_put(read_box(spec, whole, tensors, dtype, executor)))
    devices: dict[Box, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(spec.shape).items():
        devices.setdefault(_box(index or (), spec.shape), []).append(device)
    shards: list[jax.Array] = []
    for box, targets in devices.items():
        data = read_box(spec, box, tensors, dtype, executor)
        shards += [in_flight.add(jax.device_put(data, device)) for device in targets]
    return jax.make_array_from_single_device_arrays(spec.shape, sharding, shards, dtype=dtype)


def read_box(spec: ParamSpec, box: Box, tensors: OpenTensors, dtype: np.dtype[Any], executor: Executor) -> np.ndarray:
    """The part of a parameter inside `box`, read from the tensors that fill it."""
    data = np.empty([stop - start for start, stop in box], dtype)
    jobs = [(piece, overlap) for piece in spec.pieces if (overlap := _overlap(piece, box)) is not None]

    def copy(part: int) -> None:
        for piece, (target, wanted) in jobs[part::READERS]:
            data[target] = piece_view(piece, tensors.view(piece.name))[wanted]

    # Large copies release the GIL, and several threads keep several reads of a cold file going.
    for _ in executor.map(copy, range(min(READERS, len(jobs)))):
        pass
    if spec.init == "scale" and data.size and data.max() > LARGEST_SCALE:
        found = ((piece.name, tensors.view(piece.name)) for piece in spec.pieces)
        raise CheckpointError("scales with which weights are not finite are refused", scale_problems(found))
    return data


def _overlap(piece: HfPiece, box: Box) -> tuple[tuple[int | slice, ...], tuple[slice, ...]] | None:
    """Where in `box` a piece lands (from the box's origin), and which part of the piece that is."""
    target: list[int | slice] = []
    wanted: list[slice] = []
    for axis, (start, stop) in enumerate(box):
        part = piece.index[axis] if axis < len(piece.index) else slice(None)
        if isinstance(part, int):
            if not start <= part < stop:
                return None
            target.append(part - start)
            continue
        first, last = part.start or 0, stop if part.stop is None else part.stop
        low, high = max(first, start), min(last, stop)
        if low >= high:
            return None
        target.append(slice(low - start, high - start))
        wanted.append(slice(low - first, high - first))
    return tuple(target), tuple(wanted)


def piece_view(piece: HfPiece, tensor: np.ndarray) -> np.ndarray:
    """The part of a released tensor that `piece` takes, in the parameter's orientation, without a copy."""
    return tensor.reshape(piece.view)[piece.take].transpose(piece.permutation)


def _box(index: Sequence[slice], shape: tuple[int, ...]) -> Box:
    bounds = [part.indices(size) for part, size in zip(index, shape, strict=True)]
    return tuple((start, stop) for start, stop, _ in bounds)


def scale_problems(scales: Iterable[tuple[str, Any]]) -> list[str]:
    """One line for each named array of E8M0 scales that holds one above `LARGEST_SCALE`."""
    return [
        f"{name}: has scale byte {largest} ({'NaN' if largest == 255 else 'some codes overflow'}), expected at most "
        f"{LARGEST_SCALE}; the file is damaged or its quantisation is: fetch it again, or quantise it again"
        for name, array in scales
        if (largest := int(array.max())) > LARGEST_SCALE
    ]


def padding_problems(specs: Sequence[ParamSpec], tensors: OpenTensors) -> list[str]:
    """Released tensors of which something that no piece takes is not zero (the tail of `A_log`)."""
    pieces: dict[str, list[HfPiece]] = collections.defaultdict(list)
    for spec in specs:
        for piece in spec.pieces:
            pieces[piece.name].append(piece)
    padded = {name: parts for name, parts in pieces.items() if not _covers(parts)}
    return [problem for name, parts in padded.items() for problem in _padding_problem(name, parts, tensors)]


def _covers(pieces: Sequence[HfPiece]) -> bool:
    """Whether pieces, which never overlap, take every element of their tensor."""
    return sum(map(_taken, pieces)) == math.prod(pieces[0].shape)


def _taken(piece: HfPiece) -> int:
    sizes = [
        len(range(*piece.take[axis].indices(size))) if axis < len(piece.take) else size
        for axis, size in enumerate(piece.view)
    ]
    return math.prod(sizes)


def _padding_problem(name: str, pieces: Sequence[HfPiece], tensors: OpenTensors) -> list[str]:
    padding = np.ones(pieces[0].shape, bool)
    for piece in pieces:
        padding.reshape(piece.view)[piece.take] = False
    values = tensors.view(name)
    wrong = padding & (values != 0)
    if not wrong.any():
        return []
    where = tuple(int(axis[0]) for axis in np.nonzero(wrong))
    return [f"{name}: padding must be zero, but element {list(where)} is {values[where]} ({wrong.sum()} in all)"]
