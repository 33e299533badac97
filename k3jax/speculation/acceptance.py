"""Which drafted tokens stand: standard and block rejection sampling. Both leave the target's distribution unchanged.

p are the target's distributions at the G drafted positions and one more, q those that the drafts were drawn from,
x the drafts, u independent uniforms. Greedy rows are the case of one-hot p and q. `limit` may end a row's block early:
only its first `limit` drafts take part. Whether the limit is i must follow from the first i drafts alone.
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

Rule = Literal["standard", "block"]


class Accepted(NamedTuple):
    """How many drafts stand, and the distribution of the token that follows them."""

    count: Int32[Array, " B"]
    following: Float32[Array, "B V"]


def _at(probability: Float32[Array, "B G V"], token: Int32[Array, "B G"]) -> Float32[Array, "B G"]:
    return jnp.take_along_axis(probability, token[..., None], axis=-1)[..., 0]


def _ratio(p: Float32[Array, "B G V"], q: Float32[Array, "B G V"], x: Int32[Array, "B G"]) -> Float32[Array, "B G"]:
    """p(x) / q(x); a token of q-mass zero cannot have been drawn, except by a rounding that must not divide by it."""
    drawn = _at(q, x)
    return _at(p, x) / jnp.where(drawn > 0, drawn, 1.0)


def _places(x: Int32[Array, "B G"]) -> Int32[Array, "1 G"]:
    """1 to G."""
    return jnp.arange(1, x.shape[1] + 1, dtype=jnp.int32)[None]


def standard_chances(
    p: Float32[Array, "B W V"],
    q: Float32[Array, "B G V"],
    x: Int32[Array, "B G"],
    limit: Int32[Array, " B"],
) -> Float32[Array, "B G"]:
    """Chance that each draft is accepted once all before it are (Leviathan et al. 2023, Chen et al. 2023)."""
    chance = jnp.minimum(_ratio(p[:, :-1], q, x), 1.0)
    return jnp.where(_places(x) <= limit[:, None], chance, 0.0)


def prefix_mass(
    p: Float32[Array, "B W V"], q: Float32[Array, "B G V"], x: Int32[Array, "B G"]
) -> Float32[Array, "B W"]:
    """P_i = min(1, P_{i-1} p_i(x_i) / q_i(x_i)) of block verification, from P_0 = 1."""
    ratio = _ratio(p[:, :-1], q, x)
    mass = [jnp.ones(x.shape[0], jnp.float32)]
    for i in range(x.shape[1]):
        mass.append(jnp.minimum(mass[-1] * ratio[:, i], 1.0))
    return jnp.stack(mass, axis=1)


def block_chances(
    p: Float32[Array, "B W V"],
    q: Float32[Array, "B G V"],
    x: Int32[Array, "B G"],
    limit: Int32[Array, " B"],
) -> Float32[Array, "B G"]:
    """h_i: chance that the block is cut at i, unless it is cut later (Sun et al. 2024, arXiv 2403.10444).

    h is P at the limit, as it is after the last draft in the paper.
    """
    mass = prefix_mass(p, q, x)
    inner = mass[:, 1:-1]
    excess = jnp.sum(jnp.maximum(inner[..., None] * p[:, 1:-1] - q[:, 1:], 0.0), axis=-1)
    chance = jnp.where(inner >= 1, 1.0, excess / jnp.maximum(excess + 1.0 - inner, 1e-30))
    chance = jnp.concatenate([chance, mass[:, -1:]], axis=1)
    last = limit[:, None]
    return jnp.where(_places(x) < last, chance, jnp.where(_places(x) == last, mass[:, 1:], 0.0))


def accept(
    rule: Rule,
    p: Float32[Array, "B W V"],
    q: Float32[Array, "B G V"],
    x: Int32[Array, "B G"],
    u: Float32[Array, "B G"],
    limit: Int32[Array, " B"],
) -> Accepted:
    """Applies `rule`; u lies in [0, 1)."""
    if x.shape[1] == 0:
        return Accepted(jnp.zeros(x.shape[0], jnp.int32), p[:, 0])
    if rule == "standard":
        count = jnp.sum(jnp.cumprod((u < standard_chances(p, q, x, limit)).astype(jnp.int32), axis=1), axis=1)
        weight = jnp.ones(count.shape, jnp.float32)
    else:
        cut = u < block_chances(p, q, x, limit)
        count = jnp.max(jnp.where(cut, _places(x), 0), axis=1)
        weight = jnp.take_along_axis(prefix_mass(p, q, x), count[:, None], axis=1)[:, 0]
    return Accepted(count.astype(jnp.int32), following(p, q, count, weight, limit))


def following(
    p: Float32[Array, "B W V"],
    q: Float32[Array, "B G V"],
    count: Int32[Array, " B"],
    weight: Float32[Array, " B"],
    limit: Int32[Array, " B"],
) -> Float32[Array, "B V"]:
    """Distribution after `count` drafts: what is left of weight * p after taking q away; p itself at the limit."""
    rows = count[:, None, None]
    padded = jnp.concatenate([q, jnp.zeros_like(p[:, :1])], axis=1)
    target = jnp.take_along_axis(p, rows, axis=1)[:, 0]
    proposed = jnp.take_along_axis(padded, rows, axis=1)[:, 0]
    last = (count == limit)[:, None]
    residual = jnp.maximum(jnp.where(last, target, weight[:, None] * target - proposed), 0.0)
    total = jnp.sum(residual, axis=-1, keepdims=True)
    # Equal distributions leave nothing but rounding; they also reject nothing, so any law will do.
    return jnp.where(total > 1e-12, residual / jnp.maximum(total, 1e-30), target)
