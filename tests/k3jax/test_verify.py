"""`k3jax.verify`: passes on Moonshot's outputs, and finds every kind of difference."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import api, verify
from k3jax.verification import golden, selfcheck
from k3jax.verification.compare import compare, relative_rms
from k3jax.verification.comparison import Bounds, Verification, compare_choices
from k3jax.verification.golden import GoldenError

PROMPT = np.random.default_rng(3).integers(0, 256, 21).astype(np.int32)
DECODE = np.asarray([5, 6, 7], np.int32)


@pytest.fixture(scope="module")
def arrays(door):
    """What a golden file of the shared model would hold: two prompts, the second of one token and without decoding."""
    whole, one = door.states(PROMPT, DECODE), door.states(PROMPT[:1])
    order = np.argsort(whole.router_ids)
    return {
        "0.input_ids": PROMPT,
        "0.logits": whole.logits,
        "0.layer_prefix": whole.layer_prefix,
        "0.router_ids": np.take_along_axis(whole.router_ids, order, -1),
        "0.router_weights": np.take_along_axis(whole.router_weights, order, -1),
        "0.kda_state.0": whole.kda_state[0],
        "0.conv_state.0": whole.conv_state[0],
        "0.decode_ids": DECODE,
        "0.decode_logits": whole.decode_logits,
        "0.kda_state_after_decode.0": whole.kda_state_after_decode[0],
        "1.input_ids": PROMPT[:1],
        "1.logits": one.logits,
        "1.conv_state.0": one.conv_state[0],
    }


@pytest.fixture
def write(tmp_path, monkeypatch, door):
    """Writes a golden file; the program then loads the shared model instead of compiling its own."""
    monkeypatch.setattr(api, "load", lambda *args, **kwargs: door)

    def write(arrays):
        np.savez(tmp_path / "golden.npz", **arrays)
        return [str(tmp_path), "--golden", str(tmp_path / "golden.npz")]

    return write


def failures(door, tmp_path, arrays):
    np.savez(tmp_path / "golden.npz", **arrays)
    run = Verification(door, golden.read(tmp_path / "golden.npz"), Bounds(2e-4, 1e-4)).run()
    return {item.name: item for item in run if not item.passed}


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_agrees_with_the_released_code(shared, name, capsys):
    path = shared / "golden" / name
    assert verify.main([str(path), "--golden", str(path / "golden.npz")]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    with np.load(path / "golden.npz") as file:
        held = [key for key in file.files if not key.endswith(("input_ids", "decode_ids"))]
    assert {line.split()[1] for line in lines[:-1]} >= set(held)
    assert all(line.startswith("ok") for line in lines[:-1])
    assert " 0 failed; tolerance 0.0002" in lines[-1]


def test_own_outputs_pass_and_gaps_are_noted(write, arrays, capsys):
    extra = arrays | {"0.hidden": np.zeros(3), "comment": np.asarray("text")}
    assert verify.main(write(extra)) == 0
    out = capsys.readouterr().out
    assert "note 1: the file has no layer_prefix, router_ids, router_weights, decode_ids" in out
    assert "note the file also holds 0.hidden, comment, which mean nothing here: not compared" in out
    assert "ok   0.logits (chunked)" in out
    assert "1.logits (chunked)" not in out  # one token cannot be cut


@pytest.mark.parametrize(
    "name",
    [
        "0.logits",
        "0.layer_prefix",
        "0.router_weights",
        "0.kda_state.0",
        "0.conv_state.0",
        "0.decode_logits",
        "0.kda_state_after_decode.0",
        "1.logits",
    ],
)
def test_a_difference_in_any_array_is_found(door, tmp_path, arrays, name):
    changed = arrays[name].copy()
    changed.flat[7 % changed.size] += 0.01 * np.sqrt(changed.size) * np.abs(changed).max()
    found = failures(door, tmp_path, arrays | {name: changed})
    assert found.keys() - {f"{name} (chunked)"} == {name}
    assert found[name].error > 2e-4
    worst = [int(i) for i in np.unravel_index(7 % changed.size, changed.shape)]
    assert f"worst {worst}: ours " in found[name].detail


def test_an_empty_decode_part_passes(door, tmp_path, arrays):
    empty = {"1.decode_ids": np.zeros(0), "1.decode_logits": np.zeros((0, 512))}
    empty["1.kda_state_after_decode.0"] = door.states(PROMPT[:1]).kda_state[0]
    assert failures(door, tmp_path, arrays | empty) == {}


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_fail(door, tmp_path, arrays, value):
    changed = arrays["0.logits"].copy()
    changed[2, 3] = value
    found = failures(door, tmp_path, arrays | {"0.logits": changed})
    assert found["0.logits"].error == np.inf
    assert "worst [2, 3]" in found["0.logits"].detail


def test_other_shapes_and_layers_fail(door, tmp_path, arrays):
    found = failures(door, tmp_path, arrays | {"0.logits": arrays["0.logits"][:, 1:], "0.kda_state.1": np.zeros(3)})
    assert found["0.logits"].detail == "shape: ours [21, 512], theirs [21, 511]"
    found |= failures(door, tmp_path, arrays | {"0.router_ids": arrays["0.router_ids"][..., :1]})
    assert found["0.router_ids"].detail == "shape: ours [1, 21, 2], theirs [1, 21, 1]"
    assert found["0.kda_state.1"].detail == "this model's layer has no such state"


def test_the_program_ends_with_1_on_a_breach(write, arrays, capsys):
    assert verify.main(write(arrays | {"0.logits": arrays["0.logits"] * 1.01})) == 1
    out = capsys.readouterr().out
    assert "FAIL 0.logits " in out
    assert "2 failed; tolerance 0.0002, largest relative RMS 9.90e-03 (0.logits" in out
    assert verify.main([*write(arrays | {"0.logits": arrays["0.logits"] * 1.01}), "--tolerance", "0.02"]) == 0


def test_a_wrong_expert_fails_and_the_rest_is_judged_with_it(door, tmp_path, arrays):
    """A far-off choice at one token: named with its margin; that token's outputs then differ too."""
    wrong = arrays["0.router_ids"].copy()
    wrong[0, 4] = sorted(set(range(6)) - set(wrong[0, 4].tolist()))[:2]
    found = failures(door, tmp_path, arrays | {"0.router_ids": wrong})
    assert "0.router_ids" in found
    assert "1 of 21 choices differ; widest margin" in found["0.router_ids"].detail
    assert f"at [0, 4]: ours {arrays['0.router_ids'][0, 4].tolist()}, theirs {wrong[0, 4].tolist()}" in (
        found["0.router_ids"].detail
    )
    assert "0.logits" in found
    assert "0.kda_state.0" not in found  # before the router


