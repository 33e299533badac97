"""Headers of safetensors files: read, validated against the file size, never a byte of data.

A file is: 8 bytes little-endian header length n, n bytes of JSON, then the data. The JSON maps each
tensor to its dtype, shape and byte range in the data (https://github.com/huggingface/safetensors).
"""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}


class TensorEntry(NamedTuple):
    """One tensor of a file: safetensors dtype name, shape, and `[start, stop)` bytes from the file's beginning."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return self.stop - self.start


@dataclasses.dataclass(frozen=True, slots=True)
class Header:
    """Everything a safetensors file says about itself."""

    metadata: dict[str, str] | None
    tensors: dict[str, TensorEntry]
    data_start: int
    file_bytes: int


class HeaderError(ValueError):
    """What is wrong with one file, without the file's name."""


def read_header(path: Path) -> Header:
    """Reads and validates the header of one file.

    Raises `HeaderError` when the file cannot be read, is not safetensors, or its size differs from what
    the header declares (a truncated or over-long file).
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            file_bytes = path.stat().st_size
            if not 0 < length <= min(MAX_HEADER_BYTES, file_bytes - LENGTH_BYTES):
                raise HeaderError(_not_safetensors(length, file_bytes))
            text = file.read(length)
    except OSError as error:
        raise HeaderError(f"cannot be read ({error.strerror})") from error
    try:
        fields = json.loads(text)
        if isinstance(fields, dict) and text.count(b'"data_offsets"') != len(fields.keys() - {"__metadata__"}):
            json.loads(text, object_pairs_hook=_unique_keys)  # slow, and it names the repeated tensor
    except HeaderError:
        raise
    except (ValueError, RecursionError) as error:
        raise HeaderError(f"is not a safetensors file (its header is not JSON: {error})") from error
    return _parse(fields, LENGTH_BYTES + length, file_bytes)


def _not_safetensors(length: int, file_bytes: int) -> str:
    if file_bytes < LENGTH_BYTES:
        return f"is truncated or not a safetensors file ({file_bytes} bytes)"
    announced = f"its first 8 bytes announce a header of {length} bytes, it has {file_bytes}"
    return f"is truncated or not a safetensors file ({announced})"


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a repeated key would silently hide a tensor."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        raise HeaderError(f"header repeats {sorted({name for name in names if names.count(name) > 1})}")
    return fields


def _parse(fields: Any, data_start: int, file_bytes: int) -> Header:
    if not isinstance(fields, dict):
        raise HeaderError(f"is not a safetensors file (its header is a JSON {type(fields).__name__})")
    metadata = fields.pop("__metadata__", None)
    tensors = {name: _entry(name, value, data_start) for name, value in fields.items()}
    _check_ranges(tensors, data_start, file_bytes)
    return Header(metadata, tensors, data_start, file_bytes)


def _entry(name: str, value: Any, data_start: int) -> TensorEntry:
    try:
        dtype, shape, (start, stop) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise HeaderError(f"{name}: header entry is {value!r}, expected dtype, shape and data_offsets") from error
    if dtype not in ITEM_BYTES:
        raise HeaderError(f"{name}: unknown dtype {dtype!r}")
    numbers = (*shape, start, stop)
    if [type(number) for number in numbers] != [int] * len(numbers) or min(numbers) < 0:
        raise HeaderError(f"{name}: shape {shape} or data_offsets {[start, stop]} are not natural numbers")
    expected = math.prod(shape) * ITEM_BYTES[dtype]
    if stop - start != expected:
        raise HeaderError(f"{name}: data_offsets span {stop - start} bytes, {dtype} {list(shape)} needs {expected}")
    return TensorEntry(dtype, shape, data_start + start, data_start + stop)


def _check_ranges(tensors: dict[str, TensorEntry], data_start: int, file_bytes: int) -> None:
    """The ranges tile the data exactly: no overlap, no hole, nothing after the end, nothing cut off."""
    end = data_start
    for name, entry in _by_offset(tensors):
        if entry.start != end:
            raise HeaderError(f"{name}: data begins at byte {entry.start}, expected {end} (overlap or hole)")
        end = entry.stop
    if file_bytes < end:
        raise HeaderError(f"is truncated: {file_bytes} bytes, its header declares {end}")
    if file_bytes > end:
        raise HeaderError(f"is too long: {file_bytes} bytes, its header declares {end}")


def _by_offset(tensors: dict[str, TensorEntry]) -> Iterator[tuple[str, TensorEntry]]:
    # Empty tensors share their start with the next one and come first.
    yield from sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop))
