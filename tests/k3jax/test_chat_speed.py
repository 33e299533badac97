"""How long a prompt and an output take: without the tests' type checks, so in another process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from k3jax import chat

# Prints the least process time of some rounds, which a loaded machine hardly changes.
RENDER = """
import sys, time
from k3jax import chat, tokenizer

vocabulary = tokenizer.load(sys.argv[1])
text = "def function(argument: int) -> str:\\n    return f'value {argument} of {len(name)} 漢字'\\n" * 12
messages = [{"role": role, "content": text} for role in ("user", "assistant")] * (500_000 // len(text.encode()))
seconds = []
for _ in range(3):
    start = time.process_time()
    chat.render(vocabulary, messages)
    seconds.append(time.process_time() - start)
print(min(seconds) * 1e6 / sum(len(message["content"].encode()) for message in messages))
"""
PARSE = """
import sys, time
from k3jax import chat, tokenizer
from k3jax.parse import StreamParser

vocabulary = tokenizer.load(sys.argv[1])
results = []
for repeats in (300, 3000):
    call = {"function": {"name": "f", "arguments": {"text": "x y z " * repeats, "list": list(range(repeats))}}}
    message = {"role": "assistant", "content": "The answer is 42. " * repeats, "tool_calls": [call]}
    ids = chat.render_completion(vocabulary, message)
    seconds = []
    for _ in range(5):
        parser = StreamParser(vocabulary)
        start = time.process_time()
        for id_ in ids:
            parser.push(id_)
        seconds.append(time.process_time() - start)
    results.append(min(seconds) * 1e6 / len(ids))
print(results)
"""


def measured(program: str, vocabulary: Path) -> object:
    command = [sys.executable, "-c", program, str(vocabulary)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(chat.__file__).parents[2])
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.usefixtures("released")
def test_rendering_a_megabyte_is_fast(shared: Path) -> None:
    seconds = measured(RENDER, shared / "tokenizer")
    assert seconds < 0.5, f"{seconds:.2f} s for a megabyte"


@pytest.mark.usefixtures("released")
def test_parsing_is_fast_and_constant_per_token(shared: Path) -> None:
    short, long = measured(PARSE, shared / "tokenizer")
    assert max(short, long) < 5, f"{short:.1f} and {long:.1f} microseconds a token"
    assert long < 2 * short, f"{short:.1f} microseconds a token grow to {long:.1f} with the length"
