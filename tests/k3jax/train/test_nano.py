"""The shipped model: its files, what its card says, and what it writes."""

import ast
import lzma
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import checkpoints
import k3jax
from k3jax import chat, params
from k3jax.config import K3Config, nano
from k3jax.train import specs

DIRECTORY = Path(checkpoints.__path__[0]) / "nano"
PROMPTS = (
    "def fibonacci(n):",
    "import os\nimport re\n\n\ndef read_lines(path):\n",
    'class Stack:\n    """A last-in, first-out stack."""\n\n    def __init__(self):\n',
)
TASKS = (
    "write a function that returns the sum of two numbers",
    "write a function that reverses a string",
    "Write a function that checks whether a number is even.",
    "write a Python function that reads a file and returns its lines",
    "Write a function that returns the largest value of a list.",
    "Please write a function that converts a string to lower case.",
    "write a function that counts the words in a text",
    "Write a function that joins two paths.",
    "write a function that removes duplicates from a list",
    "Write a Python function that computes the mean of an array.",
)
SAMPLING = {"temperature": 0.8, "top_p": 0.95}


def test_the_files_are_small_and_of_the_released_format() -> None:
    assert sum(path.stat().st_size for path in DIRECTORY.iterdir()) <= 40_000_000
    assert K3Config.from_file(DIRECTORY) == nano()
    tensors = params.hf_tensors(params.model_specs(nano()))
    assert checkpoints.check(DIRECTORY, nano()).tensors.keys() == tensors.keys()


def test_the_card_and_the_list_of_files_name_permissive_sources_only() -> None:
    rows = [line.split("\t") for line in lzma.open(DIRECTORY / "training_files.tsv.xz", "rt").read().splitlines()]
    assert rows[0] == ["package", "licence", "split", "file", "sha256"]
    assert len({(row[0], row[3]) for row in rows[1:]}) == len(rows) - 1 > 10_000
    licences = {row[1] for row in rows[1:]}
    assert all(re.search(r"MIT|BSD|Apache|PSF|Python Software Foundation", licence) for licence in licences)
    assert not any(re.search(r"GPL|MPL|Proprietary", licence) for licence in licences)
    assert {row[2] for row in rows[1:]} == {"training", "validation"}
    card = (DIRECTORY / "README.md").read_text(encoding="utf-8")
    for word in ("bits per byte", "5-gram", "Quantile Balancing", "Apache-2.0", "H200", "max / mean", "training_files.tsv.xz"):
        assert word in card, word


def test_going_through_the_trainer_and_back_changes_no_byte() -> None:
    config, tree = checkpoints.load(DIRECTORY, dtype=jnp.bfloat16)
    again = specs.packed_parameters(config, specs.master_parameters(config, tree))
    for (path, a), (_, b) in zip(params.flatten(tree), params.flatten(again), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=".".join(path))


@pytest.fixture(scope="module")
def model() -> k3jax.Model:
    return k3jax.load(DIRECTORY)


def first_statement(prompt: str, text: str) -> str:
    """The code up to the next top-level statement; of a text that was cut off, without its unfinished tail."""
    lines = (prompt + text).split("\n")
    for i in range(prompt.count("\n") + 1, len(lines)):
        if lines[i] and not lines[i][0].isspace() and not lines[i].startswith((")", "]", "}")):
            return "\n".join(lines[:i])
    lines.pop()
    while lines and (not lines[-1].strip() or lines[-1].rstrip().endswith((":", ",", "(", "["))):
        lines.pop()
    return "\n".join(lines)


def parses(code: str) -> bool:
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return False
    return len(list(ast.walk(tree))) > 15


@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPTS, ids=["function", "module", "class"])
def test_completions_are_valid_python_in_two_of_three_seeds(model: k3jax.Model, prompt: str) -> None:
    texts = ["".join(k3jax.generate(model, prompt, max_tokens=200, seed=seed, **SAMPLING)) for seed in range(3)]
    codes = [first_statement(prompt, text) for text in texts]
    assert sum(map(parses, codes)) >= 2, "\n-----\n".join(codes)


@pytest.mark.slow
def test_chat_answers_in_the_right_channels_and_stops(model: k3jax.Model) -> None:
    tokenizer = model.tokenizer
    good = []
    for i, task in enumerate(TASKS):
        effort = ("low", "high", "max")[i % 3]
        ids = chat.render(tokenizer, [{"role": "user", "content": task}], thinking_effort=effort)
        completion = list(k3jax.generate(model, ids, max_tokens=400, as_ids=True, seed=i, **SAMPLING))
        text = tokenizer.decode(completion)
        shape = r"[^|]*<\|close\|>think<\|sep\|><\|open\|>response<\|sep\|>def [^|]*<\|close\|>response<\|sep\|><\|close\|>message<\|sep\|>(<\|end_of_msg\|>)?"
        stopped = model.config.eos_token_id in completion or text.endswith("<|close|>message<|sep|>")
        good.append(bool(re.fullmatch(shape, text)) and stopped)
    assert sum(good) >= 9, good
