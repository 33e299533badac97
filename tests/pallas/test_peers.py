"""The child process that measures other houses' kernels, here with a child that answers without a GPU."""

import importlib.util

import pytest

from pallas import peers


def test_without_torch_a_peer_is_not_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with peers.PeerProcess("pallas.attn_res.peers", [(9, 1)]) as child, pytest.raises(ImportError, match="torch"):
        child.time((9, 1))


def test_a_child_answers_in_json_or_failed(monkeypatch, tmp_path):
    script = "import sys\nfor line in sys.stdin:\n    print('{\"us\": 2.5}' if '1' in line else 'no', flush=True)\n"
    (tmp_path / "answers.py").write_text(script)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with peers.PeerProcess("answers", [(1,), (2,)]) as child:
        assert child.time((1,)) == 2.5
        with pytest.raises(RuntimeError, match="no time"):
            child.time((2,))
