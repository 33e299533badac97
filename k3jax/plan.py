"""`python -m k3jax.plan`: what a model takes on a mesh of devices, and how many requests fit."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from k3jax import program

CONFIGS = ("k3", "nano")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Bytes per device of weights, states and pages, the requests that fit, and the least time of a decode step.

    Everything comes from shapes; no device is needed and nothing is allocated. Exit code 1 if not one request fits.

    Examples:
      python -m k3jax.plan --preset tp16 --device gb300
      python -m k3jax.plan --preset tp8 --device gb300 --context 1048576 --states 4
      python -m k3jax.plan --config nano --preset single --memory-gib 8 --json nano.json
    """

    config: str = "k3"
    """`k3`, `nano`, or the path of a config.json or its directory."""
    preset: str = "tp8"
    """Mesh preset: single, or tpN for N devices."""
    device: Literal["h200", "b200", "gb300"] = "gb300"
    """Memory and bandwidth of each device."""
    memory_gib: float | None = None
    """Memory of each device, instead of that of `--device`."""
    utilization: float = 0.9
    """Part of the memory for weights and caches; the rest is workspace of the programs."""
    context: int = 131072
    """Tokens of each request."""
    states: float = 2.0
    """KDA states per request: its own and those kept for reuse."""
    page_size: int = 64
    """Tokens per page."""
    draft: Path | None = None
    """Directory of a DSpark draft, whose weights and rows count too."""
    draft_weights: Literal["auto", "model", "int8"] = "auto"
    """Of the draft's matrices; auto: int8 for a bfloat16 model, as on a GPU."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of activations, latents and of the weights that are not fixed."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Of latents; auto: as the activations."""
    json: Path | None = None
    """Also write the numbers to this file."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; the exit code."""
    options = program.parse(Options, "k3jax.plan", arguments)
    return program.run(lambda: plan(options))


def plan(options: Options) -> int:
    """Prints the plan; 1 if no request fits."""
    values = numbers(options)
    for line in lines(options, values):
        print(line)
    if options.json is not None:
        options.json.write_text(json.dumps(values, indent=1) + "\n")
    return 0 if values["requests"] else program.FAILURE


def numbers(options: Options) -> dict[str, Any]:
    """Every figure by name. Raises `UsageError`, `ConfigError` and `ShardingError`, each naming what is wrong."""
    import jax.numpy as jnp

    from k3jax import capacity
    from k3jax.dspark.config import DSparkConfig

    _check(options)
    device = capacity.DEVICES[options.device]
    if options.memory_gib is not None:
        device = dataclasses.replace(device, memory=int(options.memory_gib * 2**30))
    config = read_config(options.config)
    draft = None if options.draft is None else DSparkConfig.from_file(options.draft)
    if draft is not None and (problems := list(draft.misfits(config))):
        raise program.UsageError(f"--draft {options.draft} is not a draft of {options.config}: {'; '.join(problems)}")
    best = "int8" if options.dtype == "bfloat16" else "model"
    sizes = capacity.footprint(
        config,
        layout=capacity.abstract_layout(options.preset),
        dtype=jnp.dtype(options.dtype),
        page_size=options.page_size,
        draft=draft,
        draft_weights=best if options.draft_weights == "auto" else options.draft_weights,
        kv_cache_dtype=options.kv_cache_dtype,
    )
    budget = options.utilization * device.memory - sizes.weights
    requests, pools = capacity.fit(sizes, budget, options.context, options.states)
    seconds = {rows: sizes.decode_seconds(device, rows, options.context) for rows in sorted({1, max(requests, 1)})}
    return {
        **dataclasses.asdict(sizes),
        "memory": device.memory,
        "budget": budget,
        "latents_of_context": options.context * sizes.token,
        "requests": requests,
        "pages": pools.pages,
        "slots": pools.slots,
        "pool_bytes": sizes.pools(pools.pages, pools.slots),
        "decode_seconds": seconds,
    }


def read_config(name: str) -> Any:
    """A preset or a file."""
    from k3jax import config

    if name in CONFIGS:
        return getattr(config, name)()
    program.require_path(Path(name), "--config")
    return config.K3Config.from_file(name)


def _check(options: Options) -> None:
    if options.draft_weights != "auto" and options.draft is None:
        raise program.UsageError("--draft-weights needs --draft")
    limits = {
        "--context": (options.context, 1, 2**31),
        "--states": (options.states, 1, 2**20),
        "--page-size": (options.page_size, 1, 2**20),
        "--utilization": (options.utilization, 0.01, 1),
    }
    for name, (value, low, high) in limits.items():
        if not low <= value <= high:
            raise program.UsageError(f"{name} is {value}, expected {low} to {high}")


def lines(options: Options, values: dict[str, Any]) -> Iterator[str]:
    """The plan as text."""
    gib, mib = 2**30, 2**20
    count = values["devices"]
    yield f"{options.config} in {options.dtype} on {options.preset}: {count} x {options.device}"
    yield f"{'':34s}{'per device':>14s}"
    yield f"{'memory':34s}{values['memory'] / gib:10.2f} GiB"
    yield f"{'weights':34s}{values['weights'] / gib:10.2f} GiB   routed experts {values['routed'] / gib:.2f} GiB"
    yield f"{f'left of {options.utilization:.0%}':34s}{values['budget'] / gib:10.2f} GiB"
    yield f"{'state of one request':34s}{values['slot'] / mib:10.2f} MiB"
    yield f"{f'page of {options.page_size} tokens':34s}{values['page'] / mib:10.2f} MiB"
    yield f"{f'latents of {options.context} tokens':34s}{values['latents_of_context'] / mib:10.2f} MiB"
    yield f"{'sampling state of one request':34s}{values['row'] / mib:10.2f} MiB"
    yield f"requests of {options.context} tokens with {options.states:g} states each: {values['requests']}"
    if not values["requests"]:
        yield "nothing fits: use more devices, a shorter context or fewer states"
        return
    yield f"pools: {values['pages']} pages and {values['slots']} slots, {values['pool_bytes'] / gib:.2f} GiB per device"
    for rows, seconds in values["decode_seconds"].items():
        rate = rows / seconds
        yield f"decode of {rows} rows: at least {1e3 * seconds:.2f} ms, at most {rate:.0f} tokens/s (bytes alone)"


if __name__ == "__main__":
    raise SystemExit(main())
