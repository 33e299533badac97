"""Loading into shardings: each device gets exactly its part."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import checkpoints
from checkpoints import CheckpointError
from checkpoints.orbax_adapter import ocp
from k3jax import params


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), ("a", "b"))


def _dividing(shape, parts):
    return [axis for axis, size in enumerate(shape) if size % parts == 0]


def _first(mesh, spec):
    """The first dimension that can be split eight ways."""
    axes = _dividing(spec.shape, 8)
    return NamedSharding(mesh, PartitionSpec(*[None] * axes[0], ("a", "b")) if axes else PartitionSpec())


def _last(mesh, spec):
    """The last dimension split four ways, copies over the other mesh axis."""
    axes = _dividing(spec.shape, 4)
    return NamedSharding(mesh, PartitionSpec(*["b" if axis in axes[-1:] else None for axis in range(len(spec.shape))]))


def _two(mesh, spec):
    """Two dimensions split at once."""
    axes = _dividing(spec.shape, 4)
    names = {axes[0]: "b"} if axes else {}
    other = [axis for axis in _dividing(spec.shape, 2) if axis not in names]
    if other:
        names[other[-1]] = "a"
    return NamedSharding(mesh, PartitionSpec(*[names.get(axis) for axis in range(len(spec.shape))]))


@pytest.mark.parametrize("rule", [_first, _last, _two])
def test_every_device_has_its_part(checkpoint, config, mesh, rule):
    shardings = params.map_tree(lambda spec: rule(mesh, spec), params.model_specs(config))
    _, whole = checkpoints.load(checkpoint)
    _, tree = checkpoints.load(checkpoint, shardings=shardings)
    for array, sharding, expected in zip(
        jax.tree.leaves(tree), jax.tree.leaves(shardings), jax.tree.leaves(whole), strict=True
    ):
        assert array.sharding == sharding
        assert len(array.addressable_shards) == 8
        for shard in array.addressable_shards:
            assert shard.data.devices() == {shard.device}
            np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(expected)[shard.index])


def test_each_expert_is_read_only_for_its_device(checkpoint, config, mesh, monkeypatch):
    """With one expert per device, no expert's bytes are touched twice."""
    from checkpoints.source import OpenTensors

    views = []
    original = OpenTensors.view
    monkeypatch.setattr(OpenTensors, "view", lambda self, name: views.append(name) or original(self, name))
    shardings = params.map_tree(lambda spec: _first(mesh, spec), params.model_specs(config))
    checkpoints.load(checkpoint, shardings=shardings)
    packed = [name for name in views if name.endswith("weight_packed")]
    assert len(packed) == len(set(packed)) == 2 * 8 * 3


def test_ill_fitting_shardings_are_listed_before_reading(checkpoint, config, mesh):
    shardings = params.map_tree(lambda _: NamedSharding(mesh, PartitionSpec()), params.model_specs(config))
    shardings["norm"] = NamedSharding(mesh, PartitionSpec("a", "b"))
    del shardings["head"]
    shardings["extra"] = NamedSharding(mesh, PartitionSpec())
    three = jax.make_mesh((3,), ("c",), devices=jax.devices()[:3])
    shardings["layers"]["0"]["attention"]["a_log"] = NamedSharding(three, PartitionSpec("c"))
    with pytest.raises(CheckpointError) as error:
        checkpoints.load(checkpoint, shardings=shardings)
    named = sorted(problem.split(":")[0] for problem in error.value.problems)
    assert named == ["extra", "head", "layers.0.attention.a_log", "norm"]


def test_orbax_reads_the_same(checkpoint, config, mesh):
    """orbax's own safetensors reader, which needs no assembly for these, agrees."""
    names = {"embedding": "model.embed_tokens.weight", "head": "lm_head.weight", "norm": "model.norm.weight"}
    shardings = params.map_tree(lambda spec: _first(mesh, spec), params.model_specs(config))
    _, tree = checkpoints.load(checkpoint, shardings=shardings)
    abstract = {
        f"language_model.{name}": jax.ShapeDtypeStruct(tree[key].shape, tree[key].dtype, sharding=shardings[key])
        for key, name in names.items()
    }
    context = ocp.Context()
    context.checkpoint_layout = ocp.options.CheckpointLayout.SAFETENSORS
    with context:
        read = ocp.load(str(checkpoint), abstract)
    for key, name in names.items():
        array = read[f"language_model.{name}"]
        assert array.sharding == tree[key].sharding
        np.testing.assert_array_equal(np.asarray(array), np.asarray(tree[key]))
