"""Hash manifests notice what neither format notices by itself."""

import hashlib
import json

import pytest

import checkpoints
from checkpoints import CheckpointError
from checkpoints.hashing import verify_hashes, weight_files, write_hashes


def _flip(file, position=-1):
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


def test_manifest_holds_plain_digests(checkpoint):
    write_hashes(checkpoint, checkpoint / "sha256.json")
    files = json.loads((checkpoint / "sha256.json").read_text())["files"]
    assert sorted(files) == ["part-0.safetensors", "part-1.safetensors", "part-2.safetensors"]
    for file, digest in files.items():
        assert digest == hashlib.sha256((checkpoint / file).read_bytes()).hexdigest()
    assert verify_hashes(checkpoint, checkpoint / "sha256.json") == 3


def test_a_flipped_bit_is_seen(checkpoint):
    write_hashes(checkpoint, checkpoint / "sha256.json")
    _flip(checkpoint / "part-1.safetensors")
    checkpoints.check(checkpoint)  # headers cannot show it
    with pytest.raises(CheckpointError, match=r"part-1\.safetensors: SHA-256 is \w{64}, expected \w{64}") as error:
        verify_hashes(checkpoint, checkpoint / "sha256.json")
    assert len(error.value.problems) == 1


def test_a_flipped_bit_in_orbax_is_seen(checkpoint, tmp_path):
    checkpoints.save(tmp_path / "saved", *checkpoints.load(checkpoint))
    write_hashes(tmp_path / "saved", tmp_path / "hashes.json")
    files = weight_files(tmp_path / "saved")
    assert len(files) > 4
    largest = max((tmp_path / "saved" / file for file in files), key=lambda file: file.stat().st_size)
    _flip(largest, largest.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=largest.name):
        verify_hashes(tmp_path / "saved", tmp_path / "hashes.json")


def test_missing_and_unlisted_files(checkpoint):
    write_hashes(checkpoint, checkpoint / "sha256.json")
    (checkpoint / "part-0.safetensors").rename(checkpoint / "part-9.safetensors")
    with pytest.raises(CheckpointError) as error:
        verify_hashes(checkpoint, checkpoint / "sha256.json")
    assert list(error.value.problems) == ["part-0.safetensors: missing", "part-9.safetensors: not in sha256.json"]


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"files": 3}'])
def test_broken_manifest(checkpoint, text):
    (checkpoint / "sha256.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"sha256\.json: is not a hash manifest"):
        verify_hashes(checkpoint, checkpoint / "sha256.json")


def test_unwritable_manifest(checkpoint):
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_hashes(checkpoint, checkpoint / "nowhere" / "sha256.json")
