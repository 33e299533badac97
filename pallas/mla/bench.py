"""MLA benchmark: latent attention at Kimi K3's shapes, beside floors, goals and peers.

`python -m k3jax.bench kernels --op mla` asks for `gate()` and `measure()`. Times of decode are of the attention over
latents, without the projections that fold keys into queries and lift values; times of prefill likewise start from
expanded keys and values, except where a line says otherwise.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas import timing
from pallas.benchmark import BANDWIDTH, FLOPS, THREADS, Check, Measurement, Peer, compiling, measured_peer
from pallas.dispatch import Implementation
from pallas.mla import api, mosaic, mosaic_prefill, peers, reference
from pallas.mla.shapes import HEADS, LATENT, OWN, PAGE, PREFILL_TOKENS, RANK, RANK_HEADS, SCALE, SHARED, VALUE
from pallas.peers import PeerProcess

__all__ = ["gate", "measure"]

BEYOND_CACHE = 150e6
"""Bytes of latents that a chain of calls walks over at least."""


attend_pages = jax.jit(mosaic.attend_pages, static_argnames=("heads", "rank", "scale"))


def normal(key: int, *shape: int) -> jax.Array:
    """Random bfloat16 values."""
    return _normal(jnp.uint32(key), shape)


@partial(jax.jit, static_argnums=1)
def _normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(jax.random.key(key), shape, jnp.float32).astype(jnp.bfloat16)


def paged(rows: int, tokens: int, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    """(pool, page table) of random latents in shuffled pages; one block of values repeats where there are many."""
    pages = -(-tokens // PAGE)
    own = normal(seed, min(rows * pages, 2048) + 1, PAGE, LATENT)
    order = np.random.default_rng(seed).permutation(rows * pages).reshape(rows, pages)
    return _repeated(own, rows * pages + 1), jnp.asarray(1 + order, jnp.int32)


@partial(jax.jit, static_argnums=1)
def _repeated(pages: jax.Array, count: int) -> jax.Array:
    return pages[jnp.arange(count) % pages.shape[0]]


class Call(NamedTuple):
    """Arguments of `api.decode`; `page_scale` for latents of 8 bits."""

    query: jax.Array
    pool: jax.Array
    page_table: jax.Array
    key_up: jax.Array
    value_up: jax.Array
    start: jax.Array
    length: jax.Array
    page_scale: jax.Array | None = None

    def expected(self) -> jax.Array:
        """The definition in float32, on the values that the pool holds."""
        latents = api.gather_pages(self.pool, self.page_table, self.page_scale)
        return reference.attend(self.query, latents, self.key_up, self.value_up, self.start, scale=SCALE)

    def rows(self, order: Any) -> "Call":
        """The same call for some of its rows."""
        pick = lambda x: x[jnp.asarray(order)]  # noqa: E731
        query, table, start, length = map(pick, (self.query, self.page_table, self.start, self.length))
        return self._replace(query=query, page_table=table, start=start, length=length)


def random_call(lengths: list[int], tokens: int, heads: int) -> Call:
    """Rows that end with `tokens` new tokens each."""
    pool, table = paged(len(lengths), max(lengths))
    length = jnp.asarray(lengths, jnp.int32)
    query = normal(1, len(lengths), tokens, heads, OWN + SHARED)
    ups = (normal(2, heads, OWN, RANK) / 16, normal(3, heads, VALUE, RANK) / 16)
    return Call(query, pool, table, *ups, length - tokens, length)


def decode_checks(
    implementation: Implementation, heads: int, lengths: list[int], counts: tuple[int, ...]
) -> Iterator[Check]:
    """Against the definition; rows moved bit for bit; many tokens against single steps."""
    attend = lambda call: api.decode(*call, scale=SCALE, implementation=implementation)  # noqa: E731
    for tokens in counts:
        call = random_call(lengths, tokens, heads)
        actual, expected = attend(call), jax.jit(Call.expected)(call)
        for row, length in enumerate(lengths):
            error = timing.relative_rms(actual[row], expected[row])
            yield Check(f"decode {heads} heads, {tokens} of {length} tokens", error, 1e-2)
        order = list(reversed(range(len(lengths))))
        yield Check("decode, rows moved", float(jnp.any(attend(call.rows(order)) != actual[jnp.asarray(order)])), 0.0)
        for token in range(0, tokens, 4):
            single = call._replace(
                query=call.query[:, token : token + 1], start=call.start + token, length=call.start + token + 1
            )
            error = timing.relative_rms(actual[:, token], attend(single)[:, 0])
            yield Check(f"decode, token {token} of {tokens} equals a single step", error, 5e-3)


def alone_checks(heads: int, lengths: list[int], tokens: int, narrow: bool = False) -> Iterator[Check]:
    """Attention of a row in a batch and alone, bit for bit; of the kernels alone.

    The projections around them are XLA's, which may sum in another order for another number of rows.
    """
    pool, table = paged(len(lengths), max(lengths))
    query = [normal(key, len(lengths), tokens * heads, width) for key, width in enumerate((RANK, SHARED))]
    length = jnp.asarray(lengths, jnp.int32)
    scales: list[jax.Array] = []
    if narrow:
        pool, scale = jax.jit(api.quantize_pages)(pool)
        scales.append(scale)
    options = {"heads": heads, "rank": RANK, "scale": SCALE}
    together = attend_pages(*query, pool, table, length - tokens, length, *scales, **options)
    first = [x[:1] for x in query]
    alone = attend_pages(*first, pool, table[:1], length[:1] - tokens, length[:1], *scales, **options)
    name = f"attention of {heads} heads x {tokens}{', 8 bit' if narrow else ''}, a row alone"
    yield Check(name, float(jnp.any(alone[0] != together[0])), 0.0)


def narrow_checks(implementation: Implementation, heads: int, lengths: list[int]) -> Iterator[Check]:
    """Latents of 8 bits against the definition on the values that they hold, and on those that they stand for."""
    wide = random_call(lengths, 1, heads)
    pool, page_scale = jax.jit(api.quantize_pages)(wide.pool)
    narrow = wide._replace(pool=pool, page_scale=page_scale)
    actual = api.decode(*narrow, scale=SCALE, implementation=implementation)
    for call, bound in ((narrow, 1e-2), (wide, 6e-2)):
        error = timing.relative_rms(actual, jax.jit(Call.expected)(call))
        yield Check(f"decode of 8-bit latents, {heads} heads, against {call.pool.dtype}", error, bound)


def prefill_checks(implementation: Implementation, heads: int, tokens: int) -> Iterator[Check]:
    """A chunk behind a prefix, rows of different lengths, NaN behind them."""
    length, start = jnp.array([tokens, 2 * tokens - 3], jnp.int32), jnp.array([0, tokens], jnp.int32)
    query, latents = normal(1, 2, tokens, heads, OWN + SHARED), normal(2, 2, 2 * tokens, LATENT)
    ups = (normal(3, heads, OWN, RANK) / 16, normal(4, heads, VALUE, RANK) / 16)
    stored = jnp.arange(2 * tokens)[None] < length[:, None]
    poisoned = jnp.where(stored[..., None], latents, jnp.bfloat16(jnp.nan))
    actual = api.prefill(query, poisoned, *ups, start, length, scale=SCALE, implementation=implementation)
    expected = reference.attend(query, latents, *ups, start, scale=SCALE)
    for row, kept in enumerate((tokens, tokens - 3)):
        error = timing.relative_rms(actual[row, :kept], expected[row, :kept])
        yield Check(f"prefill {tokens} tokens behind {int(start[row])}", error, 1e-2)


def gate(implementation: Implementation = None) -> list[Check]:
    """Every check; few heads and tokens where there is no GPU."""
    lengths = [4000, 9, 63, 64, 65, 130, 1000, 128]
    if jax.default_backend() != "gpu":
        runs = [partial(decode_checks, implementation, 2, [70, 9], (1, 9))]
        runs += [partial(narrow_checks, implementation, 2, [70, 9]), partial(prefill_checks, implementation, 2, 20)]
        return [check for run in runs for check in run()]
    runs = [partial(decode_checks, implementation, RANK_HEADS, lengths, (tokens,)) for tokens in (1, 9)]
    # 9000 tokens: wide enough for the groups of long contexts.
    runs += [partial(decode_checks, implementation, HEADS, rows, (1,)) for rows in (lengths, [9000, 70])]
    runs += [partial(narrow_checks, implementation, heads, [4000, 9, 65]) for heads in (RANK_HEADS, HEADS)]
    runs += [partial(prefill_checks, implementation, 4, tokens) for tokens in (130, 600)]
    if implementation != "xla":
        alone = [(RANK_HEADS, lengths, 1), (RANK_HEADS, lengths, 9), (HEADS, lengths, 1), (HEADS, [9000, 70], 1)]
        alone.append((HEADS, [9000, 70], 1, True))
        runs += [partial(alone_checks, *case) for case in alone]
    # Side by side, for most of the time goes into compiling.
    with ThreadPoolExecutor(THREADS) as pool:
        return [check for checks in pool.map(lambda run: list(run()), runs) for check in checks]


class Line(NamedTuple):
    """A line of the table: a program of `calls` chained calls from carry to carry."""

    name: str
    program: Any
    arguments: Callable[[], tuple]
    calls: int
    floor: float
    goal: float | None
    published: tuple[Peer, ...] = ()
    rival: tuple[str, int, int] | None = None
    """What others are asked for: prefill or decode, heads and tokens."""


def decode_line(
    rows: int, tokens: int, heads: int, length: int, goal: float | None, *published: Peer, narrow: bool = False
) -> Line:
    """`tokens` queries of each row over `length` cached tokens; calls in turn read other pages."""
    moved = rows * length * LATENT * (1 if narrow else 2)
    turns = max(1, round(BEYOND_CACHE / moved))
    calls = max(turns, 4 if rows > 8 else 24)

    def chain(query: jax.Array, shared: jax.Array, start: jax.Array, pool: jax.Array, tables: Any, *scales: Any) -> Any:
        for index in range(calls):
            options = {"heads": heads, "rank": RANK, "scale": SCALE}
            # The next call asks with what this one found, so calls cannot overlap, and nothing else runs between them.
            query = attend_pages(query, shared, pool, tables[index % turns], start, start + tokens, *scales, **options)
        return query

    def arguments() -> tuple:
        pool, table = paged(rows * turns, length)
        scales: list[jax.Array] = []
        if narrow:
            pool, scale = jax.jit(api.quantize_pages)(pool)
            scales.append(scale)
        tables = table.reshape(turns, rows, -1)
        start = jnp.full(rows, length - tokens, jnp.int32)
        query = (normal(key, rows, tokens * heads, width) for key, width in enumerate((RANK, SHARED)))
        return *query, start, pool, tables, *scales

    work = max(moved / BANDWIDTH, 2.0 * rows * tokens * heads * length * (LATENT + RANK) / FLOPS)
    name = f"decode bs {rows}, {heads} heads x {tokens}, {length} tokens{', 8 bit' if narrow else ''}"
    rival = ("decode", heads, length) if rows == tokens == 1 and heads == HEADS and not narrow else None
    # The carry is donated: addresses that change from call to call cost host time for every kernel of the graph.
    return Line(name, jax.jit(chain, donate_argnums=0), arguments, calls, work * 1e6, goal, published, rival)


def prefill_line(heads: int, tokens: int, goal: float | None, *published: Peer) -> Line:
    """Causal attention of one row over its own expanded keys and values, dispatched one by one."""

    def run(start: jax.Array, query: jax.Array, own: jax.Array, shared: jax.Array, value: jax.Array) -> jax.Array:
        mixed = mosaic_prefill.attend(query, own, shared, value, start, scale=SCALE)
        return start + (mixed[:, 0, 0, 0] * 0).astype(jnp.int32)

    def arguments() -> tuple:
        shapes = ((heads, OWN + SHARED), (heads, OWN), (SHARED,), (heads, VALUE))
        return jnp.zeros(1, jnp.int32), *(normal(i, 1, tokens, *shape) for i, shape in enumerate(shapes))

    work = heads * tokens * (tokens + 1) * (OWN + SHARED + VALUE) / FLOPS * 1e6
    name = f"prefill {tokens}, {heads} heads, expanded given"
    return Line(name, jax.jit(run), arguments, 1, work, goal, published, ("prefill", heads, tokens))


def whole_prefill_line(heads: int, tokens: int) -> Line:
    """`api.prefill`: from latents, expansion of keys and values included."""

    def run(start: jax.Array, query: jax.Array, latents: jax.Array, *ups: jax.Array) -> jax.Array:
        mixed = api.prefill(query, latents, *ups, start, start + tokens, scale=SCALE)
        return start + (mixed[:, 0, 0, 0] * 0).astype(jnp.int32)

    def arguments() -> tuple:
        latents = (normal(0, 1, tokens, heads, OWN + SHARED), normal(1, 1, tokens, LATENT))
        return jnp.zeros(1, jnp.int32), *latents, normal(2, heads, OWN, RANK), normal(3, heads, VALUE, RANK)

    per_key = heads * ((tokens + 1) * (OWN + SHARED + VALUE) + 2 * RANK * (OWN + VALUE))
    return Line(
        f"prefill {tokens}, {heads} heads, from latents",
        jax.jit(run),
        arguments,
        1,
        tokens * per_key / FLOPS * 1e6,
        None,
    )


def lines() -> list[Line]:
    """The rows of the table; published times are for 128 or 8 heads."""
    fa3, trt = "published: FA3, H200", "published: TRT-LLM, H200"
    return [
        decode_line(1, 1, HEADS, 8192, 10.0, Peer(fa3, 26.4)),
        decode_line(1, 1, HEADS, 131072, 45.0, Peer(fa3, 96.0), Peer(trt, 78.4)),
        decode_line(1, 1, RANK_HEADS, 8192, None, Peer(fa3, 21.0)),
        decode_line(1, 1, RANK_HEADS, 131072, None, Peer(fa3, 64.0), Peer(trt, 58.5)),
        decode_line(1, 8, RANK_HEADS, 8192, None),
        decode_line(1, 1, HEADS, 131072, None, narrow=True),
        decode_line(1, 1, RANK_HEADS, 131072, None, narrow=True),
        decode_line(64, 1, RANK_HEADS, 131072, 2500.0, Peer(fa3, 2222.0)),
        prefill_line(HEADS, PREFILL_TOKENS, 3500.0, Peer("published: FA3 class, H100", 3300.0)),
        prefill_line(RANK_HEADS, PREFILL_TOKENS, None),
        whole_prefill_line(HEADS, PREFILL_TOKENS),
    ]


def example_us(run: Callable, heads: int, tokens: int) -> float:
    """Time of JAX's example kernel."""
    inputs = [normal(i, 1, tokens, heads, OWN + SHARED).astype(jnp.float16) for i in range(3)]
    return timing.device_call_us(lambda query: run(query, *inputs[1:]), inputs[0], 1)


