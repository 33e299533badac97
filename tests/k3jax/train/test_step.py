import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints import orbax_adapter
from k3jax import params
from k3jax.config import K3Config
from k3jax.train import specs, step
from k3jax.train.forward import Batch, losses
from k3jax.train.report import Journal
from k3jax.train.run import RETIMED, Phase, Progress, Run, place, place_whole

FLOAT32 = {"dtype": jnp.float32, "remat": True}
UNUSED = ("layers", "0", "attention_res")
"""Nothing is frozen before the first layer, so its first AttnRes read is the identity."""


@pytest.fixture(scope="module")
def gradients(small_model: K3Config, awake: dict, batch: Batch) -> tuple:
    return jax.jit(lambda masters, batch: step.gradients(small_model, masters, batch, **FLOAT32))(awake, batch)


def controls(mesh: jax.sharding.Mesh, rate: float = 1e-3) -> step.Controls:
    return place_whole(step.Controls(np.float32(rate), np.bool_(True)), mesh)


@pytest.fixture(scope="module")
def one_device(small_model: K3Config) -> tuple:
    mesh = step.data_mesh(jax.devices()[:1])
    return mesh, step.make_step(small_model, mesh, **FLOAT32, muon_dtype=jnp.float32)


@pytest.fixture(scope="module")
def start(small_model: K3Config) -> step.TrainState:
    mesh = step.data_mesh(jax.devices()[:1])
    return jax.device_get(step.create_state(small_model, 0, mesh, muon_dtype=jnp.float32))


def test_every_parameter_gets_a_finite_gradient(gradients: tuple) -> None:
    result, gradient = gradients
    assert 3 < float(result.nats / result.weight) < 12
    for path, leaf in params.flatten(gradient):
        assert np.isfinite(np.asarray(leaf)).all(), path
        silent = path[:3] == UNUSED or path[-1] == "correction_bias"
        assert bool(np.any(np.asarray(leaf))) != silent, path


def test_a_directional_derivative_matches_a_difference(
    small_model: K3Config, awake: dict, batch: Batch, gradients: tuple
) -> None:
    _, gradient = gradients
    # Quantised experts are piecewise constant in their masters, so they stay where they are.
    direction = {
        path: jnp.zeros_like(leaf)
        if "experts" in path or "router" in path
        else leaf / (jnp.linalg.norm(leaf.reshape(-1)) + 1e-9)
        for path, leaf in params.flatten(gradient)
    }
    direction = specs.nest(direction)

    @jax.jit
    def nats(size: jax.Array) -> jax.Array:
        moved = jax.tree.map(lambda master, way: master + size * way, awake, direction)
        return losses(
            small_model, specs.compute_parameters(specs.training_specs(small_model), moved, jnp.float32), batch
        ).nats

    slope = float(
        sum(jnp.vdot(a, b) for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(direction), strict=True))
    )
    # A step that is large enough to change a router's choice measures a jump instead of the slope.
    size = 2e-5
    difference = float(nats(jnp.float32(size)) - nats(jnp.float32(-size))) / (2 * size)
    assert abs(difference / slope - 1) < 0.03


def test_eight_devices_and_micro_batches_equal_one(
    small_model: K3Config, batch: Batch, one_device: tuple, start: step.TrainState
) -> None:
    mesh, alone = one_device
    state, metrics = alone(place_whole(start, mesh), place(batch, mesh), controls(mesh))
    many = step.data_mesh()
    assert many.size == 8
    split = step.make_step(small_model, many, **FLOAT32, micro_batches=2, muon_dtype=jnp.float32)
    other, sharded = split(place_whole(start, many), place(batch, many), controls(many))
    np.testing.assert_array_equal(sharded.load, metrics.load)
    np.testing.assert_allclose(sharded.loss, metrics.loss, rtol=1e-5)
    np.testing.assert_allclose(sharded.gradient_norm, metrics.gradient_norm, rtol=1e-4)
    for (path, a), (_, b) in zip(params.flatten(state.masters), params.flatten(other.masters), strict=True):
        if path[-1] == "correction_bias":
            np.testing.assert_array_equal(a, b)
            assert np.any(np.asarray(a))
    assert int(metrics.load.sum()) == 2 * 2 * int((np.asarray(batch.ids)[:, :-1] != small_model.pad_token_id).sum())


def _run(
    small_model: K3Config, batch: Batch, one_device: tuple, start: step.TrainState, directory, journal: Journal
) -> Run:
    mesh, train_step = one_device
    rows = jax.device_get(batch)
    phase = Phase(
        name="pretrain",
        batches=lambda i: Batch(np.roll(rows.ids, i, 0), np.roll(rows.weight, i, 0)),
        peak=3e-3,
        steps=6,
    )
    return Run(
        config=small_model,
        mesh=mesh,
        step=train_step,
        state=place_whole(start, mesh),
        phases=[phase],
        journal=journal,
        directory=directory,
        save=orbax_adapter.write,
        log_every=1,
    )


def test_a_resumed_run_is_bit_identical(
    small_model: K3Config,
    batch: Batch,
    one_device: tuple,
    start: step.TrainState,
    tmp_path,
) -> None:
    with Journal(tmp_path / "log.jsonl") as journal:
        whole = _run(small_model, batch, one_device, start, tmp_path / "whole", journal)
        whole.directory.mkdir()
        expected = jax.device_get(whole.train())
        first = _run(small_model, batch, one_device, start, tmp_path / "parts", journal)
        first.directory.mkdir()
        first.train(stop_after=2)
        second = _run(small_model, batch, one_device, start, tmp_path / "parts", journal)
        assert second.resume(orbax_adapter.read)
        assert (second.progress.step, second.progress.total) == (2, 6)
        found = jax.device_get(second.train())
    assert np.abs(expected.masters["head"] - start.masters["head"]).max() > 1e-4
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_run_may_go_on_at_a_step_that_is_timed(
    small_model: K3Config, batch: Batch, one_device: tuple, start: step.TrainState, tmp_path, monkeypatch
) -> None:
    first, last = RETIMED // 2, RETIMED // 2 + 2
    with Journal(tmp_path / "log.jsonl") as journal:
        run = _run(small_model, batch, one_device, start, tmp_path, journal)
    run.phases = [Phase(name="pretrain", batches=lambda i: batch, peak=3e-3, steps=last, seconds=1e4)]
    run.progress, run.log_every, run.save = Progress(step=first, total=last), RETIMED, lambda *_: None
    taken = []

    def advance(self: Run, phase: Phase, rate: float) -> None:
        taken.append(self.progress.step)
        self.progress.step += 1

    monkeypatch.setattr(Run, "advance", advance)
    run.train()
    assert taken == [first, first + 1]


def test_a_phase_needs_a_length() -> None:
    with pytest.raises(ValueError, match="phase chat: steps and seconds are None; give one of them or both"):
        Phase(name="chat", batches=lambda i: i, peak=1.0)
