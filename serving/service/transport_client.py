"""The clients of `serving.service.transport`, in a process of their own so that each side has its own interpreter."""

import asyncio
import json
import sys
import time

import grpc
from smg_grpc_proto import vllm_engine_pb2 as worker

from serving.protocol import WORKER
from serving.service import event_loop


async def ask(call: grpc.aio.UnaryStreamMultiCallable, number: int, tokens: int) -> list[bytes]:
    """The messages of one call, as they came: reading them is not what is measured."""
    params = worker.SamplingParams(max_tokens=tokens, ignore_eos=True)
    prompt = worker.TokenizedInput(input_ids=[number % 32, number // 32, 5])
    request = worker.GenerateRequest(tokenized=prompt, sampling_params=params, stream=True)
    return [message async for message in call(request.SerializeToString())]


async def main(port: str, streams: int, tokens: int) -> None:
    """Connects, says that it is there, waits for the word, and prints figures of what it has got."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await channel.channel_ready()
        print("there", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        start, cpu = time.perf_counter(), time.process_time()
        call = channel.unary_stream(f"/{WORKER}/Generate")
        answers = await asyncio.gather(*(ask(call, number, tokens) for number in range(streams)))
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        chunks = [worker.GenerateResponse.FromString(message).chunk for answer in answers for message in answer]
        figures = {"seconds": seconds, "cpu": cpu, "messages": len(chunks)}
        print(json.dumps(figures | {"tokens": sum(len(chunk.token_ids) for chunk in chunks)}), flush=True)


if __name__ == "__main__":
    event_loop.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
