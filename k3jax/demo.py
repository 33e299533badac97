"""`make demo`: three prompts completed by the shipped model, and what it cost."""

import sys
from typing import TYPE_CHECKING

from k3jax import program, speedup

if TYPE_CHECKING:
    from k3jax.generation.results import Statistics

PROMPTS = (
    "def fibonacci(n):\n",
    "import os\nimport re\n\n\ndef read_lines(path):\n",
    'class Stack:\n    """A last-in, first-out stack."""\n\n    def __init__(self):\n',
)
STOP = ("\n\n\n", "\n@", "\ndef ", "\nclass ", "\nif __name__")
"""What begins after the first top-level statement."""
SETTINGS = {"temperature": 0.5, "top_p": 0.95}
PLAIN_TOKENS = 96
"""Decoded without the draft, for comparison."""


def main() -> int:
    """Runs the program; the exit code."""
    return program.run(demo)


def demo() -> int:
    """Streams each completion after its prompt; figures go to standard error."""
    import jax
    import jax.numpy as jnp

    from k3jax import api

    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    with program.status("loading the model"):
        model = api.load(dtype=dtype, draft="auto")
    figures = []
    for seed, prompt in enumerate(PROMPTS):
        sys.stdout.write(f"{'' if seed == 0 else chr(10)}{prompt}")
        stream = api.generate(model, prompt, max_tokens=160, seed=seed, stop=STOP, **SETTINGS)
        for piece in stream:
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")
        figures.append(stream.statistics)
    seconds = sum(item.decode_seconds for item in figures)
    tokens = sum(item.completion_tokens - item.first_tokens for item in figures)
    size = model.weight_bytes / 1e6
    print(f"\n{size:.0f} MB of weights, {tokens / seconds:.0f} tokens/s", file=sys.stderr)
    if model.draft is not None:
        with program.status("timing the model without its draft"):
            alone = speedup.plain(model, PROMPTS[0], PLAIN_TOKENS, **SETTINGS)
        steps = sum(item.row_steps for item in figures)
        print(draft_line(tokens / steps, seconds / tokens, alone), file=sys.stderr)
    return 0


def draft_line(per_step: float, seconds_per_token: float, alone: "Statistics") -> str:
    """What the draft gained or cost."""
    ratio = alone.milliseconds_per_token / (1e3 * seconds_per_token)
    rate = 1e3 / alone.milliseconds_per_token
    return f"with the draft: {per_step:.2f} tokens per step, {ratio:.2f} x plain decoding ({rate:.0f} tokens/s)"


if __name__ == "__main__":
    sys.exit(main())
