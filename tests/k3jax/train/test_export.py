"""What is shipped is what was trained: packed weights, loss, and the way back."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import checkpoints
from k3jax import params
from k3jax.config import K3Config
from k3jax.model import K3
from k3jax.train import specs
from k3jax.train.forward import Batch, losses, rows_of


def test_an_exported_model_reloads_bit_exactly(small_model: K3Config, awake: dict, tmp_path: Path) -> None:
    packed = specs.packed_parameters(small_model, awake)
    checkpoints.export(tmp_path / "model", small_model, packed, max_shard_bytes=1 << 40)
    config, loaded = checkpoints.load(tmp_path / "model", dtype=jnp.bfloat16)
    assert config == small_model
    for (path, a), (_, b) in zip(params.flatten(packed), params.flatten(loaded), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=".".join(path))
    again = specs.packed_parameters(small_model, specs.master_parameters(small_model, loaded))
    for (path, a), (_, b) in zip(params.flatten(packed), params.flatten(again), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=".".join(path))


def test_packed_experts_decode_to_the_weights_of_the_training_graph(small_model: K3Config, awake: dict) -> None:
    used = specs.compute_parameters(specs.training_specs(small_model), awake, jnp.float32)
    shipped = specs.master_parameters(small_model, specs.packed_parameters(small_model, awake))
    for name in ("gate_up", "down"):
        for layer in small_model.moe_layers:
            trained, stored = (tree["layers"][str(layer)]["ffn"]["experts"][name] for tree in (used, shipped))
            np.testing.assert_array_equal(trained, stored)
            assert np.any(np.asarray(trained) != np.asarray(awake["layers"][str(layer)]["ffn"]["experts"][name]))


def test_the_packed_model_has_the_training_loss(small_model: K3Config, awake: dict, batch: Batch) -> None:
    """The shipped model, through the public modules, against the training graph's own number: within one per cent."""
    packed = specs.packed_parameters(small_model, awake)

    @jax.jit
    def trained(masters: dict) -> jax.Array:
        return losses(
            small_model, specs.compute_parameters(specs.training_specs(small_model), masters, jnp.bfloat16), batch
        ).nats

    @jax.jit
    def shipped(packed: dict) -> jax.Array:
        model = K3(small_model, packed, "xla")
        logits = model.logits(model(batch.ids[:, :-1], rows_of(batch.ids[:, :-1], small_model.pad_token_id)).hidden)
        nats = jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, batch.ids[:, 1:, None], axis=-1)[..., 0]
        return jnp.sum(nats * batch.weight)

    assert abs(float(shipped(packed)) / float(trained(awake)) - 1) < 0.01
