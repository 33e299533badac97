"""`make demo`: three prompts completed by the shipped model, and what it cost."""

import sys

from k3jax import program

PROMPTS = (
    "def fibonacci(n):\n",
    "import os\nimport re\n\n\ndef read_lines(path):\n",
    'class Stack:\n    """A last-in, first-out stack."""\n\n    def __init__(self):\n',
)
STOP = ("\n\n\n", "\n@", "\ndef ", "\nclass ", "\nif __name__")
"""What begins after the first top-level statement."""


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
    tokens, seconds, steps = 0, 0.0, 0
    for seed, prompt in enumerate(PROMPTS):
        sys.stdout.write(f"{'' if seed == 0 else chr(10)}{prompt}")
        stream = api.generate(model, prompt, max_tokens=160, temperature=0.5, top_p=0.95, seed=seed, stop=STOP)
        for piece in stream:
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")
        figures = stream.statistics
        tokens += figures.completion_tokens - figures.first_tokens
        seconds += figures.decode_seconds
        steps += figures.row_steps
    draft = f", {tokens / steps:.2f} tokens per step with the draft" if model.draft else ""
    size = model.weight_bytes / 1e6
    print(f"\n{size:.0f} MB of weights, {tokens / seconds:.0f} tokens/s{draft}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
