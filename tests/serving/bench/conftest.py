"""Small servers with answers that are known: one for each protocol."""

import asyncio
import contextlib
import json
import threading

import grpc
import pytest


class Answers:
    """What the servers do: `tokens` in messages of `size`, after refusing the first `refuse` requests."""

    def __init__(self, tokens=7, size=2, refuse=0):
        self.tokens, self.size, self.refuse = tokens, size, refuse
        self.requests = []
        self.running = self.most = 0

    def sizes(self, limit):
        left = min(self.tokens, limit)
        while left > 0:
            yield min(self.size, left)
            left -= self.size

    @contextlib.contextmanager
    def one(self, request):
        self.requests.append(request)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            yield len(self.requests) <= self.refuse
        finally:
            self.running -= 1


def worker(answers):
    from smg_grpc_proto.generated import vllm_engine_pb2 as pb
    from smg_grpc_proto.generated import vllm_engine_pb2_grpc as stubs

    class Worker(stubs.VllmEngineServicer):
        async def GetModelInfo(self, request, context):
            return pb.GetModelInfoResponse(served_model_name="stub", vocab_size=300)

        async def Generate(self, request, context):
            with answers.one(request) as refused:
                if refused:
                    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
                for size in answers.sizes(request.sampling_params.max_tokens):
                    await asyncio.sleep(0.001)
                    yield pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=[1] * size))
                yield pb.GenerateResponse(complete=pb.GenerateComplete(finish_reason="length"))

    return Worker(), stubs.add_VllmEngineServicer_to_server


async def serve_worker(answers, ready, stopping):
    servicer, add = worker(answers)
    server = grpc.aio.server()
    add(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    ready(f"127.0.0.1:{port}")
    await stopping.wait()
    await server.stop(0)


async def serve_http(answers, ready, stopping):
    async def handle(reader, writer):
        method, path, _ = (await reader.readline()).decode().split()
        length = 0
        while line := (await reader.readline()).strip():
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        body = json.loads(await reader.readexactly(length) or b"null")
        if path == "/v1/models":
            content = b'{"data":[{"id":"stub"}]}'
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(content), content))
        else:
            assert (method, path) == ("POST", "/v1/completions")
            with answers.one(body) as refused:
                await complete(writer, refused, answers, body["max_tokens"])
        await writer.drain()
        writer.close()

    async def complete(writer, refused, answers, limit):
        if refused:
            writer.write(b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n")
            return
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        events = [{"choices": [{"text": "x" * size}]} for size in answers.sizes(limit)]
        events.append({"choices": [], "usage": {"completion_tokens": min(answers.tokens, limit)}})
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + ": ping\n\ndata: [DONE]\n\n"
        for at in range(0, len(text), 11):  # chunks that end anywhere
            piece = text[at : at + 11].encode()
            writer.write(b"%x;x=1\r\n%s\r\n" % (len(piece), piece))
            await asyncio.sleep(0.0002)
        writer.write(b"0\r\n\r\n")

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    ready(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    await stopping.wait()
    server.close()


@pytest.fixture
def serve():
    """A function (protocol, answers) -> address of a server in a thread of its own."""
    with contextlib.ExitStack() as stack:

        def start(protocol, answers):
            address, listening = [], threading.Event()
            handles = {}

            async def main():
                handles["loop"], handles["stopping"] = asyncio.get_running_loop(), asyncio.Event()

                def ready(where):
                    address.append(where)
                    listening.set()

                await {"vllm-grpc": serve_worker, "openai": serve_http}[protocol](answers, ready, handles["stopping"])

            thread = threading.Thread(target=lambda: asyncio.run(main()))
            thread.start()
            stack.callback(thread.join, 10)
            stack.callback(lambda: handles["loop"].call_soon_threadsafe(handles["stopping"].set))
            assert listening.wait(10)
            return address[0]

        yield start
