import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from k3jax import params, sharding, sharding_local
from k3jax.config import k3, nano
from pallas import collectives


def test_single_is_one_device():
    layout = sharding.layout("single")
    assert layout.mesh.devices.size == 1
    shardings = layout.parameters(params.model_specs(nano()))
    assert all(part.spec == PartitionSpec(*[None] * len(part.spec)) for part in jax.tree.leaves(shardings))


def test_k3_is_split_evenly_by_tp8():
    """Everything large is divided by eight; only router, latent projections and norms are whole."""
    layout = sharding.layout("tp8")
    whole = 0
    for path, spec in params.flatten(params.model_specs(k3())):
        shape = layout.sharding(spec.axes, spec.shape).shard_shape(spec.shape)
        size = spec.array_dtype("bfloat16").itemsize
        if shape == spec.shape:
            whole += (
                size * jax.numpy.prod(jax.numpy.array(shape)).item() if len(shape) < 2 else size * shape[0] * shape[1]
            )
        elif path[-1] == "experts":
            assert shape[-1] * 8 == spec.shape[-1]
    assert whole < 12e9


def test_indivisible_axes_stay_whole():
    layout = sharding.layout("tp8")
    assert layout.sharding(("heads", None), (6, 4)).spec == PartitionSpec(None, None)
    assert layout.sharding(("heads", None), (16, 4)).spec == PartitionSpec("tensor", None)


def test_two_axes_on_one_mesh_axis_are_refused():
    layout = sharding.layout("tp2")
    with pytest.raises(sharding.ShardingError, match=r"would be split twice by mesh axis 'tensor'"):
        layout.sharding(("heads", "ffn"), (4, 4))


def test_unknown_preset():
    with pytest.raises(
        sharding.ShardingError, match=r"'tp3' is unknown, expected one of single, tp2, tp4, tp8, tp16, dep8"
    ):
        sharding.layout("tp3")


def test_too_few_devices():
    with pytest.raises(sharding.ShardingError, match="needs 8 devices, 2 are visible"):
        sharding.layout("tp8", jax.devices()[:2])


def test_sums_in_one_hop_need_gpus():
    with pytest.raises(
        sharding.ShardingError, match=r"'tp2-one-hop' does not fit .* not all devices are GPUs.*use tp2$"
    ):
        sharding.layout("tp2-one-hop")


def test_sums_of_plain_presets(monkeypatch, caplog):
    """In one hop where a trial has proved them; else the runtime's, with a note on GPUs; by name either."""
    assert all(sharding.layout(preset).inboxes is None for preset in ("tp2", "tp2-nccl", "tp8"))
    assert not caplog.messages
    group = collectives.Inboxes(jnp.zeros((2, 8), jnp.uint32), ())
    monkeypatch.setattr(collectives, "proved", lambda mesh: group)
    assert sharding.layout("tp2").inboxes is sharding.layout("tp2-one-hop").inboxes is group
    assert sharding.layout("tp2-nccl").inboxes is sharding.layout("dep8").inboxes is None

    monkeypatch.setattr(collectives, "proved", lambda mesh: NotImplementedError("GPU 1 is far away"))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert sharding.layout("tp2").inboxes is None
    assert caplog.messages == ["note mesh tp2: sums are NCCL's, which are slower than in one hop: GPU 1 is far away"]


def test_devices_that_a_trial_left_stuck(monkeypatch):
    def stuck(mesh):
        raise collectives.StuckError("the devices do not end their trial sums")

    monkeypatch.setattr(collectives, "proved", stuck)
    with pytest.raises(collectives.StuckError, match=r"'tp4': the devices do not end .*; start anew with tp4-nccl$"):
        sharding.layout("tp4")


def test_parameters_that_share_an_axis_are_split_together():
    """96 inner channels: eight devices divide weights and codes, but not the three scales of a row."""
    moe = dataclasses.replace(nano().moe, intermediate_size=96)
    config = dataclasses.replace(nano(), moe=moe)
    specs = params.layer_specs(config, 1)["ffn"]["experts"]
    for preset, axis in (("tp8", None), ("tp2", None), ("single", None)):
        parts = sharding.layout(preset).partitions(specs)
        assert {part[-1] for name, part in parts.items() if name.startswith("down")} == {axis}
    wide = params.layer_specs(dataclasses.replace(config, moe=dataclasses.replace(moe, intermediate_size=256)), 1)
    parts = sharding.layout("tp8").partitions(wide["ffn"]["experts"])
    assert {part[-1] for name, part in parts.items() if name.startswith("down")} == {"tensor"}
    assert {part[2] for name, part in parts.items() if name.startswith("gate_up")} == {"tensor"}


def test_terms_of_eight_devices_add_up():
    """Every kind of term, and rows of a table and experts that live on one device each."""
    layout, whole, split = sharding.layout("tp8"), PartitionSpec(), PartitionSpec("tensor")
    rng = np.random.default_rng(0)
    same, table = rng.standard_normal((3, 16)).astype(np.float32), rng.standard_normal((24, 16)).astype(np.float32)
    ids = np.array([0, 5, 23, 2, 3], np.int32)

    def local(same, columns, table):
        terms = (
            sharding_local.term_of("tensor", same),
            sharding_local.term_of_columns("tensor", columns),
            sharding_local.look_up("tensor", table, jnp.asarray(ids)),
        )
        sums = [sharding_local.add_up("tensor", term, jnp.dtype("float32")) for term in terms]
        mine = sharding_local.own_experts("tensor", jnp.asarray(ids)[:, None], 3)
        return *sums, sharding_local.own_part("tensor", same, 2, 1), mine

    run = layout.on_devices(
        local, (whole, PartitionSpec(None, "tensor"), split), (whole,) * 3 + (PartitionSpec(None, "tensor"),) * 2
    )
    summed, side_by_side, rows, parts, mine = jax.jit(run)(same, same, table)
    np.testing.assert_array_equal(summed, same)
    np.testing.assert_array_equal(side_by_side, same)
    np.testing.assert_array_equal(rows, table[ids])
    np.testing.assert_array_equal(parts, same)
    for expert, places in zip(ids, mine, strict=True):
        assert [(device, place) for device, place in enumerate(places) if place >= 0] == [(expert // 3, expert % 3)]
