"""The benchmark of a speculative step, at tiny widths: every part runs, and the parts are the step."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import bench as program
from k3jax import params
from k3jax.config import k3
from k3jax.dspark.config import DraftMla, DSparkConfig
from k3jax.sampling import NO_FILTERS
from k3jax.speculation import bench, report, synthetic
from k3jax.speculation.step import speculate
from tests.k3jax.test_dspark import INFERACT


@pytest.fixture(scope="module")
def setting(door_config):
    config = dataclasses.replace(door_config, attn_res_block_size=2)
    draft = dataclasses.replace(
        bench.k3_draft(config),
        intermediate_size=64,
        num_layers=1,
        attention=DraftMla(
            num_heads=2, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8
        ),
        block_size=2,
        markov_rank=8,
        target_layer_ids=(0, 1),
    )
    return bench.Setting(config=config, draft=draft, context=100, dtype=jnp.float32)


@pytest.mark.slow
def test_it_prints_every_part_and_says_what_is_real(setting, capsys, tmp_path):
    assert report.run(setting, tmp_path / "out.json") == 0
    out = capsys.readouterr().out
    assert "2 of K3's 93 layers" in out
    assert "6 of 896 experts in each of 1 MoE layers" in out
    assert out.index("\n  draft: ") < out.index("\n  markov: ") < out.index("\n  whole: ")
    for name in ("draft", "markov", "verify", "accept", "commit", "plain", "whole", "sum of parts"):
        assert f"\n{name} " in out
    assert "acceptance length 2.61: " in out
    record = json.loads((tmp_path / "out.json").read_text())
    # Parts of microseconds are lost in what else a machine does.
    assert all(record["microseconds"][name] > 0 for name in ("plain", "whole"))
    assert 2 <= record["experts"]["one token"] <= record["experts"]["block"] <= 6
    assert record["programs"]["whole"]["transfers"] == []


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["model", "int8"])
def test_the_parts_make_the_step(setting, weights):
    """Draft, Markov, verify, accept and commit in a row leave what `speculate` leaves."""
    loaded = bench.load(dataclasses.replace(setting, draft_weights=weights))
    one = bench.Parts(loaded)
    state = jax.tree.map(jnp.copy, loaded.speculative)
    block = one.draft(*bench.draft_inputs(loaded, loaded.leaves))
    proposal = one.markov(loaded.draft_leaves, block, state.token, state.rows, loaded.params)
    bare = bench.bare(state)
    verified = one.verify(state.cache, bare, loaded.leaves, proposal.token)
    given = bench.parts.Given(loaded.params, loaded.stop_ids)
    judged = one.accept(verified.logits, proposal, bare, given)
    pools = (verified.cache, state.context)
    cache, context = one.commit(pools, bare, loaded.draft_leaves, verified.pending, verified.features, judged)
    args = (loaded.graph, loaded.leaves, loaded.drafter, loaded.draft_leaves, loaded.speculative)
    after, whole = speculate(*args, loaded.params, loaded.stop_ids, filters=NO_FILTERS)
    np.testing.assert_array_equal(judged.block.token[0, : int(whole.count[0])], whole.token[0, : int(whole.count[0])])
    assert int(judged.block.count[0]) == int(whole.count[0])
    for mine, theirs in zip(
        jax.tree.leaves((cache, context)), jax.tree.leaves((after.cache, after.context)), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-4)


def test_the_draft_is_the_published_one_but_for_its_taps():
    published, draft = DSparkConfig.from_hf(INFERACT), bench.k3_draft(k3())
    assert dataclasses.replace(draft, target_layer_ids=published.target_layer_ids) == published
    assert draft.features == published.features


def held(setting):
    """Bytes of target and draft in bfloat16."""
    trees = (params.model_specs(setting.config), bench.draft_specs(setting.draft))
    specs = [spec for tree in trees for _, spec in params.flatten(tree)]
    return sum(math.prod(spec.shape) * {"float32": 4, "model": 2, "uint8": 1}[spec.dtype] for spec in specs)


def test_a_draft_in_8_bits_reads_half_the_bytes():
    setting = bench.Setting.of_k3(8, None, 1024, draft_weights="model")
    whole, half = (bench.floors(dataclasses.replace(setting, draft_weights=w), 16.0, 121.0) for w in ("model", "int8"))
    for name in ("draft", "markov", "commit"):
        assert half[name] == pytest.approx(whole[name] / 2, rel=0.02)  # but for keys and values of the latents
    assert half["verify"] == whole["verify"]
    # 5 layers of 410 million weights and the head, at 4.3 TB/s
    assert whole["draft"] == pytest.approx((5 * 2 * 410e6 + 2 * 163840 * 7168) / 4.3e6, rel=0.01)


def test_experts_fill_what_the_device_has_left(monkeypatch):
    whole = bench.Setting.of_k3(8, None, 1024)
    assert whole.config.moe.num_experts == 896  # no limit is known on a CPU
    assert held(whole) == pytest.approx(132e9, rel=0.03)

    class Device:
        def memory_stats(self):
            return {"bytes_limit": 80 * 10**9}

    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    some = bench.Setting.of_k3(8, None, 1024)
    assert 300 < some.config.moe.num_experts < 500
    expert = 3 * 3584 * 3072 * 4.25 / 8
    assert 80e9 - 7 * expert - bench.RESERVE < held(some) < 80e9 - bench.RESERVE


def test_synthetic_weights_vary_and_keep_sizes_near_one():
    codes = np.asarray(synthetic.fill(jnp.uint32(3), (64, 2, 32, 16), "uint8", "packed"))
    assert np.bincount(codes.ravel(), minlength=256).min() > 150
    weights = np.asarray(synthetic.fill(jnp.uint32(3), (64, 400), "float32", "normal"))
    assert weights.std() == pytest.approx(1 / 20, rel=0.02)
    assert abs(np.corrcoef(weights)[~np.eye(64, dtype=bool)]).max() < 0.3
    other = np.asarray(synthetic.fill(jnp.uint32(4), (64, 400), "float32", "normal"))
    assert abs(np.corrcoef(weights.ravel(), other.ravel())[0, 1]) < 0.03


def test_wrong_subjects_exit_with_2(capsys):
    with pytest.raises(SystemExit) as stop:
        program.main(["speculation"])
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("error: ")
