"""The shipped model: its files, what its card says, and what it writes."""

import ast
import lzma
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import checkpoints
import k3jax
from k3jax import chat, params
from k3jax.config import K3Config, nano
from k3jax.train.quantize import pack
from pallas.moe import dequantize

DIRECTORY = Path(checkpoints.__path__[0]) / "nano"
PROMPTS = (
    "def fibonacci(n):",
    "import os\nimport re\n\n\ndef read_lines(path):\n",
    'class Stack:\n    """A last-in, first-out stack."""\n\n    def __init__(self):\n',
)
TASKS = tuple(Path(__file__).with_name("tasks.txt").read_text(encoding="utf-8").splitlines())
CODE = {"temperature": 0.6, "top_p": 0.95}
CHAT = {"temperature": 1.0, "top_p": 0.95}
"""What Moonshot recommends for K3."""
UNFINISHED = 8
"""Lines of a text that was cut off in the middle of a statement."""
ANSWER = re.compile(
    r"((?!<\|).)*<\|close\|>think<\|sep\|><\|open\|>response<\|sep\|>def ((?!<\|).)*"
    r"<\|close\|>response<\|sep\|><\|close\|>message<\|sep\|>(<\|end_of_msg\|>)?",
    flags=re.DOTALL,
)
"""Think channel, response channel with a function, end of the message."""


def test_the_files_are_small_and_of_the_released_format() -> None:
    assert sum(path.stat().st_size for path in DIRECTORY.iterdir()) <= 40_000_000
    assert K3Config.from_file(DIRECTORY) == nano()
    tensors = params.hf_tensors(params.model_specs(nano()))
    assert checkpoints.check(DIRECTORY, nano()).tensors.keys() == tensors.keys()


def test_the_card_and_the_list_of_files_name_permissive_sources_only() -> None:
    with lzma.open(DIRECTORY / "training_files.tsv.xz", "rt") as file:
        rows = [line.split("\t") for line in file.read().splitlines()]
    assert rows[0] == ["package", "licence", "split", "file", "sha256"]
    assert len({(row[0], row[3]) for row in rows[1:]}) == len(rows) - 1 > 10_000
    licences = {row[1] for row in rows[1:]}
    assert all(re.search(r"MIT|BSD|Apache|PSF|Python Software Foundation", licence) for licence in licences)
    assert not any(re.search(r"GPL|MPL|Proprietary", licence) for licence in licences)
    assert {row[2] for row in rows[1:]} == {"training", "validation"}
    card = (DIRECTORY / "README.md").read_text(encoding="utf-8")
    for word in (
        "bits per byte",
        "5-gram",
        "Quantile Balancing",
        "Apache-2.0",
        "H200",
        "max / mean",
        "training_files.tsv.xz",
    ):
        assert word in card, word


@pytest.mark.parametrize("layer", [1, 12])
def test_quantising_the_shipped_experts_again_changes_no_byte(layer: int) -> None:
    _, tree = checkpoints.load(DIRECTORY, dtype=jnp.bfloat16)
    experts = tree["layers"][str(layer)]["ffn"]["experts"]
    for name in ("gate_up", "down"):
        stored = experts[f"{name}_packed"], experts[f"{name}_scale"]
        again = jax.jit(lambda packed, scale: pack(dequantize(packed, scale)))(*stored)
        for a, b in zip(stored, again, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def model() -> k3jax.Model:
    return k3jax.load(DIRECTORY)


def first_statement(prompt: str, text: str) -> tuple[str, bool]:
    """The code up to the next top-level statement, and whether there was one (otherwise the text was cut off)."""
    lines = (prompt + text).split("\n")
    for i in range(prompt.count("\n") + 1, len(lines)):
        if lines[i] and not lines[i][0].isspace() and not lines[i].startswith((")", "]", "}")):
            return "\n".join(lines[:i]), True
    return "\n".join(lines), False


def parses(prompt: str, text: str) -> bool:
    """Whether the completed statement is valid; one that was cut off may lose its last, unfinished lines."""
    code, complete = first_statement(prompt, text)
    lines = code.split("\n")
    for dropped in range(1 if complete else 1 + min(UNFINISHED, len(lines) // 2)):
        try:
            tree = ast.parse("\n".join(lines[: len(lines) - dropped]))
        except SyntaxError:
            continue
        return len(list(ast.walk(tree))) > 15
    return False


@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPTS, ids=["function", "module", "class"])
def test_completions_are_valid_python_in_two_of_three_seeds(model: k3jax.Model, prompt: str) -> None:
    texts = ["".join(k3jax.generate(model, prompt, max_tokens=200, seed=seed, **CODE)) for seed in range(3)]
    assert sum(parses(prompt, text) for text in texts) >= 2, "\n-----\n".join(texts)


@pytest.mark.slow
def test_chat_answers_in_the_right_channels_and_stops(model: k3jax.Model) -> None:
    prompts = [
        chat.render(model.tokenizer, [{"role": "user", "content": task}], thinking_effort=("low", "high", "max")[i % 3])
        for i, task in enumerate(TASKS)
    ]
    completions: list[list[int]] = [[] for _ in prompts]
    stream = k3jax.generate(model, prompts, max_tokens=480, as_ids=True, seed=0, **CHAT)
    for row, id_ in stream:
        completions[row].append(id_)
    good = [bool(ANSWER.fullmatch(model.tokenizer.decode(ids))) for ids in completions]
    assert sum(good) >= 9, good
    assert sum(result.finish_reason == "stop" for result in stream.results) >= 9
