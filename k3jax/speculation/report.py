"""`python -m k3jax.bench speculate`: prints what `speculation.bench` measures, as it is measured."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from k3jax.config import k3
from k3jax.speculation import bench
from k3jax.speculation.programs import TOP_P, Programs
from k3jax.speculation.stopwatch import Stopwatch, distinct

GIGABYTE = 1e9
DRAFTS = {
    "model": "weights of the model's kind, the target's head",
    "int8": "weights of 8 bits, among them a copy of the target's head",
}
PARTS = ("draft", "markov", "verify", "accept", "commit")


def run(setting: bench.Setting, json_path: Path | None = None) -> int:
    """Measures and prints; what was measured before a failure has been printed by then."""
    record: dict[str, Any] = {"device": jax.devices()[0].device_kind, "programs": {}}

    def say(line: str) -> None:
        print(line, flush=True)
        if json_path is not None:
            json_path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    for line in describe(setting):
        say(line)
    begin = time.perf_counter()
    programs = Programs(bench.abstract(setting))
    loaded = bench.load(setting)
    say(f"weights made in {time.perf_counter() - begin:.0f} s; programs are measured as they are compiled")
    watch, times = Stopwatch(programs, loaded), {}
    record["microseconds"] = times
    with jax.transfer_guard_device_to_host("disallow"):
        for name, spent in watch.times():
            times[name] = spent
            say(f"  {name}: {spent:.0f} us{inspect(name, programs, record['programs'])}")
    say(f"measured {len(times)} programs in {time.perf_counter() - begin:.0f} s")
    moved = record["programs"]["whole"]["transfers"]
    say(f"device-to-host transfers inside a speculative step: {len(moved) or 'none'}")
    one, block = (distinct(watch.experts, tokens) for tokens in (1, None))
    record["experts"] = {"one token": one, "block": block}
    for line in table(setting, times, one, block):
        say(line)
    return 0


def describe(setting: bench.Setting) -> Iterator[str]:
    """What is real and what is not."""
    config, whole = setting.config, k3()
    target, draft = map(bench.held, setting.shapes())
    experts = config.moe.num_experts
    yield f"{jax.devices()[0].device_kind}: {config.num_layers} of K3's {whole.num_layers} layers at full width"
    yield (
        f"  {len(config.kda_layers)} KDA and {len(config.mla_layers)} MLA layers, hidden {config.hidden_size}, "
        f"{config.kda.num_heads} heads; {experts} of {whole.moe.num_experts} experts in each of "
        f"{len(config.moe_layers)} MoE layers, {config.moe.num_experts_per_token} a token; "
        f"vocabulary {config.vocab_size}; {config.num_attn_res_blocks} of {whole.num_attn_res_blocks} AttnRes blocks"
    )
    yield (
        f"  {target / GIGABYTE:.1f} GB of target, {draft / GIGABYTE:.1f} GB of draft ({setting.draft.num_layers} MLA "
        f"layers, {setting.draft.block_size} drafts; {DRAFTS[setting.draft_weights]})"
    )
    yield f"  random weights, {setting.context} tokens of context, batch 1, temperature 1"


def inspect(name: str, programs: Programs, record: dict[str, Any]) -> str:
    """Which kernels run, and what leaves the device inside a step."""
    kernels, transfers = programs.kernels(name), programs.transfers(name)
    record[name] = {"kernels": kernels, "transfers": transfers}
    calls = ", ".join(f"{count} x {target}" for target, count in kernels.items())
    moved = f"; leaves the device: {', '.join(sorted(set(transfers)))} ({len(transfers)})" if transfers else ""
    return f" ({calls or 'kernels of XLA alone'}{moved})"


def table(setting: bench.Setting, times: dict[str, float], one: float, block: float) -> Iterator[str]:
    """Parts, wholes, shares, and the speed-ups that published acceptance lengths would give."""
    apart = sum(times[name] for name in PARTS)
    least = bench.floors(setting, one, block)
    yield f"{'part':<16}{'us':>10}{'floor us':>10}{'of parts':>10}"
    for name, spent in times.items():
        share = f"{spent / apart:.1%}" if name in PARTS else ""
        floor = f"{least[name]:.0f}" if name in least else ""
        yield f"{name:<16}{spent:>10.0f}{floor:>10}{share:>10}".rstrip()
    yield f"{'sum of parts':<16}{apart:>10.0f}"
    yield f"experts reached in a layer: {one:.0f} by one token, {block:.0f} by a block"
    others = apart - times["verify"]
    yield f"draft + markov + accept + commit: {others:.0f} us, {others / apart:.1%} of the parts (goal: at most 15 %)"
    ratio = times["whole"] / times["plain"]
    least_share = 1 - least["verify"] / least["whole"]
    yield f"by their bytes alone they would be {least_share:.1%} of a step of so few layers"
    yield f"a speculative step takes {ratio:.2f} plain ones (vLLM on GB300: 1.43)"
    for length in bench.PUBLISHED:
        yield f"acceptance length {length}: {length / ratio:.2f} x plain decoding"
    more = sum(times[f"{name}{TOP_P}"] - times[name] for name in ("markov", "accept"))
    yield f"top-p adds {more:.0f} us to a speculative step"
    layers, whole = setting.config.num_layers, k3().num_layers
    fixed, depth = sum(times[name] for name in ("draft", "markov", "accept")), whole / layers
    share = (fixed + depth * times["commit"]) / (fixed + depth * (times["commit"] + times["verify"]))
    yield f"estimate with verify and commit of {whole} layers: {share:.1%} (the head is scaled too)"