def test_near_ties_may_go_either_way():
    scores = np.asarray([[[0.9, 0.50001, 0.5, 0.1], [0.9, 0.6, 0.5, 0.1]]])
    near = compare_choices("ids", scores, np.asarray([[[0, 2], [0, 1]]]), 1e-4)
    assert near.passed
    assert near.error == pytest.approx(1e-5, rel=1e-3)
    far = compare_choices("ids", scores, np.asarray([[[0, 1], [0, 2]]]), 1e-4)
    assert not far.passed
    assert "widest margin 1.0e-01 (allowed 0.0001) at [0, 1]: ours [0, 1], theirs [0, 2]" in far.detail
    assert compare_choices("ids", scores, np.asarray([[[1, 0], [0, 1]]]), 1e-4).error == 0


def test_a_flipped_tie_does_not_spread(door, tmp_path, arrays):
    """References that took the other of two equal experts: outputs are compared under their choice."""
    config = door.config
    model = door.graph.merge(door.leaves)
    router = np.asarray(model.layers[1].ffn.router[...]).copy()
    bias = np.asarray(model.layers[1].ffn.correction_bias[...]).copy()
    router[1], bias[1] = router[0], bias[0]  # experts 0 and 1 now tie at every token
    swap = {id(model.layers[1].ffn.router[...]): router, id(model.layers[1].ffn.correction_bias[...]): bias}
    leaves = tuple(jnp.asarray(swap[id(leaf)]) if id(leaf) in swap else leaf for leaf in door.leaves)
    tied = dataclasses.replace(door, leaves=leaves)
    states = tied.states(PROMPT)
    experts = np.sort(states.router_ids)
    token = next(t for t in range(len(PROMPT)) if experts[0, t, 0] == 0 and experts[0, t, 1] != 1)
    other = experts.copy()
    other[0, token, 0] = 1  # as good as 0, which ties go to
    from k3jax.verification.observe import observe_forced

    forced, _ = observe_forced(tied, PROMPT.tolist(), other, size=32, room=21)
    assert relative_rms(forced.logits, states.logits) > 1e-3
    theirs = {"0.input_ids": PROMPT, "0.router_ids": other, "0.logits": forced.logits}
    assert failures(tied, tmp_path, theirs) == {}
    assert config.moe_layers == (1,)


