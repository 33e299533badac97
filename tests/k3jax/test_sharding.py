import jax
import pytest
from jax.sharding import PartitionSpec

from k3jax import params, sharding
from k3jax.config import k3, nano


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
    with pytest.raises(sharding.ShardingError, match=r"'tp3' is unknown, expected one of single, tp2, tp8"):
        sharding.layout("tp3")


def test_too_few_devices():
    with pytest.raises(sharding.ShardingError, match="needs 8 devices, 2 are visible"):
        sharding.layout("tp8", jax.devices()[:2])
