"""`vllm.grpc.engine.VllmEngine`: the protocol in which gateways drive an engine."""

import asyncio
import contextlib
import datetime
import hashlib
import json
from importlib import metadata
from typing import NoReturn

import grpc
from smg_grpc_proto import vllm_engine_pb2 as worker
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2 as shared

from serving.protocol import WORKER
from serving.service import worker_request
from serving.service.generation import Generator, joined
from serving.service.kv_events import Publisher
from serving.service.refusals import Context, Refusal, answering, unsupported
from serving.service.state import EngineState
from serving.service.worker_response import Choice

ARCHIVE_CHUNK = 1 << 20
"""Bytes of a tokenizer's archive per message."""


class WorkerServicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Every method of the protocol; what this engine does not do is refused by name."""

    def __init__(self, generator: Generator, state: EngineState, publisher: Publisher) -> None:
        self._generator, self._state, self._publisher = generator, state, publisher
        self._card, self._jobs = generator.card, generator.jobs
        self._archive: bytes | None = None

    @answering
    async def Generate(self, request: worker.GenerateRequest, context: Context) -> None:
        """Streams the answer; each choice ends with a complete message, the call otherwise with a status.

        Writes bytes (`serving.service.door.SERIALIZED`).
        """
        self._generator.require_entry(context)
        wish = await worker_request.read(request, self._card, self._generator.limits)
        wants = wish.logprobs is not None
        choices = [Choice(index, wish.tokens, wants) for index in range(wish.n)]
        streamed, write, sent = request.stream, context.write, self._generator.metrics.counting(WORKER)
        async with contextlib.aclosing(self._generator.outputs(wish, context, WORKER)) as news:
            async for index, outputs in news:
                output, choice = joined(outputs), choices[index]
                if output.final is not None:
                    choice.cached_tokens = output.final.cached_tokens
                if not streamed:
                    choice.take(output)
                elif output.tokens:
                    await write(choice.chunk(output))
                    sent()
                if output.final is not None:
                    await write(choice.complete(output.final))
                    sent()

    @answering
    async def Embed(self, request: worker.EmbedRequest, context: Context) -> NoReturn:
        """Refused: the model generates."""
        raise unsupported("Embed", "this model generates text and has no embedding head")

    @answering
    async def StartProfile(self, request: shared.StartProfileRequest, context: Context) -> NoReturn:
        """Refused: profiles are taken by programs that have the device to themselves."""
        raise unsupported("StartProfile", "the service takes no profiles; use python -m k3jax.bench")

    @answering
    async def StopProfile(self, request: shared.StopProfileRequest, context: Context) -> NoReturn:
        """Refused as `StartProfile` is."""
        raise unsupported("StopProfile", "the service takes no profiles; use python -m k3jax.bench")

    @answering
    async def HealthCheck(self, request: worker.HealthCheckRequest, context: Context) -> worker.HealthCheckResponse:
        """Whether calls are let in, and why not."""
        closed = self._jobs.closed
        return worker.HealthCheckResponse(healthy=closed is None, message="serving" if closed is None else closed.text)

    @answering
    async def Abort(self, request: worker.AbortRequest, context: Context) -> worker.AbortResponse:
        """Ends calls by id; their streams complete with the reason "abort"."""
        self._jobs.abort(list(request.request_ids))
        return worker.AbortResponse()

    @answering
    async def FlushCache(self, request: shared.FlushCacheRequest, context: Context) -> shared.FlushCacheResponse:
        """Drops every cached prefix, when nothing runs or within `timeout_s` does not any more."""
        if len(self._jobs):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._jobs.drained(), max(request.timeout_s, 0.0))
        if len(self._jobs):
            text = f"{len(self._jobs)} requests are in flight; give timeout_s, or flush later"
            return shared.FlushCacheResponse(success=False, message=text)
        return shared.FlushCacheResponse(success=True, message=f"{await self._state.flush()} prefixes dropped")

    @answering
    async def GetModelInfo(self, request: worker.GetModelInfoRequest, context: Context) -> worker.GetModelInfoResponse:
        """Names, sizes and special ids."""
        card = self._card
        return worker.GetModelInfoResponse(
            model_path=card.path,
            is_generation=True,
            max_context_length=card.max_length,
            vocab_size=card.vocab_size,
            supports_vision=False,
            served_model_name=card.name,
            tokenizer_path=card.path if card.tokenizer is not None else "",
            model_type="kimi_k3",
            architectures=["KimiK3ForConditionalGeneration"],
            eos_token_ids=card.stop_ids,
            pad_token_id=card.pad_id,
            bos_token_id=card.bos_id,
            max_req_input_len=card.max_length - 1,
            default_sampling_params_json=json.dumps(card.default_sampling) if card.default_sampling else "",
        )

    @answering
    async def GetServerInfo(
        self, request: worker.GetServerInfoRequest, context: Context
    ) -> worker.GetServerInfoResponse:
        """What a router wants to know of this worker."""
        return worker.GetServerInfoResponse(
            active_requests=len(self._jobs),
            is_paused=self._jobs.closed is not None,
            last_receive_timestamp=self._jobs.last_arrival,
            uptime_seconds=self._state.uptime,
            server_type="k3jax-grpc",
            data_parallel_size=1,
            kv_cache_dtype=self._card.kv_cache_dtype,
            block_size=self._state.unit,
            model_dtype=self._card.dtype,
            max_num_seqs=self._state.rows,
            engine_reasoning_parser="kimi_k3" if self._card.tokenizer is not None else "",
            constrained_decoding_start="after_reasoning",
        )

    @answering
    async def GetLoads(self, request: worker.GetLoadsRequest, context: Context) -> worker.GetLoadsResponse:
        """How busy this worker is."""
        now = datetime.datetime.now(datetime.UTC).isoformat()
        loads = [] if request.HasField("dp_rank") and request.dp_rank else [self._state.load()]
        return worker.GetLoadsResponse(timestamp=now, version=version(), dp_rank_count=1, loads=loads)

    @answering
    async def GetTokenizer(self, request: shared.GetTokenizerRequest, context: Context) -> None:
        """The tokenizer as a zip archive; its SHA-256 comes with the last piece."""
        if self._card.tokenizer is None:
            raise Refusal(grpc.StatusCode.NOT_FOUND, "the checkpoint has no tokenizer; send token ids")
        if self._archive is None:
            self._archive = await asyncio.to_thread(self._pack)
        archive, digest = self._archive, hashlib.sha256(self._archive).hexdigest()
        for start in range(0, len(archive), ARCHIVE_CHUNK):
            last = start + ARCHIVE_CHUNK >= len(archive)
            piece = archive[start : start + ARCHIVE_CHUNK]
            await context.write(shared.GetTokenizerChunk(data=piece, sha256=digest if last else ""))

    def _pack(self) -> bytes:
        from k3jax.tokenizer.package import package

        return package(self._card.path)

    @answering
    async def SubscribeKvEvents(self, request: shared.SubscribeKvEventsRequest, context: Context) -> None:
        """What can be reused from the prefix cache now, then every change."""
        async with contextlib.aclosing(self._publisher.batches(request.start_sequence_number)) as batches:
            async for batch in batches:
                await context.write(batch)


def version() -> str:
    """Of this package."""
    try:
        return metadata.version("k3jax")
    except metadata.PackageNotFoundError:
        return "0"
