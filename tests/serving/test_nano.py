"""The shipped model under every policy (minutes: its programs are compiled first)."""

import numpy as np
import pytest

from serving.launch import Sizes, launch
from serving.plan import Shape
from serving.request import Request
from serving.retention import Retention


@pytest.fixture(scope="module")
def core():
    from k3jax import api

    sizes = Sizes(rows=2, max_length=640, slots=24, chunks=(Shape(2, 64), Shape(1, 256)), table_widths=(10,))
    core = launch(api.load(), sizes, report=lambda line: None)
    yield core
    core.runner.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", ["", "prompt", "interval=64", "prompt,marconi", "decode-end", "prompt,marconi,decode-end,supersede"]
)
def test_two_turns_hit_and_say_what_a_cold_start_says(core, policy):
    tokens = np.random.default_rng(len(policy)).integers(0, 3800, 300).tolist()

    def ask(tokens, policy):
        item = Request(
            id=f"{len(tokens)} {policy} {core.counters.requests}",
            tokens=tokens,
            max_tokens=16,
            sampling={"temperature": 0.0},
            retention=Retention.parse(policy),
        )
        core.submit(item)
        outputs = core.run()[item.id]
        core.check_books()
        return [token for output in outputs for token in output.tokens], outputs[-1].final.cached_tokens

    core.flush()
    first, _ = ask(tokens, policy)
    again, cached = ask(tokens, policy)
    turn, cached_turn = ask([*tokens, *first, 5, 6, 7], policy)
    core.flush()
    cold, nothing = ask([*tokens, *first, 5, 6, 7], "")
    assert (first, turn, nothing) == (again, cold, 0)
    kept = Retention.parse(policy)
    assert cached == (256 if kept.prompt or kept.interval else 0)
    assert cached_turn == (315 if kept.decode_end else cached)
