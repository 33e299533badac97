"""The engine without any protocol, in this process: what the others are compared with."""

import itertools
from collections.abc import AsyncIterator

from serving.bench.target import About, RequestFailed
from serving.bench.workload import Prompt
from serving.engine import Engine, EngineStopped
from serving.launch import Sizes, launch
from serving.request import QueueFull, Request, RequestError


class EngineTarget:
    """Loads a checkpoint when it is asked about."""

    def __init__(self, checkpoint: str | None, sizes: Sizes) -> None:
        self._checkpoint, self._sizes = checkpoint, sizes
        self._engine: Engine | None = None
        self._numbers = itertools.count()

    async def about(self) -> About:
        """Starts the engine."""
        import k3jax
        from serving.service.lifecycle import default_dtype

        model = k3jax.load(self._checkpoint, dtype=default_dtype())
        self._engine = Engine(launch(model, self._sizes))
        self._engine.start()
        return About("engine", model.config.vocab_size)

    async def stream(self, prompt: Prompt, max_tokens: int) -> AsyncIterator[int]:
        """One request."""
        assert self._engine is not None, "about() starts the engine"
        id_ = f"bench-{next(self._numbers)}"
        request = Request(id=id_, tokens=prompt.ids, max_tokens=max_tokens, sampling={"temperature": 0.0})
        try:
            async for output in await self._engine.submit(request):
                if output.tokens:
                    yield len(output.tokens)
        except (RequestError, QueueFull, EngineStopped) as error:
            raise RequestFailed(type(error).__name__) from error

    async def close(self) -> None:
        """Stops the engine."""
        if self._engine is not None:
            await self._engine.drain(1.0)
