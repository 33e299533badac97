"""`k3jax.v1.Generate`: conversations, typed pieces, and the caches in the open."""

import contextlib
from typing import Any

from serving.hashing import HashChain, root_digest
from serving.protocol import NATIVE, messages, services
from serving.service import native_request, state_transfer
from serving.service.generation import Generator, joined
from serving.service.native_response import Choice, prompt_logprobs
from serving.service.refusals import Context, answering
from serving.service.state import EngineState
from serving.service.worker import version


class NativeServicer(services.GenerateServicer):
    """Every method of the protocol."""

    def __init__(self, generator: Generator, state: EngineState) -> None:
        self._generator, self._state = generator, state
        self._card, self._jobs = generator.card, generator.jobs

    @answering
    async def Generate(self, request: Any, context: Context) -> None:
        """Streams the answer; each choice ends with a Finish, the call otherwise with a status."""
        self._generator.require_entry(context)
        wish, prompt = await native_request.read(request, self._card, self._generator.limits)
        start = messages.Start(request_id=wish.id, prompt_tokens=len(wish.tokens))
        choices: dict[int, Choice] = {}
        sent = self._generator.metrics.counting(NATIVE)
        async with contextlib.aclosing(self._generator.outputs(wish, context, NATIVE)) as news:
            async for index, outputs in news:
                output = joined(outputs)
                if start is not None:
                    if output.prompt_logprobs is not None:
                        start.prompt_logprobs.CopyFrom(prompt_logprobs(wish.tokens, output.prompt_logprobs))
                    await context.write(messages.GenerateResponse(start=start))
                    start = None
                if index not in choices:
                    choices[index] = Choice(index, wish, prompt, self._card.tokenizer, request)
                for message in choices[index].events(output):
                    await context.write(message)
                    sent()

    @answering
    async def Abort(self, request: Any, context: Context) -> Any:
        """Ends calls by id."""
        return messages.AbortResponse(aborted=self._jobs.abort(list(request.request_ids)))

    @answering
    async def GetModel(self, request: Any, context: Context) -> Any:
        """What is served here."""
        card, sizes = self._card, self._state.core.cache.options
        return messages.Model(
            name=card.name,
            path=card.path,
            max_length=card.max_length,
            vocab_size=card.vocab_size,
            has_tokenizer=card.tokenizer is not None,
            has_draft=card.has_draft,
            dtype=card.dtype,
            stop_token_ids=card.stop_ids,
            max_num_seqs=self._state.rows,
            page_size=sizes.page_size,
            prefix_match_unit=sizes.unit,
            version=version(),
        )

    @answering
    async def GetStats(self, request: Any, context: Context) -> Any:
        """Every figure of the engine."""
        stats = await self._state.engine.stats()
        return messages.Stats(values=flat(stats.summary()), uptime_seconds=self._state.uptime)

    @answering
    async def InspectCache(self, request: Any, context: Context) -> Any:
        """What the prefix cache holds of a prompt."""
        prompt = await native_request.read_prompt(request, self._card, self._generator.limits)
        return await self._state.call(lambda: inspect(self._state.core, prompt.tokens, request.salt))

    @answering
    async def FlushCache(self, request: Any, context: Context) -> Any:
        """Drops every prefix; requests that read one keep what they hold."""
        return messages.FlushCacheResponse(dropped=await self._state.flush())

    @answering
    async def ReleaseSession(self, request: Any, context: Context) -> Any:
        """Lets go of what a session holds."""
        core = self._state.core
        released = await self._state.call(lambda: core.release_session(request.session))
        return messages.ReleaseSessionResponse(found=bool(released))

    @answering
    async def ExportState(self, request: Any, context: Context) -> None:
        """The deepest reusable prefix of a prompt, in pieces."""
        prompt = await native_request.read_prompt(request, self._card, self._generator.limits)
        for chunk in await state_transfer.take(self._state, prompt.tokens, request.salt):
            await context.write(chunk)

    @answering
    async def ImportState(self, request_iterator: Any, context: Context) -> Any:
        """Stores what another server has exported, as a whole or not at all."""
        return await state_transfer.put(self._state, request_iterator)


def flat(summary: dict[str, Any]) -> dict[str, int | float]:
    """Figures by name; those by reason as `name.reason`."""
    values: dict[str, int | float] = {}
    for name, value in summary.items():
        parts = {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
        values |= {key: float(item) for key, item in parts.items() if isinstance(item, int | float)}
    return values


def inspect(core: Any, tokens: list[int], salt: str) -> Any:
    """What the tree knows of `tokens`; runs in the engine's thread and changes nothing."""
    cache = core.cache
    path = HashChain(root_digest(core.options.model_id, salt), cache.options.unit, tokens)
    match = cache.match(path, len(tokens) - 1) if len(tokens) > 1 else None
    answer = messages.InspectCacheResponse(prompt_tokens=len(tokens))
    if match is not None:
        answer.cached_tokens, answer.reach = match.tokens, match.reach
        nodes = [match.node, *match.node.ancestors()] if match.node is not None else []
        answer.states.extend(
            messages.CachedState(tokens=node.end, hits=node.hits, at_end=node.is_end)
            for node in reversed(nodes)
            if node.slot
        )
    for name, pool in zip(("pages", "slots"), cache.pool_use(), strict=True):
        use = messages.PoolUse(capacity=pool.capacity, used=pool.used, cached=pool.cached)
        getattr(answer, name).CopyFrom(use)
    return answer
