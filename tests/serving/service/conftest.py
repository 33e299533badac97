"""A service on the fake device, in an event loop of its own thread, as a client process would see it."""

import asyncio
import contextlib
import threading
import time
from pathlib import Path

import grpc
import numpy as np
import pytest
from smg_grpc_proto import vllm_engine_pb2_grpc

import serving
from serving.core import Core
from serving.engine import Engine
from serving.plan import RowResult, Shape
from serving.prefix_file import Prefix
from serving.request import Alternatives
from serving.scheduler import SchedulerOptions
from serving.service.model_card import ModelCard
from serving.service.options import ServiceOptions
from serving.service.server import Service
from tests.serving.fake_runner import FakeRunner, Reading

ROWS = 4


class PacedRunner(FakeRunner):
    """Steps take time, and may stand still: while `go_on` is not set, and at step `pause_at` until it is."""

    def __init__(self, page_size, bad=(), seconds=0.001):
        super().__init__(page_size, bad)
        self.seconds = seconds
        self.go_on = threading.Event()
        self.go_on.set()
        self.pause_at = None

    def dispatch(self, plan):
        if self.dispatched == self.pause_at:
            self.go_on.clear()
        self.go_on.wait()
        time.sleep(self.seconds)
        return super().dispatch(plan)

    def prefill(self, row, state):
        said = super().prefill(row, state)
        if not row.sequence.wants_prompt:
            return said
        return said._replace(prompt=[(-0.25, Alternatives([token], [-0.25])) for token in row.ids])

    def say(self, row, state):
        said = super().say(row, state)
        mask = row.sequence.mask if row.sequence.request.constraint is not None else None
        if mask is None:
            return said
        bits = np.unpackbits(np.ascontiguousarray(mask).view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        token = allowed[said.tokens[0] % len(allowed)]
        self.token[row.row] = token
        self.alive[row.row] = token not in row.sequence.request.stops
        return RowResult([token], [-0.5], True)

    # States of one size, so that another server can take them.

    def read(self, pages, slot):
        reading = super().read(pages, slot)
        state = np.full(400, -1, np.int32)
        state[: len(self.states[slot])] = self.states[slot]
        return Reading(Prefix(reading.prefix.latents, [state], []))

    def write(self, prefix, pages, slot):
        (state,) = prefix.states
        super().write(Prefix(prefix.latents, [state[state >= 0]], []), pages, slot)


class Running:
    """A service that can be called from the test's thread."""

    def __init__(self, core, card, **options):
        self.core, self.runner = core, core.runner
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.engine = None
        self.service = self.do(self._make(card, options))
        self.address = f"127.0.0.1:{self.service.port}"
        self.channel = grpc.insecure_channel(self.address)
        self.worker = vllm_engine_pb2_grpc.VllmEngineStub(self.channel)
        self.client = serving.Client(self.address, retries=0)

    async def _make(self, card, options):
        service = Service(ServiceOptions(**{"port": 0, "rows": ROWS} | options))
        await service.start()
        if card is not None:
            limit = service.options.write_wait_outputs
            self.engine = Engine(self.core, stream_limit=limit, on_step=service.metrics.step.observe)
            self.engine.start()
            await service.attach(self.engine, card)
        return service

    def do(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    def in_engine(self, function):
        return self.engine.call(function).result(10)

    def books_balance(self):
        """Every page and slot is where the books say, and nothing runs; what may have to settle gets a moment."""
        for _ in range(200):
            if self.in_engine(lambda: self.core.idle) and not len(self.service.jobs):
                break
            time.sleep(0.01)
        self.in_engine(self.core.check_books)
        assert self.in_engine(lambda: (self.core.idle, len(self.core.scheduler.running))) == (True, 0)
        return True

    def close(self):
        self.runner.go_on.set()
        self.client.close()
        self.channel.close()
        with contextlib.suppress(Exception):
            self.do(self.service.stop(0.1))
        if self.engine is not None:
            self.engine.stop()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture(scope="session")
def nano_tokenizer():
    from k3jax import tokenizer

    return tokenizer.load(nano())


def nano():
    import checkpoints

    return Path(checkpoints.__path__[0]) / "nano"


def make_card(tokenizer=None, **fields):
    values = {
        "name": "fake",
        "path": str(nano()) if tokenizer else "",
        "vocab_size": tokenizer.vocab_size if tokenizer else 50,
        "max_length": 400,
        "stop_ids": (49,),
        "bos_id": 48,
        "pad_id": 47,
        "dtype": "float32",
        "kv_cache_dtype": "float32",
        "tokenizer": tokenizer,
    }
    return ModelCard(**values | fields)


@pytest.fixture(scope="session")
def start(make_cache):
    """A function that starts a service; everything that it started is stopped at the end of the session."""
    started = []

    def make(tokenizer=None, *, card=True, seconds=0.001, bad=(), cache=None, scheduling=None, **options):
        pools = make_cache(**{"pages": 400, "slots": 24} | (cache or {}))
        sizes = {"rows": ROWS, "token_budget": 40, "shapes": (Shape(1, 4), Shape(2, 16)), "max_length": 400}
        runner = PacedRunner(pools.options.page_size, bad, seconds)
        core = Core(SchedulerOptions(**sizes | (scheduling or {})), pools, runner)
        running = Running(core, make_card(tokenizer) if card is True else card, **options)
        started.append(running)
        return running

    yield make
    for running in started:
        running.close()


@pytest.fixture(scope="session")
def ids_only(start):
    """A service of a checkpoint without a tokenizer."""
    return start()


@pytest.fixture(scope="session")
def with_text(start, nano_tokenizer):
    """A service with nano's vocabulary; the fake model says the first fifty ids of it."""
    return start(nano_tokenizer)
