"""What the service may ask of the engine besides generation."""

import asyncio
import time
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as worker
from smg_grpc_proto.generated import common_pb2 as shared

from serving.engine import Engine
from serving.service import memory
from serving.service.jobs import Jobs
from serving.stats import Loads, Stats


class EngineState:
    """Figures of the engine and access to its caches."""

    def __init__(self, engine: Engine, jobs: Jobs) -> None:
        self.engine, self.jobs = engine, jobs
        self.started = time.time()
        self._samples = 0
        self._latest: Loads | None = None
        self._looked = 0.0

    @property
    def core(self) -> Any:
        """The engine's core."""
        return self.engine.core

    @property
    def uptime(self) -> float:
        """Seconds since the service was made."""
        return time.time() - self.started

    @property
    def unit(self) -> int:
        """Tokens of a hash unit."""
        return self.core.cache.options.unit

    @property
    def rows(self) -> int:
        """Sequences that run at a time."""
        return self.core.options.rows

    async def call(self, function: Any) -> Any:
        """Runs `function` in the engine's thread between two steps."""
        return await asyncio.wrap_future(self.engine.call(function))

    async def flush(self) -> int:
        """Drops every cached prefix, and gives what is free then back to the system."""
        dropped = await self.engine.flush()
        await asyncio.to_thread(memory.release)
        return dropped

    def stats_within(self, seconds: int | float) -> Stats | None:
        """A snapshot for another thread, or None when the engine does not find the time."""
        try:
            return self.engine.call(self.core.stats).result(seconds)
        except TimeoutError:
            return None

    def _loads(self) -> Loads:
        """The engine's load, at most a second old: its rate of tokens is measured between two looks."""
        now = time.monotonic()
        if self._latest is not None and now - self._looked < 1.0:
            return self._latest
        fresh: Loads = self.core.loads()
        self._latest, self._looked = fresh, now
        return fresh

    def load(self) -> worker.SchedulerLoad:
        """The load record of `GetLoads`."""
        loads = self._loads()
        running = min(self.jobs.sequences, self.rows)
        return worker.SchedulerLoad(
            num_running_reqs=running,
            num_waiting_reqs=self.jobs.sequences - running,
            num_total_reqs=self.jobs.sequences,
            num_used_tokens=loads.used_tokens,
            max_total_num_tokens=loads.max_tokens,
            token_usage=loads.usage,
            gen_throughput=loads.tokens_per_second,
            cache_hit_rate=loads.hit_rate,
            utilization=running / self.rows,
            max_running_requests=self.rows,
            num_waiting_uncached_tokens=self.jobs.waiting_tokens,
        )

    def engine_load(self) -> shared.EngineLoad:
        """The load record that goes with cache events."""
        record = self.load()
        self._samples += 1
        silence = int(1000 * (time.monotonic() - self.engine.beat)) if len(self.jobs) else None
        return shared.EngineLoad(
            engine_silence_ms=silence,
            engine_reports_steps=True,
            prefill_pending_tokens=self.jobs.waiting_tokens,
            cache_hit_rate=record.cache_hit_rate,
            num_used_tokens=record.num_used_tokens,
            max_total_num_tokens=record.max_total_num_tokens,
            running_requests=record.num_running_reqs,
            waiting_requests=record.num_waiting_reqs,
            waiting_uncached_tokens=record.num_waiting_uncached_tokens,
            token_usage=record.token_usage,
            gen_throughput=record.gen_throughput,
            max_running_requests=record.max_running_requests,
            sample=self._samples,
        )
