"""Both gRPC protocols of the service."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from serving.bench.target import About, RequestFailed
from serving.bench.workload import Prompt

UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class _Channel:
    """One connection; errors as `RequestFailed`."""

    def __init__(self, address: str, token: str | None) -> None:
        self._channel = grpc.aio.insecure_channel(address.removeprefix("grpc://"), options=UNLIMITED)
        self._metadata = () if token is None else (("authorization", f"Bearer {token}"),)

    async def _ask(self, call: Any, request: Any) -> Any:
        try:
            return await call(request, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise RequestFailed(f"{error.code().name}: {error.details()}") from error

    async def _read(self, call: Any, request: Any) -> AsyncIterator[Any]:
        try:
            async for message in call(request, metadata=self._metadata):
                yield message
        except grpc.aio.AioRpcError as error:
            raise RequestFailed(error.code().name) from error

    async def close(self) -> None:
        """Hangs up."""
        await self._channel.close()


class WorkerTarget(_Channel):
    """`vllm.grpc.engine.VllmEngine`."""

    def __init__(self, address: str, token: str | None = None) -> None:
        from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

        super().__init__(address, token)
        self._messages = vllm_engine_pb2
        self._stub = vllm_engine_pb2_grpc.VllmEngineStub(self._channel)
        self._sent = 0

    async def about(self) -> About:
        """GetModelInfo."""
        answer = await self._ask(self._stub.GetModelInfo, self._messages.GetModelInfoRequest())
        return About(answer.served_model_name, answer.vocab_size)

    async def stream(self, prompt: Prompt, max_tokens: int) -> AsyncIterator[int]:
        """Generate."""
        self._sent += 1
        sampling = self._messages.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, n=1)
        request = self._messages.GenerateRequest(
            request_id=f"bench-{id(self):x}-{self._sent}",
            tokenized=self._messages.TokenizedInput(input_ids=prompt.ids),
            sampling_params=sampling,
            stream=True,
        )
        async for message in self._read(self._stub.Generate, request):
            if message.WhichOneof("response") == "chunk":
                yield len(message.chunk.token_ids)


class NativeTarget(_Channel):
    """`k3jax.v1.Generate`."""

    def __init__(self, address: str, token: str | None = None) -> None:
        from serving import protocol

        super().__init__(address, token)
        self._messages = protocol.messages
        self._stub = protocol.services.GenerateStub(self._channel)

    async def about(self) -> About:
        """GetModel."""
        answer = await self._ask(self._stub.GetModel, self._messages.GetModelRequest())
        return About(answer.name, answer.vocab_size)

    async def stream(self, prompt: Prompt, max_tokens: int) -> AsyncIterator[int]:
        """Generate."""
        request = self._messages.GenerateRequest(
            token_ids=self._messages.TokenIds(ids=prompt.ids),
            sampling=self._messages.Sampling(temperature=0.0),
            max_tokens=max_tokens,
            ignore_eos=True,
            return_token_ids=True,
        )
        async for message in self._read(self._stub.Generate, request):
            if message.WhichOneof("event") == "delta":
                yield len(message.delta.token_ids)