def test_files_that_cannot_be_used(tmp_path, arrays):
    with pytest.raises(GoldenError, match=r"nothing\.npz: cannot be read \(No such file"):
        golden.read(tmp_path / "nothing.npz")
    (tmp_path / "text.npz").write_text("no archive")
    with pytest.raises(GoldenError, match=r"text\.npz: cannot be read"):
        golden.read(tmp_path / "text.npz")
    np.savez(tmp_path / "other.npz", weights=np.zeros(3))
    with pytest.raises(GoldenError, match=r"holds no prompt, expected names such as 0\.input_ids"):
        golden.read(tmp_path / "other.npz")
    np.savez(tmp_path / "ids.npz", **{"0.logits": arrays["0.logits"]})
    with pytest.raises(GoldenError, match=r"0\.input_ids is missing, expected a list of integers"):
        golden.read(tmp_path / "ids.npz")
    np.savez(tmp_path / "decode.npz", **{"a.input_ids": PROMPT, "a.decode_logits": np.zeros((2, 3))})
    with pytest.raises(GoldenError, match=r"a\.decode_ids is missing"):
        golden.read(tmp_path / "decode.npz")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["here"], "error: give --golden FILE, --self or --against xla, one of them"),
        (["here", "--golden", "g.npz", "--self"], "error: give --golden FILE, --self or --against xla, one of them"),
        (["nowhere", "--self"], "error: checkpoint nowhere does not exist; give the path of one"),
        (["here", "--golden", "g.npz"], "error: golden file g.npz does not exist; give the path of one"),
    ],
)
def test_wrong_command_lines_exit_with_2(arguments, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    assert verify.main(arguments) == 2
    assert capsys.readouterr().err == message + "\n"


def test_ids_that_the_model_does_not_have_are_named(write, arrays, capsys):
    assert verify.main(write(arrays | {"0.input_ids": np.full(21, 600)})) == 2
    assert capsys.readouterr().err.startswith("error: 0.input_ids has token id 600 at position 0")


def test_self_check_passes_and_names_every_form(door):
    lines = list(selfcheck.run(door, 2e-4, tokens=32))
    assert all(line.passed for line in lines), [str(line) for line in lines]
    assert [line.name for line in lines] == [
        "layer 0: recurrent against chunked",
        "layer 1: absorbed against expanded",
        "layer 1: packed against plain experts",
        "model: prefill into a cache against none",
        "model: decode against no cache",
    ]


def test_plain_matrices_follow_the_format():
    """Low nibble first; one scale byte per 32 inputs; 127 is one."""
    packed = np.zeros((1, 32), np.uint8)
    packed[0, 0], packed[0, 16] = 0xF2, 0x07
    matrix = selfcheck.plain_matrix(packed, np.asarray([[128, 126]], np.uint8))
    assert matrix[0, :2].tolist() == [2.0, -12.0]
    assert matrix[0, 32] == 3.0
    assert np.count_nonzero(matrix) == 3


def test_relative_rms():
    theirs = np.asarray([3.0, 4.0])
    assert compare("x", theirs * 1.5, theirs, 1.0).error == pytest.approx(0.5)
    assert relative_rms(np.zeros(2), np.zeros(2)) == 0
    assert relative_rms(np.ones(2), np.zeros(2)) == np.inf
    assert compare("x", np.zeros((0, 3)), np.zeros((0, 3)), 0.0).passed
