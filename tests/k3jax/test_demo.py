"""The demo on the shipped checkpoint: what a newcomer sees first."""

import ast

import pytest

from k3jax import api, demo


@pytest.mark.skipif(not (api.shipped_checkpoint() / "model.safetensors").is_file(), reason="checkpoints/nano is absent")
def test_the_demo_writes_python(capsys):
    assert demo.main() == 0
    out, err = capsys.readouterr()
    assert "tokens/s" in err
    for prompt in demo.PROMPTS:
        assert prompt in out
    assert ast.parse(demo.PROMPTS[0] + "    pass")  # the prompts themselves are the beginnings of Python
