"""The capacity plan: against the arrays that are allocated, and against figures worked out by hand for K3."""

import json

import jax
import jax.numpy as jnp
import pytest

from k3jax import api, capacity, config, params, plan, sharding
from k3jax.cache import create


def test_k3_by_hand():
    """State: 69 layers of 96 x 128 x 128 float32 and 3 x 3 x 12288 bfloat16; latents: 24 layers of 576 bfloat16."""
    each = capacity.footprint(config.k3())
    assert each.slot == 69 * (96 * 128 * 128 * 4 + 3 * 3 * 96 * 128 * 2)
    assert each.page == 24 * 576 * 2 * 64
    assert each.embedding == 163840 * 7168 * 2
    assert each.touched == 16 / 896
    eighth = capacity.footprint(config.k3(), layout=capacity.abstract_layout("tp8"))
    assert eighth.slot * 8 == each.slot
    assert eighth.page == each.page, "latents are whole on every device"
    assert each.weights / 8 < eighth.weights < each.weights / 7


@pytest.mark.parametrize("mesh", ["single", "tp2", "tp8"])
def test_planned_bytes_are_those_of_sharded_arrays(tiny_config, mesh):
    """D.1 18, on fake devices: the bytes of the first device, array by array."""
    layout = sharding.layout(mesh)
    each = capacity.footprint(tiny_config, layout=capacity.abstract_layout(mesh), dtype=jnp.float32, page_size=8)

    def held(tree, places):
        arrays = jax.tree.map(lambda a, place: jnp.zeros(a.shape, a.dtype, device=place), tree, places)
        first = jax.devices()[0]
        return sum(s.data.nbytes for a in jax.tree.leaves(arrays) for s in a.addressable_shards if s.device == first)

    specs = params.model_specs(tiny_config)
    assert each.weights == held(params.abstract(tiny_config, jnp.float32), layout.parameters(specs))
    cache = jax.eval_shape(lambda: create(tiny_config, slots=5, pages=7, page_size=8, dtype=jnp.float32))
    assert each.pools(7, 5) == held(cache, layout.cache(cache))
    assert each.devices == int(mesh[2:] if mesh != "single" else 1)


def test_fit_is_tight(tiny_config):
    each = capacity.footprint(tiny_config, page_size=8)
    budget = 5 * 2**20
    requests, pools = capacity.fit(each, budget, 100, 3)
    assert requests > 1
    assert (pools.pages, pools.slots) == (13 * requests + 1, 3 * requests + 1)
    assert each.pools(pools.pages, pools.slots) + requests * each.row <= budget
    assert each.pools(1, 1) + (requests + 1) * each.request(100, 3) > budget


def test_divide(tiny_config):
    each = capacity.footprint(tiny_config, page_size=8)
    pools = capacity.divide(each, 2**22, 0.25)
    assert pools.slots * each.slot <= 2**20 < (pools.slots + 1) * each.slot
    assert pools.pages * each.page <= 3 * 2**20 < (pools.pages + 1) * each.page
    with pytest.raises(capacity.CapacityError, match="0 pages and 0 states"):
        capacity.divide(each, -1, 0.5)


def test_decode_reads_more_for_more_rows():
    each, device = capacity.footprint(config.k3()), capacity.DEVICES["gb300"]
    one, many = (each.decode_seconds(device, rows, 8192) for rows in (1, 4096))
    dense = each.weights - each.routed - each.embedding
    assert one == pytest.approx((dense + each.routed / 56 + 2 * each.slot + 8192 * each.token) / 8e12)
    assert many * 8e12 - 4096 * (2 * each.slot + 8192 * each.token) == pytest.approx(dense + each.routed, rel=1e-6)


def test_program(tmp_path, capsys):
    file = tmp_path / "plan.json"
    assert plan.main(["--preset", "tp16", "--context", "1024", "--json", str(file)]) == 0
    said, values = capsys.readouterr().out, json.loads(file.read_text())
    assert said.startswith("k3 in bfloat16 on tp16: 16 x gb300\n")
    assert values["slot"] == 69 * (96 * 128 * 128 * 4 + 3 * 3 * 96 * 128 * 2) // 16
    assert f"{values['requests']}\n" in said
    assert values["weights"] + values["pool_bytes"] < 0.9 * values["memory"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--preset", "ring"], 2, "mesh preset 'ring' is unknown, expected tpN"),
        (["--context", "0"], 2, "--context is 0"),
        (["--config", "nowhere"], 2, "--config nowhere does not exist"),
        (
            ["--draft", str(api.shipped_checkpoint().with_name("nano-dspark"))],
            2,
            "nano-dspark is not a draft of k3: vocab_size is 4096",
        ),
        (["--draft-weights", "int8"], 2, "--draft-weights needs --draft"),
        (["--preset", "tp8", "--device", "h200"], 1, ""),
    ],
)
def test_bad_usage(capsys, arguments, code, message):
    assert plan.main(arguments) == code
    streams = capsys.readouterr()
    assert message in streams.err
    assert ("nothing fits" in streams.out) == (code == 1)
