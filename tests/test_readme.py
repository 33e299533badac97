"""The README's Python runs as it stands, on the shipped checkpoint."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.skipif(not (ROOT / "checkpoints/nano/model.safetensors").is_file(), reason="checkpoints/nano is absent")
@pytest.mark.usefixtures("quick_compilation")
def test_python_blocks_run(capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    assert blocks
    scope: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), scope)
    assert scope["stream"].statistics.completion_tokens > 0
    assert capsys.readouterr().out


def test_commands_name_modules_that_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for module in set(re.findall(r"python -m ((?:k3jax|checkpoints|serving)[\w.]*)", text)):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module
