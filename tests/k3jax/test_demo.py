"""The demo on the shipped checkpoint: what a newcomer sees first."""

import ast
import re

import pytest

from k3jax import api, demo


@pytest.mark.slow
@pytest.mark.skipif(not (api.shipped_checkpoint() / "model.safetensors").is_file(), reason="checkpoints/nano is absent")
def test_the_demo_writes_python(capsys):
    assert demo.main() == 0
    out, err = capsys.readouterr()
    assert "tokens/s" in err
    if api.shipped_checkpoint().with_name("nano-dspark").is_dir():
        assert re.search(r"with the draft: \d\.\d\d tokens per step, \d+\.\d\d x plain decoding \(\d+ tokens/s\)", err)
    starts = [out.index(prompt) for prompt in demo.PROMPTS]
    texts = [out[start:end] for start, end in zip(starts, [*starts[1:], len(out)], strict=True)]
    assert sum(map(parses, texts)) >= 2


def parses(text):
    """Whether a completion is valid Python; one that the limit cut off may lose its last eight lines."""
    lines = text.rstrip().split("\n")
    for kept in range(len(lines), max(len(lines) - 9, 1), -1):
        try:
            ast.parse("\n".join(lines[:kept]))
        except SyntaxError:
            continue
        return True
    return False
