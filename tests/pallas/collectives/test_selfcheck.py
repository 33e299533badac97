"""The trial of sums in one hop, with sums that are right, wrong in one place, lost or late."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from pallas import collectives
from pallas.collectives import inboxes, selfcheck


@pytest.fixture
def trial(monkeypatch):
    """Runs the trial on two fake devices with small sums; `spoil` changes a device's result."""
    lines = [line._replace(size=min(line.size, 24)) for line in selfcheck.LINES]
    monkeypatch.setattr(selfcheck, "LINES", tuple(lines[::2]))
    mesh = jax.make_mesh((2,), ("t",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def run(spoil=lambda total, x: total, **options):
        def add(table, x, dtype):
            assert table.shape == (1, inboxes.layout.row_words(2))
            return spoil(jax.lax.psum(x.astype(jnp.float32), "t").astype(dtype), x)

        selfcheck.check(mesh, jnp.asarray(inboxes.rows(range(2))), add, **options)

    return run


def test_right_sums_pass(trial):
    trial()


def test_one_wrong_bit_is_found_with_its_device(trial):
    """On the second device alone, in the last place of a number, of sums in float32."""

    def spoil(total, x):
        off = jnp.where(jax.lax.axis_index("t") == 1, 1, 0).astype(jnp.uint32)
        if total.dtype != jnp.float32:
            return total
        return jax.lax.bitcast_convert_type(
            jax.lax.bitcast_convert_type(total, jnp.uint32).at[0, 3].add(off), "float32"
        )

    with pytest.raises(selfcheck.Unproved, match=r"^2 numbers .* wrong on devices 1 \(0 never came; call 1 of 32\)$"):
        trial(spoil)


def test_words_that_never_come_and_terms_left_out(trial):
    with pytest.raises(selfcheck.Unproved, match=r"on devices 0, 1 \(8 never came"):
        trial(lambda total, x: total.at[0, 5].set(jnp.nan))
    with pytest.raises(selfcheck.Unproved, match=r"on devices 0, 1 \(0 never came"):
        trial(lambda total, x: x.astype(total.dtype))


def test_devices_that_do_not_end(trial):
    def late(total, x):
        def wait(total):
            time.sleep(0.05)
            return total

        return jax.pure_callback(wait, total, total)

    with pytest.raises(selfcheck.StuckError, match=r"do not end .* within 0\.02 s"):
        trial(late, patience=0.02)


def test_terms_differ_by_device_and_need_no_rounding():
    line = selfcheck.Line(512, jnp.bfloat16, jnp.bfloat16)
    first, second = (np.asarray(selfcheck.draw(jnp.uint32(7), jnp.uint32(rank), line), np.float32) for rank in (0, 1))
    assert np.mean(first == second) < 0.05
    assert abs(first.mean()) < 0.05
    assert first.min() < -0.45
    assert first.max() > 0.45
    wide = np.asarray(selfcheck.draw(jnp.uint32(7), jnp.uint32(0), line._replace(kind=jnp.float32)))
    np.testing.assert_array_equal(first, np.floor(wide * 128) / 128)


def test_no_inboxes_without_gpus():
    mesh = jax.make_mesh((2,), ("t",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    reason = collectives.proved(mesh)
    assert isinstance(reason, NotImplementedError)
    assert "not all devices are GPUs" in str(reason)
    assert collectives.proved(mesh) is reason
