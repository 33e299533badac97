"""Pieces of a sequence as affine maps of the state."""

import jax
import jax.numpy as jnp
import pytest

from pallas import kda


def piece(case, part, window, op="affine", state=None):
    tokens = [x[:, part] for x in case.tokens[:3]]
    length = jnp.full(tokens[0].shape[0], tokens[0].shape[1], jnp.int32)
    if op == "affine":
        return kda.affine(*tokens, case.tokens[3], window, length, implementation="xla")
    return kda.prefill(*tokens, case.tokens[3], state, window, length, implementation="xla")


def cut_windows(case, size):
    raw = jnp.concatenate([case.window, case.tokens[0][..., :3, :]], axis=1)
    return [raw[:, start : start + 3] for start in range(0, case.tokens[0].shape[1], size)]


@pytest.mark.parametrize("gates", ["random", "slow"])
def test_a_piece_maps_the_state(gates, make_case, float64_recurrence, close):
    case = make_case(2, 70, 2, 32, gates=gates)
    pair = piece(case, slice(None), case.window)
    expected = float64_recurrence(case, [70, 70])["states"][:, -1]
    applied = jnp.matmul(pair.transition, case.state, precision="highest") + pair.local_state
    close(applied, expected, 5e-6, "state")


def test_pieces_compose(make_case, close):
    case = make_case(1, 60, 2, 32, gates="slow")
    windows = cut_windows(case, 20)
    pieces = [piece(case, slice(20 * n, 20 * n + 20), windows[n]) for n in range(3)]
    whole = piece(case, slice(None), case.window)
    left = kda.compose(kda.compose(pieces[0], pieces[1]), pieces[2])
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *pieces)
    scanned = jax.tree.map(lambda x: x[-1], jax.lax.associative_scan(jax.vmap(kda.compose), stacked))
    for name in ("transition", "local_state"):
        close(getattr(left, name), getattr(whole, name), 5e-6, name)
        close(getattr(scanned, name), getattr(whole, name), 5e-6, f"scanned {name}")
