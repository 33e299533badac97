"""The clients of `serving.service.transport`, in a process of their own so that each side has its own interpreter."""

import asyncio
import json
import sys

import grpc
from smg_grpc_proto import vllm_engine_pb2 as worker
from smg_grpc_proto import vllm_engine_pb2_grpc


async def ask(stub: vllm_engine_pb2_grpc.VllmEngineStub, number: int, tokens: int) -> tuple[int, int]:
    """Messages and tokens of one call."""
    params = worker.SamplingParams(max_tokens=tokens, ignore_eos=True)
    prompt = worker.TokenizedInput(input_ids=[number % 32, number // 32, 5])
    messages = received = 0
    async for message in stub.Generate(worker.GenerateRequest(tokenized=prompt, sampling_params=params, stream=True)):
        messages += 1
        received += len(message.chunk.token_ids)
    return messages, received


async def main(port: str, streams: int, tokens: int) -> None:
    """Connects, says that it is there, waits for the word, and prints [messages, tokens]."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await channel.channel_ready()
        print("there", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        counts = await asyncio.gather(*(ask(stub, number, tokens) for number in range(streams)))
        print(json.dumps([sum(column) for column in zip(*counts)]), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
