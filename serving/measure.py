"""Times of the engine's parts on this machine.

python -m serving.measure                   lookup, host time per step, TTFT of a hit and a miss
python -m serving.measure --prompt 2048
"""

import dataclasses
import itertools
import sys
import time
from collections.abc import Callable

import numpy as np

from k3jax import program
from serving import answers
from serving.core import Core
from serving.costs import ModelCost
from serving.hashing import HashChain, root_digest
from serving.plan import Plan, RowResult, Shape, StepResult
from serving.prefix_cache import CacheOptions, PrefixCache
from serving.request import Request
from serving.scheduler import SchedulerOptions
from serving.upload import DecodeTables

UNIT_COST = ModelCost(flops_per_token=1.0, flops_per_pair=0.0, latent_bytes_per_token=1.0, state_bytes=1.0)


def seconds(function: Callable[[], object], repeats: int) -> float:
    """Median time of a call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def lookup(nodes: int = 100_000, tokens: int = 8192) -> float:
    """Seconds to match an 8 K-token prompt in a tree of that many nodes; its digests are there already."""
    unit = page = 64
    cache = PrefixCache(CacheOptions(pages=4 * nodes, slots=nodes + 2, page_size=page, unit=unit), UNIT_COST)
    rng = np.random.default_rng(0)
    root = root_digest("measure")
    shared = rng.integers(0, 1000, tokens).tolist()
    long: list[list[int]] = []
    for number in itertools.count():
        if cache.tree.nodes >= nodes:
            break
        keep = int(rng.integers(0, tokens // unit)) * unit if number % 50 == 0 else int(rng.integers(8)) * unit
        keep = min(keep, tokens - 4 * unit)
        whole = [*shared[:keep], *rng.integers(0, 10**6, 2 * unit).tolist()]
        path = HashChain(root, unit, whole)
        length = keep + 2 * unit
        table, slot = cache.take_pages(length // page, 0.0), cache.take_slot(0.0)
        assert table is not None
        assert slot is not None
        cache.store(path, length, table, slot, 0.0)
        cache.pages.release(table)
        if length > tokens // 2 and len(long) < 200:
            long.append(whole)
    probes = [HashChain(root, unit, [*whole, *rng.integers(0, 9, tokens - len(whole)).tolist()]) for whole in long]
    return float(np.mean([seconds(lambda p=p: cache.match(p, tokens - 1), 5) for p in probes]))


class _Silent:
    """A device that takes no time. Its answers are converted as those of a real one."""

    def __init__(self, rows: int) -> None:
        self._answer = np.asarray([[7, 0, 1, 1]] * rows, np.int32)

    def dispatch(self, plan: Plan) -> Plan:
        return plan

    def collect(self, ticket: Plan) -> StepResult:
        said, silent = RowResult([7], [0.0], True), RowResult([], [], True)
        return StepResult(
            [said if row.final else silent for row in ticket.prefill],
            [[True] * len(row.captures) for row in ticket.prefill],
            answers.tokens(ticket, self._answer) if ticket.decode else [],
        )


def host_step(rows: int = 64, context: int = 8192) -> float:
    """Seconds of host work per decode step: plan, one step's results, and the array that is sent."""
    cache = PrefixCache(CacheOptions(pages=rows * 200, slots=2 * rows, page_size=64, unit=64), UNIT_COST)
    options = SchedulerOptions(rows=rows, token_budget=9000, shapes=(Shape(1, 8192),), max_length=16384)
    core = Core(options, cache, _Silent(rows))
    rng = np.random.default_rng(0)
    for number in range(rows):
        tokens = rng.integers(0, 99, context).tolist()
        core.submit(Request(id=str(number), tokens=tokens, max_tokens=2000, eos_ids=(3, 4)))
    while any(not s.wants_decode for s in core.scheduler.running) or len(core.scheduler.running) < rows:
        core.step()
    tables = DecodeTables(rows, 256)
    dispatch = core.runner.dispatch

    def pack_and_dispatch(plan: Plan) -> Plan:
        tables.pack(plan.decode, 256)
        return dispatch(plan)

    core.runner.dispatch = pack_and_dispatch
    return seconds(core.step, 300)


def first_token(prompt: int) -> tuple[float, float]:
    """Seconds to the first token of the shipped model, for a miss and for a hit."""
    from k3jax import api
    from serving.launch import Sizes, launch

    model = api.load()
    width = prompt // 64 + 1
    sizes = Sizes(
        rows=1,
        max_length=prompt + 64,
        pages=4 * width,
        slots=16,
        chunks=(Shape(1, 64), Shape(1, min(2048, prompt))),
        table_widths=(width,),
    )
    core = launch(model, sizes)
    rng = np.random.default_rng(0)

    def ask(tokens: list[int], id: str) -> float:
        core.submit(Request(id=id, tokens=tokens, max_tokens=1, sampling={"temperature": 0.0}))
        final = core.run()[id][-1].final
        assert final is not None
        return final.first_token_seconds

    misses, hits = [], []
    for number in range(3):
        tokens = rng.integers(0, 3000, prompt).tolist()
        misses.append(ask(tokens, f"miss{number}"))
        hits.append(ask(tokens, f"hit{number}"))
    return float(np.median(misses)), float(np.median(hits))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Measures lookup, host work per step and the time to the first token.

    Examples:
      python -m serving.measure
      python -m serving.measure --no-model --rows 16
    """

    prompt: int = 8192
    """Tokens of the repeated prompt."""
    nodes: int = 100_000
    """Of the prefix tree."""
    rows: int = 64
    """That decode."""
    model: bool = True
    """Measure the shipped model too."""

    def check(self) -> None:
        """Raises `UsageError` for a number below its least."""
        for name, least in (("prompt", 64), ("nodes", 100), ("rows", 1)):
            if getattr(self, name) < least:
                raise program.UsageError(f"--{name} is {getattr(self, name)}, expected at least {least}")


def main(arguments: list[str] | None = None) -> int:
    """Prints a table; the exit code."""
    options = program.parse(Options, "serving.measure", arguments)
    return program.run(lambda: _print(options))


def _print(options: Options) -> int:
    options.check()
    print(f"lookup of 8192 tokens among {options.nodes} nodes   {1e6 * lookup(options.nodes):8.1f} us")
    print(f"host work per step, {options.rows} rows            {1e6 * host_step(options.rows):8.1f} us")
    if options.model:
        miss, hit = first_token(options.prompt)
        print(f"first token after {options.prompt} tokens, miss          {1e3 * miss:8.1f} ms")
        share = f"{100 * hit / miss:.1f} % of a miss"
        print(f"first token after {options.prompt} tokens, hit           {1e3 * hit:8.1f} ms ({share})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
