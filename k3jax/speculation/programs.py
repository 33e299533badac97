"""The programs of `k3jax.speculation.bench`, compiled one after another while the first are measured already."""

import collections
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from k3jax import sampling, step
from k3jax.speculation import bench, parts
from k3jax.speculation.step import speculate
from pallas import timing

THREADS = 6
"""Programs that are turned into machine code at the same time."""
GRAPHS = {"xla_gpu_graph_min_graph_size": 1}
"""A part of a few launches is captured in a graph too, as it is within the step, where it has thousands beside it."""
TOP_P = ", top-p"
"""Marks a part that filters, as it does for settings with top-p."""
FILTERED = sampling.Filters(top_k=False, top_p=True, min_p=False)
NAMES = (
    "draft",
    "markov",
    "verify",
    "accept",
    "commit",
    "plain",
    "whole",
    f"markov{TOP_P}",
    f"accept{TOP_P}",
)
"""In the order in which they are compiled."""


class Programs:
    """Everything that is timed. `programs[name]` waits until that one is compiled; tracing waits for `timing.TURN`."""

    def __init__(self, loaded: bench.Loaded) -> None:
        self._compiled: dict[str, Future[Any]] = {name: Future() for name in NAMES}
        self._pool = ThreadPoolExecutor(THREADS)
        threading.Thread(target=self._build, args=(lowerings(loaded),), daemon=True).start()

    def __getitem__(self, name: str) -> Any:
        return self._compiled[name].result()

    def _build(self, lowered: Iterator[tuple[str, Any]]) -> None:
        try:
            for _ in NAMES:
                with timing.TURN:
                    name, program = next(lowered)
                self._pool.submit(self._compile, name, program)
                time.sleep(0.01)  # a lock is not fair: whoever waits for it gets it now
        except Exception as error:  # told by whoever asks for the program
            for waiting in self._compiled.values():
                if not waiting.done():
                    waiting.set_exception(error)

    def _compile(self, name: str, program: Any) -> None:
        try:
            self._compiled[name].set_result(program.compile(GRAPHS if jax.default_backend() == "gpu" else None))
        except Exception as error:  # likewise
            self._compiled[name].set_exception(error)

    def transfers(self, name: str) -> list[str]:
        """Instructions of a program that move data between device and host, or make the host look at the device."""
        text = self[name].as_text()
        found = re.findall(r" (infeed|outfeed|send|recv|conditional)\(", text)
        found += ["host memory"] * text.count("S(5)")
        found += [target for target in _targets(text) if "callback" in target or "python" in target]
        # A loop whose trip count is unknown asks the host after each trip.
        loops = [line for line in text.splitlines() if " while(" in line and "known_trip_count" not in line]
        return found + ["while"] * len(loops)

    def kernels(self, name: str) -> dict[str, int]:
        """Calls of a program that XLA did not generate, by target."""
        return dict(collections.Counter(_targets(self[name].as_text())).most_common())


def _targets(text: str) -> list[str]:
    """Custom calls of a compiled program, with the op that they belong to."""
    found = []
    for line in text.splitlines():
        if target := re.search(r'custom_call_target="([^"]+)"', line):
            ops = "prefill|decode|verify|commit_layers|experts|route|read|attend"
            op = re.search(rf'op_name="[^"]*?jit\(({ops})\)/', line)
            found.append(f"{op[1]}: {target[1]}" if op else target[1])
    return found


def lowerings(loaded: bench.Loaded) -> Iterator[tuple[str, Any]]:
    """Each program, traced and lowered. Inputs that another part makes are abstract."""
    one, state, bare = bench.Parts(loaded), loaded.speculative, bench.bare(loaded.speculative)
    shared = (loaded.params, loaded.stop_ids)
    draft = jax.jit(one.draft, donate_argnums=0).trace(
        *jax.eval_shape(lambda leaves: bench.draft_inputs(loaded, leaves), loaded.leaves)
    )
    yield "draft", draft.lower()
    markov = (loaded.draft_leaves, _shapes(draft)._replace(pools=()), state.token, state.rows, loaded.params)
    drafted = jax.jit(one.markov).trace(*markov)
    yield "markov", drafted.lower()
    proposal = _shapes(drafted)
    verify = jax.jit(one.verify, donate_argnums=0).trace(state.cache, bare, loaded.leaves, proposal.token)
    yield "verify", verify.lower()
    verified = _shapes(verify)
    accept = (verified.logits, proposal, bare, parts.Given(*shared))
    judged = jax.jit(one.accept).trace(*accept)
    yield "accept", judged.lower()
    commit = (bare, loaded.draft_leaves, verified.pending, verified.features, _shapes(judged))
    yield "commit", jax.jit(one.commit, donate_argnums=0).lower((state.cache, state.context), *commit)
    plain = (loaded.graph, loaded.leaves, loaded.plain, *shared)
    yield "plain", step.decode.lower(*plain, filters=sampling.NO_FILTERS)
    whole = (loaded.graph, loaded.leaves, loaded.drafter, loaded.draft_leaves, state, *shared)
    yield "whole", speculate.lower(*whole, filters=sampling.NO_FILTERS)
    filtered = bench.Parts(loaded, filters=FILTERED)
    yield f"markov{TOP_P}", jax.jit(filtered.markov).lower(*markov)
    yield f"accept{TOP_P}", jax.jit(filtered.accept).lower(*accept)


def _shapes(traced: Any) -> Any:
    """Shapes of what a traced program gives."""
    return jax.tree.map(lambda out: jax.ShapeDtypeStruct(out.shape, out.dtype), traced.out_info)
