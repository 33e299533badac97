"""Single safetensors headers: what is read, and what is refused with which reason."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoints.header import HeaderError, read_header


def _file(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def _entry(start, stop, shape=None, dtype="U8"):
    return {"dtype": dtype, "shape": [stop - start] if shape is None else shape, "data_offsets": [start, stop]}


def test_reads_what_the_library_writes(tmp_path):
    tensors = {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.ones((3, 0), ml_dtypes.bfloat16),
        "scalar": np.array(7, np.uint8),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    header = read_header(tmp_path / "x.safetensors")
    assert header.metadata == {"format": "pt"}
    assert {name: (entry.dtype, entry.shape) for name, entry in header.tensors.items()} == {
        "a": ("BF16", (3, 0)),
        "b": ("F32", (2, 3)),
        "scalar": ("U8", ()),
    }
    content = (tmp_path / "x.safetensors").read_bytes()
    for name, entry in header.tensors.items():
        assert content[entry.start : entry.stop] == tensors[name].tobytes()


@pytest.mark.parametrize("cut", [0, 5, 8, 20, -1])
def test_truncation_anywhere_is_seen(tmp_path, cut):
    save_file({"a": np.zeros(100, np.float32)}, tmp_path / "x.safetensors")
    content = (tmp_path / "x.safetensors").read_bytes()
    (tmp_path / "x.safetensors").write_bytes(content[:cut])
    with pytest.raises(HeaderError, match="truncated"):
        read_header(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("header", "data", "reason"),
    [
        (b"not json", b"", "is not a safetensors file .*not JSON"),
        (b"\xff\xfe\x00", b"", "is not a safetensors file"),
        (b"[" * 100_000, b"", "is not a safetensors file"),
        (b"[]", b"", "its header is a JSON list"),
        ({"a": 3}, b"", "a: header entry is 3, expected dtype, shape and data_offsets"),
        ({"a": {"dtype": "U8", "shape": [1]}}, b"", "a: header entry"),
        ({"a": _entry(0, 4, dtype="Q4")}, b"1234", "a: unknown dtype 'Q4'"),
        ({"a": _entry(0, 4, [5])}, b"1234", r"a: data_offsets span 4 bytes, U8 \[5\] needs 5"),
        ({"a": _entry(0, 4, [-2, -2])}, b"1234", "a: shape .* are not natural numbers"),
        ({"a": _entry(0, 4, [True, 4])}, b"1234", "a: shape .* are not natural numbers"),
        ({"a": _entry(0, 4), "b": _entry(2, 6)}, b"123456", r"b: data begins at byte \d+, expected \d+ \(overlap"),
        ({"a": _entry(0, 4), "b": _entry(6, 8)}, b"12345678", "b: data begins at byte"),
        ({"a": _entry(0, 4)}, b"12345", "is too long"),
        (
            b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
            b"1",
            r"header repeats \['a'\]",
        ),
    ],
)
def test_malformed(tmp_path, header, data, reason):
    with pytest.raises(HeaderError, match=reason):
        read_header(_file(tmp_path / "x.safetensors", header, data))


def test_unreadable(tmp_path):
    (tmp_path / "x.safetensors").mkdir()
    with pytest.raises(HeaderError, match="cannot be read"):
        read_header(tmp_path / "x.safetensors")