BACKENDS = {"prefill": ("CUDNN_ATTENTION", "FLASH_ATTENTION"), "decode": ("FLASH_ATTENTION", "MATMUL")}
"""What torch is asked to run; see `peers.prepare`."""


def rivals(line: Line, ready: dict[str, Future[Callable]], child: PeerProcess) -> Iterator[Peer]:
    """The peers of a line, measured."""
    if line.rival is None:
        return
    kind, *sizes = line.rival
    if kind == "prefill":
        run = ready[f"example {line.name}"].result()
        yield measured_peer("jax attention_mgpu, values padded to 192", partial(example_us, run, *sizes))
    for backend in BACKENDS[kind]:
        yield measured_peer(f"torch {backend}", partial(child.time, (backend, kind, *sizes)))


def measure() -> Iterator[Measurement]:
    """Times every line on the present GPU, one by one, each as soon as its program is compiled."""
    table = lines()
    rival = {line.name: line.rival for line in table if line.rival}
    calls = [(name, *sizes) for sizes in rival.values() for name in BACKENDS[sizes[0]]]
    with PeerProcess("pallas.mla.peers", calls) as child:
        programs = {line.name: (line.program, jax.eval_shape(line.arguments)) for line in table}
        examples = {
            f"example {name}": peers.jax_example(*sizes) for name, (kind, *sizes) in rival.items() if kind == "prefill"
        }
        ready = compiling({**programs, **examples})
        for line in table:
            run = ready[line.name].result()
            carry, *rest = line.arguments()
            time = timing.device_call_us(lambda carry, run=run, rest=rest: run(carry, *rest), carry, line.calls)
            yield Measurement(line.name, time, line.floor, line.goal, (*rivals(line, ready, child), *line.published))
